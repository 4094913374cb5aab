"""What has to happen to communicators when the process ends or forks."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol


class Mortal(Protocol):
    """Something that holds what the process must give back in order."""

    def close(self) -> None: ...

    def forked(self) -> None: ...


live: list[Mortal] = []  # in the order in which they were made, which is the same on every rank


@atexit.register
def _close_all() -> None:
    for communicator in list(live):
        try:
            communicator.close()
        except Exception as error:  # the others still have to be closed
            print(f"ipcreduce: closing a communicator at exit: {error}", file=sys.stderr, flush=True)


def _after_fork_in_child() -> None:
    for communicator in live:
        communicator.forked()
    live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
