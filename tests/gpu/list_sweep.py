"""The sweep of lists of arrays on GPUs: ``mpirun -n 2 python tests/gpu/list_sweep.py [--cases 2000] [OUT.json]``."""

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
from tests.shared import bounds, list_cases, worker
from tests.tools import machine


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=4 << 20, help="bytes of the members of a list, together")
    parser.add_argument("--most", type=int, default=2000, help="members of a list")
    parser.add_argument("--late", type=float, default=0.002, help="seconds that a late rank is late")
    parser.add_argument("--backend", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--hosts", type=int, default=1, help="pretended ones, over nccl")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    machine.pretend_hosts(world.rank, world.size, options.hosts)
    communicators = {"planned": ipcreduce.Communicator(backend=options.backend)}
    if options.backend == "ipc":
        for name in ("one_shot", "two_shot"):
            communicators[name] = ipcreduce.Communicator(algorithm=name)
        communicators["of 1 MB"] = ipcreduce.Communicator(workspace=1 << 20)
    started = time.time()
    result = list_cases.run(
        cupy_module, communicators, options.seed, options.cases, options.largest, most=options.most,
        late_seconds=options.late, first=options.first,
    )  # fmt: skip
    for comm in communicators.values():
        comm.synchronize()
        comm.close()
    if world.rank == 0:
        keys = ("seed", "first", "backend", "hosts")
        result |= {"seconds": round(time.time() - started, 1), "ranks": world.size}
        result |= {key: getattr(options, key) for key in keys}
        calls, members = (result["counted"].get(key, 0) for key in ("calls", "members"))
        print(
            f"{options.cases} lists of {members} arrays, {calls} calls on {world.size} ranks, all right, "
            f"{result['seconds']} s"
        )
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | result, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
