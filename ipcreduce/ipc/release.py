"""How what the driver gave goes back to it: at any time, from any thread, and each thing whatever becomes of the rest.

Freeing waits for the device. Objects are collected in any thread, also in one that captures, which does not let the
driver free by itself, and in the watchdog's, on which every wait relies. At interpreter exit the context may be gone,
and everything with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..cuda import driver
from ..errors import CudaError
from . import watchdog

_deferred: deque[tuple[int, Callable[[], None]]] = deque()
_awaited: list[tuple[Callable[[], bool], int, tuple[Callable[[], None], ...]]] = []
_flushing = threading.Lock()


def give_back(context: int, *steps: Callable[[], None]) -> None:
    """Runs steps that free something in ``context``, in their order, where and when that does no harm."""
    _deferred.extend((context, step) for step in steps)
    if watchdog.is_watching():
        threading.Thread(target=flush, name="ipcreduce-finaliser").start()
    else:
        flush()


def give_back_after(ready: Callable[[], bool], context: int, *steps: Callable[[], None]) -> None:
    """As :func:`give_back`, once ``ready()``, which is asked now and at every :func:`flush`."""
    _awaited.append((ready, context, steps))
    flush()


def flush() -> None:
    """Runs what was put off, in order, unless a thread is at it: that one goes on."""
    for item in [item for item in _awaited if item[0]()]:
        with suppress(ValueError):  # another thread has found it too
            _awaited.remove(item)
            _deferred.extend((item[1], step) for step in item[2])
    while _deferred and _flushing.acquire(blocking=False):
        try:
            while _deferred:
                attempt(*_deferred.popleft())
        finally:
            _flushing.release()


def attempt(context: int, *steps: Callable[[], None]) -> None:
    """Runs each step with ``context`` current, as far as that works; one that the driver refuses is given up."""
    previous = None
    with suppress(CudaError):
        previous = driver.current_context()
        driver.set_context(context)
    with driver.relaxed():
        for step in steps:
            with suppress(CudaError):
                step()
    if previous is not None:
        with suppress(CudaError):
            driver.set_context(previous)
