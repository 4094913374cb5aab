"""Exceptions that come out of the midst of other code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

_AGAIN_SECONDS = 1e-3
_RAISED = "raised by an alarm"  # an attribute of the exceptions


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    if hasattr(unraisable.exc_value, _RAISED):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(unraisable)


def call_later(seconds: float, act: Callable[[], None]) -> None:
    """Let the main thread call ``act``, which may raise, ``seconds`` from now, wherever it is then.

    Coverage's own code is left first: an exception there leaves its lock taken, and the process hangs. An exception
    that comes in a finaliser is ignored by Python, so it is raised once more a little later.
    """

    def ring(_: int, frame: FrameType | None) -> None:
        if frame is not None and "coverage" in frame.f_code.co_filename:
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
