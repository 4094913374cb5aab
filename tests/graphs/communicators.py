"""One rank alone, a communicator that is closed first, algorithms, no GPU."""

from __future__ import annotations

import copy
import gc
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import Communicator, Graph
from tests.graphs import options
from tests.graphs.common import (
    RANK,
    SIZE,
    TOTAL,
    given_back,
    held_by_library,
    mine,
    raises,
    right,
)


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
    counts = (4, 12, 1000, 9004, 9001)  # whole packets, which direct takes, and others, which stay staged
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
            direct = 4 if algorithm == "direct" and SIZE > 1 else 0
            assert graph.state == ("registered" if direct else "staged"), graph.state
            assert graph.describe().count(" direct") == direct, graph.describe()
            graph.close()
    for count, values in zip(counts, found[0], strict=True):
        draws = [np.random.default_rng([rank, count]).standard_normal(count) for rank in range(SIZE)]
        wanted = sum(draw.astype(np.float32) for draw in draws)  # in the order of the ranks
        assert np.array_equal(np.frombuffer(values, np.float32), wanted)
    assert all(values == found[0] for values in found)


def host_communicator() -> None:
    """Without GPUs: record() says what it needs. Not among SCENARIOS: it wants a run in which no GPU is visible."""
    with Communicator() as comm:
        assert comm.backend == "host"
        with raises(ipcreduce.UnsupportedError, "a Graph needs backend ipc or nccl"):
            Graph(comm).record().__enter__()
        assert (comm.allreduce(np.full(3, RANK + 1)) == TOTAL).all()


def shown(comm: Any) -> None:
    """One line each, true in every state; no copies. On a communicator of its own, which it closes."""
    comm = Communicator()
    assert repr(comm) == f"<Communicator: rank {RANK} of {SIZE}, backend ipc>"
    x = cupy.ones(100, np.float32)
    with Graph(comm, name="twice") as graph:
        assert repr(graph) == "<Graph 'twice': empty>"
        with graph.record():
            assert repr(graph) == "<Graph 'twice': recording>"
            comm.allreduce(comm.allreduce(x), "max")
            graph.add_eager(lambda: None)
            comm.allreduce(x)
        assert repr(graph) == "<Graph 'twice': staged, 3 calls in 2 segments>"
        assert repr(graph.pool) == f"<GraphPool: {graph.pool.nbytes} bytes in 1 slabs>"
        for thing in (comm, graph, graph.pool):
            with raises(TypeError, "cannot be copied or pickled"):
                copy.copy(thing)
    assert repr(graph) == "<Graph 'twice': closed>"
    runner = ipcreduce.GraphRunner(comm.allreduce, comm)
    with ipcreduce.forward_context(1):
        runner(x)
    assert repr(runner) == "<GraphRunner of Communicator.allreduce: mode piecewise, 1 recordings>"
    failed = Graph(comm)
    with raises(KeyError, "of the program"), failed.record():
        raise KeyError("of the program")
    assert repr(failed) == "<Graph: failed>"
    MPI.COMM_WORLD.Barrier()
    comm.close()
    assert repr(comm) == f"<Communicator: rank {RANK} of {SIZE}, closed>"
    with raises(ipcreduce.ArgumentError, "the communicator is closed"):
        comm.__enter__()


SCENARIOS = [alone, closed_first, algorithms, shown]
