"""What graphs have to stand. ``mpirun -n 2 python -m tests.graphs [--sim] [--algorithm direct] [name ...]``.

Each function of a module's SCENARIOS is one; it runs on every rank and asserts. The ranks may share a GPU. With --sim
it runs on the simulated device.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import cupy

from ipcreduce import Communicator
from tests.graphs import breaks, communicators, driver_faults, errors, memory, options, pieces, replays, runners
from tests.graphs.common import GPUS, RANK, WORLD, works

MODULES = (replays, memory, pieces, breaks, runners, errors, communicators, driver_faults)
SCENARIOS = [scenario for module in MODULES for scenario in module.SCENARIOS]


def main() -> None:
    if options.names == ["host_communicator"]:
        run(communicators.host_communicator)
        return
    cupy.cuda.Device(RANK % GPUS).use()
    with Communicator(timeout=20, algorithm=options.algorithm) as comm:
        assert comm.backend == "ipc", comm.describe()
        works(comm)
        run(*[one for one in SCENARIOS if not options.names or one.__name__ in options.names], comm=comm)


def run(*scenarios: Callable[..., None], **arguments: Any) -> None:
    for scenario in scenarios:
        started = time.monotonic()
        scenario(**arguments)
        WORLD.Barrier()
        if RANK == 0:
            print(f"{scenario.__name__}: right, {time.monotonic() - started:.1f} s", flush=True)
    if RANK == 0:
        print(f"{len(scenarios)} scenarios, all right", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        WORLD.Abort(1)
