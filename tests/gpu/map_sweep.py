"""The sweep of calls with an expression on GPUs: ``mpirun -n 2 python tests/gpu/map_sweep.py [--cases 2000]``."""

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
from tests.shared import bounds, map_cases, worker


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=4 << 20, help="bytes of an array")
    parser.add_argument("--kinds", type=int, default=len(map_cases.KINDS), help="of dtypes and ops: the first so many")
    parser.add_argument("--backend", choices=["ipc", "nccl"], default="ipc")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    communicators = {"planned": ipcreduce.Communicator(backend=options.backend)}
    if options.backend == "ipc":
        for name in ("one_shot", "two_shot"):
            communicators[name] = ipcreduce.Communicator(algorithm=name, workspace=1 << 20)
    started = time.time()
    sweep = map_cases.Sweep(cupy_module, communicators, options.seed)
    calls = sweep.run(options.cases, options.largest, options.kinds, options.first)
    for comm in communicators.values():
        comm.close()
    if world.rank == 0:
        result = {"expressions": options.cases, "calls": calls, "ranks": world.size, "backend": options.backend}
        result |= {"seconds": round(time.time() - started, 1), "seed": options.seed, "first": options.first}
        print(f"{options.cases} expressions in {calls} calls on {world.size} ranks, all right, {result['seconds']} s")
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | result, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
