"""The sweep of all-reduces with RMSNorm on GPUs: ``mpirun -n 2 python tests/gpu/norm_sweep.py [--cases 2000] [OUT]``.

It launches the fused kernels and the unfused pair by themselves, below the public call. With --abandoned the last rank
comes too late, in every launch shape: the others' waits end, and no rank gets a wrong value.
"""

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
from tests.shared import bounds, norm_cases, worker


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=8 << 20, help="bytes of the rows, together")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--late", type=float, default=0.002, help="seconds that a late rank is late")
    parser.add_argument("--abandoned", action="store_true")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    if options.abandoned:
        shapes = norm_cases.abandoned(cupy_module, world, 1.0 if cupy.__name__ == "cupy" else 0.2)
        if world.rank == 0:
            print(f"{shapes} abandoned launches on {world.size} ranks, all right")
        return
    communicators = {"planned": ipcreduce.Communicator(backend="ipc")}
    for name in ("one_shot", "two_shot"):
        communicators[name] = ipcreduce.Communicator(algorithm=name)
    communicators["of 1 MB"] = ipcreduce.Communicator(workspace=1 << 20)
    started = time.time()
    result = norm_cases.run(
        cupy_module, communicators, options.seed, options.cases, options.largest, rows=options.rows,
        late_seconds=options.late, first=options.first,
    )  # fmt: skip
    for comm in communicators.values():
        comm.synchronize()
        comm.close()
    if world.rank == 0:
        result |= {"seconds": round(time.time() - started, 1), "ranks": world.size}
        result |= {key: getattr(options, key) for key in ("seed", "first")}
        for name, count in sorted(result["counted"].items()):
            print(f"{count:8} {name}")
        print(f"{options.cases} cases on {world.size} ranks, all right, {result['seconds']} s")
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | result, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
