"""Times long messages with workspaces of several sizes, to find the smallest that costs no time.

    mpirun -n 2 python -m benchmarks.workspace OUT.json

A message that does not fit into half a workspace takes several launches. The table has, for each size of message and
of workspace, the launches and the microseconds of a call in a CUDA graph: medians of turns, in which the workspaces
follow each other. It also has the launches that the plan makes for 4 and 8 ranks. Results are compared before, bit for
bit, with those of the largest workspace.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report, timing
from ipcreduce.ipc import plan

WORLD = MPI.COMM_WORLD
WORKSPACES = (16, 24, 32, 48, 64, 96, 128, 256)  # MB
MESSAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # MB
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TURNS, REPLAYS = 7, 7


def launches(nbytes: int, ranks: int, workspace: int) -> int:
    return len(plan.make_plan(nbytes, plan.Gpus(ranks, workspace * plan.MB // 2)))


def check(comms: dict[int, ipcreduce.Communicator], nbytes: int) -> None:
    """Compare the workspaces' results. :raises AssertionError: if they differ."""
    numbers = np.random.default_rng([nbytes, WORLD.rank]).standard_normal(1 << 20).astype(np.float32)
    source = cupy.resize(cupy.asarray(numbers), nbytes // 4)
    *others, largest = comms.values()
    expected = largest.allreduce(source).view(np.uint32)
    for comm in others:
        assert bool((comm.allreduce(source).view(np.uint32) == expected).all()), (comm, nbytes)


def timed(comms: dict[int, ipcreduce.Communicator], nbytes: int) -> dict[int, float]:
    """Microseconds of a call in a graph, for each workspace."""
    source, target = cupy.ones(nbytes // 2, BFLOAT16), cupy.empty(nbytes // 2, BFLOAT16)
    calls = max(3, min(100, 256 * plan.MB // nbytes))
    graphs = {}
    for workspace, comm in comms.items():
        call = functools.partial(comm.allreduce, source, out=target)
        call()
        cupy.cuda.get_current_stream().synchronize()
        graphs[workspace] = timing.captured(call, calls)
    turns: dict[int, list[float]] = {workspace: [] for workspace in comms}
    for _ in range(TURNS):
        for workspace, graph in graphs.items():
            turns[workspace].append(timing.in_graph(graph, calls, REPLAYS, WORLD).median)
    return {workspace: statistics.median(times) for workspace, times in turns.items()}


def main() -> None:
    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack, cupy.cuda.Stream(non_blocking=True):
        comms = {
            workspace: stack.enter_context(ipcreduce.Communicator(backend="ipc", workspace=workspace * plan.MB))
            for workspace in WORKSPACES
        }
        for message in MESSAGES:
            nbytes = message * plan.MB
            check(comms, nbytes)
            times = timed(comms, nbytes)
            for workspace, us in times.items():
                counts = {f"launches, {n} ranks": launches(nbytes, n, workspace) for n in (2, 4, 8)}
                ratio = us / times[WORKSPACES[-1]]
                rows.append({"message_mb": message, "workspace_mb": workspace, "us": us, "ratio": ratio} | counts)
            if WORLD.rank == 0:
                ratios = ", ".join(
                    f"{workspace} MB {us / times[WORKSPACES[-1]]:.3f}" for workspace, us in times.items()
                )
                print(f"{message} MB: {times[WORKSPACES[-1]]:.1f} us; {ratios}", flush=True)
    if WORLD.rank == 0:
        report.write_json(Path(sys.argv[1]), report.header(sys.argv) | {"ranks": WORLD.size, "rows": rows})


if __name__ == "__main__":
    main()
