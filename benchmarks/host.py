"""Collectives of NumPy arrays against MPI's, on one host.

    mpirun -n 4 python -m benchmarks.host --json FILE [--largest BYTES] [--splits]

All-reduces of float32 and float64, sum and max, into an ``out``; and of bfloat16, which MPI lacks. Random data; the
results are checked first. Times are medians over the rounds, of the slowest rank, in microseconds a call. Behind the
table stands the bandwidth of memory: the least that the larger messages can take is the time of moving their bytes.

``--splits``: all-gathers, reduce-scatters and broadcasts of float32. ``bytes`` are those that a rank passes. MPI and
ipcreduce take turns of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import contenders, report, timing
from ipcreduce.bench.collectives import ALLREDUCE, COLLECTIVES, Collective
from ipcreduce.bench.data import Message

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = [(np.dtype(name), op) for name in ("float32", "float64") for op in ("sum", "max")] + [(BFLOAT16, "sum")]
SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
ROUNDS, ROUND_SECONDS = 9, 0.05
TURNS = 25


def microseconds(call: Callable[[], Any]) -> float:
    """The time of one call: the median over the rounds of the slowest rank's."""
    call()
    started = time.perf_counter()
    call()
    count = WORLD.bcast(max(1, min(2000, int(ROUND_SECONDS / (time.perf_counter() - started)))))
    rounds = []
    for _ in range(ROUNDS):
        WORLD.Barrier()
        started = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - started) / count * 1e6)
    return WORLD.allreduce(statistics.median(rounds), MPI.MAX)


def row(comm: ipcreduce.Communicator, dtype: np.dtype, op: str, nbytes: int) -> dict[str, Any]:
    count = max(1, nbytes // dtype.itemsize)
    values = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32).astype(dtype)
    ours, theirs = np.empty_like(values), np.empty_like(values)
    result: dict[str, Any] = {"dtype": dtype.name, "op": op, "bytes": count * dtype.itemsize, "mpi_us": None}
    comm.allreduce(values, op, out=ours)
    if dtype != BFLOAT16:
        call = {"sum": MPI.SUM, "max": MPI.MAX}[op]
        WORLD.Allreduce(values, theirs, call)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        result["mpi_us"] = round(microseconds(lambda: WORLD.Allreduce(values, theirs, call)), 2)
    result["ours_us"] = round(microseconds(lambda: comm.allreduce(values, op, out=ours)), 2)
    return result


def split_row(comm: ipcreduce.Communicator, of: Collective, nbytes: int) -> dict[str, Any]:
    message = Message(nbytes, np.dtype(np.float32), comm, of=of)
    ways = {"mpi_us": contenders.Mpi(WORLD, of), "ours_us": contenders.Ours(comm, of)}
    calls = {name: way.prepare(message.source, message.target) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in calls.values():
        message.renew()
        call()
        assert message.is_right(), message.what
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(timing.on_host(call, 1, WORLD).median)
    return {"dtype": "float32", "op": of.name, "bytes": nbytes} | {
        name: round(statistics.median(every), 2) for name, every in times.items()
    }


def copy_bandwidth() -> float:
    """GB/s of memory that all ranks together read and write, each copying 64 MB."""
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    return round(WORLD.size * 2 * source.nbytes / microseconds(lambda: np.copyto(target, source)) / 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.host", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--splits", action="store_true")
    args = parser.parse_args()
    rows = []
    with ipcreduce.Communicator() as comm:
        ways: list[Callable[[int], dict[str, Any]]] = [partial(row, comm, *kind) for kind in KINDS]
        if args.splits:
            ways = [partial(split_row, comm, of) for of in COLLECTIVES.values() if of is not ALLREDUCE]
        for way, nbytes in product(ways, (one for one in SIZES if one <= args.largest)):
            found = way(nbytes)
            rows.append(found)
            if comm.rank == 0:
                ours, mpi = found["ours_us"], found["mpi_us"]
                ratio = f"{mpi:12.1f} {ours / mpi:6.2f}" if mpi else ""
                print(f"{found['dtype']:9} {found['op']:14} {found['bytes']:>10} {ours:12.1f} {ratio}", flush=True)
        bandwidth = copy_bandwidth()
        if comm.rank == 0 and args.json:
            header = report.header(["-m", "benchmarks.host", *sys.argv[1:]])  # argv[0] is a path of this machine
            about = {"ranks": comm.size, "copy_GB_per_s": bandwidth}
            args.json.write_text(json.dumps({**header, **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
