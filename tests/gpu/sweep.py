"""Random calls on GPUs, checked against NumPy: ``mpirun -n 4 python tests/gpu/sweep.py [KIND...] --cases 2000``.

Without a kind, calls of all kinds come mixed. With --abandoned the last rank comes too late for fused norms, in every
launch shape: the others' waits end, and no rank gets a wrong value.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import cupy

import ipcreduce
from ipcreduce.bench import report
from tests.gpu import cupy_module
from tests.shared import bounds, sweep, worker
from tests.shared.cases import KINDS, Limits
from tests.shared.world import WORLD
from tests.tools import machine


def main() -> None:
    bounds.patient()
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all if none is named")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=Limits.largest, help="bytes of a call's arrays, together")
    parser.add_argument("--smallest", type=int, default=Limits.smallest, help="bytes of a plain call that is not empty")
    parser.add_argument("--members", type=int, default=Limits.members, help="of a list")
    parser.add_argument("--rows", type=int, default=Limits.rows, help="of a norm")
    parser.add_argument("--expressions", type=int, default=Limits.expressions, help="the first so many")
    parser.add_argument("--late", type=float, default=0.002, help="seconds that a late rank is late")
    parser.add_argument("--abandoned", action="store_true")
    parser.add_argument("--backend", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--hosts", type=int, default=1, help="pretended ones, over nccl")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    if options.abandoned:
        shapes = sweep.abandoned(cupy_module, 1.0 if cupy.__name__ == "cupy" else 0.2)
        if WORLD.rank == 0:
            print(f"{shapes} abandoned launches on {WORLD.size} ranks, all right")
        return
    machine.pretend_hosts(WORLD.rank, WORLD.size, options.hosts)
    communicators = {"planned": ipcreduce.Communicator(backend=options.backend)}
    if options.backend == "ipc":
        for name in ("one_shot", "two_shot", "bulk"):
            communicators[name] = ipcreduce.Communicator(algorithm=name)
        communicators["of 1 MB"] = ipcreduce.Communicator(workspace=1 << 20)
    kinds = options.kinds or [name for name, kind in KINDS.items() if options.backend == "ipc" or kind.over_nccl]
    limits = Limits(options.largest, options.smallest, options.members, options.rows, options.expressions)
    started = time.time()
    result = sweep.run(
        cupy_module, communicators, kinds, options.seed, options.cases, limits, first=options.first,
        late_seconds=options.late,
    )  # fmt: skip
    for comm in communicators.values():
        comm.synchronize()
        comm.close()
    if WORLD.rank == 0:
        result |= {"seconds": round(time.time() - started, 1), "ranks": WORLD.size}
        result |= {key: getattr(options, key) for key in ("seed", "first", "backend", "hosts")}
        for name, count in sorted(result["counted"].items()):
            print(f"{count:8} {name}")
        print(
            f"{result['cases']} cases, {result['calls']} calls on {WORLD.size} ranks, all right, {result['seconds']} s"
        )
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | result, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
