"""suspend() and resume(): what they give back and how long they take, and workspaces in virtual memory beside IPC's.

    mpirun -n 2 python -m benchmarks.suspend --json FILE [--cycles 1000] [--turns 7] [--pool-mb 512]

"ipc" is a communicator whose workspaces are behind IPC handles, and "vmm" one with workspaces in virtual memory; both
have the default size. They take turns. Latencies are of float32 sums from one array into another: in a Graph of CALLS
calls, from end to end where they are eager, and on the host alone. All times are the slowest rank's; latencies are
medians of the turns' medians, in microseconds. Memory is that of cuMemGetInfo. In each cycle the graph is replayed and
its bits are compared. Whatever is wrong ends the program with an error.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import errors
from ipcreduce.bench import report, timing

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SIZES = {"8 KB": 8 << 10, "256 KB": 256 << 10, "2 MB": 2 << 20, "64 MB": 64 << 20}
MEMORIES = "ipc", "vmm"
CALLS = 64
STARTS = 5
OUTPUTS = 8  # of the graph with pools=True
COMMUNICATORS = 50
STRAY = 16  # mappings of Python's own that may come meanwhile; one left in each cycle would be many more


def slowest(seconds: float) -> float:
    """The largest of all ranks' times, in milliseconds."""
    return round(max(WORLD.allgather(seconds)) * 1e3, 3)


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a collective call takes, with an idle GPU before."""
    cupy.cuda.Device().synchronize()
    WORLD.Barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def summary(seconds: list[float]) -> dict[str, float]:
    """The median and the longest of some times, each the slowest rank's, in milliseconds."""
    return {"median": slowest(statistics.median(seconds)), "longest": slowest(max(seconds))}


def made(memory: str, **options: Any) -> ipcreduce.Communicator:
    """A communicator with its workspaces there."""
    os.environ["IPCREDUCE_MEMORY"] = memory
    comm = ipcreduce.Communicator(**options)
    assert comm.backend == "ipc", comm.describe()
    assert ("workspace in virtual memory" in comm.describe()) == (memory == "vmm"), comm.describe()
    return comm


def starts() -> dict[str, Any]:
    """The time of start-up, in turns."""
    found: dict[str, list[float]] = {memory: [] for memory in MEMORIES}
    for _ in range(STARTS):
        for memory, each in found.items():
            comms: list[ipcreduce.Communicator] = []
            each.append(timed(lambda memory=memory, comms=comms: comms.append(made(memory))))
            comms[0].close()
    return {memory: summary(each) for memory, each in found.items()}


def same_bits(comms: dict[str, ipcreduce.Communicator]) -> int:
    """Compare the results of both memories, and return how many were compared."""
    generator, compared = np.random.default_rng(RANK), 0
    for dtype in (np.float32, np.float16, np.float64, np.int32):
        for count in (1, 77, 2048, 65_537, 1_000_003):
            source = cupy.asarray((generator.standard_normal(count) * 100).astype(dtype))
            results = {cupy.asnumpy(comm.allreduce(source)).tobytes() for comm in comms.values()}
            assert len(results) == 1, f"{np.dtype(dtype)} of {count} elements differ"
            compared += 1
    return compared


def latencies(comms: dict[str, ipcreduce.Communicator], turns: int) -> list[dict[str, Any]]:
    rows = []
    for name, nbytes in SIZES.items():
        source, target = (cupy.ones(nbytes // 4, np.float32) for _ in range(2))
        samples: dict[str, list[float]] = {}
        with ExitStack() as graphs:
            replays = {
                memory: graphs.enter_context(graph_of(comm, source, target)).replay for memory, comm in comms.items()
            }
            for _ in range(turns):
                for memory, comm in comms.items():
                    call = call_of(comm, source, target)
                    graph = timing.in_graph(replays[memory], CALLS, 10, WORLD)
                    eager, host = timing.eagerly(call, CALLS, 10, WORLD)
                    for kind, times in (("graph", graph), ("eager", eager), ("host", host)):
                        samples.setdefault(f"{memory} {kind}", []).append(times.median)
        rows.append({"size": name} | {key: round(statistics.median(each), 3) for key, each in samples.items()})
        say(rows[-1])
    return rows


def call_of(comm: ipcreduce.Communicator, source: Any, target: Any) -> Callable[[], Any]:
    return lambda: comm.allreduce(source, out=target)


def graph_of(comm: ipcreduce.Communicator, source: Any, target: Any, calls: int = CALLS) -> ipcreduce.Graph:
    """A recording of so many calls."""
    graph = ipcreduce.Graph(comm)
    with graph.record():
        for _ in range(calls):
            comm.allreduce(source, out=target)
    comm.synchronize()
    return graph


def held() -> dict[str, int]:
    """What this process holds: free bytes of the GPU, open files, mappings."""
    cupy.cuda.Device().synchronize()
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    free = cupy.cuda.runtime.memGetInfo()[0]
    return {"free bytes": free, "descriptors": len(os.listdir("/proc/self/fd")), "mappings": mappings}


def cycles(comm: ipcreduce.Communicator, count: int) -> dict[str, Any]:
    """So many times suspended and resumed, with a replay between."""
    source = cupy.asarray(np.random.default_rng(RANK).standard_normal(2048).astype(np.float32))
    target = cupy.zeros(2048, np.float32)
    suspends, resumes, trail = [], [], []
    with graph_of(comm, source, target) as graph:
        expected = cupy.asnumpy(target).tobytes()
        for turn in range(count):
            before = held()
            suspends.append(timed(comm.suspend))
            suspended = held()
            target.fill(0)
            resumes.append(timed(comm.resume))
            after = held()
            graph.replay()
            assert cupy.asnumpy(target).tobytes() == expected, f"cycle {turn}: other bits"
            if turn in (0, 1, 9, 99, count - 1):
                trail.append({"cycle": turn + 1, "before": before, "suspended": suspended, "after": after})
    first, last = trail[min(1, len(trail) - 1)], trail[-1]
    given = last["suspended"]["free bytes"] - last["before"]["free bytes"]
    flat = all(
        first[when][kind] == last[when][kind] if kind != "mappings" else last[when][kind] <= first[when][kind] + STRAY
        for when in ("before", "suspended", "after")
        for kind in first[when]
    )
    return {
        "cycles": count,
        "suspend ms": summary(suspends),
        "resume ms": summary(resumes),
        "bytes given back": min(WORLD.allgather(given)),
        "trail of rank 0": trail,
        "flat": all(WORLD.allgather(flat)),
    }


def pools(comm: ipcreduce.Communicator, count: int, pool_bytes: int) -> dict[str, Any]:
    """With the memory of a graph of ``pool_bytes``, too. Half of its memory are outputs, which kernels may write to."""
    results: list[Any] = []
    sources = [cupy.full(pool_bytes // (4 * OUTPUTS) // 2, RANK + turn, np.float32) for turn in range(OUTPUTS)]
    suspends, resumes, trail = [], [], []
    with ipcreduce.Graph(comm) as graph:
        with graph.record():
            results += [comm.allreduce(source) for source in sources]
            scratch = cupy.empty(pool_bytes // 2, np.uint8)
        del scratch
        comm.synchronize()
        for turn in range(count):
            before = held()
            suspends.append(timed(lambda: comm.suspend(pools=True)))
            suspended = held()
            resumes.append(timed(comm.resume))
            after = held()
            trail.append((before, suspended, after))
            for result in results:
                result.fill(-1)
            graph.replay()
            _expect_sums(results, f"cycle {turn}")
        state, in_pool = graph.state, graph.pool.nbytes
    (first, *_), (before, suspended, after) = trail[min(1, len(trail) - 1)], trail[-1]
    grown = after["mappings"] - first["mappings"]
    flat = before["free bytes"] == after["free bytes"] and first["descriptors"] == after["descriptors"]
    return {
        "state": state,
        "pool bytes": in_pool,
        "workspace bytes": comm._state.backend.workspace.mapped_bytes,
        "suspend ms": summary(suspends),
        "resume ms": summary(resumes),
        "bytes given back": min(WORLD.allgather(suspended["free bytes"] - before["free bytes"])),
        "flat": all(WORLD.allgather(flat and grown <= STRAY)),
    }


def _expect_sums(results: list[Any], when: str) -> None:
    for turn, result in enumerate(results):
        due = sum(rank + turn for rank in range(SIZE))
        assert bool((result == due).all()), f"{when}, output {turn}: {cupy.asnumpy(result)[:4]}, expected {due}"


def direct(count: int, pool_bytes: int) -> dict[str, Any]:
    """The same as :func:`pools` with direct graphs, whose kernels write into the peers' pools."""
    with made("vmm", algorithm="direct") as comm:
        found = pools(comm, count, pool_bytes)
    assert found["state"] == "registered", found
    return found


def files() -> Counter[str]:
    """What the descriptors of this process stand for, without numbers."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of the list itself
            found[re.sub("[0-9]+|-locked-.*", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return found


def communicators(count: int) -> dict[str, Any]:
    """What so many communicators leave open, which have made a call each. The garbage is not collected before."""
    rows = {}
    for memory in MEMORIES:
        made(memory).close()
        before, bytes_before = files(), held()["free bytes"]
        for _ in range(count):
            with made(memory) as comm:
                comm.allreduce(cupy.ones(100, np.float32))
        WORLD.Barrier()
        left, collected = files() - before, gc.collect()
        rows[memory] = {
            "descriptors left": dict(left), "after gc.collect()": dict(files() - before), "collected": collected,
            "bytes left": bytes_before - held()["free bytes"],
        }  # fmt: skip
    return rows


def refused(call: Callable[[], Any]) -> float:
    """Seconds until a call while suspended has raised."""
    begin = time.perf_counter()
    try:
        call()
    except errors.GraphStateError:
        return time.perf_counter() - begin
    raise AssertionError("a call while suspended went through")


def while_suspended(comm: ipcreduce.Communicator) -> dict[str, Any]:
    """Calls and replays are refused; a graph that CuPy captured ends with NaN, and resume() says so."""
    stream = cupy.cuda.Stream(non_blocking=True)
    rows = {}
    for name, nbytes in SIZES.items():
        source, target = (cupy.ones(nbytes // 4, np.float32) for _ in range(2))
        with graph_of(comm, source, target, 2) as graph, stream:
            stream.begin_capture()
            comm.allreduce(source, out=target)
            captured = stream.end_capture()
            comm.suspend()
            seconds = [refused(graph.replay), refused(lambda: comm.allreduce(source)), refused(comm.synchronize)]  # noqa: B023
            begin = time.perf_counter()
            captured.launch(stream)
            stream.synchronize()
            ended = time.perf_counter() - begin
            values = cupy.asnumpy(target)
            assert np.isnan(values).all(), f"{name}: {values[:4]}"
            raised = ""
            try:
                comm.resume()
            except errors.GraphStateError as error:
                raised = str(error)
            assert "was launched while it was suspended" in raised, raised
            for launch in (lambda: comm.allreduce(source, out=target), lambda: captured.launch(stream), graph.replay):  # noqa: B023
                target.fill(0)
                launch()
                assert (cupy.asnumpy(target) == SIZE).all(), f"{name}: {cupy.asnumpy(target)[:4]}"
        rows[name] = {"refused after ms": slowest(max(seconds)), "launch ended after ms": slowest(ended)}
    return rows


def say(*what: Any) -> None:
    if RANK == 0:
        print(*what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes (64 MB)")
    parser.add_argument("--pool-mb", type=int, default=512, help="memory of the graph with pools=True (512)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in [name for name, nbytes in SIZES.items() if nbytes > options.largest]:
        del SIZES[name]
    cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()
    made("ipc").close()  # compiles what start-up needs
    found: dict[str, Any] = {"ranks": SIZE, "start-up ms": starts()}
    say(found)
    comms = {memory: made(memory) for memory in MEMORIES}
    found["workspace bytes"] = comms["vmm"]._state.backend.workspace.mapped_bytes
    found["results with the same bits"] = same_bits(comms)
    say(found["results with the same bits"], "results have the same bits")
    found["latencies us"] = latencies(comms, options.turns)
    comms.pop("ipc").close()
    found["cycles"] = cycles(comms["vmm"], options.cycles)
    say(found["cycles"])
    pool_bytes, few = options.pool_mb << 20, min(options.cycles, 20)
    found["cycles with pools"] = pools(comms["vmm"], few, pool_bytes)
    say(found["cycles with pools"])
    found["cycles with pools, direct graphs"] = direct(few, pool_bytes)
    say(found["cycles with pools, direct graphs"])
    found["communicators"] = {"made and closed": COMMUNICATORS} | communicators(COMMUNICATORS)
    say(found["communicators"])
    found["while suspended"] = while_suspended(comms["vmm"])
    say(found["while suspended"])
    comms["ipc"] = made("ipc")
    found["latencies us after the cycles"] = latencies(comms, options.turns)
    for comm in comms.values():
        comm.close()
    if RANK == 0 and options.json is not None:
        report.write_json(options.json, report.header(sys.argv) | found)
    for name, row in found.items():
        assert not isinstance(row, dict) or row.get("flat", True), f"{name}: memory, descriptors or mappings have grown"


if __name__ == "__main__":
    main()
