"""Semaphores of the C library that several processes share (POSIX ``sem_overview``).

They order memory: stores before :func:`post` are visible after the :func:`try_wait` or :func:`wait` that takes it, on
every processor.
"""

from __future__ import annotations

import ctypes
import functools
import math

from ..errors import UnsupportedError
from ..originals import monotonic, time

BYTES = 64  # for each, a cache line: a sem_t takes 16 to 32


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Library:
    """The functions of the C library. Those that never wait keep the GIL, since releasing it takes longer.

    ``post`` and ``try_wait`` take an address, as a c_void_p: where ctypes has to convert it, a RecursionError would be
    an ArgumentError of ctypes. ``try_wait`` returns 0 if it has taken the semaphore.

    :raises UnsupportedError: if the C library has none.
    """

    def __init__(self) -> None:
        try:
            quick, waiting = ctypes.PyDLL(None), ctypes.CDLL(None)
            self.init, self.post, self.try_wait = quick.sem_init, quick.sem_post, quick.sem_trywait
            if hasattr(waiting, "sem_clockwait"):
                self.clock, self.now, self.wait = [time.CLOCK_MONOTONIC], monotonic, waiting.sem_clockwait
            else:  # musl; glibc before 2.30
                self.clock, self.now, self.wait = [], self._real_time, waiting.sem_timedwait
                self._clock_gettime = quick.clock_gettime
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"the C library has no semaphores ({error})") from None

    def _real_time(self) -> float:
        """The system's time in seconds, which time-machine changes within Python's C."""
        found = _Timespec()
        self._clock_gettime(time.CLOCK_REALTIME, ctypes.byref(found))
        return found.seconds + found.nanoseconds * 1e-9


library = functools.cache(_Library)  # made once a process


def init(address: ctypes.c_void_p) -> None:
    """Make a semaphore of value 0 at ``address``, in shared memory."""
    if library().init(address, 1, 0):
        raise UnsupportedError("sem_init has failed: the C library has no semaphores between processes")


def wait(address: ctypes.c_void_p, seconds: float) -> bool:
    """Wait for a semaphore up to ``seconds``, and take it. False if it did not come, or a signal came.

    Other threads run meanwhile. Short waits again and again let Python's signal handlers run.
    """
    found = library()
    fraction, whole = math.modf(found.now() + seconds)
    until = _Timespec(int(whole), int(fraction * 1e9))
    return bool(found.wait(address, *found.clock, ctypes.byref(until)) == 0)
