"""Exceptions that come out of the midst of other code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_AGAIN_SECONDS = 1e-3
_ROOT = str(Path(__file__).parents[2])
_DEVICE = tuple(
    f"{_ROOT}/tests/simulated/{part}"
    for part in ("machine", "driver", "virtual_memory", "cupy", "graph", "pools", "kernels", "nccl")
)
_LOSING = "numpy/_core/_internal.py"  # what NumPy's C code calls from here, and drops the exceptions of
_RAISED = "raised by an alarm"  # an attribute of the exceptions


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    if hasattr(unraisable.exc_value, _RAISED):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(unraisable)


def _is_left_first(frame: FrameType | None) -> bool:
    """True within NumPy's, coverage's or the simulated device's code, which may have called the standard library's."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(_LOSING) or "coverage" in path or path.startswith(_DEVICE):
            return True
        if path.startswith(_ROOT):
            return False
        frame = frame.f_back
    return False


def call_later(seconds: float, act: Callable[[], None]) -> None:
    """Let the main thread call ``act``, which may raise, ``seconds`` from now, wherever it is then.

    Coverage's own code is left first: an exception there leaves its lock taken, and the process hangs. So is NumPy's,
    which loses exceptions, and the simulated device, as a call of the driver is: no signal's handler runs within one.
    An exception that comes in a finaliser is ignored by Python, so it is raised once more a little later.
    """

    def ring(_: int, frame: FrameType | None) -> None:
        if _is_left_first(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        try:
            act()
        except BaseException as error:
            setattr(error, _RAISED, True)
            raise

    sys.unraisablehook = _again
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
