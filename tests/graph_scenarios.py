"""What graphs have to stand. ``mpirun -n 2 python tests/graph_scenarios.py [--sim] [--algorithm direct] [name ...]``.

Each function of SCENARIOS is one; it runs on every rank and asserts. The ranks may share a GPU. With --sim it runs on
the simulated device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--sim", action="store_true")
parser.add_argument("--algorithm")
parser.add_argument("names", nargs="*")
options = parser.parse_args()
SIM: bool = options.sim
if SIM:
    from tests import sim

    os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "4")
    sim.install()

import cupy  # noqa: E402
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import ipcreduce  # noqa: E402
from ipcreduce import (  # noqa: E402
    CaptureError,
    Communicator,
    Graph,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    PeerTimeoutError,
    RankMismatchError,
)
from ipcreduce.ipc import faults as faults_module  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
TOTAL = SIZE * (SIZE + 1) // 2
try:
    GPUS = cupy.cuda.runtime.getDeviceCount()
except RuntimeError:  # CuPy's, where no GPU is visible
    GPUS = 0
QUICK = GPUS >= SIZE and not SIM
WIDTH = 65536 if QUICK else 48  # of the largest all-reduce: 64 MB, or 48 KB
REPLAYS = 200 if QUICK else 24
HUGE = 1 << 45  # bytes: more than any GPU has


# ---- what the scenarios use
def mine(count: int = 1000, dtype: Any = np.float32) -> Any:
    """This rank's array: RANK + 1 everywhere, so that sums are TOTAL."""
    return cupy.full((count,), RANK + 1, dtype)


def right(array: Any, expected: float = TOTAL) -> None:
    values = cupy.asnumpy(array)
    assert (values == expected).all(), f"{values.ravel()[:8]}... where {expected} was due"


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block must raise this, with these words in the message."""
    try:
        yield
    except kind as error:
        for word in words:
            if word not in str(error):
                raise AssertionError(f"{word!r} is not in {error}") from error
        return
    raise AssertionError(f"no {kind.__name__} where {words} were due")


def works(comm: Any) -> None:
    """An eager call and a new recording are right."""
    right(comm.allreduce(mine(10)))
    comm.synchronize()
    source = mine(300)
    with Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(source)
        right(result)
        graph.replay()
        right(result)
    comm.synchronize()


def free_all_blocks() -> None:
    cupy.get_default_memory_pool().free_all_blocks()


def held_by_library(comm: Any) -> tuple[dict[str, int], int]:
    """What would show a leak, once every rank is here: the simulator's list, or memory in use; file descriptors."""
    gc.collect()
    WORLD.Barrier()
    comm.synchronize()  # drops pools that the last rank has unmapped just now, ...
    gc.collect()  # ... whose chunks refer to each other
    cupy.cuda.Device().synchronize()
    free_all_blocks()
    WORLD.Barrier()
    descriptors = len(os.listdir("/proc/self/fd"))
    if SIM:
        return {kind: count for kind, count in driver.leaks().items() if kind != "modules"}, descriptors
    free, total = cupy.cuda.runtime.memGetInfo()
    return {"bytes": total - free}, descriptors


def given_back(comm: Any, before: tuple[dict[str, int], int]) -> None:
    """Once every rank has closed its graphs. The driver of a GPU may keep some MB for later."""
    now = held_by_library(comm)
    assert now[1] == before[1], f"{now[1]} file descriptors, {before[1]} before"
    grown = {kind: count - before[0].get(kind, 0) for kind, count in now[0].items()}
    assert all(count <= (0 if SIM else 64 << 20) for count in grown.values()), f"left behind: {grown}"


def keep_busy(stream: Any) -> None:
    """For longer than a recording takes."""
    if SIM:
        streams.submit(stream.ptr, lambda: time.sleep(0.05))
    else:
        with stream:
            large = cupy.zeros(1 << 24, np.float32)
            for _ in range(500):
                large += 1


class Canaries:
    """Arrays in memory that was free: what a graph writes to memory that it no longer has, is seen here."""

    def __init__(self, *counts: int) -> None:
        free_all_blocks()
        self.arrays = [cupy.full((count,), 0x5A, np.uint8) for count in counts]

    def intact(self) -> None:
        for array in self.arrays:
            right(array, 0x5A)


class Model:
    """A function as a model's layers: element-wise work, four all-reduces from 2 bytes up, temporaries freed midway.

    All numbers are small integers, so every order of a sum gives the same.
    """

    def __init__(self, comm: Any, batch: int) -> None:
        self.comm, self.batch = comm, batch
        self.inputs = {
            "x": cupy.zeros((batch, 16), np.float32),
            "w": cupy.zeros((16, 32), np.float32),
            "v": cupy.zeros((32, WIDTH), np.float32),
        }
        self.sizes = [batch * 32 * WIDTH * 4, batch * 16 * 32 * 4, batch * 32 * 4]
        self.seed = 0

    def __call__(self) -> None:
        x, w, v = self.inputs["x"], self.inputs["w"], self.inputs["v"]
        products = x[:, :, None] * w
        hidden = products.sum(axis=1)
        del products
        hidden = self.comm.allreduce(hidden)
        first = self.comm.allreduce(x[:1, :1].astype(np.float16))
        wide = hidden[:, :, None] * v
        self.comm.allreduce(wide, out=wide)
        ends = (wide[:, :, :8] + wide[:, :, -8:]).sum(axis=2)
        del wide
        ends += RANK
        ends = self.comm.allreduce(ends, "max")
        self.output, self.first = ends + hidden, first

    def new_inputs(self) -> None:
        """Others on every rank, the same in every process of a seed."""
        self.seed += 1
        draw = np.random.default_rng([self.seed, self.batch])
        shapes = {name: array.shape for name, array in self.inputs.items()}
        of_all = [
            {name: draw.integers(0, 4, shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(SIZE)
        ]
        for name, array in self.inputs.items():
            array.set(of_all[RANK][name])
        hidden = sum(one["x"] @ one["w"] for one in of_all)
        wide = sum(hidden[:, :, None] * np.concatenate([one["v"][:, :8], one["v"][:, -8:]], 1) for one in of_all)
        self.expected = wide.sum(axis=2) + LAST + hidden
        self.expected_first = sum(one["x"][0, 0] for one in of_all)

    def check(self) -> None:
        found = cupy.asnumpy(self.output)
        assert (found == self.expected).all(), f"batch {self.batch}: {found}, {self.expected} was due"
        right(self.first, self.expected_first)


# ---- replays
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
    with raises(CaptureError, "UNJOINED"), Graph(comm).record():
        side.wait_event(cupy.cuda.get_current_stream().record())
        comm.allreduce(source, stream=side)
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
            assert graph.describe().count("all-reduce") == 2, graph.describe()
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


def freed_in_the_body(comm: Any) -> None:
    """Temporaries freed, garbage collected and every free block given back, in the body and after it."""
    source = mine(4000)
    canaries: Any = None
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
            for turn in range(6):
                cycle = [comm.allreduce(source) + turn, comm.allreduce(source[: 100 + turn])]
                cycle.append(cycle)  # type: ignore[arg-type]
                large = cupy.full((1 << 20,), turn, np.float32)  # too much to share an allocation
                total = total + cycle[0] + large[:4000]
                del large
                del cycle
                gc.collect()
                free_all_blocks()
                graph.pool.allocator.__self__.free_all_blocks()
        canaries = Canaries(*[1 << 22] * 2, *[16_000] * 20, *[512] * 8)
        for turn in range(1, 9):
            right(total, TOTAL * 7 * max(1, turn - 1) + 30)
            canaries.intact()
            source.fill((RANK + 1) * turn)
            graph.replay()
            graph.pool.allocator.__self__.free_all_blocks()


def collected_in_the_body(comm: Any) -> None:
    """Other graphs are closed and collected, and the last array of a closed pool is, in the body of a recording."""
    source = mine(500)

    def recorded() -> tuple[Any, Any]:
        graph = Graph(comm)
        with graph.record():
            result = comm.allreduce(source)
        return graph, result

    (closed, _), (dropped, _), (gone, last) = recorded(), recorded(), recorded()
    cycle = [dropped]
    cycle.append(cycle)  # type: ignore[arg-type]
    gone.close()
    with Graph(comm) as graph:
        with graph.record():
            first = comm.allreduce(source)
            closed.close()
            second = comm.allreduce(first)
            del dropped, cycle
            gc.collect()
            third = comm.allreduce(second)
            del last
            gc.collect()
            fourth = comm.allreduce(third)
        graph.replay()
        right(fourth, TOTAL * SIZE**3)
    works(comm)


def collected_at_any_time(comm: Any) -> None:
    """The garbage collector runs at every step of a recording, with arrays of a closed pool to collect."""
    source, pool, old = mine(500), None, []
    threshold = gc.get_threshold()
    try:
        for turn in range(6):
            graph = Graph(comm, pool=pool)
            with graph.record():
                gc.set_threshold(1, 1, 1)
                for cycle in old:
                    cycle.append(old)
                old.clear()
                total = comm.allreduce(source)
                for count in range(1, 6):
                    total = total + comm.allreduce(source)
                    cupy.zeros(600 * (turn + 1) * count, np.float32)
                old = [[cupy.zeros(1000 * count, np.float32)] for count in range(1, 6)]
            gc.set_threshold(*threshold)
            right(total, TOTAL * 6)
            graph.close()
            pool = graph.pool
    finally:
        gc.set_threshold(*threshold)
    comm.synchronize()


def out_of_memory(comm: Any) -> None:
    """CuPy's MemoryError passes unchanged, on one rank or all; caught, the recording goes on with what it has."""
    before, source = held_by_library(comm), mine(4000)
    for who in (range(SIZE), [LAST]):
        with raises(MemoryError if RANK in who else PeerFailedError, "emory"), Graph(comm).record():
            comm.allreduce(source)
            cupy.zeros(5000, np.float32)
            if RANK in who:
                cupy.empty(HUGE, np.uint8)
        works(comm)
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
            for _ in range(3):
                total = total + comm.allreduce(source)
                with raises(MemoryError):
                    cupy.empty(HUGE, np.uint8)
        canaries = Canaries(*[16_000] * 8)
        held = graph.pool.nbytes
        cupy.empty(1 << 20, np.uint8)
        assert graph.pool.nbytes == held, "the caller's allocator is not back"
        for turn in range(1, 4):
            source.fill((RANK + 1) * turn)
            graph.replay()
            right(total, TOTAL * 4 * turn)
            canaries.intact()
    del total, source, canaries
    given_back(comm, before)


def outputs_outlive(comm: Any) -> None:
    """A graph closed, dropped, or collected with a replay on its way: outputs stay as they are as long as they live."""
    before = held_by_library(comm)
    source, outputs = mine(4000), []
    for how in ("closed", "dropped", "in a cycle"):
        graph = Graph(comm)
        with graph.record():
            outputs.append(comm.allreduce(source) + 1)
        pool = graph.pool
        graph.replay()
        if how == "closed":
            graph.close()
            graph.close()
            assert graph.state == "closed"
        elif how == "in a cycle":
            graph.itself = graph  # type: ignore[attr-defined]
        del graph
        gc.collect()
        works(comm)
        assert pool.nbytes
    canaries = Canaries(*[16_000] * 8)
    for output in outputs:
        right(output, TOTAL + 1)
    canaries.intact()
    del output, pool, canaries, source
    outputs.clear()
    given_back(comm, before)


def pool_used_again(comm: Any) -> None:
    """Recording in the pool of a graph that was closed, while one of its outputs lives on."""
    before, source = held_by_library(comm), mine(4000)
    first = Graph(comm)
    with first.record():
        kept = comm.allreduce(source) + 1
        cupy.zeros(9000, np.float32)
    first.close()
    second, third = Graph(comm, pool=first.pool), Graph(comm, pool=first.pool)
    for graph in (second, third):
        with graph.record():
            result = comm.allreduce(source) + 2
        right(result, TOTAL + 2)
        graph.replay()
        right(result, TOTAL + 2)
    second.close()
    third.replay()
    right(result, TOTAL + 2)
    right(kept, TOTAL + 1)
    third.close()
    del kept, source
    right(result, TOTAL + 2)
    del result
    given_back(comm, before)
    assert first.pool.nbytes == 0


def arrays_are_held(comm: Any) -> None:
    """Inputs that are named, and what all-reduces read and write outside of the pool, live as long as the graph."""
    source, named, target = mine(4000), [{"array": mine(4000)}], cupy.zeros(4000, np.float32)
    graph = Graph(comm)
    with graph.record(named):
        comm.allreduce(source, out=target)
        result = comm.allreduce(named[0]["array"] * 2)
        total = target * 1
    del source, named, target
    canaries = Canaries(*[16_000] * 6)
    graph.replay()
    right(result, TOTAL * 2)
    right(total)
    canaries.intact()
    graph.close()
    comm.synchronize()


def many(comm: Any) -> None:
    """200 graphs recorded and closed: everything is back."""
    source = mine(2000)

    def one(turn: int) -> None:
        with Graph(comm) as graph:
            with graph.record():
                result = comm.allreduce(source) + 1
                cupy.zeros(1000 + 37 * turn, np.float32)
            if turn % 20 == 0:
                graph.replay()
                right(result, TOTAL + 1)

    one(0)
    before = held_by_library(comm)
    for turn in range(200):
        one(turn)
    given_back(comm, before)


# ---- states and errors
def states(comm: Any) -> None:
    """Every wrong step is refused, and the error says the state and what to do."""
    source, graph, other = mine(), Graph(comm), Graph(comm)
    assert graph.state == "empty"
    with raises(GraphStateError, "replay()", "empty", "record it first"):
        graph.replay()
    with raises(GraphStateError, "empty", "Record first"):
        _ = graph.pool
    with other.record():
        again = comm.allreduce(source)
    with graph.record() as recorded:
        assert recorded is graph
        assert graph.state == "recording"
        first = comm.allreduce(source)
        with raises(GraphStateError, "record()", "recording", "new Graph"):
            graph.record().__enter__()
        with raises(GraphStateError, "record()", "same thread", "end that one first"):
            Graph(comm).record().__enter__()
        with raises(GraphStateError, "replay()", "recording", "record it first"):
            graph.replay()
        with raises(GraphStateError, "replay()", "within a recording"):
            other.replay()
        with raises(GraphStateError, "close()", "leave the with block"):
            graph.close()
        with raises(GraphStateError, "capture()", "other way round"):
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
        source = mine(300)
        with Graph(comm) as graph:
            with graph.record():
                result = comm.allreduce(source)
            right(result)
            graph.replay()
            right(result)
    comm.synchronize()


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
    started = time.monotonic()
    with raises(GraphStateError if RANK == LAST else PeerFailedError, "closed"):
        graph.replay()
        comm.synchronize()
    assert time.monotonic() - started < 5, "it waited"
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
    for who in ([LAST], range(SIZE)):
        error = ipcreduce.ArgumentError if RANK in who else PeerFailedError
        with raises(error, "op must be"), Graph(comm).record():
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
        ([usual, usual, usual, (plain, "min")], ["min of float32 (10,)", "none", "3", "number 4"]),
        ([usual, (plain, "min"), usual, usual], ["sum of float32 (10,)", "min of float32 (10,)"]),
        ([], ["sum of float32 (10,)", "none", "number 1"]),
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
    brief = Communicator(timeout=1.0)
    with Graph(brief) as graph:
        with graph.record():
            result = brief.allreduce(source)
        if RANK == LAST:
            time.sleep(2)
        with raises(PeerTimeoutError, f"rank {LAST}", "replay of a graph"):
            graph.replay()
            brief.synchronize()
        graph.replay()
        right(result)
        brief.synchronize()
    for where in ("before", "within"):
        late = Graph(brief)
        if RANK == LAST and where == "before":
            time.sleep(2)
        with raises(PeerTimeoutError, f"rank {LAST} never came", "recording of a graph"), late.record():
            brief.allreduce(source)
            if RANK == LAST:
                time.sleep(2)
        assert late.state == ("empty" if RANK == LAST and where == "before" else "failed")
        works(brief)
    patience, faults_module._PATIENCE_SECONDS = faults_module._PATIENCE_SECONDS, 1.0
    if RANK != LAST:
        with raises(PeerTimeoutError, f"rank {LAST} never came", "recording of a graph"), Graph(brief).record():
            brief.allreduce(source)
        with raises(ipcreduce.PeerLostError, "can only be closed"):
            brief.allreduce(source)
    faults_module._PATIENCE_SECONDS = patience
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
        with raises(CaptureError, "end that capture first"):
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
    assert ["no all-reduce and no kernel" in text for text in caught(lambda: None)] == [True]
    if not SIM:
        host = np.zeros(1000, np.float32)

        def copy() -> None:
            runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
            runtime.memcpyAsync(source.data.ptr, host.ctypes.data, 4000, runtime.memcpyHostToDevice, stream)
            comm.allreduce(source)

        assert ["1 copies" in text and "(4000 bytes)" in text for text in caught(copy)] == [True]


def refused_by_cupy(comm: Any) -> None:
    """On a GPU: what CuPy does not do while a stream captures is a CaptureError that says the way round."""
    if SIM:
        return
    square = cupy.ones((64, 64), np.float32)
    _ = square @ square
    for body in (lambda: square @ square, lambda: cupy.array([1.0, 2.0])):
        with raises(CaptureError, "nvmath", "before the recording"), Graph(comm).record():
            body()
        works(comm)


# ---- communicators
def alone(comm: Any) -> None:
    """One rank: the same, with nobody to agree with."""
    before = held_by_library(comm)
    with Communicator(MPI.COMM_SELF) as single, single.capture(), Graph(single) as graph:
        source = mine(600)
        with graph.record():
            result = single.allreduce(source) + single.allreduce(source, "avg")
        right(result, 2 * (RANK + 1))
        source.fill(7)
        graph.replay()
        right(result, 14)
        with raises(ZeroDivisionError), Graph(single).record():
            _ = 1 // 0
        works_alone = Graph(single)
        with works_alone.record():
            result = single.allreduce(source)
        right(result, 7)
        works_alone.close()
    del source, result, works_alone, graph
    given_back(comm, before)


def closed_first(comm: Any) -> None:
    """A communicator closed before its graphs: replay says so, outputs stay, close() still gives everything back."""
    before, graphs, outputs = held_by_library(comm), [], []
    brief = Communicator(algorithm=options.algorithm)
    for _ in range(3):
        graphs.append(Graph(brief))
        with graphs[-1].record():
            outputs.append(brief.allreduce(mine(3000)))
    graphs[0].replay()
    brief.close()
    for graph in graphs:
        with raises(ipcreduce.ArgumentError, "closed"):
            graph.replay()
    with raises(ipcreduce.ArgumentError, "closed"):
        Graph(brief).record().__enter__()
    graphs[0].close()
    del graphs[1:], graph
    gc.collect()
    for output in outputs:
        right(output)
    del output
    outputs.clear()
    graphs.clear()
    given_back(comm, before)


def algorithms(comm: Any) -> None:
    """Every algorithm at small and large sizes, staged within capture() and after its exit: the same bits."""
    counts = (1, 9, 1000, 9001)
    sources = [cupy.asarray(np.random.default_rng([RANK, n]).standard_normal(n).astype(np.float32)) for n in counts]
    found = []
    for algorithm in (None, "one_shot", "two_shot", "direct"):
        with Communicator(algorithm=algorithm) as forced:
            graph = Graph(forced)
            with forced.capture():
                with graph.record():
                    results = [forced.allreduce(source) for source in sources]
                found.append([array.get().tobytes() for array in results])
                assert graph.state == "staged"
            for _ in range(3):
                for array in results:
                    array.fill(-1)
                graph.replay()
                found.append([array.get().tobytes() for array in results])
            assert (graph.state == "registered") == (algorithm == "direct" and SIZE > 1), graph.state
            graph.close()
    for count, values in zip(counts, found[0], strict=True):
        draws = [np.random.default_rng([rank, count]).standard_normal(count) for rank in range(SIZE)]
        wanted = sum(draw.astype(np.float32) for draw in draws)  # in the order of the ranks
        assert np.array_equal(np.frombuffer(values, np.float32), wanted)
    assert all(values == found[0] for values in found)


def host_communicator() -> None:
    """Without GPUs: record() says what it needs. Not among SCENARIOS: it wants a run in which no GPU is visible."""
    with Communicator() as comm:
        assert comm.backend == "mpi"
        with raises(ipcreduce.UnsupportedError, "a Graph needs backend ipc"):
            Graph(comm).record().__enter__()
        assert (comm.allreduce(np.full(3, RANK + 1)) == TOTAL).all()


# ---- the driver fails
REFUSED = {  # what may stay behind, if the driver does not take it back
    "cuMemFree": [{"allocations": 1}],
    "cuGraphDestroy": [{"graphs": 1}],
    "cuGraphExecDestroy": [{"executables": 1}],
    # A peer does not free what is still mapped here.
    "cuIpcCloseMemHandle": [{"mappings": 1}, {"allocations": 1}, {"mappings": 1, "allocations": 1}],
}


def faults(comm: Any) -> None:
    """On the simulator: each driver call in turn of a recording, a replay and a close fails on one rank.

    Every rank goes on or has an error of ours, soon; the communicator works; and nothing is left behind but what the
    driver refused to take back.
    """
    if not SIM:
        return
    found: list[str] = []
    for phase in ("record", "replay", "close"):
        brief, k, over = None, 0, False
        while not over:
            k += 1
            brief = brief or Communicator(timeout=3.0, algorithm=options.algorithm)
            over, problems = _fault(brief, phase, k)
            found += [f"{phase}, call {k}: {problem}" for problem in problems]
            if WORLD.allreduce(bool(problems), MPI.LOR) or over:
                with contextlib.suppress(IpcReduceError):
                    brief.close()
                brief = None
    print("".join(f"rank {RANK}: {problem}\n" for problem in found), end="", flush=True)
    assert not found, f"{len(found)} problems"


def _fault(comm: Any, phase: str, k: int) -> tuple[bool, list[str]]:
    """Whether the phase was over before its ``k``-th call; and what went wrong that must not."""
    works(comm)
    before, _ = held_by_library(comm)
    graph, source, problems = Graph(comm), mine(3000), []
    if phase != "record":
        _attempt(comm, graph, source, "record")
    WORLD.Barrier()
    started, calls = time.monotonic(), driver.calls()
    driver.fault_at(k if RANK == LAST else 0)
    error = _attempt(comm, graph, source, phase)
    driver.fault_at(0)
    over = driver.calls() - calls < k
    over, failed = WORLD.bcast((over, failed_calls[-1] if failed_calls else ""), root=LAST)
    if time.monotonic() - started > 2.5:
        problems.append(f"{time.monotonic() - started:.1f} s")
    if error and not error.startswith("ipcreduce: "):
        problems.append(f"not an error of ours: {error}")
    trouble = [_attempt(comm, graph, source, "eager") for _ in range(3)]  # what this rank has not heard of comes first
    if trouble[-1]:
        problems.append(f"an all-reduce afterwards: {trouble[-1]}")
    ready = set(WORLD.allgather(graph.state))
    if {"staged", "registered"} <= ready:
        problems.append(f"the ranks' graphs are {ready}")
    elif len(ready) == 1 and graph.state in ("staged", "registered"):
        trouble.append(_attempt(comm, graph, source, "replay"))
        if trouble[-1]:
            problems.append(f"a replay afterwards: {trouble[-1]}")
    graph.close()
    del graph, source
    try:
        works(comm)
        now, _ = held_by_library(comm)
        left = {kind: count - before.get(kind, 0) for kind, count in now.items() if count != before.get(kind, 0)}
        if left and left not in REFUSED.get(failed, []):
            problems.append(f"left behind: {left}")
    except (IpcReduceError, AssertionError) as late:
        problems.append(f"a recording afterwards: {late}")
    return over, [f"{failed} failed: {problem}; the error was {error}" for problem in problems]


def _attempt(comm: Any, graph: Graph, source: Any, phase: str) -> str:
    """The error that this ends in, as a text: an exception would keep arrays alive."""
    try:
        if phase == "record":
            with graph.record(source):
                first = comm.allreduce(source)
                cupy.zeros(4000, np.float32)
                result = comm.allreduce(first + 1)
            comm.synchronize()
            right(result, (TOTAL + 1) * SIZE)
        elif phase == "replay":
            graph.replay()
            comm.synchronize()
        elif phase == "close":
            graph.close()
        else:
            right(comm.allreduce(mine(10)))
            comm.synchronize()
        return ""
    except IpcReduceError as error:
        return f"ipcreduce: {error!r}"
    except Exception as error:
        return repr(error)


SCENARIOS = [
    shared_pool, separate_pools, replays_in_a_row, filled_at_the_exit, forked_streams, eager_meanwhile,
    recorded_elsewhere, freed_in_the_body, collected_in_the_body, collected_at_any_time, out_of_memory, outputs_outlive,
    pool_used_again, arrays_are_held, many, states, after_a_fault, caught_in_the_body, refused_on_one_rank, two_threads,
    exceptions, disagreement, different_graphs, rank_missing, foreign_capture, warned, refused_by_cupy, alone,
    closed_first, algorithms, faults,
]  # fmt: skip


def main() -> None:
    if options.names == ["host_communicator"]:
        run(host_communicator)
        return
    cupy.cuda.Device(RANK % GPUS).use()
    with Communicator(timeout=20, algorithm=options.algorithm) as comm:
        assert comm.backend == "ipc", comm.describe()
        works(comm)
        run(*[one for one in SCENARIOS if not options.names or one.__name__ in options.names], comm=comm)


def run(*scenarios: Callable[..., None], **arguments: Any) -> None:
    for scenario in scenarios:
        started = time.monotonic()
        scenario(**arguments)
        WORLD.Barrier()
        if RANK == 0:
            print(f"{scenario.__name__}: right, {time.monotonic() - started:.1f} s", flush=True)
    if RANK == 0:
        print(f"{len(scenarios)} scenarios, all right", flush=True)


if SIM:
    from tests.sim import driver, streams

    failed_calls: list[str] = []  # the names of those that were made to fail

    class Noted(driver.CudaError):
        """Keeps the name of the call."""

        def __init__(self, call: str, code: int, text: str) -> None:
            super().__init__(call, code, text)
            if code == 999:
                failed_calls.append(call)

    driver.CudaError = Noted  # type: ignore[misc]

if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os.sys.stderr.flush()
        WORLD.Abort(1)
