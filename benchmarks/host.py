"""All-reduces of NumPy arrays against ``MPI.Allreduce``, on one host.

    mpirun -n 4 python -m benchmarks.host --json FILE [--largest BYTES]

float32 and float64, sum and max, into an ``out``; and bfloat16, which MPI lacks. Random data; the
results are checked first. Times are medians over the rounds, of the slowest rank, in microseconds a call. Behind the
table stands the bandwidth of memory: the least that the larger messages can take is the time of moving their bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = [(np.dtype(name), op) for name in ("float32", "float64") for op in ("sum", "max")] + [(BFLOAT16, "sum")]
SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
ROUNDS, ROUND_SECONDS = 9, 0.05


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


def copy_bandwidth() -> float:
    """GB/s of memory that all ranks together read and write, each copying 64 MB."""
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    return round(WORLD.size * 2 * source.nbytes / microseconds(lambda: np.copyto(target, source)) / 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.host", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    args = parser.parse_args()
    rows = []
    with ipcreduce.Communicator() as comm:
        for dtype, op in KINDS:
            for nbytes in SIZES:
                if nbytes > args.largest:
                    continue
                rows.append(row(comm, dtype, op, nbytes))
                if comm.rank == 0:
                    ours, mpi = rows[-1]["ours_us"], rows[-1]["mpi_us"]
                    ratio = f"{mpi:12.1f} {ours / mpi:6.2f}" if mpi else ""
                    print(f"{dtype.name:9} {op:4} {rows[-1]['bytes']:>10} {ours:12.1f} {ratio}", flush=True)
        bandwidth = copy_bandwidth()
        if comm.rank == 0 and args.json:
            about = {"ranks": comm.size, "copy_GB_per_s": bandwidth}
            args.json.write_text(json.dumps({**report.header(sys.argv), **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
