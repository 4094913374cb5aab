"""The turns of a communicator's calls: one at a time, and none within another one of the same thread.

A signal handler or a finaliser runs in the middle of whatever its thread does. If it makes a call while that thread is
within one, it is refused at once, as the two would take each other's data. The peers hear of that call behind the one
around it, which ends as if nothing had been. Calls of another communicator share nothing with it, and are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from ..errors import IpcReduceError, UnsupportedError

_T = TypeVar("_T")


class Calls(Protocol):
    """A sequence of calls: see calls.py.

    :ivar within: a call is under way, or an exchange: of the thread that holds the lock.
    :ivar nested: each tells the peers of a call that failed within another one, once that has ended.
    """

    lock: threading.RLock
    within: bool
    nested: list[Callable[[], None]]
    raised: bool
    rank: int
    number: int
    unusable: IpcReduceError | None

    def check_usable(self) -> None: ...
    def fail(self, error: BaseException, *, begun: bool = True) -> None: ...


def make(calls: Calls, body: Callable[..., _T], *given: Any) -> _T:
    """Make one call, under the lock: ``body(*given)``, whose exception is told to the peers.

    ``FastPath.make`` does the same for the repeated calls on GPUs.
    """
    try:
        calls.lock.acquire()  # here, so that an interrupt behind it still releases the lock
        if calls.within or calls.nested:
            make_way(calls)
        if calls.unusable is not None:
            calls.check_usable()
        try:
            calls.within = True  # first: from here on a signal handler's call is a nested one
            calls.number += 1
            return body(*given)
        except BaseException as error:
            calls.fail(error)
            raise
        finally:
            calls.within = False
            if calls.nested:
                tell_nested(calls)
    finally:
        try:  # noqa: SIM105 - an interrupt within suppress() would leave the lock taken
            calls.lock.release()
        except RuntimeError:  # interrupted before we had it
            pass


def make_way(calls: Calls) -> None:
    """Let a call begin. :raises UnsupportedError: within another one of this thread."""
    if not calls.within:
        while calls.nested:
            calls.nested.pop(0)()
        return
    error = UnsupportedError(
        f"a signal handler, a finaliser or a method of an array has made this call within call {calls.number} of the "
        "same communicator and thread. Let it set a flag, and make the call where the program looks at that flag."
    )
    error.locate(calls.rank, calls.number + 1 + len(calls.nested))
    calls.nested.append(partial(calls.fail, error, begun=False))
    raise error


def tell_nested(calls: Calls) -> None:
    """Tell the peers of a call that was refused within the one that has ended. The next one tells of any further."""
    if calls.nested and not calls.raised:  # else the ranks have to meet first, which the next call does
        calls.nested.pop(0)()


def alone(calls: Calls, body: Callable[..., _T], *given: Any) -> _T:
    """Hold off nested calls in ``body(*given)``, which waits for the peers under the lock."""
    try:  # no context manager: an interrupt within its own methods would leave ``within`` set
        calls.within = True
        return body(*given)
    finally:
        calls.within = False
        if calls.nested:
            tell_nested(calls)
