"""Times lists of arrays in one call, beside a call on one array of the same bytes, NCCL's groups, and PyTorch.

    mpirun -n 2 python benchmarks/lists.py OUT.json

Every list is checked against NumPy before it is timed. Times are microseconds a call: in a CUDA graph of many calls
(median over replays, maximum over ranks), and on the host (median over rounds, and the least round, maximum over
ranks). The ways take turns of a round, since the speed of a host may change by two within seconds. "known" is a list
of the same arrays at each call, "new" one of other arrays each time, as gradients are after zero_grad().

A host time may only be compared with one of the same library, since CuPy's arrays and PyTorch's tensors are on streams
of their own: "one array" and "one tensor" are plain calls with out=. Each library has a communicator, whose calls are
all on one stream, and no graph is captured before all host times are known. Otherwise each call would also wait for an
event and record it, as in a program that changes streams or captures graphs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report, timing

WORLD = MPI.COMM_WORLD
KB = 1024
REPLAYS, ROUNDS, WARM = 40, 20, 3
ROUND = 50  # calls


def resnet50() -> list[int]:
    """The elements of the 161 parameters of ResNet-50 (He et al. 2015, torchvision's variant)."""
    sizes, wide = [64 * 3 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [wide * width, width, width, width * width * 9, width, width, width * 4 * width, 4 * width]
            sizes += [4 * width]
            if block == 0:
                sizes += [wide * 4 * width, 4 * width, 4 * width]
            wide = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def llama_layer() -> list[int]:
    """The elements of the parameters of one layer of Llama 3 8B: hidden 4096, 8 key-value heads of 128, MLP 14336."""
    hidden, kv, mlp = 4096, 1024, 14336
    return [hidden * hidden, hidden * kv, hidden * kv, hidden * hidden, *[hidden * mlp] * 3, hidden, hidden]


LISTS: dict[str, Callable[[int], list[int]]] = {
    **{f"{count} x 1 KB": (lambda itemsize, count=count: [KB // itemsize] * count) for count in (4, 32, 200, 1000)},
    "100 x 800 B": lambda itemsize: [800 // itemsize] * 100,
    "ResNet-50": lambda itemsize: resnet50(),
    "Llama layer": lambda itemsize: llama_layer(),
}


def values(size: int, dtype: Any, seed: int, rank: int) -> Any:
    """Small integers, whose sums are exact in every dtype."""
    return np.random.default_rng([seed, rank]).integers(-8, 9, size).astype(dtype)


def check(call: Callable[[list[Any]], Any], sizes: list[int], dtype: Any, seed: int) -> None:
    """Compare one in-place call with NumPy. :raises AssertionError: if a result differs."""
    given = [values(size, dtype, seed + i, WORLD.rank) for i, size in enumerate(sizes)]
    arrays = [cp.asarray(one.view(np.uint8)).view(cp.dtype(dtype)) for one in given]
    call(arrays)
    cp.cuda.get_current_stream().synchronize()
    for i, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        total = sum(values(size, dtype, seed + i, rank).astype(np.float64) for rank in range(WORLD.size))
        assert np.array_equal(array.get().astype(np.float64), total), f"member {i} of {len(sizes)}"


Way = Callable[[], Callable[[], Any]]  # prepares a round, and gives what makes one call


def host_times(ways: dict[str, Way], calls: int) -> dict[str, float]:
    """The host's time for a call of each way, of the slowest rank: the median over rounds, and the least."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + WARM):
        for name, prepare in ways.items():
            call = prepare()
            cp.cuda.runtime.deviceSynchronize()  # PyTorch has a stream of its own
            WORLD.Barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            found[name] += [(time.perf_counter() - begin) / calls * 1e6] if turn >= WARM else []
    cp.cuda.runtime.deviceSynchronize()
    times: dict[str, float] = {}
    for name, every in found.items():
        times[name] = float(WORLD.allreduce(statistics.median(every), MPI.MAX))
        times[f"{name}, least"] = float(WORLD.allreduce(min(every), MPI.MAX))
    return times


def on(given: Any, reduce: Callable[[Any], Any]) -> Way:
    """The way that makes every call on the same arrays."""
    return lambda: partial(reduce, given)


def on_new(arrays: list[Any], reduce: Callable[[Any], Any], empty: Callable[[int, Any], Any], calls: int) -> Way:
    """The way whose calls are on lists like this of which no array has been used before. They are made just before."""
    every = new_lists(arrays, empty, calls * (ROUNDS + WARM))

    def prepare() -> Callable[[], Any]:
        given = iter([next(every) for _ in range(calls)])
        return lambda: reduce(next(given))

    return prepare


def graph_of(call: Callable[[], Any], calls: int) -> float:
    """Median over replays of the time of a call in a graph that CuPy captures."""
    return timing.in_graph(timing.captured(call, calls), calls, REPLAYS, WORLD).median


class Nccl:
    """CuPy's NCCL, with a group around the all-reduces of a list."""

    def __init__(self) -> None:
        from cupy.cuda import nccl

        self._nccl, self.version = nccl, nccl.get_version()
        identity = WORLD.bcast(nccl.get_unique_id() if WORLD.rank == 0 else None)
        self._comm = nccl.NcclCommunicator(WORLD.size, identity, WORLD.rank)

    def __call__(self, arrays: list[Any]) -> None:
        """Reduce the arrays in place."""
        kind = {"float32": 7, "bfloat16": 9}[str(arrays[0].dtype)]
        stream = cp.cuda.get_current_stream().ptr
        self._nccl.groupStart()
        for array in arrays:
            self._comm.allReduce(array.data.ptr, array.data.ptr, array.size, kind, 0, stream)
        self._nccl.groupEnd()


class Torch:
    """torch.distributed's all_reduce_coalesced over NCCL."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        torch.cuda.set_device(cp.cuda.Device().id)
        dist.init_process_group("nccl", rank=WORLD.rank, world_size=WORLD.size)
        self.torch, self._dist = torch, dist

    def tensors(self, arrays: list[Any]) -> list[Any]:
        """PyTorch's own tensors of the same sizes."""
        kind = getattr(self.torch, str(arrays[0].dtype))
        return [self.torch.zeros(array.size, dtype=kind, device="cuda") for array in arrays]

    def empty(self, size: int, dtype: Any) -> Any:
        """A new tensor."""
        return self.torch.empty(size, dtype=dtype, device="cuda")

    def __call__(self, tensors: list[Any]) -> None:
        """Reduce the tensors in place."""
        self._dist.all_reduce_coalesced(tensors)


def new_lists(arrays: list[Any], empty: Callable[[int, Any], Any], most: int) -> Iterator[list[Any]]:
    """So many lists like this one, made when they are asked for: views of one array, at other addresses each time."""
    lengths = [array.size if isinstance(array, cp.ndarray) else array.numel() for array in arrays]
    step = 256 // arrays[0].itemsize  # elements; allocators give multiples of 256 bytes
    padded = [-(-length // step) * step for length in lengths]
    room = empty(sum(padded) + step * most, arrays[0].dtype)
    begins = [end - length for end, length in zip(accumulate(padded), padded, strict=True)]
    for turn in range(most):
        yield [room[begin + step * turn :][:length] for begin, length in zip(begins, lengths, strict=True)]


def in_place(comm: ipcreduce.Communicator) -> Callable[[Any], Any]:
    """A function that reduces an array or a list in place."""
    return lambda given: comm.allreduce(given, out=given)


class Case:
    """A list of arrays, and one array of as many bytes."""

    def __init__(self, sizes: list[int], dtype: Any) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.nbytes = sum(-(-size * dtype.itemsize // 16) * 16 for size in sizes)
        self._large = self.nbytes > 8 << 20
        self._host_calls = 20 if self._large else ROUND

    def _arrays(self) -> tuple[list[Any], Any]:
        return [cp.ones(size, self.dtype) for size in self.sizes], cp.ones(
            self.nbytes // self.dtype.itemsize, self.dtype
        )

    def host(self, comm: ipcreduce.Communicator, peers: dict[str, Any]) -> dict[str, Any]:
        """The host times."""
        arrays, one = self._arrays()
        calls, reduce = self._host_calls, in_place(comm)
        check(reduce, self.sizes, self.dtype, 7)
        ways = {"one array": on(one, reduce), "known": on(arrays, reduce)}
        ways["new"] = on_new(arrays, reduce, cp.empty, calls)
        if nccl := peers.get("nccl"):
            ways["NCCL's group"] = on(arrays, nccl)
        if torch := peers.get("torch"):
            tensors, (tensor,) = torch.tensors(arrays), torch.tensors([one])
            reduce = in_place(peers["comm of tensors"])
            ways["one tensor"], ways["tensors, known"] = on(tensor, reduce), on(tensors, reduce)
            ways["tensors, new"] = on_new(tensors, reduce, torch.empty, calls)
            ways["all_reduce_coalesced, new"] = on_new(tensors, torch, torch.empty, calls)
        times = host_times(ways, calls)
        row: dict[str, Any] = {"bytes": self.nbytes, "members": len(self.sizes)}
        return row | {f"host, {name}": one for name, one in times.items()}

    def in_graphs(self, comm: ipcreduce.Communicator, peers: dict[str, Any]) -> dict[str, Any]:
        """The times in CUDA graphs."""
        arrays, one = self._arrays()
        calls, reduce = 10 if self._large else 100, in_place(comm)
        row = {"graph": graph_of(lambda: reduce(arrays), calls)}
        row["graph, one array"] = graph_of(lambda: reduce(one), calls)
        if nccl := peers.get("nccl"):
            row["graph, NCCL's group"] = graph_of(lambda: nccl(arrays), calls)
        return row


def main(out: str) -> None:
    """Measure every list, and write the rows on rank 0."""
    comm, of_tensors = (ipcreduce.Communicator(device="auto") for _ in range(2))
    peers: dict[str, Any] = {"comm of tensors": of_tensors}
    for name, peer in (("nccl", Nccl), ("torch", Torch)):
        try:
            peers[name] = peer()
        except Exception as error:
            if comm.rank == 0:
                print(f"without {name}: {error}")
    dtypes = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    cases = [(name, Case(make(dtype.itemsize), dtype)) for name, make in LISTS.items() for dtype in dtypes]
    rows: list[dict[str, Any]] = [{"list": name, "dtype": str(case.dtype)} for name, case in cases]
    with cp.cuda.Stream(non_blocking=True):
        for measure in (Case.host, Case.in_graphs):
            for row, (_, case) in zip(rows, cases, strict=True):
                row |= measure(case, comm, peers)
                if comm.rank == 0:
                    print(row, flush=True)
    if comm.rank == 0:
        report.write_json(Path(out), report.header(["benchmarks/lists.py"]) | {"rows": rows})
    comm.close()
    of_tensors.close()


if __name__ == "__main__":
    main(sys.argv[1])
