"""Host time of calls on PyTorch's tensors beside the same calls on CuPy's arrays, in turns.

    mpirun -n 2 python -m benchmarks.torch_host --json FILE [--calls 200] [--turns 21]

Both libraries' arrays are of the same memory: 512 numbers of float16. "side": on a stream of the library's own, made
current. Beside them PyTorch's allocation alone, and its NCCL where there is a GPU for each rank. Times are the slowest
rank's medians over turns, in microseconds for one call, with an idle GPU before each turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import torch
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report

WORLD = MPI.COMM_WORLD
COUNT = 512
Call = Callable[[], Any]


def host_time(call: Call, calls: int) -> float:
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = (time.perf_counter() - start) / calls * 1e6
    torch.cuda.synchronize()
    return taken


def ways(comm: ipcreduce.Communicator) -> dict[str, tuple[Any, Call]]:
    """By name: the context in which to call, and the call."""
    tensor, tensor_out = (torch.ones(COUNT, dtype=torch.float16, device="cuda") for _ in range(2))
    array, out = cupy.from_dlpack(tensor), cupy.from_dlpack(tensor_out)
    torch_side, cupy_side = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    at_torchs, at_cupys = partial(torch.cuda.stream, torch_side), partial(_using, cupy_side)
    many, many_arrays = tensor.repeat(8), cupy.tile(array, 8)
    here = contextlib.nullcontext
    torch.cuda.synchronize()
    return {
        "CuPy, out": (here, lambda: comm.allreduce(array, out=out)),
        "tensor, out": (here, lambda: comm.allreduce(tensor, out=tensor_out)),
        "CuPy, in place": (here, lambda: comm.allreduce(array, out=array)),
        "tensor, in place": (here, lambda: comm.allreduce(tensor, out=tensor)),
        "CuPy, out, side": (at_cupys, lambda: comm.allreduce(array, out=out)),
        "tensor, out, side": (at_torchs, lambda: comm.allreduce(tensor, out=tensor_out)),
        "CuPy, new": (here, lambda: comm.allreduce(array)),
        "tensor, new": (here, lambda: comm.allreduce(tensor)),
        "torch.empty_like": (here, lambda: torch.empty_like(tensor)),
        "CuPy, fresh array": (here, lambda: comm.allreduce(array[:], out=array)),
        "CuPy's slicing": (here, lambda: array[:]),
        "tensor, fresh tensor": (here, lambda: comm.allreduce(tensor.detach(), out=tensor)),
        "tensor.detach": (here, lambda: tensor.detach()),
        "CuPy, stream=int": (here, lambda: comm.allreduce(array, out=out, stream=cupy_side.ptr)),
        "CuPy, stream=Stream": (here, lambda: comm.allreduce(array, out=out, stream=cupy_side)),
        "CuPy, view": (here, lambda: comm.allreduce(many_arrays[COUNT : 2 * COUNT], out=out)),
        "CuPy, strided": (here, lambda: comm.allreduce(many_arrays[::8], out=out)),
        "tensor, view": (here, lambda: comm.allreduce(many[COUNT : 2 * COUNT], out=tensor_out)),
        "call and synchronize()": (here, lambda: (comm.allreduce(array, out=out), comm.synchronize())),
        "call and the stream's": (here, lambda: (comm.allreduce(array, out=out), cupy.cuda.Stream.null.synchronize())),
    }


@contextlib.contextmanager
def _using(stream: Any) -> Iterator[None]:
    with stream:
        yield


def torch_nccl(tensor: torch.Tensor) -> Call | None:
    """PyTorch's own all-reduce, if each rank has a GPU."""
    if torch.cuda.device_count() < WORLD.size:
        return None
    import torch.distributed as dist

    dist.init_process_group("nccl", "tcp://127.0.0.1:29541", world_size=WORLD.size, rank=WORLD.rank)
    return lambda: dist.all_reduce(tensor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(WORLD.rank % torch.cuda.device_count())
    cupy.cuda.Device(torch.cuda.current_device()).use()
    with ipcreduce.Communicator(timeout=60) as comm:
        measured = ways(comm)
        theirs = torch_nccl(torch.ones(COUNT, dtype=torch.float16, device="cuda"))
        if theirs is not None:
            measured["PyTorch's NCCL"] = (contextlib.nullcontext, theirs)
        times: dict[str, list[float]] = {name: [] for name in measured}
        for turn in range(options.turns + 2):
            for name, (context, call) in measured.items():
                with context():
                    call()
                    call()
                    taken = host_time(call, options.calls)
                if turn > 1:
                    times[name].append(taken)
    everyone = WORLD.allgather({name: statistics.median(taken) for name, taken in times.items()})
    row = {name: round(max(one[name] for one in everyone), 3) for name in times}
    if WORLD.rank == 0:
        print(json.dumps(row, indent=1))
        if options.json:
            options.json.write_text(json.dumps(report.header(sys.argv) | {"us": row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
