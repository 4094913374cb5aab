"""The clock of every deadline in the package, and waits that use it.

The clock is an attribute of this module, which each use reads, so that tests can stop and move it. Code that measures
real time, such as the benchmarks, uses :mod:`time`.
"""

from __future__ import annotations

from collections.abc import Callable

from .originals import monotonic

_SLICE_SECONDS = 0.05  # the length of one wait in the operating system, which does not know this clock

now: Callable[[], float] = monotonic  # in seconds


def wait(attempt: Callable[[float], bool], seconds: float) -> bool:
    """Call ``attempt(timeout)``, which waits up to ``timeout`` seconds, until it returns True or ``seconds`` are over.

    :returns: the last result of ``attempt``.
    """
    until = now() + seconds
    while not attempt(max(0.0, min(_SLICE_SECONDS, until - now()))):
        if now() >= until:
            return False
    return True


def on_host(deadline: float) -> float:
    """A deadline of this clock, on the monotonic clock, which all processes of a host share."""
    return monotonic() + deadline - now()
