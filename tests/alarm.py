"""Exceptions that come out of the midst of other code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

_AGAIN_SECONDS = 1e-3


def call_later(seconds: float, act: Callable[[], None]) -> None:
    """Let the main thread call ``act``, which may raise, ``seconds`` from now, wherever it is then.

    Coverage's own code is left first: an exception there leaves its lock taken, and the process hangs.
    """

    def ring(_: int, frame: FrameType | None) -> None:
        if frame is not None and "coverage" in frame.f_code.co_filename:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            act()

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
