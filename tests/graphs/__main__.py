"""What graphs have to stand. ``mpirun -n 2 python -m tests.graphs [--sim] [--algorithm direct] [name ...]``.

Each function of a module's SCENARIOS is one; it runs on every rank and asserts. The ranks may share a GPU. With --sim
it runs on the simulated device.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy

from ipcreduce import Communicator
from ipcreduce.bench import report
from tests import worker
from tests.graphs import (
    breaks,
    communicators,
    driver_faults,
    endurance,
    errors,
    memory,
    options,
    pieces,
    quick,
    replays,
    runners,
)
from tests.graphs.common import FIGURES, GPUS, RANK, WORLD, works

MODULES = (replays, memory, pieces, breaks, runners, errors, quick, communicators, driver_faults, endurance)
SCENARIOS = [scenario for module in MODULES for scenario in module.SCENARIOS]


def left_out() -> set[str]:
    """Scenarios, by what they look like, that are in no list."""
    found = {
        name
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and [*inspect.signature(function).parameters] == ["comm"]
    }
    return found - {scenario.__name__ for scenario in SCENARIOS}


def main() -> None:
    assert not left_out(), f"in no list of scenarios: {left_out()}"
    if options.names == ["host_communicator"]:
        run(communicators.host_communicator)
        return
    cupy.cuda.Device(RANK % GPUS).use()
    with Communicator(timeout=20, algorithm=options.algorithm) as comm:
        assert comm.backend != "mpi", comm.describe()
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
        for name, figure in FIGURES.items():
            print(f"{name}: {figure}")
        print(f"{len(scenarios)} scenarios, all right", flush=True)
        if options.json:
            names = [scenario.__name__ for scenario in scenarios]
            content = report.header(["-m", "tests.graphs", *sys.argv[1:]]) | {"right": names} | FIGURES
            Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    worker.run(main)
