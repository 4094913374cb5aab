# mpirun -n 4 python mpi_examples/tensor_parallel.py
"""A layer split over the ranks: each rank holds some rows of the weights, and partial products are all-reduced.

y = x @ w is the sum over the ranks of x[:, rows] @ w[rows], so no rank needs all the weights.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

import ipcreduce

TOKENS, HIDDEN, OUT = 16, 1000, 512
TOLERANCE = 1e-5  # relative to the largest element: float32 sums of 1,000 products are taken in another order

comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
xp = comm.xp
if comm.backend == "host" and comm.rank == 0:
    print("no GPUs here: with GPUs product and all-reduce run there, one behind the other, without waits on the host")

random = np.random.default_rng(7)
x = random.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
w = random.standard_normal((HIDDEN, OUT), dtype=np.float32)

rows = np.array_split(np.arange(HIDDEN), comm.size)[comm.rank]
x_part, w_part = xp.asarray(x[:, rows]), xp.asarray(w[rows])

y = x_part @ w_part
comm.allreduce(y, out=y)

y = y if xp is np else xp.asnumpy(y)
unsplit = x.astype(np.float64) @ w.astype(np.float64)
error = float(np.abs(y - unsplit).max() / np.abs(unsplit).max())
if comm.rank == 0:
    print(f"{comm.size} ranks, backend {comm.backend}: {len(rows)} of {HIDDEN} rows of weights on rank 0")
    print(f"largest error {error:.1e} of the largest element, at most {TOLERANCE:g}", flush=True)
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(error <= TOLERANCE, MPI.LAND) else 1)
