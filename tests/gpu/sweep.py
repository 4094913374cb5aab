"""The sweep on GPUs: ``mpirun -n 4 python tests/gpu/sweep.py --cases 2000 --json FILE`` (see tests/sweep_cases.py)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import cupy
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report
from tests import sweep_cases, worker
from tests.gpu import cupy_module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=1 << 20, help="bytes of the largest message")
    parser.add_argument("--smallest", type=int, default=1, help="bytes of the smallest message that is not empty")
    parser.add_argument("--late", type=float, default=0.002, help="seconds that a late rank is late")
    parser.add_argument("--tight", action="store_true", help="no memory behind an array: for memcheck")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    communicators = {
        name or "planned": ipcreduce.Communicator(algorithm=name) for name in (None, "one_shot", "two_shot")
    }
    assert communicators["planned"].backend == "ipc", communicators["planned"].describe()
    if options.tight:
        cupy.cuda.set_allocator(None)  # no pool, which would give more than was asked for
    started, sizes = time.time(), (options.smallest, options.largest)
    result = sweep_cases.run(
        cupy_module, communicators, options.seed, options.cases, sizes, options.late, options.tight
    )
    for comm in communicators.values():
        comm.synchronize()
        comm.close()
    if world.rank == 0:
        result |= {"seconds": round(time.time() - started, 1), "ranks": world.size, "seed": options.seed}
        print(
            f"{result['cases']} cases, {result['calls']} calls on {world.size} ranks, all right, {result['seconds']} s"
        )
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | result, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
