"""States, exceptions, and ranks that do not do the same."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import cupy
import numpy as np

import ipcreduce
from ipcreduce import (
    CaptureError,
    Communicator,
    Graph,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    PeerTimeoutError,
    RankMismatchError,
    eager_break,
)
from ipcreduce.calls import sequence as faults_module
from ipcreduce.calls import votes
from tests.graphs.common import (
    BRIEF,
    LAST,
    RANK,
    SIM,
    SIZE,
    TOTAL,
    WORLD,
    given_back,
    held_by_library,
    mine,
    raises,
    records,
    right,
    time_passes,
    works,
)
from tests.shared import clock, worker
from tests.shared.bounds import LONG, no_hang


def states(comm: Any) -> None:
    """Every wrong step is refused, and the error says the state and what to do."""
    source, graph, other = mine(), Graph(comm), Graph(comm)
    assert graph.state == "empty"
    with raises(GraphStateError, "replay()", "empty", "record it first"):
        graph.replay()
    with raises(GraphStateError, "empty", "Record it first"):
        _ = graph.pool
    with other.record():
        again = comm.allreduce(source)
    with graph.record() as recorded:
        assert recorded is graph
        assert graph.state == "recording"
        first = comm.allreduce(source)
        with raises(GraphStateError, "record()", "recording", "new Graph"):
            graph.record().__enter__()
        with raises(GraphStateError, "record()", "same thread", "End that recording first"):
            Graph(comm).record().__enter__()
        with raises(GraphStateError, "replay()", "recording", "record it first"):
            graph.replay()
        with raises(GraphStateError, "replay()", "within a recording"):
            other.replay()
        with raises(GraphStateError, "close()", "Leave the with block"):
            graph.close()
        with raises(GraphStateError, "capture()", "within a recording"):
            comm.capture().__enter__()
        second = comm.allreduce(first)
    assert graph.state in ("staged", "registered")
    right(second, TOTAL * SIZE)
    with raises(GraphStateError, "record()", graph.state, "new Graph"):
        graph.record().__enter__()
    graph.replay()
    other.replay()
    right(again)
    right(second, TOTAL * SIZE)
    text = graph.describe()
    for word in (graph.state, "kernel nodes", "bytes in", "sum of float32 (1000,)"):
        assert word in text, text
    failed = Graph(comm)
    with raises(ZeroDivisionError), failed.record():
        _ = 1 // 0
    assert failed.state == "failed"
    for bad, state in ((failed, "failed"), (graph, "closed")):
        if state == "closed":
            graph.close()
        with raises(GraphStateError, "replay()", state, "record it first"):
            bad.replay()
        with raises(GraphStateError, "record()", state, "new Graph"):
            bad.record().__enter__()
        bad.close()
        bad.close()
        assert bad.state == "closed"
    unused = Graph(comm)
    unused.close()
    with raises(GraphStateError, "record()", "closed", "new Graph"):
        unused.record().__enter__()
    with raises(ipcreduce.ArgumentError, "pool"):
        Graph(comm, pool=graph)  # type: ignore[arg-type]
    other.close()
    works(comm)


def after_a_fault(comm: Any) -> None:
    """A recording right after a call that was refused: the ranks start anew, and it is right."""
    for call in (lambda: comm.allreduce(mine(), "mode"), lambda: comm.allreduce(mine(10 + RANK))):
        with raises(IpcReduceError):
            call()
            comm.synchronize()
        records(comm)


def interrupted_at_the_end(comm: Any) -> None:
    """One rank, in the end of a recording: before its vote, behind it, or as it tells of an error. The others hear."""
    source, calls, session = mine(), comm._state.calls, comm._state.session
    for what, failing in (
        ("before", mock.patch.object(votes, "_checksums", side_effect=KeyboardInterrupt)),
        ("behind", mock.patch.object(session, "run_recording", side_effect=KeyboardInterrupt)),
        ("telling", mock.patch.object(calls, "fail", side_effect=KeyboardInterrupt)),
    ):
        interrupted = failing if RANK == LAST else contextlib.nullcontext()
        words = [] if RANK == LAST else [f"rank {LAST} raised an error (KeyboardInterrupt"]
        with no_hang(), raises(KeyboardInterrupt if RANK == LAST else PeerFailedError, *words), interrupted:
            with Graph(comm) as graph, graph.record():
                graph.add_eager(lambda: comm.allreduce(source))
                comm.allreduce(source)  # for which the others wait
                if what == "telling" and RANK == LAST:
                    raise LookupError
            comm.synchronize()
        works(comm)


def caught_in_the_body(comm: Any) -> None:
    """A refused call that the body catches: the recording fails by a typed error on every rank, and all goes on."""
    source = mine()
    for who in ([LAST], range(SIZE)):
        with raises(IpcReduceError), Graph(comm).record():
            comm.allreduce(source)
            with contextlib.suppress(IpcReduceError):
                comm.allreduce(source, "mode" if RANK in who else "sum")
            comm.allreduce(source)
        works(comm)


def refused_on_one_rank(comm: Any) -> None:
    """A replay that one rank cannot make: the others are told, and not left waiting."""
    source, graph = mine(), Graph(comm)
    with graph.record():
        comm.allreduce(source)
    if RANK == LAST:
        graph.close()
    with no_hang(), raises(GraphStateError if RANK == LAST else PeerFailedError, "closed"):
        graph.replay()
        comm.synchronize()
    works(comm)
    graph.close()


def two_threads(comm: Any) -> None:
    """A second recording of the same communicator, in another thread, is refused; the first one goes on."""
    source, found, device = mine(), [], cupy.cuda.Device()

    def record() -> None:
        with Graph(comm).record():
            comm.allreduce(source)

    def attempt() -> None:
        try:
            with device:
                record()
        except BaseException as error:
            found.append(error)

    with Graph(comm) as graph:
        with graph.record():
            first = comm.allreduce(source)
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
            second = comm.allreduce(first)
        right(second, TOTAL * SIZE)
    assert isinstance(found[0], GraphStateError), repr(found)
    works(comm)


def two_tasks(comm: Any) -> None:
    """While an asyncio task records, whatever another one calls is refused, and the recording goes on."""
    source, weight, second = mine(), cupy.ones(1000, np.float32), Communicator()
    other = Graph(comm)
    with other.record():
        comm.allreduce(source)
    second.allreduce(source)  # this call is cached
    runner = ipcreduce.GraphRunner(comm.allreduce, comm, copy_inputs=True)

    def run(_: Graph) -> None:
        with ipcreduce.forward_context("a"):
            runner(given.pop())

    given = [mine(), mine()]
    run(other)

    async def attempted(attempt: Callable[[Graph], Any], graph: Graph) -> None:
        with raises(CaptureError, "another asyncio task", "await nothing"):
            attempt(graph)

    async def record(attempt: Callable[[Graph], Any], graph: Graph) -> Any:
        with graph.record():
            first = comm.allreduce(source)
            await asyncio.create_task(attempted(attempt, graph))
            return comm.allreduce(first)

    attempts: list[Callable[[Graph], Any]] = [
        lambda _: comm.allreduce(source), lambda _: comm.allreduce([source]), lambda _: second.allreduce(source),
        lambda _: comm.allreduce(source, then=ipcreduce.Map("v + 1")),
        lambda _: comm.allreduce_rmsnorm(source, weight),
        lambda _: other.replay(), lambda graph: graph.replay(), lambda graph: graph.record().__enter__(),
        lambda _: Graph(second).record().__enter__(), lambda graph: graph.add_eager(list), eager_break(lambda _: None),
        run,
    ]  # fmt: skip
    captured = set()
    for attempt in attempts:
        graph = Graph(comm)
        right(asyncio.run(record(attempt, graph)), TOTAL * SIZE)
        graph.replay()
        works(comm)
        works(second)
        captured.update((part.nodes.kernels, part.nodes.others) for part in graph.segments)
    assert len(captured) == 1, f"something else was captured: {captured}"
    runner.close()
    second.close()

    async def within() -> Any:
        return comm.allreduce(source)

    with Graph(comm).record():
        total = asyncio.run(within())  # a body that is no task's may run a loop of its own
    right(total)
    works(comm)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


def exceptions(comm: Any) -> None:
    """In the body, on one rank or on all: unchanged there, named on the others; stream and allocator are as before."""
    before, source = held_by_library(comm), mine()
    for who in ([LAST], [0], range(SIZE)):
        for midway in (False, True):
            caller, graph = cupy.cuda.get_current_stream(), Graph(comm)
            words = [] if RANK in who else [f"rank {who[0]}", "ValueError: spilled"]
            with raises(ValueError if RANK in who else PeerFailedError, *words), graph.record():
                cupy.zeros(5000, np.float32)
                if midway:
                    comm.allreduce(source)
                if RANK in who:
                    raise ValueError("spilled")
                comm.allreduce(source)
            assert graph.state == "failed"
            assert cupy.cuda.get_current_stream().ptr == caller.ptr
            held = graph.pool.nbytes
            cupy.empty(3 << 20, np.uint8)
            assert graph.pool.nbytes == held
            works(comm)
    for odd in (RuntimeError("cannot read /data/\udcff"), Mute()):  # texts that cannot be encoded, or not even made
        told = f"({type(odd).__name__}: {'cannot read' if isinstance(odd, RuntimeError) else 'a Mute without a text'}"
        words = [] if RANK == LAST else [f"rank {LAST}", told]
        with raises(type(odd) if RANK == LAST else PeerFailedError, *words), Graph(comm).record():
            comm.allreduce(source)
            if RANK == LAST:
                raise odd
        works(comm)
    del odd
    for who in ([LAST], range(SIZE)):
        error = ipcreduce.ArgumentError if RANK in who else PeerFailedError
        with raises(error, "there is no op"), Graph(comm).record():
            comm.allreduce(source, "mode" if RANK in who else "sum")
            comm.allreduce(source)
        works(comm)
    del graph, source
    given_back(comm, before)


def disagreement(comm: Any) -> None:
    """Number, shape, dtype or op of the all-reduces differ: named on every rank, with both; then all works."""
    before = held_by_library(comm)
    plain, integers = mine(10), mine(10, np.int32)
    usual = (plain, "sum")
    for theirs, words in (
        ([usual, (mine(20), "sum"), usual], ["sum of float32 (10,)", "sum of float32 (20,)"]),
        ([usual, (integers, "sum"), usual], ["sum of float32 (10,)", "sum of int32 (10,)"]),
        ([usual, (plain, "max"), usual], ["sum of float32 (10,)", "max of float32 (10,)"]),
        ([usual, usual, usual, (plain, "min")], ["min of float32 (10,)", "none", "3", "call 4 of"]),
        ([usual, (plain, "min"), usual, usual], ["sum of float32 (10,)", "min of float32 (10,)"]),
        ([], ["sum of float32 (10,)", "none", "call 1 of"]),
    ):
        graph = Graph(comm)
        with raises(RankMismatchError, *words), graph.record():
            for array, op in theirs if RANK == LAST else [usual] * 3:
                comm.allreduce(array, op)
        assert graph.state == "failed"
        works(comm)
    del graph, plain, integers, usual, theirs, array
    given_back(comm, before)


def different_graphs(comm: Any) -> None:
    """Replays of different graphs are named, with what they are."""
    small, large = mine(10), mine(20)
    graphs = [Graph(comm), Graph(comm)]
    for graph, array in zip(graphs, (small, large), strict=True):
        with graph.record():
            result = comm.allreduce(array)
    with raises(RankMismatchError, "float32 (10,)", "float32 (20,)"):
        graphs[RANK == LAST].replay()
        comm.synchronize()
    with raises(RankMismatchError, "replay of a graph", "sum of float32 (20,)"):
        if RANK == LAST:
            graphs[1].replay()
        else:
            comm.allreduce(large)
        comm.synchronize()
    graphs[1].replay()
    right(result)
    for graph in graphs:
        graph.close()
    works(comm)


def rank_missing(comm: Any) -> None:
    """A rank that is late for a replay or a recording is named, and all goes on; one that never comes ends it."""
    source = mine()
    brief = Communicator(**BRIEF)
    with Graph(brief) as graph:
        with graph.record():
            result = brief.allreduce(source)
        worker.await_others(WORLD)
        # Of three ranks another one may be named, whose packets are still on their way as time passes.
        missing = f"rank {LAST} did not call within" if SIZE == 2 else "did not call within"
        with time_passes(brief), raises(PeerTimeoutError, missing, "replay of a graph"):
            graph.replay()
            brief.synchronize()
        worker.let_last_go(WORLD)
        graph.replay()
        right(result)
        brief.synchronize()
    for where in ("before", "within"):
        late = Graph(brief)
        if where == "before":
            worker.await_others(WORLD)
        words = f"rank {LAST} did not call within", "recording of a graph"
        with time_passes(brief, where == "within"), raises(PeerTimeoutError, *words), late.record():
            brief.allreduce(source)
            if where == "within":
                worker.await_others(WORLD)
        worker.let_last_go(WORLD)
        assert late.state == ("empty" if RANK == LAST and where == "before" else "failed")
        works(brief)
    if RANK != LAST:
        with time_passes(brief), raises(PeerTimeoutError, *words), Graph(brief).record():
            brief.allreduce(source)
        patience = mock.patch.object(faults_module, "_PATIENCE_SECONDS", LONG if SIM else 1.0)
        passing = clock.passing(LONG + 1) if SIM else contextlib.nullcontext()
        with patience, passing, raises(ipcreduce.PeerLostError, "can only be closed"):
            brief.allreduce(source)
    WORLD.Barrier()
    brief.close()
    works(comm)


def foreign_capture(comm: Any) -> None:
    """record() within somebody else's capture is refused, and that capture goes on."""
    stream, source = cupy.cuda.Stream(non_blocking=True), mine()
    comm.allreduce(source)
    comm.synchronize()
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        result = comm.allreduce(source, out=source)
        with raises(CaptureError, "End that capture first"):
            Graph(comm).record().__enter__()
        captured = stream.end_capture()
        captured.launch(stream)
        stream.synchronize()
    right(result)
    works(comm)


def warned(comm: Any) -> None:
    """A recording of nothing; on a GPU, copies from the host."""
    source = mine()

    def caught(body: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with Graph(comm) as graph, graph.record():
                body()
        assert all(warning.filename == __file__ for warning in found), found[0].filename
        return [str(warning.message) for warning in found]

    assert not caught(lambda: comm.allreduce(source))
    assert ["no work on its stream" in text for text in caught(lambda: None)] == [True]
    if not SIM:
        host = np.zeros(1000, np.float32)

        def copy() -> None:
            runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
            runtime.memcpyAsync(source.data.ptr, host.ctypes.data, 4000, runtime.memcpyHostToDevice, stream)
            comm.allreduce(source)

        assert ["1 copies" in text and "(4000 bytes)" in text for text in caught(copy)] == [True]


def waits_in_the_body(comm: Any) -> None:
    """On the host, or for what is outside of the recording: a CaptureError that says where waits belong."""
    source, side = mine(), cupy.cuda.Stream(non_blocking=True)
    earlier = side.record()
    for wait, words in (
        (lambda: cupy.cuda.get_current_stream().synchronize(), ["before the recording"]),
        (lambda: cupy.cuda.get_current_stream().wait_event(earlier), ["in a break", "eager_break outermost"]),
    ):
        with raises(CaptureError, *words) as caught, Graph(comm).record():
            comm.allreduce(source)
            wait()
        _leads_with_its_cause(caught.error)
        works(comm)


def read_in_the_body(comm: Any) -> None:
    """A result on the host: a CaptureError that names the copy to the host, and where it belongs."""
    source = mine(1)
    for read in (
        cupy.asnumpy,
        lambda result: result.get(),
        lambda result: result.item(),
        float,
        lambda result: 1 if result > 0 else 0,
        str,
    ):
        with raises(CaptureError, "to the host", "behind the block", "in a break") as caught, Graph(comm).record():
            read(comm.allreduce(source))
        _leads_with_its_cause(caught.error)
        works(comm)


def _leads_with_its_cause(error: CaptureError) -> None:
    """CuPy's own message comes first, behind rank and call: it is what people know and look up."""
    cause = error.__cause__
    assert isinstance(cause, RuntimeError), repr(cause)  # as CuPy's are
    own = re.escape(str(cause).rstrip("."))
    assert re.match(rf"rank {RANK}, call \d+: {own}. So the recording cannot be made into a graph. ", str(error)), error


def events_across_a_break(comm: Any) -> None:
    """An event from before a break is refused after it, with advice; side streams that follow it work."""
    source, side = mine(200), cupy.cuda.Stream(non_blocking=True)
    total = cupy.zeros(200, np.float32)

    def fork_and_join() -> Any:
        here = cupy.cuda.get_current_stream()
        side.wait_event(here.record())
        comm.allreduce(source, out=total, stream=side)
        joined = side.record()
        here.wait_event(joined)
        return joined

    for wait in (lambda event: cupy.cuda.get_current_stream().wait_event(event), side.wait_event):
        graph = Graph(comm)
        with raises(CaptureError, "before a break", "Join side streams", "recorded after it") as caught, graph.record():
            joined = fork_and_join()
            graph.add_eager(lambda: None)
            wait(joined)
        _leads_with_its_cause(caught.error)
        assert graph.state == "failed"
        works(comm)
    with Graph(comm) as graph:
        with graph.record():
            fork_and_join()
            graph.add_eager(lambda: source.fill(RANK + 2))
            fork_and_join()
        right(total, TOTAL + SIZE)
        source.fill(RANK + 1)
        total.fill(0)
        graph.replay()
        right(total, TOTAL + SIZE)
    works(comm)


def refused_by_cupy(comm: Any) -> None:
    """On a GPU: what CuPy does not do while a stream captures is a CaptureError that says the way round."""
    if SIM:
        return
    square = cupy.ones((64, 64), np.float32)
    bodies = [lambda: square @ square, lambda: cupy.array([1.0, 2.0])]
    try:
        bodies[0]()
    except ImportError as error:  # no cuBLAS of CuPy's generation
        print(f"refused_by_cupy: left out matrix products: {error}", flush=True)
        del bodies[0]
    for body in bodies:
        with raises(CaptureError, "nvmath", "before the recording") as caught, Graph(comm).record():
            body()
        _leads_with_its_cause(caught.error)
        works(comm)


SCENARIOS = [
    states, after_a_fault, interrupted_at_the_end, caught_in_the_body, refused_on_one_rank, two_threads, two_tasks,
    exceptions, disagreement, different_graphs, rank_missing, foreign_capture, warned, waits_in_the_body,
    read_in_the_body, events_across_a_break, refused_by_cupy,
]  # fmt: skip
