"""Validation of a communicator's options. The ranks exchange their findings before any of them raises.

They come from arguments and from environment variables, whose names are in ``VARIABLES``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError
from .ipc import plan
from .texts import printable, shown, text_of

_PREFIX = "IPCREDUCE_"
VARIABLES = (
    "IPCREDUCE_BACKEND", "IPCREDUCE_CACHE_DIR", "IPCREDUCE_ENGINES", "IPCREDUCE_HOSTID", "IPCREDUCE_SYNC",
    "IPCREDUCE_WORKSPACE_MB",
)  # fmt: skip
ALGORITHMS = (*plan.ALGORITHMS, "direct")
BACKENDS = ("ipc", "nccl", "mpi")
_DEFAULT_WORKSPACE_MB = 256
_MOST_MB = 1 << 20  # 1 TB, more than any GPU has
_DEFAULT_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """One rank's options. ``wrong`` describes an invalid option, which is then not used; None if all are valid."""

    device: Any
    timeout: float
    algorithm: str | None
    backend: str | None  # None: the first of BACKENDS that can be
    workspace: int
    sync: bool
    wrong: str | None

    @property
    def direct(self) -> bool:
        """True if graphs' kernels are to write straight into the peers' outputs."""
        return self.algorithm == ALGORITHMS[-1]

    @property
    def staged(self) -> str | None:
        """The algorithm of all calls that are not direct; None for the fastest at each size."""
        return "two_shot" if self.direct else self.algorithm

    @classmethod
    def of(cls, device: Any, timeout: Any, algorithm: Any, backend: Any = None, workspace: Any = None) -> Options:
        """Check the arguments of ``Communicator``. Raises nothing. That GPU ``device`` exists is checked later.

        :param timeout: seconds.
        :param workspace: bytes; None for ``IPCREDUCE_WORKSPACE_MB``.
        """
        wrong, nbytes, sync = None, 0, False
        where = "backend"
        if backend is None:
            backend, where = os.environ.get("IPCREDUCE_BACKEND") or None, "IPCREDUCE_BACKEND"
        try:
            nbytes, sync = workspace_bytes(workspace), is_synchronous()
        except ArgumentError as error:
            wrong = text_of(error)
        ordinal = getattr(device, "id", device)
        if not (device is None or (isinstance(device, str) and device == "auto") or _is_ordinal(ordinal)):
            wrong = (
                "device must be None, 'auto' or the ordinal of one of the visible GPUs, from 0; found "
                f"{shown(device)}. Leave it out: arrays on the host need none, and each rank gets a GPU of its own"
            )
        if algorithm is not None and not (isinstance(algorithm, str) and algorithm in ALGORITHMS):
            wrong = f"algorithm must be None or one of {ALGORITHMS}; found {shown(algorithm)}"
            algorithm = None
        if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
            wrong = f"{where} must be one of {', '.join(BACKENDS)}; found {shown(backend)}. None chooses the best"
            backend = None
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
            wrong = f"timeout must be a positive number of seconds; found {shown(timeout)}. Pass how late a rank may be"
            timeout = _DEFAULT_SECONDS
        return cls(device, float(timeout), algorithm, backend, nbytes, sync, wrong)


def _is_ordinal(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def workspace_bytes(given: Any = None) -> int:
    """The bytes of workspace a rank: as given, or ``IPCREDUCE_WORKSPACE_MB``, or 256 MB.

    :raises ArgumentError: if that is less than 1 MB or more than 1 TB, or the variable is not a whole number.
    """
    if given is not None:
        if not _is_ordinal(given) or not plan.MB <= given <= _MOST_MB * plan.MB:
            raise ArgumentError(
                f"workspace must be None or {plan.MB} to {_MOST_MB * plan.MB} bytes; found {shown(given)}"
            )
        return int(given)
    text = os.environ.get("IPCREDUCE_WORKSPACE_MB", str(_DEFAULT_WORKSPACE_MB))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MOST_MB:
        raise ArgumentError(f"IPCREDUCE_WORKSPACE_MB must be a whole number from 1 to {_MOST_MB}; found {text!r}")
    return int(text) * plan.MB


def is_synchronous() -> bool:
    """True if ``IPCREDUCE_SYNC`` is 1. :raises ArgumentError: if it is set to anything but 0, 1 or nothing."""
    text = os.environ.get("IPCREDUCE_SYNC", "")
    if text not in ("", "0", "1"):
        raise ArgumentError(f"IPCREDUCE_SYNC must be 0 or 1; found {text!r}")
    return text == "1"


_warned: set[str] = set()  # names, each of which is worth one warning


def unknown_variables() -> Iterator[str]:
    """Warnings of set variables that are named like ours and that nothing reads, once each in a process."""
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        if name in VARIABLES or name in _warned:
            continue
        _warned.add(name)
        close = difflib.get_close_matches(name[len(_PREFIX) :], [known[len(_PREFIX) :] for known in VARIABLES], 1)
        meant = f"Did you mean {_PREFIX}{close[0]}?" if close else f"There are {', '.join(VARIABLES)}."
        yield f"the environment variable {printable(name)} is not one of ipcreduce's, and has no effect. {meant}"
