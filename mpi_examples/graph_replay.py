# mpirun -n 4 python mpi_examples/graph_replay.py
"""Record a function with two all-reduces once, then replay it with new inputs: 1,000 runs, one launch a replay.

A graph reads the arrays of its recording, so new inputs are written into those. Every result is checked against
NumPy. Without GPUs each run calls the function.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import ipcreduce

RUNS, TOKENS, HIDDEN = 1000, 16, 64

comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
xp = comm.xp
if comm.backend == "host" and comm.rank == 0:
    print("no GPUs here: with GPUs the function is recorded once, and each of the other runs is one launch")


def draw(turn: int) -> list[np.ndarray]:
    """Draw every rank's input for a turn: small whole numbers, so that sums are exact in any order."""
    random = np.random.default_rng(turn)
    return list(random.integers(-8, 8, (comm.size, TOKENS, HIDDEN)).astype(np.float32))


def function() -> Any:
    total = comm.allreduce(x)
    return comm.allreduce(total * x, "max") + total


x = xp.asarray(draw(0)[comm.rank])
graph = None
if comm.backend != "host":
    graph = ipcreduce.Graph(comm)
    with graph.record(x):  # a real run: y holds the result afterwards
        y = function()

wrong = 0
seconds = 0.0
for run in range(RUNS):
    inputs = draw(run)
    x[...] = xp.asarray(inputs[comm.rank])
    begin = time.perf_counter()
    if graph is None:
        y = function()
    elif run:
        graph.replay()
    seconds += time.perf_counter() - begin
    expected = sum(inputs)
    expected = np.max([expected * one for one in inputs], axis=0) + expected
    wrong += not np.array_equal(y if graph is None else xp.asnumpy(y), expected)

comm.synchronize()
if comm.rank == 0:
    each = seconds / RUNS * 1e6
    print(f"{comm.size} ranks, backend {comm.backend}. {'no graph' if graph is None else graph.describe()}")
    print(f"{RUNS} runs, {wrong} wrong; the host spends {each:.1f} us on a run", flush=True)
if graph is not None:
    graph.close()
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(wrong) == 0 else 1)
