"""``mpirun -n 2 python -m tests.sim.scenarios name ...`` runs scenarios of the library on the simulated device.

Each function of a module's SCENARIOS is one; it runs on every rank and asserts, and must leave nothing behind.
``--visible 0,1/1,0`` sets CUDA_VISIBLE_DEVICES, rank by rank. ``--among directory rank size`` makes this process a rank
without MPI: one that is killed or ends, ends only itself.
"""

from __future__ import annotations

import contextlib
import sys
import time

import cupy

from ipcreduce import Communicator
from tests.shared import bounds, worker
from tests.sim.scenarios import (
    captures,
    devices,
    driver_faults,
    ends,
    gradients,
    lists,
    maps,
    norms,
    options,
    over_nccl,
    peers,
    recovered,
    splits,
    startup,
    suspended,
    tensors,
    threads,
    virtual,
    written,
)
from tests.sim.scenarios.common import GPUS, RANK, WORLD, grown, held, host_works, open_files

MODULES = (
    startup, driver_faults, ends, peers, threads, captures, devices, tensors, gradients, written, over_nccl, lists,
    maps, norms, virtual, suspended, recovered, splits,
)  # fmt: skip
SCENARIOS = {scenario.__name__: scenario for module in MODULES for scenario in module.SCENARIOS}


def more(before: dict[str, int]) -> dict[str, int]:
    """What is held beyond ``before``: then, a thread of the first communicator may still have been ending."""
    return {kind: count for kind, count in grown(before).items() if count > 0}


def main() -> None:
    bounds.patient()
    if options.among:
        for name in options.names:
            SCENARIOS[name]()
            print(f"{name}: right on rank {RANK}", flush=True)
        return
    if GPUS:
        cupy.cuda.Device(RANK % GPUS).use()
    with contextlib.closing(Communicator()) as comm:  # opens what stays open
        host_works(comm)
    bounds.until(lambda: not held()["mapped pages"], "the end of the first communicator")  # NCCL's is in the background
    for name in options.names:
        before, files, started = held(), open_files(), time.monotonic()
        SCENARIOS[name]()
        WORLD.Barrier()
        if not name.endswith("driver_faults"):
            bounds.until(
                lambda before=before: not more(before),
                lambda before=before, files=files: f"less than {more(before)}, {open_files() - files}",
            )
        if RANK == 0:
            print(f"{name}: right, {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        worker.show()
        if options.among:
            sys.exit(1)
        WORLD.Abort(1)
