"""The sweep on GPUs: ``mpirun -n 4 python tests/gpu/sweep.py --cases 2000 --json FILE``."""

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
from tests.gpu import cupy_module
from tests.shared import bounds, sweep_cases, worker
from tests.tools import machine


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=1 << 20, help="bytes of the largest message")
    parser.add_argument("--smallest", type=int, default=1, help="bytes of the smallest message that is not empty")
    parser.add_argument("--late", type=float, default=0.002, help="seconds that a late rank is late")
    parser.add_argument("--backend", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--hosts", type=int, default=1, help="pretended ones, over nccl")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    machine.pretend_hosts(world.rank, world.size, options.hosts)
    algorithms = (None, "one_shot", "two_shot") if options.backend == "ipc" else (None,)
    communicators = {
        name or "planned": ipcreduce.Communicator(algorithm=name, backend=options.backend) for name in algorithms
    }
    started, sizes = time.time(), (options.smallest, options.largest)
    result = sweep_cases.run(cupy_module, communicators, options.seed, options.cases, sizes, options.late)
    for comm in communicators.values():
        comm.synchronize()
        comm.close()
    if world.rank == 0:
        result |= {
            "seconds": round(time.time() - started, 1),
            "ranks": world.size,
            "seed": options.seed,
            "backend": options.backend,
            "hosts": options.hosts,
        }
        print(
            f"{result['cases']} cases, {result['calls']} calls on {world.size} ranks, all right, {result['seconds']} s"
        )
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | result, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
