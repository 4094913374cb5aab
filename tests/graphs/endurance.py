"""Many of everything: replays, graphs, memory that comes back at the same address; and what a replay costs the host."""

from __future__ import annotations

import functools
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from ipcreduce import Communicator, Graph
from ipcreduce.cuda import cupy_runtime
from ipcreduce.page.flight_recorder import RING
from tests.graphs import options
from tests.graphs.common import (
    FIGURES,
    GPUS,
    QUICK,
    RANK,
    SIM,
    SIZE,
    TOTAL,
    WORLD,
    free_all_blocks,
    held_by_library,
    mine,
    right,
)  # fmt: skip

MANY = 10_000 if QUICK else 60  # replays
GRAPHS = 500 if QUICK else 40
ROUNDS = 1_000 if QUICK else 12
LARGEST = 64 << 20 if QUICK else 48 << 10  # bytes


def long_run(comm: Any) -> None:
    """One graph, replayed with changing inputs; results sampled, a random rank late now and then."""
    source = mine(5000)
    order = random.Random(11)
    with Graph(comm) as graph:
        with graph.record():
            small = comm.allreduce(source[:9])
            result = comm.allreduce(source * 2) + small[0]
        for turn in range(1, MANY + 1):
            sampled, late = turn % max(1, MANY // 200) == 0, order.randrange(SIZE * 40)
            if sampled:
                source.fill((RANK + 1) * (turn % 7 + 1))
            if late == RANK:
                time.sleep(0.003)
            graph.replay()
            if sampled:
                right(result, 3 * TOTAL * (turn % 7 + 1))
    comm.synchronize()
    FIGURES["replays of one graph, all right"] = MANY


def nothing_is_left(comm: Any) -> None:
    """Graphs recorded, replayed and closed: GPU memory, mappings, host memory and descriptors return. A table."""
    with Communicator(algorithm="direct") as direct:
        source = mine(3000)

        def one(turn: int, on: Any) -> None:
            with Graph(on) as graph:
                with graph.record():
                    result = on.allreduce(source) + 1
                    cupy.zeros(1000 + 37 * turn, np.float32)
                graph.replay()
                right(result, TOTAL + 1)

        for on in (comm, direct):
            one(0, on)
        table = {"before": _held(comm, direct)}
        for turn in range(GRAPHS):
            one(turn % 90, direct if turn % 2 else comm)
        table["after"] = _held(comm, direct)
    FIGURES[f"held before and after {GRAPHS} graphs"] = table
    before, after = table["before"], table["after"]
    assert after["descriptors"] <= before["descriptors"], table
    assert after["mappings"] == before["mappings"], table
    assert after["device bytes"] <= before["device bytes"] + (0 if SIM else 64 << 20), table
    assert after["host KB"] <= before["host KB"] + 64 * 1024, table


def _held(comm: Any, direct: Any) -> dict[str, int]:
    held_by_library(comm)  # memory that peers had mapped goes at its synchronize()
    what, descriptors = held_by_library(direct)
    return {
        "device bytes": what.get("bytes", what.get("allocations", 0)),  # on the simulator: allocations
        "mappings": len(direct._state.session.direct.mappings._mapped) if comm.size > 1 else 0,
        "descriptors": descriptors,
        "host KB": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024,
    }


def same_address(comm: Any) -> None:
    """A rank frees the memory of its graph and gets it again at the same address, while the others keep theirs."""
    seen = set()
    with Communicator(algorithm="direct") as direct:
        source, kept = mine(600), None
        for turn in range(ROUNDS):
            who = turn % SIZE
            graph = Graph(direct, pool=None if who == RANK or kept is None else kept.pool)
            source.fill((RANK + 1) * (turn % 5 + 1))
            with graph.record():
                result = direct.allreduce(source)
            seen.add(result.data.ptr)
            right(result, TOTAL * (turn % 5 + 1))
            result.fill(-1)
            graph.replay()
            right(result, TOTAL * (turn % 5 + 1))
            del result
            if kept is not None:
                kept.close()
            kept = graph
            free_all_blocks()
        assert kept is not None
        kept.close()
    assert len(seen) < ROUNDS, "no address came again"
    FIGURES["rounds of memory at the same addresses"] = ROUNDS


def same_bits(comm: Any) -> None:
    """Staged and direct replays, every algorithm, from 16 bytes up: the same bits, and NumPy's."""
    sizes = [16 << 2 * k for k in range(12) if 16 << 2 * k <= LARGEST]
    if QUICK:
        sizes.append(LARGEST)
    for nbytes in sizes:
        count = nbytes // 4
        draws = [np.random.default_rng([rank, count]).standard_normal(count, np.float32) for rank in range(SIZE)]
        expected = draws[0].copy()
        for draw in draws[1:]:
            expected += draw
        source = cupy.asarray(draws[RANK])
        for algorithm in ("one_shot", "two_shot", "direct"):
            with Communicator(algorithm=algorithm) as forced:
                graph = Graph(forced)
                with forced.capture():
                    with graph.record():
                        result = forced.allreduce(source)
                    found = [result.get()]
                result.fill(-1)
                graph.replay()
                found.append(result.get())
                graph.close()
                del result
            for one in found:
                assert one.tobytes() == expected.tobytes(), f"{algorithm}, {nbytes} bytes"
    FIGURES["bytes at which all algorithms gave the same bits"] = sizes


def cost_of_a_replay(comm: Any) -> None:
    """Host time of a replay, beside that of the launch alone, in us: medians over rounds, the worst rank."""
    source = mine(256)
    with Graph(comm, check="never") as graph:
        with graph.record():
            comm.allreduce(source)
        executable, stream = graph.segments[0].executable, cupy.cuda.get_current_stream().ptr
        assert executable is not None
        launch = functools.partial(cupy_runtime.launch_graph, executable.handle, stream)

        def timed(call: Any, calls: int) -> float:
            rounds = []
            for _ in range(RING if QUICK else 0):  # then the flight recorder's slots are not written any more
                call()
            for _ in range(20 if QUICK else 2):
                comm.synchronize()
                WORLD.Barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                rounds.append((time.perf_counter() - begin) / calls * 1e6)
                cupy.cuda.get_current_stream().synchronize()
            return max(WORLD.allgather(statistics.median(rounds)))

        calls = 200 if QUICK else 5
        ours, bare = timed(graph.replay, calls), timed(launch, calls)
    FIGURES["host us of a replay"] = round(ours, 2)
    FIGURES["host us of the launch alone"] = round(bare, 2)
    FIGURES["GPUs"] = GPUS
    FIGURES["forced algorithm"] = options.algorithm


SCENARIOS = [long_run, nothing_is_left, same_address, same_bits, cost_of_a_replay]
