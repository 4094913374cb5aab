"""The clock of every deadline and patience in the package, and waits that go by it.

It is a module's attribute, read anew at each use, so that tests can stop and move it. What measures real time, as the
benchmarks do, reads :mod:`time` itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SLICE_SECONDS = 0.05  # of a wait in the operating system, which knows only its own clock

now: Callable[[], float] = time.monotonic  # in seconds


def wait(attempt: Callable[[float], bool], seconds: float) -> bool:
    """Wait up to ``seconds``. True once ``attempt(timeout)``, which waits up to ``timeout`` seconds, returns True."""
    until = now() + seconds
    while not attempt(max(0.0, min(_SLICE_SECONDS, until - now()))):
        if now() >= until:
            return False
    return True


def on_host(deadline: float) -> float:
    """``deadline`` on the monotonic clock, which all processes of a host share."""
    return time.monotonic() + deadline - now()
