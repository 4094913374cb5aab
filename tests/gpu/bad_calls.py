"""Wrong calls on GPUs: ``mpirun -n 2 python tests/gpu/bad_calls.py`` (see tests/shared/bad_call_table.py)."""

from __future__ import annotations

import cupy
from mpi4py import MPI

import ipcreduce
from tests.gpu import cupy_module
from tests.shared import bad_call_table, bad_splits, worker


def main() -> None:
    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    with ipcreduce.Communicator() as comm:
        assert comm.backend == "ipc", comm.describe()
        count = bad_call_table.run(cupy_module, comm, bad_splits.rows())
        count += bad_call_table.run(cupy_module, comm) + bad_call_table.run_constructors(device=True)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} wrong calls, each refused as it should be", flush=True)


if __name__ == "__main__":
    worker.run(main)
