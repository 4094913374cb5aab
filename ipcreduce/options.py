"""Validation of a communicator's options, which come from arguments and from the environment variables ``VARIABLES``.

The ranks tell each other what is wrong before any of them raises.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError, reading
from .texts import described, printable, shown, text_of, whole

_PREFIX = "IPCREDUCE_"
VARIABLES = (
    "IPCREDUCE_BACKEND", "IPCREDUCE_BATCH_INVARIANT", "IPCREDUCE_CACHE_DIR", "IPCREDUCE_ENGINES", "IPCREDUCE_FUSED",
    "IPCREDUCE_HOSTID", "IPCREDUCE_MEMORY", "IPCREDUCE_SYNC", "IPCREDUCE_WORKSPACE_MB",
)  # fmt: skip
ALGORITHMS = "one_shot", "two_shot", "bulk", "direct"
# What a device has of PyTorch (its type may be "cpu", and its index None), JAX, CuPy and Numba, and cuda.core.
_KINDS, _ORDINALS = ("type", "platform"), ("index", "local_hardware_id", "id", "device_id")
_MB = 1 << 20
BACKENDS = ("ipc", "nccl", "host")
VIRTUAL = "vmm"
MEMORIES = (VIRTUAL, "ipc")  # of workspaces, the default first: CUDA's virtual memory, or behind IPC handles
_DEFAULT_WORKSPACE_MB = 128  # the smallest that costs at most 2 % up to 1 GB: docs/performance.md
_MAX_MB = 1 << 20  # 1 TB, more than any GPU has
_DEFAULT_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """One rank's options. ``wrong`` is the error message for an invalid option; None if all options are valid."""

    device: Any  # an ordinal; "auto"; None for the current one
    timeout: float
    algorithm: str | None
    backend: str | None  # None: the first of BACKENDS that works here
    workspace: int
    sync: bool
    wrong: str | None
    memory: str = MEMORIES[0]

    @property
    def direct(self) -> bool:
        """True if graphs' kernels are to write straight into the peers' outputs."""
        return self.algorithm == ALGORITHMS[-1]

    @property
    def virtual(self) -> bool:
        """True if workspaces are to be in virtual memory, provided that every rank can have them there."""
        return self.memory == VIRTUAL

    @property
    def staged(self) -> str | None:
        """The algorithm of all calls that are not direct; None for the fastest at each size."""
        return "two_shot" if self.direct else self.algorithm

    @classmethod
    def of(cls, device: Any, timeout: Any, algorithm: Any, backend: Any = None, workspace: Any = None) -> Options:
        """Check the arguments of ``Communicator`` without raising. Whether GPU ``device`` exists is checked later.

        :param timeout: seconds.
        :param workspace: bytes; None for ``IPCREDUCE_WORKSPACE_MB``.
        """
        try:
            return cls._of(device, timeout, algorithm, backend, workspace)
        except Exception as error:  # a method of one of these objects has raised it
            return cls(None, _DEFAULT_SECONDS, None, None, 0, False, f"options cannot be read: {described(error)}")

    @classmethod
    def _of(cls, device: Any, timeout: Any, algorithm: Any, backend: Any, workspace: Any) -> Options:
        wrong, nbytes, sync, memory = None, 0, False, MEMORIES[0]
        where = "backend"
        if backend is None:
            backend, where = os.environ.get("IPCREDUCE_BACKEND") or None, "IPCREDUCE_BACKEND"
        try:
            nbytes, sync, memory = workspace_bytes(workspace), is_on("IPCREDUCE_SYNC"), workspace_memory()
        except ArgumentError as error:
            wrong = text_of(error)
        try:
            device = _device(device)
        except ArgumentError as error:
            wrong = text_of(error)
        if algorithm is not None and not (isinstance(algorithm, str) and algorithm in ALGORITHMS):
            wrong = f"algorithm is {shown(algorithm)}, which is unknown. Pass {', '.join(ALGORITHMS)} or None"
            algorithm = None
        if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
            wrong = f"{where} is {shown(backend)}, which is unknown. {_advice_on(backend)}"
            backend = None
        if not is_seconds(timeout) or timeout >= 1e9:
            wrong = f"timeout is {shown(timeout)}, which is no positive number of seconds. Pass how late a rank may be"
            timeout = _DEFAULT_SECONDS
        return cls(device, float(timeout), algorithm, backend, nbytes, sync, wrong, memory)


def _advice_on(backend: Any) -> str:
    if isinstance(backend, str) and backend == "mpi":
        return "Choose host, as the backend of NumPy arrays is called: on one host they do not go over MPI"
    return f"Choose {', '.join(BACKENDS)}, or none for the best"


def is_seconds(value: Any) -> bool:
    """True for a positive number of Python's or NumPy's."""
    kinds = int, float, np.integer, np.floating
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(value > 0)


def _is_ordinal(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _device(given: Any) -> Any:
    """The ordinal of a GPU, "auto", or None for the current one, from any form in which libraries name a GPU.

    :raises ArgumentError: if it names none.
    """
    if given is None or (isinstance(given, str) and given == "auto"):
        return given
    kind = next((getattr(given, name) for name in _KINDS if hasattr(given, name)), "cuda")
    if isinstance(given, str):
        found = re.fullmatch("cuda(?::([0-9]{1,9}))?", given)
        ordinal = whole(found[1]) if found else given
    else:
        ordinal = next((getattr(given, name) for name in _ORDINALS if hasattr(given, name)), given)
    on_gpu = kind in ("cuda", "gpu")
    if not on_gpu or not (ordinal is None or _is_ordinal(ordinal)):
        of = "" if on_gpu else f" of type {shown(kind)}"
        raise ArgumentError(
            f"device is {shown(given)}{of}, which names no GPU. Pass the ordinal of a visible GPU, from 0, or 'auto', "
            "or leave device= away: arrays on the host need no GPU, and each rank gets one of its own"
        )
    return ordinal


def workspace_bytes(given: Any = None) -> int:
    """The bytes of a rank's workspace: ``given``, or ``IPCREDUCE_WORKSPACE_MB``, or 128 MB.

    :raises ArgumentError: if that is less than 1 MB or more than 1 TB, or if the variable is not a whole number.
    """
    if given is not None:
        if not _is_ordinal(given) or not _MB <= given <= _MAX_MB * _MB:
            raise ArgumentError(
                f"workspace is {shown(given)}, which is no number of bytes from {_MB} to {_MAX_MB * _MB}. "
                f"Pass one, or None for {_DEFAULT_WORKSPACE_MB} MB"
            )
        return int(given)
    text = os.environ.get("IPCREDUCE_WORKSPACE_MB", str(_DEFAULT_WORKSPACE_MB))
    megabytes = whole(text)
    if megabytes is None or not 1 <= megabytes <= _MAX_MB:
        raise ArgumentError(
            f"IPCREDUCE_WORKSPACE_MB is {shown(text)}, which is no whole number from 1 to {_MAX_MB}. Set it to "
            "megabytes, or unset it"
        )
    return megabytes * _MB


def workspace_memory() -> str:
    """The one of :data:`MEMORIES` that ``IPCREDUCE_MEMORY`` names. :raises ArgumentError: if it names none of them."""
    text = os.environ.get("IPCREDUCE_MEMORY") or MEMORIES[0]
    if text not in MEMORIES:
        raise ArgumentError(f"IPCREDUCE_MEMORY is {shown(text)}. Set it to {' or '.join(MEMORIES)}, or unset it")
    return text


def is_on(variable: str) -> bool:
    """True if an environment variable is 1. :raises ArgumentError: if it is set to anything but 0, 1 or nothing."""
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ArgumentError(f"{variable} is {shown(text)}. Set it to 0 or 1")
    return text == "1"


def checked_sms(sms: Any) -> int:
    """The argument ``sms`` of a call. :raises ArgumentError: if it is not an int from 1 on."""
    with reading("sms", sms):
        if not _is_ordinal(sms) or not 1 <= sms < 1 << 31:
            raise ArgumentError(
                f"sms is {shown(sms)}. Pass how many blocks the call may have, from 1, or leave it away"
            )
        return int(sms)


_warned: set[str] = set()  # the variables about which this process has warned


def unknown_variables() -> Iterator[str]:
    """Warnings about variables that begin with IPCREDUCE_ and that nothing reads, once for each in a process."""
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        if name in VARIABLES or name in _warned:
            continue
        _warned.add(name)
        close = difflib.get_close_matches(name[len(_PREFIX) :], [known[len(_PREFIX) :] for known in VARIABLES], 1)
        meant = f"Did you mean {_PREFIX}{close[0]}?" if close else f"There are {', '.join(VARIABLES)}."
        yield f"ipcreduce does not know the environment variable {printable(name)}, which has no effect. {meant}"
