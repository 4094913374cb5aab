"""The backend nccl beside NCCL by itself: host time of a call, and time of a call in a graph, in turns.

    mpirun -n 2 python -m benchmarks.over_nccl --json FILE [--hosts 2] [--largest BYTES]

"nccl4py" is the binding's low layer and "CuPy" is cupy.cuda.nccl, each with a communicator of its own over the same
ranks. Both take addresses, which here are read once, before. A program that has arrays, as ours takes them, reads
theirs in each call: that is "CuPy, arrays", and "nccl4py, arrays" is the binding's upper layer, which does so itself.
Calls are float32 sums from one array into another. Times are the slowest rank's medians, in microseconds. Host times
are of calls that repeat, as in a loop over layers: each way has made WARM calls of the size before.
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
from tests.tools import machine

WORLD = MPI.COMM_WORLD
FLOAT32, SUM = library.DTYPES["float32"], library.OPS["sum"]
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]
WARM, HOST_CALLS, HOST_TURNS = 2520, 200, 11
LARGEST_FOR_THE_HOST = 1 << 20
Call = Callable[[], Any]


def host_time(call: Call, stream: Any, calls: int) -> float:
    """The time for which a call keeps the host, with an idle stream before."""
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = (time.perf_counter() - start) / calls * 1e6
    stream.synchronize()
    return taken


def host_times(ways: dict[str, Call], stream: Any) -> dict[str, float]:
    """Medians over turns, by way."""
    for call in ways.values():
        host_time(call, stream, WARM)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(HOST_TURNS):
        for name, call in ways.items():
            times[name].append(host_time(call, stream, HOST_CALLS))
    return slowest({name: statistics.median(each) for name, each in times.items()})


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


def device_times(ways: dict[str, Call], stream: Any, calls: int, turns: int) -> dict[str, float]:
    """Medians over turns of a call's time in a graph, by way.

    The graphs end with this function: NCCL waits in the end of a communicator for those that hold calls of it.
    """
    graphs = {name: captured(call, stream, calls) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name in graphs:
            times[name].append(device_time(graphs[name], stream, calls))
    return slowest({name: statistics.median(each) for name, each in times.items()})


def upper_layer(comm: Any) -> Any:
    """The binding's upper layer over a communicator of its lower one; None if it cannot be imported."""
    try:
        from nccl.core import Communicator
    except ImportError:
        return None
    return Communicator(comm.handle)


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
    parser.add_argument("--calls", type=int, default=20, help="in a graph, at most (20)")
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
    upper = upper_layer(plain)
    stream = cupy.cuda.Stream(non_blocking=True)
    rows: dict[int, dict[str, Any]] = {nbytes: {"bytes": nbytes} for nbytes in SIZES if nbytes <= options.largest}

    def ways(nbytes: int) -> dict[str, Call]:
        """The calls of this size, which have been tried."""
        count = nbytes // 4
        source = cupy.full(count, rank + 1, np.float32)
        out = cupy.empty_like(source)
        plainly = source.data.ptr, out.data.ptr, count, FLOAT32, SUM
        found: dict[str, Call] = {
            "ours": partial(comm.allreduce, source, out=out),
            "nccl4py": partial(nccl.all_reduce, *plainly, plain, stream.ptr),
            "CuPy": partial(cupys.allReduce, *plainly, stream.ptr),
            "CuPy, arrays": lambda: cupys.allReduce(
                source.data.ptr, out.data.ptr, source.size, FLOAT32, SUM, cupy.cuda.get_current_stream().ptr
            ),
        }
        if upper is not None:
            found["nccl4py, arrays"] = partial(upper.allreduce, source, out, SUM, stream=stream.ptr)
        for name, call in found.items():
            out.fill(-1)
            call()
            assert (out == size * (size + 1) / 2).all(), (name, nbytes)
        return found

    with stream:
        for nbytes, row in rows.items():  # first: once calls are captured, eager ones take both libraries longer
            if nbytes <= LARGEST_FOR_THE_HOST:
                row["host"] = host_times(ways(nbytes), stream)
        for nbytes, row in rows.items():
            row["calls"] = max(2, min(options.calls, (1 << 30) // nbytes))
            row["device"] = device_times(ways(nbytes), stream, row["calls"], options.turns)
            if rank == 0:
                print(json.dumps(row), flush=True)
        captured_before = host_times(ways(1 << 10), stream)
        if rank == 0:
            print("host at 1 KB once calls have been captured:", captured_before, flush=True)
    comm.synchronize()
    comm.close()
    library.close(plain)
    cupys.destroy()
    if rank == 0 and options.json:
        found = {
            "ranks": size,
            "hosts": options.hosts,
            "rows": [*rows.values()],
            "host at 1 KB once calls have been captured": captured_before,
        }
        report.write_json(options.json, report.header(sys.argv) | found)
    WORLD.Barrier()


if __name__ == "__main__":
    main()
