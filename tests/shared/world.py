"""MPI's world for programs of tests on more ranks than cores: who waits here leaves the processor to the others.

MPICH's own waits poll all the time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

_PAUSES = 0, 0, 1e-4, 2e-4, 5e-4  # seconds between two questions; the last one on and on


class World(MPI.Intracomm):
    """``MPI.COMM_WORLD`` itself, with patience in the calls that the tests' programs make."""

    def __new__(cls) -> World:
        return super().__new__(cls, MPI.COMM_WORLD)

    def Barrier(self) -> None:
        _until(self.Ibarrier().Test)

    def allgather(self, sendobj: Any) -> list[Any]:
        self.Barrier()
        return super().allgather(sendobj)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        self.Barrier()
        return super().allreduce(sendobj, op)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self.Barrier()
        return super().bcast(obj, root)

    def recv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        _until(lambda: self.iprobe(source, tag))
        return super().recv(buf, source, tag, status)


def _until(condition: Callable[[], bool]) -> None:
    for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
        if condition():
            return
        time.sleep(pause)


WORLD = World()
