"""A driver that fails, at every call of a communicator's life."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipcreduce import Communicator
from tests.shared import clock
from tests.shared.bounds import HANG, LONG
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    WORLD,
    error_of,
    good_communicator,
    grown,
    held,
    host_works,
    mine,
    right,
    works,
)
from tests.simulated import driver

REFUSED = {  # what may stay behind, if the driver does not take it back
    "cuDevicePrimaryCtxRelease": {"contexts": 1},
    "cuEventDestroy": {"events": 1},
    "cuIpcCloseMemHandle": {"mappings": 1},
    "cuMemFree": {"allocations": 1, "descriptors": 1},
    "cuMemAddressFree": {"reserved ranges": 1},
    "cuMemHostUnregister": {"registered host ranges": 1, "mapped pages": 1},
    "cuMemRelease": {"physical": 1, "descriptors": 1},
    # A mapping keeps its range and its memory's descriptor.
    "cuMemUnmap": {"virtual mappings": 1, "reserved ranges": 1, "descriptors": 1},
    "cuModuleUnload": {"modules": 1},
}


def driver_faults() -> None:
    """Each driver call in turn, from start-up to close(), fails on one rank.

    All ranks work, or fall back, or have an error of ours, alike and soon; later all is well; and nothing is left
    behind but what the driver refused to take back.
    """
    found: list[str] = []
    folder = Path(WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None))
    for rank in (0, LAST):
        for k in itertools.count(1):
            failed, problems = _life(rank, k, folder / f"{rank}-{k}")
            found += [f"call {k} of rank {rank}, {failed}: {problem}" for problem in problems]
            if not failed:
                break
        found += [f"a whole life in {k} driver calls"] * (k < 50)
    WORLD.Barrier()
    if RANK == 0:
        shutil.rmtree(folder)
    print("".join(f"rank {RANK}: {problem}\n" for problem in found), end="", flush=True)
    assert not found, f"{len(found)} problems"


def _life(rank: int, k: int, mark: Path) -> tuple[str, list[str]]:
    """Of a communicator whose ``k``-th driver call on ``rank`` fails.

    :param mark: a file that is there once it has, if it is a launch.
    :returns: which call it was, "" if it was over before; and what went wrong that must not.
    """
    before, problems, made, calls = held(), [], [], driver.calls()
    driver.failed.clear()
    WORLD.Barrier()
    driver.fault_at(k if rank == RANK else 0)

    def step(call: Callable[[], Any], *, may_fail: bool = True) -> str:
        begun = time.monotonic()
        error = error_of(call)
        if time.monotonic() - begun > HANG:
            problems.append(f"{time.monotonic() - begun:.1f} s for {error}")
        if error and not (may_fail and error.startswith("ours: ")):
            problems.append(error)
        return error

    def kernel_is_missing() -> bool:
        if "cuLaunchKernelEx" in driver.failed:
            mark.touch()
        return mark.exists()

    # The others' kernels wait for the one by which a rank tries the links, and which is not launched. After any other
    # failure time must not pass: all these kernels run if the library goes on, and they may be slow.
    with clock.passing(LONG + 1, kernel_is_missing, move=clock.advance_device):
        error = step(lambda: made.append(Communicator()))
    ends = WORLD.allgather(made[0].backend if made else "error")
    if len(set(ends)) > 1:
        problems.append(f"start-up ended in {ends}; here {error}")
    elif ends[0] == "host":
        step(lambda: host_works(made[0]), may_fail=False)
        if "CUDA_ERROR_UNKNOWN" not in made[0].describe():
            problems.append(made[0].describe())
    elif ends[0] == "ipc":
        _calls(made[0], step)
        driver.fault_at(0)
        if WORLD.bcast(bool(driver.failed), root=rank):
            for _ in range(2):
                step(lambda: works(made[0]), may_fail=False)
        elif rank == RANK:
            driver.fault_at(calls + k - driver.calls())
    for comm in made:
        step(comm.close, may_fail=False)
    driver.fault_at(0)
    made.clear()
    where = WORLD.bcast(driver.failed[0] if driver.failed else "", root=rank)
    step(good_communicator, may_fail=False)
    left = grown(before)
    if left and left != (REFUSED.get(where) if rank == RANK else None):
        problems.append(f"left behind: {left}")
    return where, problems


def _calls(comm: Communicator, step: Callable[..., str]) -> None:
    """Calls of two kernels. The first step that fails is the last one."""
    results: list[Any] = []
    todo = [lambda count=count: results.append(comm.allreduce(mine(count))) for count in (10, 3000)]
    if not any(map(step, [*todo, comm.synchronize])):
        step(lambda: [right(result) for result in results], may_fail=False)


SCENARIOS = [driver_faults]
