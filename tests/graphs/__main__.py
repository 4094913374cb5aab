"""What graphs have to stand. ``mpirun -n 2 python -m tests.graphs [--sim] [--algorithm direct] [--hosts 2]
[name ...]``.

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
from tests.graphs.common import FIGURES, GPUS, RANK, SIZE, WORLD, works
from tests.shared import bounds, worker
from tests.tools import machine

MODULES = (replays, memory, pieces, breaks, runners, errors, quick, communicators, driver_faults, endurance)
SCENARIOS = [scenario for module in MODULES for scenario in module.SCENARIOS]
WITHOUT_DIFFERENCES = [one for module in (replays, memory, pieces, runners) for one in module.SCENARIOS]


# Not over NCCL: graphs that outlive a call given up, kernels that are replaced or registered, and their descriptions.
OUR_KERNELS_ONLY = {
    "exceptions_in_breaks", "elsewhere_on_one_rank", "descriptors_differ", "different_graphs", "rank_missing",
    "errors_are_told", "replaced_meanwhile", "differences_are_noticed", "shown", "faults", "one_registration",
    "algorithms", "nothing_is_left", "in_several_launches",
}  # fmt: skip


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
    bounds.patient()
    assert not left_out(), f"in no list of scenarios: {left_out()}"
    if options.names == ["host_communicator"]:
        run(communicators.host_communicator)
        return
    cupy.cuda.Device(RANK % GPUS).use()
    machine.pretend_hosts(RANK, SIZE, options.hosts)
    with Communicator(algorithm=options.algorithm) as comm:
        assert comm.backend != "host", comm.describe()
        works(comm)
        modules = [one for one in MODULES if not options.modules or one.__name__.split(".")[-1] in options.modules]
        known = [scenario for module in modules for scenario in module.SCENARIOS[: 1 if options.first else None]]
        chosen = [one for one in known if not options.names or one.__name__ in options.names]
        if comm.backend == "nccl":
            chosen = [one for one in chosen if one.__name__ not in OUR_KERNELS_ONLY]
        if options.hosts > 1:  # calls that differ between hosts are told afterwards only
            chosen = [one for one in chosen if one in WITHOUT_DIFFERENCES]
        FIGURES.update(backend=comm.backend, hosts=options.hosts, ranks=SIZE)
        run(*chosen, comm=comm)


def run(*scenarios: Callable[..., None], **arguments: Any) -> None:
    for scenario in scenarios:
        started = time.monotonic()
        with worker.shown():  # before the communicator is closed, which may wait for the other ranks
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
