"""PyTorch's operators of an all-reduce with RMSNorm, on ranks without GPUs.

``mpirun -n 2 python tests/mpi/torch_norms_worker.py check ...``: each of these checks of tests/shared/torch_norms.py.
"""

from __future__ import annotations

import sys

import ipcreduce
import ipcreduce.torch as operators
from tests.shared import torch_norms, worker


def main() -> None:
    comm = ipcreduce.Communicator(timeout=60)
    operators.register(torch_norms.NAME, comm)
    worker.play(torch_norms.ALL, sys.argv[1:], comm, "cpu")


if __name__ == "__main__":
    worker.run(main)
