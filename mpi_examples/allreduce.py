# mpirun -n 4 python mpi_examples/allreduce.py
"""Sum an array over the ranks: CuPy arrays if the ranks have GPUs, else NumPy arrays."""

from __future__ import annotations

import sys

from mpi4py import MPI

import ipcreduce

comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
xp = comm.xp
if comm.backend == "host" and comm.rank == 0:
    print("no GPUs here: with GPUs the same lines reduce CuPy arrays, which never pass through the host")

mine = xp.full(1000, comm.rank + 1, dtype=xp.float32)
total = comm.allreduce(mine)

right = bool((total == sum(range(1, comm.size + 1))).all())
print(f"rank {comm.rank} of {comm.size}, backend {comm.backend}: brought {mine[0]}, got {total[0]}", flush=True)
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(right, MPI.LAND) else 1)
