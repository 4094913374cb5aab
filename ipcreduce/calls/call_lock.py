"""One call of a communicator at a time. A call from inside another one of the same thread is refused.

A signal handler or a finaliser runs in the middle of whatever its thread does. If it makes a call while that thread is
within a call of the same communicator, the inner call raises an error at once, as the two would take each other's data.
The outer call goes on undisturbed. After it, the peers are told that the inner one failed. Calls of another
communicator work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from ..errors import IpcReduceError, UnsupportedError
from ..originals import RLock

_T = TypeVar("_T")


class Calls(Protocol):
    """The part of :class:`CallSequence` that is needed here. Its module imports this one, which cannot import it.

    :ivar within: True while the thread that holds the lock makes a call or an exchange.
    :ivar nested: functions to call after the present call: each tells the peers of a call that failed within it, or of
        one of which they could not be told as it failed.
    """

    lock: RLock
    within: bool
    nested: list[partial[Any]]
    raised: bool
    rank: int
    number: int
    unusable: IpcReduceError | None

    def check_usable(self) -> None: ...
    def fail(self, error: BaseException, *, begun: bool = True) -> None: ...


def make(calls: Calls, body: Callable[..., _T], *given: Any) -> _T:
    """Make one call, under the lock: run ``body(*given)``, and tell the peers if it raises.

    ``FastPath.make`` repeats these lines for the repeated calls on GPUs, where a function of their own costs 0.1 us.
    """
    try:
        calls.lock.acquire()  # here, so that an interrupt after it still releases the lock
        if calls.within or calls.nested:
            make_way(calls)
        if calls.unusable is not None:
            calls.check_usable()
        try:
            calls.within = True  # first: from here on a signal handler's call is a nested one
            calls.number += 1
            return body(*given)
        except BaseException as error:
            try:
                calls.fail(error)
            except IpcReduceError:
                raise
            except BaseException:  # another Ctrl-C, or no room on the stack: the peers do not know yet
                calls.nested.insert(0, partial(fail_late, calls, error))
                raise
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
    """Let a call begin. :raises UnsupportedError: if this thread is within another one."""
    if not calls.within:
        while calls.nested:
            _tell_first(calls)
        return
    error = UnsupportedError(is_within("this call was made", calls))
    error.locate(calls.rank, calls.number + 1 + len(calls.nested))
    calls.nested.append(partial(calls.fail, error, begun=False))
    raise error


def is_within(what: str, calls: Calls) -> str:
    """The error message for an action, ``what``, of a thread that is within a call of the same communicator."""
    return (
        f"{what} within call {calls.number} of the same communicator and thread: by the host function of a Map, a "
        "method of an array, a signal handler or a finaliser. Do it before or behind that call. A handler can set a "
        "flag at which the program looks"
    )


def tell_nested(calls: Calls) -> None:
    """Tell the peers of a call that failed within the one that has ended. The next call tells of any further ones."""
    if calls.nested and not calls.raised:  # after a fault the ranks have to meet first, which the next call does
        _tell_first(calls)


def _tell_first(calls: Calls) -> None:
    tell = calls.nested.pop(0)
    try:
        tell()
    except BaseException:
        calls.nested.insert(0, tell)
        raise


def fail_late(calls: Calls, error: BaseException) -> None:
    """Tell the peers of a call that has raised ``error`` before."""
    with suppress(IpcReduceError):  # the program has got its error
        calls.fail(error)


def tell_late(calls: Calls) -> None:
    """Tell the peers what could not be told before, before the ranks meet, and forget the calls within others."""
    calls.nested[:] = [tell for tell in calls.nested if tell.func != calls.fail]
    make_way(calls)
    calls.check_usable()


def alone(calls: Calls, body: Callable[..., _T], *given: Any) -> _T:
    """Run ``body(*given)``, which waits for the peers under the lock, and let no nested call be made meanwhile."""
    try:  # no context manager: an interrupt within its own methods would leave ``within`` set
        calls.within = True
        return body(*given)
    finally:
        calls.within = False
        if calls.nested:
            tell_nested(calls)
