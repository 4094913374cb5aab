"""Memory of graphs: what is freed, collected, kept, or short while graphs are recorded, replayed and closed."""

from __future__ import annotations

import gc
from typing import Any

import cupy
import numpy as np

from ipcreduce import Graph, GraphRunner, Map, PeerFailedError, eager_break, forward_context
from tests.graphs.common import (
    HUGE,
    LAST,
    RANK,
    SIM,
    SIZE,
    TOTAL,
    Canaries,
    free_all_blocks,
    given_back,
    held_by_library,
    mine,
    raises,
    right,
    works,
)


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
        canaries = Canaries(*[1 << 22] * 2, *[16_000] * 20, *[512] * 8)
        for turn in range(1, 5):
            right(total, TOTAL * 7 * max(1, turn - 1) + 30)
            canaries.intact()
            source.fill((RANK + 1) * turn)
            graph.replay()
            free_all_blocks()


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


def results_of_runners_outlive(comm: Any) -> None:
    """A runner closed, dropped or collected: its results, and what its breaks were given, stay while they live."""
    source = mine(4000)
    before = held_by_library(comm)
    seen: list[Any] = []
    results: list[Any] = []
    look = eager_break(lambda array: seen.append(array))

    def body() -> Any:
        total = comm.allreduce(source) + 1
        look(total)
        return {"out": [total * 2]}

    for how in ("closed", "dropped", "in a cycle"):
        runner = GraphRunner(body, comm)
        for _ in range(2):
            with forward_context("a"):
                results.append(runner()["out"][0])
            del seen[len(results) // 2 :]  # of the recording, which have blocks of their own
        if how == "closed":
            runner.close()
        elif how == "in a cycle":
            runner.itself = runner  # type: ignore[attr-defined]
        del runner
        gc.collect()
        works(comm)
    canaries = Canaries(*[16_000] * 8)
    assert len(seen) == 3
    for array, due in [*((one, TOTAL + 1) for one in seen), *((one, 2 * (TOTAL + 1)) for one in results)]:
        right(array, due)
    canaries.intact()
    del array, canaries
    seen.clear()
    results.clear()
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


def strided_arrays_are_held(comm: Any) -> None:
    """A graph keeps arrays that its kernels read as copies, which each replay makes anew."""
    flat = mine(4000)
    for call, expected in (
        (comm.allreduce, TOTAL),
        (lambda x: comm.allreduce([x])[0], TOTAL),
        (comm.reduce_scatter, TOTAL),
        (lambda x: comm.allgather(x)[-1], LAST + 1),
        (lambda x: comm.allgather([x])[0][-1], LAST + 1),
        (lambda x: comm.allreduce(x, then=Map("v + 1")), TOTAL + 1),
        (lambda x: comm.allreduce(flat, then=Map("v * 0 + a", a=x.T.reshape(-1)[:8000:2])), RANK + 1),
    ):
        strided = [cupy.full((4 * SIZE, 2400), RANK + 1, np.float32).T]
        with Graph(comm) as graph:
            with graph.record():
                result = call(strided.pop())
            canaries = Canaries(*[38_400 * SIZE] * 6)
            graph.replay()
            right(result, expected)
            canaries.intact()


def many(comm: Any) -> None:
    """Many graphs recorded and closed: everything is back."""
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
    for turn in range(60 if SIM else 200):
        one(turn)
    given_back(comm, before)


SCENARIOS = [
    freed_in_the_body, collected_in_the_body, collected_at_any_time, out_of_memory, outputs_outlive,
    results_of_runners_outlive, pool_used_again, arrays_are_held, strided_arrays_are_held, many,
]  # fmt: skip
