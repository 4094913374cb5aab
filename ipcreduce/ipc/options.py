"""What a communicator is made with, checked. The ranks tell each other what is wrong before any of them raises."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from . import plan

_DEFAULT_WORKSPACE_MB = 256
_MOST_MB = 1 << 20  # more than a GPU has
_DEFAULT_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """The arguments of one rank. ``wrong`` says what is wrong with them, if anything is; that one is then not used."""

    device: Any
    timeout: float
    algorithm: str | None
    workspace: int
    wrong: str | None

    @classmethod
    def of(cls, device: Any, timeout: Any, algorithm: Any) -> Options:
        """The arguments as they were passed; raises nothing. ``device`` is looked at once the GPUs are known."""
        wrong, workspace = None, 0
        try:
            workspace = workspace_bytes()
        except ArgumentError as error:
            wrong = str(error)
        if algorithm is not None and not (isinstance(algorithm, str) and algorithm in plan.ALGORITHMS):
            wrong = f"algorithm must be None or one of {plan.ALGORITHMS}; found {algorithm!r}"
            algorithm = None
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
            wrong = f"timeout must be a positive number of seconds; found {timeout!r}"
            timeout = _DEFAULT_SECONDS
        return cls(device, float(timeout), algorithm, workspace, wrong)


def workspace_bytes() -> int:
    """Bytes of workspace a rank: ``IPCREDUCE_WORKSPACE_MB``, or 256 MB.

    :raises ArgumentError: if that is no whole number of at least 1.
    """
    text = os.environ.get("IPCREDUCE_WORKSPACE_MB", str(_DEFAULT_WORKSPACE_MB))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MOST_MB:
        raise ArgumentError(f"IPCREDUCE_WORKSPACE_MB must be a whole number from 1 to {_MOST_MB}; found {text!r}")
    return int(text) * plan.MB
