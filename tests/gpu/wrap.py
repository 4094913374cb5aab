"""All-reduces of replayed graphs, from before 2**32 epochs to after: ``mpirun -n 2 python tests/gpu/wrap.py``.

Each replay makes CALLS of them, in all kernels' sizes. Samples have new random inputs and poisoned outputs; a random
rank comes late now and then.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import ipcreduce
from ipcreduce.bench import report
from ipcreduce.cuda import driver
from tests.gpu import cupy_module
from tests.shared import bounds, worker
from tests.shared.world import WORLD

WRAP = 1 << 32
ALGORITHMS = ("one_shot", "two_shot", "direct")
COUNTS = (4, 33, 1000, 2048, 5001)  # numbers of 4 bytes, in turns
LARGE = 30_000  # every 50th
LATE = 40  # one replay of so many waits for each rank
TYPE = np.dtype(np.int32)


def mine(seed: int, count: int, rank: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).integers(-(1 << 30), 1 << 30, count, TYPE)


class Calls:
    """A graph of all-reduces, each of its part of one array."""

    def __init__(self, comm: ipcreduce.Communicator, calls: int, graph: ipcreduce.Graph) -> None:
        counts = [LARGE if at % 50 == 49 else COUNTS[at % len(COUNTS)] for at in range(calls)]
        starts = [int(start) for start in np.cumsum([0, *(-(-count // 4) * 4 for count in counts)])]
        self.parts = [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]
        self.source, self.graph = cupy.zeros(starts[-1], TYPE), graph
        with graph.record():
            self.results = [comm.allreduce(self.source[part]) for part in self.parts]

    def sample(self, seed: int) -> None:
        """Replay with new inputs, and compare every result."""
        of_all = [mine(seed, self.source.size, rank) for rank in range(WORLD.size)]
        due = np.sum(of_all, axis=0, dtype=TYPE)
        self.source.set(of_all[WORLD.rank])
        for result in self.results:
            result.fill(-7)
        self.graph.replay()
        for call, (part, result) in enumerate(zip(self.parts, self.results, strict=True)):
            assert (result.get() == due[part]).all(), f"rank {WORLD.rank}, replay {seed}: call {call} of it is wrong"


def epoch(comm: ipcreduce.Communicator) -> int:
    """The epoch of the next call. No kernel may be running."""
    found = np.zeros(1, np.uint32)
    driver.copy_to_host(found, comm._state.backend.workspace.address)  # type: ignore[union-attr]
    return int(found[0])


def through_the_wrap(algorithm: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table. Half of the all-reduces are made after the wrap."""
    total, order = options.calls * options.replays, random.Random(1)
    every = max(1, options.replays // options.samples)
    with ipcreduce.Communicator(backend="ipc", algorithm=algorithm, timeout=60) as comm, ipcreduce.Graph(comm) as graph:
        calls = Calls(comm, options.calls, graph)
        assert graph.state == ("registered" if algorithm == "direct" else "staged"), graph.describe()
        comm.synchronize()
        WORLD.Barrier()
        start = WRAP - total // 2
        cupy_module.set_epochs(comm, start)
        WORLD.Barrier()
        began, sampled, late = time.monotonic(), 0, 0
        for replay in range(options.replays):
            who = order.randrange(LATE * WORLD.size)
            late += who < WORLD.size
            if who == WORLD.rank:
                time.sleep(0.003)
            if replay % every == every - 1:
                calls.sample(replay)
                sampled += 1
            else:
                graph.replay()
        comm.synchronize()
        seconds = time.monotonic() - began
        assert epoch(comm) == (start + total) % WRAP, (epoch(comm), start, total)
    return {
        "algorithm": algorithm, "ranks": WORLD.size, "all-reduces": total, "of each replay": options.calls,
        "samples": sampled, "late replays": late, "epoch at the start": start, "at the end": (start + total) % WRAP,
        "seconds": round(seconds, 2),
    }  # fmt: skip


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--calls", type=int, default=1000, help="in each replay (1000)")
    parser.add_argument("--replays", type=int, default=3400, help="with each algorithm (3400)")
    parser.add_argument("--samples", type=int, default=100, help="replays whose results are compared (100)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    rows = []
    for algorithm in options.algorithms:
        rows.append(through_the_wrap(algorithm, options))
        if WORLD.rank == 0:
            print(
                "{algorithm}: {all-reduces} through the wrap, {samples} samples right, {seconds} s".format(**rows[-1])
            )
    if options.json and WORLD.rank == 0:
        report.write_json(options.json, report.header(sys.argv) | {"rows": rows})


if __name__ == "__main__":
    worker.run(main)
