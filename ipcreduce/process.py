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
    """Resources that the process must give back in order."""

    def owner(self) -> object | None:
        """The object that the program has; None once it has dropped that."""

    @property
    def is_needed(self) -> bool: ...

    def close(self, why: str = "") -> None:
        """:param why: for the other ranks, if there is more to say than that it was closed."""

    def forked(self) -> None: ...


FORKED = (
    "this process was forked from one that used ipcreduce: neither CUDA nor MPI works in it. Start processes by spawn "
    "(multiprocessing.set_start_method('spawn'))"
)
live: list[Closable] = []  # in the order in which they were made, which is the same on every rank
_used = _forked = _ended = False
CLOSE_SECONDS = 6.0  # for a close(), and for all communicators together at the process's end
_thread = threading.local()


def add(communicator: Closable) -> None:
    """Register a new communicator."""
    global _used
    _used = True
    live.append(communicator)


def resources_of(owner: object) -> Closable | None:
    """The resources of an object that is not closed yet."""
    return next((resources for resources in live if resources.owner() is owner), None)


def close_dropped() -> None:
    """Close what the program has dropped without closing it, unless it is still needed.

    Not at once, when the garbage collector finds it: that may be in any thread, and within a capture.
    """
    for resources in list(live):
        if resources.owner() is None and not resources.is_needed:
            resources.close()


def check_not_forked() -> None:
    """:raises UnsupportedError: in a child of a process that has made a communicator."""
    if _forked:
        raise UnsupportedError(FORKED)


def is_over() -> bool:
    """True if nothing is given back any more: the process ends, or is a fork, which owns nothing."""
    return _ended or _forked


def refuse_copies(thing: object) -> NoReturn:
    """``__reduce__`` of an object that stands for this process among the ranks.

    :raises TypeError: always, from copy and pickle, as Python's own sockets and locks do.
    """
    raise TypeError(
        f"a {type(thing).__name__} cannot be copied or pickled: it stands for this process among the ranks. Pass the "
        "object itself, or make a new one where it is needed"
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Bound the waits of this thread in the block, which all go by :func:`at_most`, to ``seconds`` in all."""
    before = getattr(_thread, "deadline", math.inf)
    _thread.deadline = min(before, clock.now() + seconds)
    try:
        yield
    finally:
        _thread.deadline = before


def at_most(seconds: float) -> float:
    """``seconds``, or the time left in the blocks around, if that is less: see :func:`time_limit`."""
    return max(0.0, min(seconds, getattr(_thread, "deadline", math.inf) - clock.now()))


@atexit.register
def _close_all() -> None:
    global _ended
    why = _end_of_program()
    with time_limit(CLOSE_SECONDS):
        for communicator in list(live):
            try:
                communicator.close(why)
            except Exception as error:  # the others still have to be closed
                print(f"ipcreduce: closing a communicator at exit: {text_of(error)}", file=sys.stderr, flush=True)
    _ended = True


def _end_of_program() -> str:
    """The end of this program, in words for the other ranks."""
    error = getattr(sys, "last_value", None)  # Python has shown it
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):  # a session goes on after an error
        return "its program ended"
    return f"its program ended with {described(error)}"


def _after_fork_in_child() -> None:
    global _forked
    _forked = _used
    for communicator in live:
        communicator.forked()
    live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
