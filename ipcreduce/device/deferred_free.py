"""Deferred, best-effort freeing of driver memory and objects; safe at any time, from any thread.

Freeing waits for all work on the device. So nothing is freed while a call of a communicator runs: that call waits for
the peers, which may in turn wait for this thread, or be freeing something themselves. Python collects objects in any
thread: also in a thread that captures, where the driver refuses to free, and in the watchdog's thread, on which every
wait relies. At the interpreter's exit the context may be gone, with everything in it. In a forked child nothing belongs
to the child.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from .. import clock, process
from ..cuda.contexts import using_relaxed
from ..errors import CudaError
from ..interrupts import uninterrupted
from ..originals import Thread
from ..page import watchdog
from ..page.control_page import Page
from .stream_order import StreamOrder

_RECLAIM_SECONDS = 5.0
_CALL_SECONDS = 2.0  # for a call of another thread to end, before close() aborts its waits and again after that

_orders: dict[StreamOrder, Any] = {}  # of the open communicators, with their locks
_deferred: deque[tuple[int, Action]] = deque()  # with their contexts
_awaited: list[tuple[Callable[[], bool], int, tuple[Action, ...]]] = []


Action = Callable[[], object]


class _Turn:
    """A lock that nobody waits for. An interrupt right after :meth:`acquire` cannot leave it locked."""

    def __init__(self) -> None:
        self._holder: dict[int, object] = {}

    def acquire(self, token: object) -> bool:
        """True if ``token`` has the lock now. One step of the interpreter."""
        return self._holder.setdefault(0, token) is token

    def release(self, token: object) -> None:
        """Release the lock, if ``token`` has it."""
        if self._holder.get(0) is token:
            del self._holder[0]


_flushing = _Turn()


def track(order: StreamOrder, lock: Any) -> None:
    """Free nothing while calls in this order run, or while a thread holds ``lock`` to make one."""
    _orders[order] = lock


def untrack(order: StreamOrder) -> None:
    """Undo :func:`track`: no more calls come in this order."""
    _orders.pop(order, None)


@contextmanager
def taking(lock: Any, page: Page | None) -> Iterator[bool]:
    """Hold ``lock`` in the block, for close(). If another thread keeps it, the waits of that thread's call are aborted.

    :returns: False if the lock did not come in time.
    """
    try:
        taken = _take(lock, process.at_most(_CALL_SECONDS))
        if not taken:
            if page is not None:
                page.abort_at_close()
            taken = _take(lock, process.at_most(_CALL_SECONDS))
        if not taken:
            warnings.warn(
                "close() has given up: another thread is in a call of the communicator, and that call does not end. "
                "The communicator's memory is freed when this process ends",
                RuntimeWarning,
                stacklevel=4,
            )
        yield taken
    finally:
        _release(lock)


def free_later(context: int, *actions: Action) -> None:
    """Run actions that free something in ``context``, in their order, in a thread and at a time that do no harm."""
    if process.is_over():
        return
    _deferred.extend([(context, action) for action in actions])  # all, or none: a generator can be interrupted
    if watchdog.is_watching():
        with suppress(OSError):  # no thread: the next flush() does it
            Thread(flush, "ipcreduce-finaliser").start()
    else:
        flush()


def free_after(ready: Callable[[], bool], context: int, *actions: Action) -> None:
    """Call :func:`free_later` once ``ready()`` is true, which is asked now and at every :func:`flush`."""
    if not process.is_over():
        _awaited.append((ready, context, actions))
        flush()


def flush() -> None:
    """Run the deferred actions in order, unless a call runs, or another thread is running them."""
    if process.is_over():
        return
    for item in [item for item in _awaited if item[0]()]:
        with uninterrupted(), suppress(ValueError):  # another thread has found it too
            _awaited.remove(item)
            _deferred.extend((item[1], action) for action in item[2])
    token = object()
    while _deferred:
        with uninterrupted():  # an interrupt would leave an action half done, or keep the lock for good
            try:
                if not _flushing.acquire(token):
                    return
                with ExitStack() as held:
                    if not _no_call_runs(held):
                        return
                    while _deferred:  # items are taken out only here
                        attempt(*_deferred.popleft())
            finally:
                _flushing.release(token)


def reclaim() -> None:
    """Run the deferred actions since memory is short, once the running calls have ended: wait for these a while."""
    deadline = clock.now() + _RECLAIM_SECONDS
    for order, lock in list(_orders.items()):
        with ExitStack() as held:
            held.callback(_release, lock)
            if _take(lock, _RECLAIM_SECONDS):
                order.ends_by(deadline)
    flush()


def _no_call_runs(held: ExitStack) -> bool:
    """True if no call of any communicator runs, until ``held``, which takes their locks, is left."""
    for order, lock in list(_orders.items()):
        held.callback(_release, lock)  # first, for an interrupt right after acquire()
        if not lock.acquire(blocking=False) or not order.is_over():
            return False
    return True


def _take(lock: Any, seconds: float) -> bool:
    return clock.wait(lambda timeout: bool(lock.acquire(timeout=timeout)), seconds)


def _release(lock: Any) -> None:
    """Release a re-entrant lock, if this thread has it."""
    with suppress(RuntimeError):
        lock.release()


def attempt(context: int, *actions: Action) -> None:
    """Run each action with ``context`` current. An action that the driver refuses is skipped."""
    with using_relaxed(context):
        for action in actions:
            with suppress(CudaError):
                action()
