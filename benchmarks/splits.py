"""Times of all-gather, reduce-scatter and broadcast beside NCCL's.

    mpirun -n 2 python benchmarks/splits.py OUT.json [--bytes 1024 16384] [--rounds 15]

Each way is a CUDA graph of 100 calls on bfloat16, of which one follows the other. The ways take turns; a time is the
median over the rounds, of the slowest rank, in microseconds a call. ``bytes`` are those of a part in an all-gather, and
else of the whole array. ``columns`` is an all-gather along the last axis, of 64 rows, and ``host`` the time of an eager
call on the host, in a loop. Results are checked first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report

sys.path.insert(0, str(Path(__file__).parent))
from beside import join

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CALLS, HOST_CALLS = 100, 300
Way = tuple[Callable[[], object], torch.Tensor, Callable[[], torch.Tensor]]  # the call, its result, and the right one


def tensor(count: int, device: torch.device) -> torch.Tensor:
    """Small whole numbers of this rank's own, so that sums are exact."""
    generator = torch.Generator(device).manual_seed(RANK + 1)
    return torch.randint(-8, 9, (count,), device=device, generator=generator).to(torch.bfloat16)


def ways(comm: ipcreduce.Communicator, nbytes: int, device: torch.device) -> dict[str, dict[str, Way]]:
    """The ways of each collective."""
    count = nbytes // 2
    x, gathered = tensor(count, device), torch.empty(SIZE * count, device=device, dtype=torch.bfloat16)
    part, sent = torch.empty(count // SIZE, device=device, dtype=torch.bfloat16), tensor(count, device)
    rows, columns = tensor(count, device).view(64, -1), gathered.view(64, -1)

    def all_of(array: torch.Tensor) -> torch.Tensor:
        whole = [torch.empty_like(array) for _ in range(SIZE)]
        dist.all_gather(whole, array)
        return torch.stack(whole)

    every, mine = all_of(x), slice(RANK * (count // SIZE), (RANK + 1) * (count // SIZE))
    first, whole = all_of(sent)[0], every.float().sum(0).to(torch.bfloat16)
    total, reduced = whole[mine], torch.empty_like(x)
    beside = torch.cat([*all_of(rows)], 1)
    return {
        "all-gather": {
            "NCCL": (lambda: dist.all_gather_into_tensor(gathered, x), gathered, every.flatten),
            "ipcreduce": (lambda: comm.allgather(x, out=gathered), gathered, every.flatten),
        },
        "columns": {"ipcreduce": (lambda: comm.allgather(rows, axis=1, out=columns), columns, lambda: beside)},
        "reduce-scatter": {
            "NCCL": (lambda: dist.reduce_scatter_tensor(part, x), part, lambda: total),
            "ipcreduce": (lambda: comm.reduce_scatter(x, out=part), part, lambda: total),
        },
        "all-reduce": {"ipcreduce": (lambda: comm.allreduce(x, out=reduced), reduced, lambda: whole)},
        "broadcast": {
            "NCCL": (lambda: dist.broadcast(sent, 0), sent, lambda: first),
            "ipcreduce": (lambda: comm.broadcast(sent), sent, lambda: first),
        },
    }


def check(name: str, way: Way) -> None:
    """Make a call, and look at its result."""
    call, result, right = way
    if name != "broadcast":
        result.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    assert torch.equal(result, right()), f"{name} is wrong on rank {RANK}"


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of :data:`CALLS` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a call, on the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    WORLD.Barrier()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(WORLD.allreduce(begin.elapsed_time(end) * 1000 / CALLS, MPI.MAX))


def on_host(call: Callable[[], object]) -> float:
    """Microseconds that the host takes for a call, on the slowest rank."""
    torch.cuda.synchronize()
    WORLD.Barrier()
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    took = (time.perf_counter() - began) * 1e6 / HOST_CALLS
    torch.cuda.synchronize()
    return float(WORLD.allreduce(took, MPI.MAX))


def measured(every: dict[str, Way], rounds: int, host: bool) -> dict[str, Any]:
    """The times of the ways of one collective, in turns."""
    graphs = {name: captured(way[0]) for name, way in every.items()}
    for graph in graphs.values():
        graph.replay()
    times: dict[str, list[float]] = {name: [] for name in every}
    hosts: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, way in every.items():
            times[name].append(replayed(graphs[name]))
            if host:
                hosts[name].append(on_host(way[0]))
    row = {name: round(statistics.median(one), 3) for name, one in times.items()}
    if host:
        row["host"] = {name: round(statistics.median(one), 2) for name, one in hosts.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    sizes = [1 << power for power in range(10, 31, 2)]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    join(device)
    rows = []
    with ipcreduce.Communicator(device=device.index) as comm:
        for nbytes in options.bytes:
            for collective, every in ways(comm, nbytes, device).items():
                if collective == "columns" and nbytes < 64 * 32:
                    continue
                for way in every.values():
                    check(collective, way)
                row = {"collective": collective, "bytes": nbytes}
                row |= measured(every, options.rounds if nbytes < 1 << 28 else 3, nbytes <= 1 << 14)
                rows.append(row)
                if RANK == 0:
                    print(row, flush=True)
        if RANK == 0:
            head = report.header(["benchmarks/splits.py", *sys.argv[1:]])
            report.write_json(
                options.out, head | {"ranks": SIZE, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "rows": rows}
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
