"""Deferred, best-effort release of driver resources; safe at any time, from any thread.

Freeing waits for all that runs on the device. So nothing is freed while a call of a communicator runs: that waits for
the peers, which may wait for this thread, or free something themselves. Objects are collected in any thread: also in
one that captures, where the driver refuses to free, and in the watchdog's, on which every wait relies. At interpreter
exit the context may be gone, and everything with it; in a forked child nothing is ours.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

from .. import clock, process
from ..cuda.contexts import using_relaxed
from ..errors import CudaError
from ..page import watchdog
from .stream_order import StreamOrder

_RECLAIM_SECONDS = 5.0
_CALL_SECONDS = 2.0  # for a call of another thread to end, before close() ends its waits and after that

_orders: dict[StreamOrder, Any] = {}  # of the open communicators, with their locks
_deferred: deque[tuple[int, Action]] = deque()  # with their contexts
_awaited: list[tuple[Callable[[], bool], int, tuple[Action, ...]]] = []


Action = Callable[[], object]


class _Turn:
    """A lock that nobody waits for, and that an interrupt right behind :meth:`acquire` cannot leave locked."""

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
    """Free nothing while calls in this order run, or a thread holds ``lock`` to make one."""
    _orders[order] = lock


def forget(order: StreamOrder) -> None:
    """End of :func:`track`: there are no more calls in this order."""
    _orders.pop(order, None)


class Waiting(Protocol):
    """A backend whose calls may wait for peers."""

    def end_waits(self) -> None: ...


@contextmanager
def taking(lock: Any, waiting: Waiting | None) -> Iterator[bool]:
    """Hold ``lock`` in the block, for close(). If another thread keeps it, the waits of that thread's call are ended.

    :returns: False if the lock did not come in time.
    """
    try:
        taken = _take(lock, process.at_most(_CALL_SECONDS))
        if not taken:
            if waiting is not None:
                waiting.end_waits()
            taken = _take(lock, process.at_most(_CALL_SECONDS))
        if not taken:
            warnings.warn(
                "close() has given up: another thread is in a call of the communicator that does not end. What the "
                "communicator holds is freed with this process",
                RuntimeWarning,
                stacklevel=4,
            )
        yield taken
    finally:
        _release(lock)


def give_back(context: int, *actions: Action) -> None:
    """Run actions that free something in ``context``, in their order, where and when that does no harm."""
    if process.is_over():
        return
    _deferred.extend((context, action) for action in actions)
    if watchdog.is_watching():
        threading.Thread(target=flush, name="ipcreduce-finaliser").start()
    else:
        flush()


def give_back_after(ready: Callable[[], bool], context: int, *actions: Action) -> None:
    """:func:`give_back` once ``ready()``, which is asked now and at every :func:`flush`."""
    if not process.is_over():
        _awaited.append((ready, context, actions))
        flush()


def flush() -> None:
    """Run the deferred actions in order, unless a call runs, or another thread is running them."""
    if process.is_over():
        return
    for item in [item for item in _awaited if item[0]()]:
        with suppress(ValueError):  # another thread has found it too
            _awaited.remove(item)
            _deferred.extend((item[1], action) for action in item[2])
    token = object()
    while _deferred:
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
    """:func:`flush` when memory is short: waits for the calls that run, for a while."""
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
        held.callback(_release, lock)  # first, for an interrupt right behind acquire()
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
    """Run each action with ``context`` current. One that the driver refuses is given up."""
    with using_relaxed(context):
        for action in actions:
            with suppress(CudaError):
                action()
