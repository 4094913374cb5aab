"""PyTorch's operators of an all-reduce with RMSNorm, on ranks without GPUs.

``mpirun -n 2 python tests/mpi/torch_norms_worker.py check ...``: each of these checks of tests/shared/torch_norms.py.
"""

from __future__ import annotations

import sys

from mpi4py import MPI

import ipcreduce
import ipcreduce.torch as operators
from tests.shared import torch_norms, worker

CHECKS = {check.__name__: check for check in torch_norms.ALL}


def main() -> None:
    comm = ipcreduce.Communicator(timeout=60)
    operators.register(torch_norms.NAME, comm)
    for name in sys.argv[1:]:
        CHECKS[name](comm, "cpu")
        MPI.COMM_WORLD.Barrier()
        if comm.rank == 0:
            print(f"{name}: right", flush=True)


if __name__ == "__main__":
    worker.run(main)
