"""Communicators at the end of the process and in forked children."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from . import clock
from .errors import UnsupportedError
from .texts import described, text_of


class Closable(Protocol):
    """Resources that the process must close in order. Their classes stand in higher layers, above this module."""

    def owner(self) -> object | None:
        """The program's object that uses the resources; None once the program has dropped it."""

    @property
    def is_needed(self) -> bool:
        """True if something other than the owner still uses the resources."""

    def close(self, why: str = "") -> None:
        """Close the resources. ``why`` is a reason to tell the other ranks, or ""."""

    def forked(self) -> None:
        """Forget the resources in a forked child, which owns none of them."""


FORKED = (
    "this process was forked from one that used ipcreduce, and neither CUDA nor MPI works in it. Start processes by "
    "spawn (multiprocessing.set_start_method('spawn'))"
)
live: list[Closable] = []  # in the order in which they were made, which is the same on every rank
_used = _forked = _ended = False
CLOSE_SECONDS = 6.0  # for one close(), and for closing all communicators when the process ends
_thread = threading.local()


def begin() -> None:
    """Begin to make a communicator. From here on, a forked child has a share in it.

    :raises UnsupportedError: in a forked child of a process that has used ipcreduce.
    """
    global _used
    check_not_forked()
    _used = True


def add(communicator: Closable) -> None:
    """Register a new communicator."""
    live.append(communicator)


def resources_of(owner: object) -> Closable | None:
    """The resources of an object; None if it is closed."""
    return next((resources for resources in live if resources.owner() is owner), None)


def close_dropped() -> None:
    """Close the resources whose owner the program has dropped without closing it, unless they are still needed.

    The garbage collector does not close them itself: it may run in any thread, and within a capture.
    """
    for resources in list(live):
        if resources.owner() is None and not resources.is_needed:
            resources.close()


def check_not_forked() -> None:
    """Check that this is no forked process. :raises UnsupportedError: in a child of one that has used ipcreduce."""
    if _forked:
        raise UnsupportedError(FORKED)


def is_over() -> bool:
    """True if nothing must be closed any more: the process ends, or it is a forked child, which owns nothing."""
    return _ended or _forked


def refuse_copies(thing: object) -> NoReturn:
    """Raise the error of copy and pickle for an object that stands for this process among the ranks.

    :raises TypeError: always, as Python's sockets and locks do.
    """
    raise TypeError(
        f"a {type(thing).__name__} cannot be copied or pickled, because it stands for this process among the ranks. "
        "Pass the object itself, or make a new one where you need it"
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the waits of this thread in the block, all of which use :func:`at_most`, to ``seconds`` in total."""
    before = getattr(_thread, "deadline", math.inf)
    _thread.deadline = min(before, clock.now() + seconds)
    try:
        yield
    finally:
        _thread.deadline = before


def at_most(seconds: float) -> float:
    """The smaller of ``seconds`` and the time that the surrounding blocks of :func:`time_limit` have left."""
    return max(0.0, min(seconds, getattr(_thread, "deadline", math.inf) - clock.now()))


@atexit.register
def _close_all() -> None:
    global _ended
    why = _end_of_program()
    try:
        with time_limit(CLOSE_SECONDS):
            for communicator in list(live):
                try:
                    communicator.close(why)
                except Exception as error:  # the other communicators still have to be closed
                    print(f"ipcreduce: closing a communicator at exit: {text_of(error)}", file=sys.stderr, flush=True)
    finally:
        _ended = True


def _end_of_program() -> str:
    """The text that tells the other ranks how this program has ended."""
    error = getattr(sys, "last_value", None)  # the error that Python has printed
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):  # an interactive session goes on after an error
        return "its program ended"
    return f"its program ended with {described(error)}"


def _after_fork_in_child() -> None:
    global _forked
    _forked = _used
    for communicator in live:
        communicator.forked()
    live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
