"""What the scenarios use: small checks, what the library holds, and a function as a model's layers."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from ipcreduce import Graph
from tests.graphs import SIM
from tests.shared import clock, world
from tests.shared.bounds import HANG, LONG

if SIM:
    from tests.simulated import driver, machine_streams

WORLD = world.WORLD if SIM else MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
TOTAL = SIZE * (SIZE + 1) // 2
try:
    GPUS = cupy.cuda.runtime.getDeviceCount()
except RuntimeError:  # CuPy's, where no GPU is visible
    GPUS = 0
QUICK = GPUS >= SIZE and not SIM
WIDTH = 65536 if QUICK else 48  # of the largest all-reduce: 64 MB, or 48 KB
REPLAYS = 200 if QUICK else 24
FIGURES: dict[str, Any] = {}  # what scenarios have measured
HUGE = 1 << 45  # bytes: more than any GPU has
BRIEF: dict[str, Any] = {} if SIM else {"timeout": 5.0}  # options where a rank is late: only the simulator's time moves


# ---- what the scenarios use
def time_passes(comm: Any, within: bool = False) -> AbstractContextManager[None]:
    """In the block, whose call the last rank does not make, the time of the others is up once all of them wait.

    :param within: the last rank begins the call too, and does not come to its end.
    """
    if RANK == LAST or not SIM:
        return contextlib.nullcontext()
    page, number = comm._state.calls.page, comm._state.calls.number + 1
    return clock.passing(LONG + 1, lambda: all(page.calls.call_of(rank) >= number for rank in range(LAST + within)))


def mine(count: int = 1000, dtype: Any = np.float32) -> Any:
    """This rank's array: RANK + 1 everywhere, so that sums are TOTAL."""
    return cupy.full((count,), RANK + 1, dtype)


def right(array: Any, expected: float = TOTAL) -> None:
    values = cupy.asnumpy(array)
    assert (values == expected).all(), f"{values.ravel()[:8]}... where {expected} was due"


class Caught:
    """The error that a block has raised."""

    error: Any = None


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[Caught]:
    """The block must raise this, with these words in the message."""
    caught = Caught()
    try:
        yield caught
    except kind as error:
        for word in words:
            if word not in str(error):
                raise AssertionError(f"{word!r} is not in {error}") from error
        caught.error = error.with_traceback(None)  # which would keep arrays alive
        return
    raise AssertionError(f"no {kind} where {words} were due")


def works(comm: Any) -> None:
    """An eager call and a new recording are right."""
    right(comm.allreduce(mine(10)))
    comm.synchronize()
    records(comm)


def records(comm: Any) -> None:
    """A new recording is right."""
    source = mine(300)
    with Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(source)
        right(result)
        graph.replay()
        right(result)
    comm.synchronize()


def free_all_blocks() -> None:
    cupy.get_default_memory_pool().free_all_blocks()


def held_by_library(comm: Any) -> tuple[dict[str, int], int]:
    """What would show a leak, once every rank is here: the simulator's list, or memory in use; file descriptors."""
    gc.collect()
    comm.synchronize()  # unmaps what closed graphs had of the peers' memory, ...
    WORLD.Barrier()
    comm.synchronize()  # ... and gives back what no peer has mapped any more
    cupy.cuda.Device().synchronize()
    free_all_blocks()
    WORLD.Barrier()
    descriptors = len(os.listdir("/proc/self/fd"))
    if SIM:
        held = {kind: count for kind, count in driver.leaks().items() if kind != "modules"}
        held["executables"] = held.get("executables", 0) - len(kept_graphs(comm))
        return held, descriptors
    free, total = cupy.cuda.runtime.memGetInfo()
    return {"bytes": total - free}, descriptors


def kept_graphs(comm: Any) -> list[Any]:
    """The graphs of calls that were made again, which our kernels' backend keeps."""
    return [*comm._state.backend._graphs._graphs.values()] if comm.backend == "ipc" else []


def given_back(comm: Any, before: tuple[dict[str, int], int]) -> None:
    """Once every rank has closed its graphs. The driver of a GPU may keep some MB for later."""
    begun = time.monotonic()
    while problems := [*filter(None, WORLD.allgather(_kept(comm, before)))]:
        hangs = WORLD.bcast(time.monotonic() - begun > HANG)
        assert comm.backend == "nccl", problems  # which frees in the background, once the graphs are gone
        assert not hangs, problems
        time.sleep(0.1)


def _kept(comm: Any, before: tuple[dict[str, int], int]) -> str:
    now = held_by_library(comm)
    more = now[1] - before[1]
    if more != 0 if comm.backend == "ipc" or SIM else more > 1:
        # older communicators may be gone too, and rank 0 keeps an identity ready after a fault
        return f"rank {RANK}: {now[1]} file descriptors, {before[1]} before"
    grown = {kind: count - before[0].get(kind, 0) for kind, count in now[0].items()}
    if any(count > (0 if SIM else 64 << 20) for count in grown.values()):
        return f"rank {RANK}: left behind: {grown}"
    return ""


def keep_busy(stream: Any) -> None:
    """For longer than a recording takes."""
    if SIM:
        machine_streams.submit(stream.ptr, lambda: time.sleep(0.05))
    else:
        with stream:
            large = cupy.zeros(1 << 24, np.float32)
            for _ in range(500):
                large += 1


class Canaries:
    """Arrays in memory that was free: what a graph writes to memory that it no longer has, is seen here."""

    def __init__(self, *counts: int) -> None:
        free_all_blocks()
        self.arrays = [cupy.full((count,), 0x5A, np.uint8) for count in counts]

    def intact(self) -> None:
        for array in self.arrays:
            right(array, 0x5A)


class Model:
    """A function as a model's layers: element-wise work, four all-reduces from 2 bytes up, temporaries freed midway.

    All numbers are small integers, so every order of a sum gives the same.
    """

    def __init__(self, comm: Any, batch: int) -> None:
        self.comm, self.batch = comm, batch
        self.inputs = {
            "x": cupy.zeros((batch, 16), np.float32),
            "w": cupy.zeros((16, 32), np.float32),
            "v": cupy.zeros((32, WIDTH), np.float32),
        }
        self.sizes = [batch * 32 * WIDTH * 4, batch * 16 * 32 * 4, batch * 32 * 4]
        self.seed = 0

    def __call__(self) -> None:
        x, w, v = self.inputs["x"], self.inputs["w"], self.inputs["v"]
        products = x[:, :, None] * w
        hidden = products.sum(axis=1)
        del products
        hidden = self.comm.allreduce(hidden)
        first = self.comm.allreduce(x[:1, :1].astype(np.float16))
        wide = hidden[:, :, None] * v
        self.comm.allreduce(wide, out=wide)
        ends = (wide[:, :, :8] + wide[:, :, -8:]).sum(axis=2)
        del wide
        ends += RANK
        ends = self.comm.allreduce(ends, "max")
        self.output, self.first = ends + hidden, first

    def new_inputs(self) -> None:
        """Others on every rank, the same in every process of a seed."""
        self.seed += 1
        draw = np.random.default_rng([self.seed, self.batch])
        shapes = {name: array.shape for name, array in self.inputs.items()}
        of_all = [
            {name: draw.integers(0, 4, shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(SIZE)
        ]
        for name, array in self.inputs.items():
            array.set(of_all[RANK][name])
        hidden = sum(one["x"] @ one["w"] for one in of_all)
        wide = sum(hidden[:, :, None] * np.concatenate([one["v"][:, :8], one["v"][:, -8:]], 1) for one in of_all)
        self.expected = wide.sum(axis=2) + LAST + hidden
        self.expected_first = sum(one["x"][0, 0] for one in of_all)

    def check(self) -> None:
        found = cupy.asnumpy(self.output)
        assert (found == self.expected).all(), f"batch {self.batch}: {found}, {self.expected} was due"
        right(self.first, self.expected_first)
