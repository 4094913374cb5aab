"""suspend() and resume() over NCCL, which gives back memory of its own: what, how long, and what graphs do then.

    mpirun -n 2 python -m benchmarks.suspend_nccl --json FILE [--cycles 6] [--largest 67108864]

It needs ncclCommSuspend, which NCCL has from 2.29.7 on. Behind each cycle a graph, one that CuPy has captured, and
eager calls must have the bits of before; they are float32 sums of 8 KB to 64 MB. Times are the slowest rank's, and
memory is that of cuMemGetInfo. Whatever is wrong ends the program with an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import ipcreduce
from benchmarks.suspend import RANK, SIZE, SIZES, WORLD, held, refused, say, summary, timed
from ipcreduce.bench import report
from ipcreduce.nccl import library


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes (64 MB)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
    sizes = [nbytes for nbytes in SIZES.values() if nbytes <= options.largest]
    found = {"ranks": SIZE, "NCCL": library.shown_version(library.version())} | cycles(options.cycles, sizes)
    say(found)
    if RANK == 0 and options.json is not None:
        report.write_json(options.json, report.header(sys.argv) | found)


def cycles(count: int, sizes: list[int]) -> dict[str, Any]:
    """So many times suspended and resumed, and all ways of a call behind each."""
    suspends, resumes, given, taken = [], [], [], []
    generator = np.random.default_rng(RANK)
    sources = [cupy.asarray(generator.standard_normal(nbytes // 4).astype(np.float32)) for nbytes in sizes]
    targets = [cupy.zeros(nbytes // 4, np.float32) for nbytes in sizes]
    stream = cupy.cuda.Stream(non_blocking=True)

    def bits(launch: Callable[[], Any]) -> list[bytes]:
        for target in targets:
            target.fill(0)
        cupy.cuda.Device().synchronize()
        launch()
        cupy.cuda.Device().synchronize()
        return [cupy.asnumpy(target).tobytes() for target in targets]

    with ipcreduce.Communicator(backend="nccl") as comm, ipcreduce.Graph(comm) as graph:

        def calls() -> None:
            for source, target in zip(sources, targets, strict=True):
                comm.allreduce(source, out=target)

        expected = bits(calls)
        with graph.record():
            calls()
        with stream:
            stream.begin_capture()
            calls()
            captured = stream.end_capture()
        ways = {"graph": graph.replay, "captured by CuPy": lambda: captured.launch(stream), "eager": calls}
        for turn in range(count):
            before = held()["free bytes"]
            suspends.append(timed(comm.suspend))
            refused(graph.replay)
            suspended = held()["free bytes"]
            resumes.append(timed(comm.resume))
            given.append(suspended - before)
            taken.append(suspended - held()["free bytes"])
            for way, launch in ways.items():
                assert bits(launch) == expected, f"cycle {turn}, {way}: other bits"
    return {
        "cycles": count,
        "the bits of before": list(ways),
        "suspend ms": summary(suspends),
        "resume ms": summary(resumes),
        "bytes given back": min(WORLD.allgather(min(given))),
        "bytes taken again": max(WORLD.allgather(max(taken))),
    }


if __name__ == "__main__":
    main()
