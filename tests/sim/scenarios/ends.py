"""Ranks that close, are killed or fork, and errors in place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import Communicator, Graph, errors
from tests import worker
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    SOON,
    WORLD,
    close_seconds,
    environment,
    good_communicator,
    grown,
    held,
    host_works,
    mine,
    pages,
    raises,
    right,
    works,
)


# ---- ends
def closed_early() -> None:
    """A rank closes while the others still call: they hear of it, soon, and can close."""
    comm = Communicator(timeout=20)
    works(comm)
    WORLD.Barrier()
    if RANK == 0:
        started = time.monotonic()
        comm.close()
        assert time.monotonic() - started < SOON
    else:
        with raises(errors.PeerLostError, "rank 0", "it closed the communicator"):
            works(comm)
        with raises(errors.PeerLostError, "can only be closed"):
            comm.allreduce(mine())
        comm.close()
    comm.close()
    WORLD.Barrier()
    good_communicator()


def never_closed() -> None:
    """A rank that does not close keeps the others for 5 s, and then nothing of theirs that it does not map."""
    comm = Communicator(timeout=20)
    works(comm)
    if RANK != LAST:
        started = time.monotonic()
        comm.close()
        assert 4 < time.monotonic() - started < 8
    WORLD.Barrier()
    comm.close()
    good_communicator()


def crosswise() -> None:
    """Two communicators, closed in another order on each rank, and twice."""
    pair = [Communicator(timeout=20), Communicator(timeout=20)]
    for comm in pair:
        works(comm)
    started = time.monotonic()
    with close_seconds(0.5):  # of which each rank waits one
        for comm in pair[:: 1 if RANK % 2 else -1] * 2:
            comm.close()
            with raises(errors.ArgumentError, "closed"):
                works(comm)
    assert time.monotonic() - started < SOON
    WORLD.Barrier()
    good_communicator()


def killed() -> None:
    """With --among: the last rank's process is killed while the others' kernels wait for it."""
    _killed(works)


def killed_in_a_host_call() -> None:
    _killed(host_works)


def _killed(call: Callable[[Any], None]) -> None:
    """The survivors hear of it soon, and can close."""
    before = held()
    comm = Communicator(WORLD, timeout=60, device=RANK)
    assert (comm.backend, comm.rank, comm.size) == ("ipc", RANK, SIZE), comm.describe()
    with cupy.cuda.Device(RANK):
        for turn in range(10):
            right(comm.allreduce(np.full(20_000, RANK + 1.0)))
            right(comm.allreduce(mine(3 + turn)))
        comm.synchronize()
        assert len(pages) == (RANK == 0), pages
        assert not any(map(os.path.exists, pages)), "a page has a name that nobody would remove"
        if RANK == LAST:
            time.sleep(0.2)  # the others are in their call
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(errors.PeerLostError, f"rank {LAST} to take part", "its process has ended", "can only be closed"):
            call(comm)
    with raises(errors.PeerLostError, "can only be closed"):
        comm.allreduce(np.ones(3))
    started = time.monotonic()
    comm.close()
    assert time.monotonic() - started < SOON
    del comm
    while left := grown(before):  # by the next close(), what another survivor had still mapped
        assert time.monotonic() - started < SOON, f"left behind: {left}"
        Communicator(MPI.COMM_SELF).close()


# ---- errors in place, fork
def synchronous() -> None:
    """IPCREDUCE_SYNC=1: what goes wrong in a call is raised by it, on every rank."""
    with environment(IPCREDUCE_SYNC="1"), Communicator(timeout=2.0) as comm:
        works(comm)
        for array, op in ((mine(), "max"), (mine().astype(np.int32), "sum"), (mine(999), "sum")):
            with raises(errors.RankMismatchError, f"on rank {LAST}", "the same call"):
                comm.allreduce(*((array, op) if RANK == LAST else (mine(),)))
            works(comm)
        if RANK == 0:
            with raises(errors.ArgumentError, "op must be"):
                comm.allreduce(mine(), "mode")
        else:
            with raises(errors.PeerFailedError, "rank 0 refused"):
                comm.allreduce(mine())
        works(comm)
        WORLD.Barrier()
        if RANK == LAST:
            time.sleep(4)
        with raises(errors.PeerTimeoutError, f"rank {LAST} never came"):
            comm.allreduce(mine())
        works(comm)


def forked() -> None:
    """In a forked child everything says what to do instead; the parent goes on."""
    comm, source = Communicator(timeout=20), mine()
    works(comm)
    default = ipcreduce.get_communicator()
    graph = Graph(comm)
    with graph.record():
        result = comm.allreduce(source)
    comm.synchronize()
    quick, out = mine(), mine()
    for _ in range(3):
        comm.allreduce(quick, out=out)
    graph.replay()  # both take the quick way by now
    comm.synchronize()

    def check() -> None:
        for call in (
            lambda: comm.allreduce(quick, out=out), lambda: comm.allreduce(source),
            lambda: comm.allreduce(np.ones(3)), comm.synchronize,
            lambda: comm.allreduce(source, "mode"), lambda: ipcreduce.allreduce(source),
            ipcreduce.get_communicator, Communicator, graph.replay, lambda: Graph(comm).record().__enter__(),
            lambda: comm.capture().__enter__(),
        ):  # fmt: skip
            with raises(errors.UnsupportedError, "Start processes by spawn"):
                call()
        graph.close()
        comm.close()

    with held_by_another_thread(comm._lock):
        worker.in_a_fork(check)
    graph.replay()
    right(result)
    works(comm)
    works(default)
    graph.close()
    comm.close()
    default.close()


@contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    """As it may be when a process forks: in the child nobody ever gives it back."""
    held_now, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held_now.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held_now.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


SCENARIOS = [closed_early, never_closed, crosswise, killed, killed_in_a_host_call, synchronous, forked]
