"""Ranks that close, are killed or fork, and errors in place."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import Communicator, Graph, communicator_state, errors
from ipcreduce.cuda.virtual_memory import Range
from ipcreduce.device import deferred_free
from ipcreduce.graphs.direct.registration import DirectGraphs
from tests.shared import clock, worker
from tests.shared.bounds import HANG, LONG, as_shipped, late, no_hang, until
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    WORLD,
    close_seconds,
    environment,
    fault,
    good_communicator,
    grown,
    held,
    host_works,
    mine,
    others_wait,
    pages,
    raises,
    right,
    works,
)
from tests.simulated import driver, machine_streams


# ---- ends
def closed_early() -> None:
    """A rank closes while the others still call: they hear of it, soon, and can close."""
    comm = Communicator()
    works(comm)
    WORLD.Barrier()
    if RANK == 0:
        with no_hang("close()"):
            comm.close()
    else:
        with raises(errors.PeerLostError, "rank 0", "it closed the communicator"):
            works(comm)
        with raises(errors.PeerLostError, "can only be closed"):
            comm.allreduce(mine())
        comm.close()
    comm.close()
    WORLD.Barrier()
    good_communicator()


def freed_once_unmapped() -> None:
    """A workspace is freed once every peer has unmapped it, however late that is, and a rank leaves behind its own."""
    for memory in ("ipc", "vmm"):
        with environment(IPCREDUCE_MEMORY=memory):
            comm = Communicator()
        _freed_once_unmapped(comm)


def _freed_once_unmapped(comm: Communicator) -> None:
    works(comm)
    assert comm._state.backend is not None
    page, workspace, peers = (
        comm._state.calls.page,
        comm._state.backend.workspace,
        [rank for rank in range(SIZE) if rank != RANK],
    )
    own, unmap = workspace.address, workspace.unmap_peers
    free, close = driver.free, Range.close
    freed: list[bool] = []
    had_left: list[bool] = []

    def freeing(address: int) -> None:
        if address == own:
            freed.append(all(page.has_unmapped(rank) for rank in peers))
        free(address)

    def closing(place: Range) -> None:
        if place.address == own:
            freed.append(all(page.has_unmapped(rank) for rank in peers))
        close(place)

    def unmapping() -> None:
        had_left.append(page.has_left(RANK))
        unmap()

    workspace.unmap_peers = unmapping
    with (
        mock.patch.object(driver, "free", freeing),
        mock.patch.object(Range, "close", closing),
        mock.patch.object(communicator_state, "_CLOSE_SECONDS", 0.2),
    ):
        if RANK != 0:
            WORLD.Barrier()
        comm.close()
        if RANK == 0:
            assert not freed, "the peers have not closed"
            WORLD.Barrier()
        until(lambda: deferred_free.flush() or freed, "the end of the workspace")
    assert freed == [True]
    assert had_left
    assert not any(had_left)


def never_closed() -> None:
    """A rank that does not close keeps the others for 5 s, and then nothing of theirs that it does not map."""
    comm = Communicator()
    works(comm)
    if RANK != LAST:
        assert closing_takes(comm, 5.25) >= 5
    WORLD.Barrier()
    comm.close()
    good_communicator()


def closing_takes(comm: Communicator, most: float) -> float:
    """The seconds of close(), at most ``most`` by a clock that stands but for these, and else the test hangs."""
    with as_shipped(), clock.standing():
        begun = clock.now()
        with clock.passing(0.25, clock.once_looked(), most=most):
            comm.close()
        return clock.now() - begun


def crosswise() -> None:
    """Two communicators, closed in another order on each rank, and twice."""
    pair = [Communicator(), Communicator()]
    for comm in pair:
        works(comm)
    with no_hang("close()"), close_seconds(0.5):  # of which each rank waits one
        for comm in pair[:: 1 if RANK % 2 else -1] * 2:
            comm.close()
            with raises(errors.ArgumentError, "closed"):
                works(comm)
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
    comm = Communicator(WORLD, device=RANK)
    assert (comm.backend, comm.rank, comm.size) == ("ipc", RANK, SIZE), comm.describe()
    with cupy.cuda.Device(RANK):
        for turn in range(10):
            right(comm.allreduce(np.full(20_000, RANK + 1.0)))
            right(comm.allreduce(mine(3 + turn)))
        comm.synchronize()
        assert len(pages) == (2 if RANK == 0 else 0), pages  # the control page, and memory for NumPy arrays
        assert not any(map(os.path.exists, pages)), "a page has a name that nobody would remove"
        if RANK == LAST:
            late(0.2)  # the others are in their call
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(errors.PeerLostError, f"rank {LAST} is gone", "its process has ended", "can only be closed"):
            call(comm)
    with raises(errors.PeerLostError, "can only be closed"):
        comm.allreduce(np.ones(3))
    with no_hang("close()"):
        comm.close()
    del comm
    gives_back(before)


# ---- errors in place, fork
def synchronous() -> None:
    """IPCREDUCE_SYNC=1: what goes wrong in a call is raised by it, on every rank."""
    with environment(IPCREDUCE_SYNC="1"), Communicator() as comm:
        works(comm)
        for array, op in ((mine(), "max"), (mine().astype(np.int32), "sum"), (mine(999), "sum")):
            with raises(errors.RankMismatchError, f"on rank {LAST}", "is not the same on every rank"):
                comm.allreduce(*((array, op) if RANK == LAST else (mine(),)))
            works(comm)
        if RANK == 0:
            with raises(errors.ArgumentError, "there is no op"):
                comm.allreduce(mine(), "mode")
        else:
            with raises(errors.PeerFailedError, "rank 0 raised an error"):
                comm.allreduce(mine())
        works(comm)
        WORLD.Barrier()
        worker.await_others(WORLD)
        passing = clock.passing(121.0, others_wait(comm)) if RANK != LAST else nullcontext()
        with passing, raises(errors.PeerTimeoutError, f"rank {LAST} did not call within"):
            comm.allreduce(mine())
        worker.let_last_go(WORLD)
        works(comm)


def forked() -> None:
    """In a forked child everything says what to do instead; the parent goes on."""
    comm, source = Communicator(), mine()
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

    with held_by_another_thread(comm._state.calls.lock):
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


# ---- ends that nothing holds up
def closed_beside_a_forked_child() -> None:
    """A forked child that has nothing to do with us lives on: close() does not wait for it."""
    comm = Communicator()
    works(comm)
    with forked_child():
        with no_hang("close()"):
            comm.close()
        WORLD.Barrier()


def ended_beside_a_forked_child() -> None:
    """With --among: the program ends while its child lives, which itself waits for that."""
    comm = Communicator(WORLD, device=RANK)
    with cupy.cuda.Device(RANK):
        works(comm)
    child = os.fork()
    if not child:
        os.close(1)  # whoever reads it waits for its end
        os.close(2)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)


@contextmanager
def forked_child() -> Iterator[None]:
    child = os.fork()
    if not child:
        signal.alarm(int(LONG))
        while True:
            time.sleep(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def closed_with_their_graph_under_way() -> None:
    """Rank 0 alone replays a graph that CuPy has captured, and all close: within 6 s, whatever the timeout."""
    stream, source, target = cupy.cuda.Stream(non_blocking=True), mine(), mine()
    before, comm = held(), Communicator()
    works(comm, 1000)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    comm.allreduce(source, out=target, stream=stream)
    graph = stream.end_capture()
    WORLD.Barrier()
    if RANK == 0:
        graph.launch(stream)
        closing_takes(comm, 5.25)
    comm.close()
    WORLD.Barrier()
    del comm, graph
    gives_back(before)


def gives_back(before: dict[str, int]) -> None:
    """The next close() frees what could not be freed before, because a peer still had it mapped or the GPU was busy."""
    begun = time.monotonic()
    while left := grown(before):
        assert time.monotonic() - begun < HANG, f"left behind: {left}"
        Communicator(MPI.COMM_SELF).close()


def closed_on_a_busy_device() -> None:
    """Something of somebody else's runs on rank 0's GPU and does not end: close() leaves the rest to the process."""
    before, comm, over = held(), Communicator(), threading.Event()
    works(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    if RANK == 0:
        machine_streams.submit(stream.ptr, over.wait)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if RANK == 0:
            closing_takes(comm, 6.0)
        with close_seconds(0.5):  # rank 0 does not come any more
            comm.close()
    assert [str(one.message)[:54] for one in warned] == (
        ["rank 0: close() has given up waiting for GPU 0, where "] if RANK == 0 else []
    )
    with raises(errors.ArgumentError, "is closed"):
        comm.allreduce(mine())
    WORLD.Barrier()
    over.set()
    del comm
    gives_back(before)
    WORLD.Barrier()
    good_communicator()


def closed_beside_a_call() -> None:
    """Another thread of rank 0 is in a call that waits for the others, who close: it ends, and close() is bounded."""
    comm, found = Communicator(), []
    works(comm)
    WORLD.Barrier()

    def call() -> None:
        try:
            comm.allreduce(np.ones(100))
        except errors.IpcReduceError as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    if RANK == 0:
        before = comm._state.calls.number
        thread.start()
        until(lambda: comm._state.calls.number > before, "the call")
        closing_takes(comm, 2.25)
        thread.join(HANG)
        assert [type(error) for error in found] == [errors.PeerLostError], found
    WORLD.Barrier()  # before it the others do not come
    comm.close()
    WORLD.Barrier()
    good_communicator()


def ended_on_a_busy_device() -> None:
    """With --among: two communicators, a graph and arrays are open at the program's end, and the GPU is never free.

    In real time: it takes 6 s, with the library as it is.
    """
    kept.append(shipped := as_shipped())  # or its end would come with that of the object
    shipped.__enter__()
    comms = [Communicator(WORLD, device=RANK) for _ in range(2)]
    with cupy.cuda.Device(RANK):
        graph = Graph(comms[0])
        with graph.record():
            kept.append(comms[0].allreduce(mine()))
        comms[0].synchronize()
        kept.extend([*comms, graph, cupy.cuda.Stream(non_blocking=True)])
        machine_streams.submit(kept[-1].ptr, threading.Event().wait)


kept: list[Any] = []


def interrupted_where_others_meet() -> None:
    """Ctrl-C in a resynchronisation passes, at once; the others, who wait there or come later, hear why."""
    comm = Communicator()
    works(comm)
    fault(comm)
    WORLD.Barrier()
    if RANK == 0:
        page, meeting = comm._state.calls.page, comm._state.calls._rounds._meeting + 1

        def interrupt() -> None:
            until(lambda: page.read_meeting(meeting)[0], "rank 0")
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            with no_hang("Ctrl-C"):
                comm.allreduce(mine())
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no KeyboardInterrupt")
        with raises(errors.PeerLostError, "KeyboardInterrupt", "can only be closed"):
            comm.allreduce(mine())
        WORLD.send(None, LAST)
    else:
        if RANK == LAST:
            WORLD.recv(source=0)  # it has left by then; a rank between is in the meeting
        with raises(errors.PeerLostError, "rank 0", "left the resynchronisation after a fault (KeyboardInterrupt)"):
            comm.allreduce(mine())
    with no_hang("close()"):
        comm.close()
    WORLD.Barrier()
    good_communicator()


def busy_where_others_meet() -> None:
    """Rank 0's GPU is busy with somebody else's work during a resynchronisation: an error on all, and no hang."""
    comm, over = Communicator(), threading.Event()
    works(comm)
    fault(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    if RANK == 0:
        machine_streams.submit(stream.ptr, over.wait)
    WORLD.Barrier()
    passing = clock.passing(LONG + 1) if RANK == 0 else nullcontext()
    with passing, raises(errors.PeerLostError, "GPU 0 is still busy" if RANK == 0 else "can only be closed"):
        works(comm)
    over.set()
    comm.close()
    WORLD.Barrier()
    good_communicator()


def registered_graph_in_a_fork() -> None:
    """A child that collects a registered graph of its parent's tells the peers nothing."""
    with Communicator(algorithm="direct") as comm:
        graphs = [Graph(comm)]
        with graphs[0].record():
            result = comm.allreduce(mine())
        assert graphs[0].state == "registered"
        comm.synchronize()
        marks, calls = comm._state.session.direct.mappings.marks, driver.calls()

        def check() -> None:
            graphs.clear()
            gc.collect()

        worker.in_a_fork(check)
        WORLD.Barrier()
        assert not marks._words.any(), "a child has said that we have unmapped"
        assert driver.calls() == calls
        graphs[0].replay()
        right(result)
        comm.synchronize()


def registration_that_lies() -> None:
    """A rank names an allocation that it has not sent, or bytes outside of one, or one that is larger than it is.

    The first two are an error on every rank; after the third, too, no rank writes to what is not mapped.
    """
    gather = DirectGraphs._gather_rows
    for field, by in (("slab", 77), ("offset", 1 << 40), ("nbytes", 1 << 30)):

        def garbled(self: Any, number: int, rows: Any, field: str = field, by: int = by) -> Any:
            if RANK == LAST and field in rows.dtype.names:
                rows[field] += by
            return gather(self, number, rows)

        with Communicator(algorithm="direct") as comm, Graph(comm) as graph:
            works(comm)
            with mock.patch.object(DirectGraphs, "_gather_rows", garbled):
                refused = raises(errors.RankMismatchError, f"rank {LAST} names bytes", "of its allocation")
                with nullcontext() if field == "nbytes" else refused, graph.record():
                    result = comm.allreduce(mine())
            assert graph.state == "staged", graph.state
            graph.replay()
            right(result)
            works(comm)


SCENARIOS = [
    closed_early, freed_once_unmapped, never_closed, crosswise, killed, killed_in_a_host_call, synchronous, forked,
    closed_beside_a_forked_child, ended_beside_a_forked_child, closed_with_their_graph_under_way,
    closed_on_a_busy_device, closed_beside_a_call, ended_on_a_busy_device, interrupted_where_others_meet,
    busy_where_others_meet, registered_graph_in_a_fork, registration_that_lies,
]  # fmt: skip
