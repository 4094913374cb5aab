"""Validation of a communicator's options. The ranks exchange their findings before any of them raises."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError
from . import plan

_DEFAULT_WORKSPACE_MB = 256
_MOST_MB = 1 << 20  # 1 TB, more than any GPU has
_DEFAULT_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """One rank's options. ``wrong`` describes an invalid option, which is then not used; None if all are valid."""

    device: Any
    timeout: float
    algorithm: str | None
    workspace: int
    wrong: str | None

    @classmethod
    def of(cls, device: Any, timeout: Any, algorithm: Any) -> Options:
        """Check the arguments of ``Communicator``. Raises nothing. That GPU ``device`` exists is checked later.

        :param timeout: seconds.
        """
        wrong, workspace = None, 0
        try:
            workspace = workspace_bytes()
        except ArgumentError as error:
            wrong = str(error)
        ordinal = getattr(device, "id", device)
        if not (device is None or (isinstance(device, str) and device == "auto") or _is_ordinal(ordinal)):
            wrong = f"device must be None, 'auto' or the ordinal of one of the visible GPUs, from 0; found {device!r}"
        if algorithm is not None and not (isinstance(algorithm, str) and algorithm in plan.ALGORITHMS):
            wrong = f"algorithm must be None or one of {plan.ALGORITHMS}; found {algorithm!r}"
            algorithm = None
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
            wrong = f"timeout must be a positive number of seconds; found {timeout!r}"
            timeout = _DEFAULT_SECONDS
        return cls(device, float(timeout), algorithm, workspace, wrong)


def _is_ordinal(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def workspace_bytes() -> int:
    """The bytes of workspace a rank: ``IPCREDUCE_WORKSPACE_MB``, or 256 MB.

    :raises ArgumentError: if the variable is not a whole number from 1 to 1,048,576.
    """
    text = os.environ.get("IPCREDUCE_WORKSPACE_MB", str(_DEFAULT_WORKSPACE_MB))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MOST_MB:
        raise ArgumentError(f"IPCREDUCE_WORKSPACE_MB must be a whole number from 1 to {_MOST_MB}; found {text!r}")
    return int(text) * plan.MB
