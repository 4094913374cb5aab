"""The backend nccl beside NCCL by itself: host time of a call, and time of a call in a graph, in turns.

    mpirun -n 2 python -m benchmarks.over_nccl --json FILE [--hosts 2] [--largest BYTES]

"nccl4py" is the binding's low layer and "CuPy" is cupy.cuda.nccl, each with a communicator of its own over the same
ranks. Calls are float32 sums from one array into another. Times are the slowest rank's medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report
from ipcreduce.nccl import library
from tests import machine

WORLD = MPI.COMM_WORLD
FLOAT32, SUM = library.DTYPES["float32"], library.OPS["sum"]
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]
Call = Callable[[], Any]


def host_time(call: Call, stream: Any, calls: int, turns: int) -> float:
    """Median over turns of the time for which a call keeps the host, with an idle stream before each turn."""
    times = []
    for _ in range(turns):
        WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        stream.synchronize()
    return statistics.median(times)


def captured(call: Call, stream: Any, calls: int) -> Any:
    """A graph of so many calls."""
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    for _ in range(calls):
        call()
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    return graph


def device_time(graph: Any, stream: Any, calls: int) -> float:
    """Time of one call of a replay."""
    before, after = cupy.cuda.Event(), cupy.cuda.Event()
    stream.synchronize()
    WORLD.Barrier()
    before.record(stream)
    graph.launch(stream)
    after.record(stream)
    after.synchronize()
    return cupy.cuda.get_elapsed_time(before, after) * 1e3 / calls


def slowest(row: dict[str, float]) -> dict[str, float]:
    return (
        {key: round(max(each[key] for each in everyone), 3) for key in row}
        if (everyone := WORLD.allgather(row))
        else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=1, help="pretended ones (1)")
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--calls", type=int, default=20, help="in a graph or a turn, at most (20)")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rank, size = WORLD.rank, WORLD.size
    machine.pretend_hosts(rank, size, options.hosts)
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    from cupy.cuda import nccl as cupy_nccl

    nccl = library.load()
    comm = ipcreduce.Communicator(backend="nccl")
    plain = library.join(size, rank, WORLD.bcast(library.new_id() if rank == 0 else None))
    cupys = cupy_nccl.NcclCommunicator(size, WORLD.bcast(cupy_nccl.get_unique_id() if rank == 0 else None), rank)
    stream, rows = cupy.cuda.Stream(non_blocking=True), []
    with stream:
        for nbytes in SIZES:
            if nbytes > options.largest:
                break
            count = nbytes // 4
            source = cupy.full(count, rank + 1, np.float32)
            out = cupy.empty_like(source)
            plainly = source.data.ptr, out.data.ptr, count, FLOAT32, SUM
            ways: dict[str, Call] = {
                "ours": partial(comm.allreduce, source, out=out),
                "nccl4py": partial(nccl.all_reduce, *plainly, plain, stream.ptr),
                "CuPy": partial(cupys.allReduce, *plainly, stream.ptr),
            }
            for name, call in ways.items():
                out.fill(-1)
                call()
                assert (out == size * (size + 1) / 2).all(), (name, nbytes)
            calls = max(2, min(options.calls, (1 << 30) // nbytes))
            graphs = {name: captured(call, stream, calls) for name, call in ways.items()}
            row: dict[str, Any] = {"bytes": nbytes, "calls": calls}
            if nbytes <= 1 << 20:
                host: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(5):
                    for name, call in ways.items():
                        host[name].append(host_time(call, stream, options.calls, 2))
                row["host"] = slowest({name: statistics.median(times) for name, times in host.items()})
            device: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(options.turns):
                for name, graph in graphs.items():
                    device[name].append(device_time(graph, stream, calls))
            row["device"] = slowest({name: statistics.median(times) for name, times in device.items()})
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
            del graphs
    comm.synchronize()
    comm.close()
    if rank == 0 and options.json:
        options.json.write_text(json.dumps(report.header(sys.argv) | {"rows": rows}, indent=1) + "\n")
    WORLD.Barrier()


if __name__ == "__main__":
    main()
