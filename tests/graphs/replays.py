"""Replays: of models, in a row, on forked streams, beside eager calls."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from typing import Any

import cupy
import numpy as np

from ipcreduce import CaptureError, Graph
from tests.graphs.common import (
    RANK,
    REPLAYS,
    SIM,
    SIZE,
    TOTAL,
    Canaries,
    Model,
    given_back,
    held_by_library,
    keep_busy,
    mine,
    raises,
    right,
    works,
)


def shared_pool(comm: Any) -> None:
    """Batch sizes 8, 4, 2, 1 in one pool, replayed in random order with new inputs."""
    _model(comm, shared=True)


def separate_pools(comm: Any) -> None:
    """The same with a pool each."""
    _model(comm, shared=False)


def _model(comm: Any, shared: bool) -> None:
    before = held_by_library(comm)
    models, graphs = [Model(comm, batch) for batch in (8, 4, 2, 1)], []
    for model in models:
        model.new_inputs()
        graph = Graph(comm, pool=graphs[0].pool if shared and graphs else None)
        with graph.record(model.inputs):
            model()
        model.check()
        graphs.append(graph)
    sizes = [size for model in models for size in model.sizes]
    canaries, order = Canaries(*sizes), random.Random(1)
    for turn in range(REPLAYS):
        chosen = order.randrange(4)
        models[chosen].new_inputs()
        graphs[chosen].replay()
        models[chosen].check()
        if turn % 5 == 0:
            canaries.intact()
            canaries.arrays.clear()
            canaries = Canaries(*sizes)
    canaries.intact()
    comm.synchronize()
    for graph in graphs:
        graph.close()
    del model, models, canaries
    given_back(comm, before)
    assert graphs[0].pool.nbytes == 0, graphs[0].describe()


def replays_in_a_row(comm: Any) -> None:
    """Without waiting, on several streams, mixed with eager calls, from another thread: in the order of the calls."""
    total, step = cupy.zeros(3000, np.float32), mine(3000)
    cupy.cuda.Device().synchronize()
    with Graph(comm) as graph:
        with graph.record():
            total += comm.allreduce(step)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        for turn in range(12):
            graph.replay(stream=(None, streams[0], streams[1].ptr, streams[2])[turn % 4])
            if turn % 3 == 0:  # (total * SIZE) / SIZE: the same, if it comes in between
                comm.allreduce(total, "avg", out=total, stream=streams[turn // 4])
        thread = threading.Thread(target=graph.replay, kwargs={"stream": streams[1]})
        thread.start()
        thread.join()
        graph.replay()
        graph.replay()
        comm.synchronize()
        right(total, 16 * TOTAL)
    comm.synchronize()


def filled_at_the_exit(comm: Any) -> None:
    """record() comes after the work on the caller's stream, and what follows there comes after the recording."""
    stream, source = cupy.cuda.Stream(non_blocking=True), cupy.zeros(6000, np.float32)
    cupy.cuda.Device().synchronize()
    with stream, Graph(comm) as graph:
        for turn in range(1, 4):
            keep_busy(stream)
            source.fill((RANK + 1) * turn)
            if turn == 1:
                with graph.record():
                    assert cupy.cuda.get_current_stream().ptr != stream.ptr
                    result = comm.allreduce(source) + 0
                assert cupy.cuda.get_current_stream().ptr == stream.ptr
            else:
                graph.replay()
            right(result + 0, TOTAL * turn)


def forked_streams(comm: Any) -> None:
    """All-reduces on forked streams of a body are ordered, in the order in which they were made."""
    side, source, result = cupy.cuda.Stream(non_blocking=True), mine(500), []
    ops = {"sum": TOTAL, "max": SIZE, "min": 1}
    with Graph(comm) as graph:
        with graph.record():
            here = cupy.cuda.get_current_stream()
            first = comm.allreduce(source)
            side.wait_event(here.record())
            for turn in range(12):
                with side if turn % 2 else here:
                    result.append(comm.allreduce(source, list(ops)[turn % 3]))
            here.wait_event(side.record())
            result.append(comm.allreduce(first))
        for factor in range(1, 4):
            for array, expected in zip(result, [*ops.values()] * 4 + [TOTAL * SIZE], strict=True):
                right(array, expected * max(1, factor - 1))
            source.fill((RANK + 1) * factor)
            graph.replay()
    source.fill(RANK + 1)
    with Graph(comm) as unjoined:
        refused = raises(CaptureError, "UNJOINED") if comm.backend == "ipc" or SIM else nullcontext()
        with refused, unjoined.record():
            side.wait_event(cupy.cuda.get_current_stream().record())
            first = comm.allreduce(source, stream=side)
        if unjoined.segments:  # NCCL's calls are joined by NCCL
            first.fill(0)
            unjoined.replay()
            right(first)
    works(comm)


def eager_meanwhile(comm: Any) -> None:
    """Another thread's eager call, on a stream of its own, while this one records: not part of the graph."""
    source, found, device = mine(200), [], cupy.cuda.Device()

    def call() -> None:
        with device, cupy.cuda.Stream(non_blocking=True) as stream:
            found.append((comm.allreduce(mine(70)), stream))

    first = second = None
    for _ in range(2):  # the second time the recording's stream is that of the last call
        with Graph(comm) as graph:
            del first, second
            with graph.record():
                first = comm.allreduce(source)
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
                second = comm.allreduce(first)
            right(second, TOTAL * SIZE)
            assert graph.describe().count("\n  ") == 2, graph.describe()
            array, stream = found.pop()
            stream.synchronize()
            right(array)
    comm.synchronize()


def recorded_elsewhere(comm: Any) -> None:
    """Recorded, replayed and closed in a thread that has no CUDA context."""
    source, found = mine(), []
    cupy.cuda.Device().synchronize()

    def record() -> None:
        with Graph(comm) as graph:
            with graph.record(source):
                comm.allreduce(source, out=source)
            graph.replay()
        comm.synchronize()
        found.append(source)

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    assert found, "the thread's recording failed"
    right(source, TOTAL * SIZE)


def the_stream_in_use_stays(comm: Any) -> None:
    """One that use() has made current, whatever works on another stream meanwhile. CuPy's ``with`` forgets it."""
    before, other = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
    stream = cupy.cuda.Stream(non_blocking=True).use()
    try:
        total = cupy.zeros(2000, np.float32)
        comm.allreduce(mine(2000)[::2], out=total[::2])
        assert cupy.cuda.get_current_stream() is stream, "not after copies"
        source = mine()
        stream.synchronize()
        result = comm.allreduce(source, stream=other)
        comm.synchronize(other)
        assert cupy.cuda.get_current_stream() is stream, "not after an allocation for another stream"
        comm.empty(5)
        assert cupy.cuda.get_current_stream() is stream, "not after empty()"
        with Graph(comm) as graph:
            with graph.record():
                graph.add_eager(lambda: total.fill(0))
                comm.allreduce(result, out=result)
            assert cupy.cuda.get_current_stream() is stream, "not after a recording"
            graph.replay()
            graph.replay(stream=other)
            assert cupy.cuda.get_current_stream() is stream, "not after replays"
            comm.synchronize()
            right(result, TOTAL * SIZE**3)
        with raises(ZeroDivisionError, ""), Graph(comm) as graph, graph.record():
            _ = 1 // 0
        assert cupy.cuda.get_current_stream() is stream, "not after a recording that failed"
    finally:
        before.use()
    works(comm)


SCENARIOS = [
    shared_pool, separate_pools, replays_in_a_row, filled_at_the_exit, forked_streams, eager_meanwhile,
    recorded_elsewhere, the_stream_in_use_stays,
]  # fmt: skip
