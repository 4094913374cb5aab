"""On the simulator: each driver call in turn of a recording, a replay and a close fails on one rank."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from ipcreduce import Communicator, Graph, IpcReduceError
from tests.graphs import options
from tests.graphs.common import (
    LAST,
    RANK,
    SIM,
    SIZE,
    TOTAL,
    WORLD,
    held_by_library,
    mine,
    right,
    works,
)
from tests.shared.bounds import HANG

if SIM:
    from tests.simulated import driver

REFUSED = {  # what may stay behind, if the driver does not take it back
    "cuMemFree": [{"allocations": 1}],
    "cuGraphDestroy": [{"graphs": 1}],
    "cuGraphExecDestroy": [{"executables": 1}],
    # A peer does not free what is still mapped here.
    "cuMemUnmap": [{"virtual mappings": 1, "reserved ranges": 1}],
    "cuMemRelease": [{"physical": 1}],
    "cuMemAddressFree": [{"reserved ranges": 1}],
    "cuIpcCloseMemHandle": [{"mappings": 1}, {"allocations": 1}, {"mappings": 1, "allocations": 1}],
}


def faults(comm: Any) -> None:
    """On the simulator: each driver call in turn of a recording, a replay and a close fails on one rank.

    Every rank goes on or has an error of ours, soon; the communicator works; and nothing is left behind but what the
    driver refused to take back.
    """
    if not SIM:
        return
    found: list[str] = []
    for phase in ("record", "replay", "close"):
        brief, k, over = None, 0, False
        while not over:
            k += 1
            brief = brief or Communicator(algorithm=options.algorithm)
            over, problems = _fault(brief, phase, k)
            found += [f"{phase}, call {k}: {problem}" for problem in problems]
            if WORLD.allreduce(bool(problems), MPI.LOR) or over:
                with contextlib.suppress(IpcReduceError):
                    brief.close()
                brief = None
    print("".join(f"rank {RANK}: {problem}\n" for problem in found), end="", flush=True)
    assert not found, f"{len(found)} problems"


def _fault(comm: Any, phase: str, k: int) -> tuple[bool, list[str]]:
    """Whether the phase was over before its ``k``-th call; and what went wrong that must not."""
    works(comm)
    before, _ = held_by_library(comm)
    graph, source, problems = Graph(comm), mine(3000), []
    if phase != "record":
        _attempt(comm, graph, source, "record")
    WORLD.Barrier()
    started, calls = time.monotonic(), driver.calls()
    driver.fault_at(k if RANK == LAST else 0)
    error = _attempt(comm, graph, source, phase)
    driver.fault_at(0)
    over = driver.calls() - calls < k
    over, failed = WORLD.bcast((over, driver.failed[-1] if driver.failed else ""), root=LAST)
    if time.monotonic() - started > HANG:
        problems.append(f"{time.monotonic() - started:.1f} s")
    if error and not error.startswith("ipcreduce: "):
        problems.append(f"not an error of ours: {error}")
    _attempt(comm, graph, source, "hear")  # or this rank might hear of it in an eager call, where the others reduce
    trouble = [_attempt(comm, graph, source, "eager") for _ in range(3)]
    if trouble[-1]:
        problems.append(f"an all-reduce afterwards: {trouble[-1]}")
    ready = set(WORLD.allgather(graph.state))
    if {"staged", "registered"} <= ready:
        problems.append(f"the ranks' graphs are {ready}")
    elif len(ready) == 1 and graph.state in ("staged", "registered"):
        trouble.append(_attempt(comm, graph, source, "replay"))
        if trouble[-1]:
            problems.append(f"a replay afterwards: {trouble[-1]}")
    graph.close()
    del graph, source
    try:
        works(comm)
        now, _ = held_by_library(comm)
        left = {kind: count - before.get(kind, 0) for kind, count in now.items() if count != before.get(kind, 0)}
        if left and left not in REFUSED.get(failed, []):
            problems.append(f"left behind: {left}")
    except (IpcReduceError, AssertionError) as late:
        problems.append(f"a recording afterwards: {late}")
    return over, [f"{failed} failed: {problem}; the error was {error}" for problem in problems]


def _attempt(comm: Any, graph: Graph, source: Any, phase: str) -> str:
    """The error that this ends in, as a text: an exception would keep arrays alive."""
    try:
        if phase == "record":
            with graph.record(source):
                first = comm.allreduce(source)
                cupy.zeros(4000, np.float32)
                result = comm.allreduce(first + 1)
            comm.synchronize()
            right(result, (TOTAL + 1) * SIZE)
        elif phase == "replay":
            graph.replay()
            comm.synchronize()
        elif phase == "hear":
            comm.synchronize()
        elif phase == "close":
            graph.close()
        else:
            right(comm.allreduce(mine(10)))
            comm.synchronize()
        return ""
    except IpcReduceError as error:
        return f"ipcreduce: {error!r}"
    except Exception as error:
        return repr(error)


SCENARIOS = [faults]
