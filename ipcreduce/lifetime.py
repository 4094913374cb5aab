"""What has to happen to communicators when the process ends or forks."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from .errors import UnsupportedError


class Mortal(Protocol):
    """Something that holds what the process must give back in order."""

    def close(self) -> None: ...

    def forked(self) -> None: ...


FORKED = (
    "this process was forked from one that used ipcreduce: neither CUDA nor MPI works in it. Start processes by spawn "
    "(multiprocessing.set_start_method('spawn'))"
)
live: list[Mortal] = []  # in the order in which they were made, which is the same on every rank
_used = _forked = False


def add(communicator: Mortal) -> None:
    """A communicator was made."""
    global _used
    _used = True
    live.append(communicator)


def check_not_forked() -> None:
    """:raises UnsupportedError: in a child of a process that has made a communicator."""
    if _forked:
        raise UnsupportedError(FORKED)


@atexit.register
def _close_all() -> None:
    for communicator in list(live):
        try:
            communicator.close()
        except Exception as error:  # the others still have to be closed
            print(f"ipcreduce: closing a communicator at exit: {error}", file=sys.stderr, flush=True)


def _after_fork_in_child() -> None:
    global _forked
    _forked = _used
    for communicator in live:
        communicator.forked()
    live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
