# mpirun -n 4 python mpi_examples/graph_replay.py
"""Record a function with two all-reduces once, then replay it with new inputs: 1,000 runs, one launch a replay.

A graph reads the arrays of its recording, so new inputs are written into those. Every result is checked against
NumPy. Needs a GPU and CuPy.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

import ipcreduce

REPLAYS, TOKENS, HIDDEN = 1000, 16, 64

comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
if comm.backend == "mpi":
    if comm.rank == 0:
        print("graphs need GPUs, and CuPy to use them: nothing to show here (python -m ipcreduce info says why)")
    comm.close()
    sys.exit(0)
import cupy  # noqa: E402


def draw(turn: int) -> list[np.ndarray]:
    """Draw every rank's input for a turn: small whole numbers, so that sums are exact in any order."""
    random = np.random.default_rng(turn)
    return list(random.integers(-8, 8, (comm.size, TOKENS, HIDDEN)).astype(np.float32))


x = cupy.asarray(draw(0)[comm.rank])
graph = ipcreduce.Graph(comm)
with graph.record(x):  # a real run: y holds the result afterwards
    total = comm.allreduce(x)
    y = comm.allreduce(total * x, "max") + total

wrong = 0
seconds = 0.0
for turn in range(REPLAYS):
    inputs = draw(turn)
    if turn:
        x.set(inputs[comm.rank])
        begin = time.perf_counter()
        graph.replay()
        seconds += time.perf_counter() - begin
    expected = sum(inputs)
    expected = np.max([expected * one for one in inputs], axis=0) + expected
    wrong += not np.array_equal(cupy.asnumpy(y), expected)

comm.synchronize()
if comm.rank == 0:
    print(f"{comm.size} ranks, backend {comm.backend}. {graph.describe()}")
    each = seconds / (REPLAYS - 1) * 1e6
    print(f"{REPLAYS} runs, {wrong} wrong; the host spends {each:.1f} us on a replay", flush=True)
graph.close()
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(wrong) == 0 else 1)
