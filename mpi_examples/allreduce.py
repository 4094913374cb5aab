# mpirun -n 4 python mpi_examples/allreduce.py
"""Sum an array over the ranks: CuPy arrays if there is a GPU, else NumPy arrays."""

from __future__ import annotations

import sys

from mpi4py import MPI

import ipcreduce

world = MPI.COMM_WORLD
try:
    import cupy as xp

    xp.cuda.Device(world.rank % xp.cuda.runtime.getDeviceCount()).use()  # one GPU for each rank, if there are enough
except (ImportError, RuntimeError):  # no CuPy, or no GPU
    import numpy as xp

mine = xp.full(1000, world.rank + 1, dtype=xp.float32)
total = ipcreduce.allreduce(mine)

right = bool((total == sum(range(1, world.size + 1))).all())
backend = ipcreduce.get_communicator().backend
print(f"rank {world.rank} of {world.size}, backend {backend}: brought {mine[0]}, got {total[0]}", flush=True)
sys.exit(0 if world.allreduce(right, MPI.LAND) else 1)
