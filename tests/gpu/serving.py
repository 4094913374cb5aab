"""Stand-ins of the servers' groups with our collectives, against PyTorch's own, and their times beside NCCL's.

    mpirun -n 2 python -m tests.gpu.serving [OUT.json]

The stand-ins have the interfaces of vLLM's CudaCommunicator and GroupCoordinator and of SGLang's GroupCoordinator, and
do by torch.distributed what the all-reduce declines. Every call is made eagerly, and with GPUs in a graph that is
replayed with new values, and compared bit by bit. With OUT.json the all-gather of logits is timed: it needs GPUs.
Without GPUs the tensors are on the host, and PyTorch's backend is gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ipcreduce import UnsupportedError, serving
from ipcreduce.bench import report
from ipcreduce.serving import groups
from ipcreduce.serving.all_reduce import ServingAllReduce
from ipcreduce.serving.methods import CommunicatorMethods, SGLangMethods
from tests.shared import worker
from tests.shared.world import WORLD

RANK, SIZE = WORLD.rank, WORLD.size
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", RANK % torch.cuda.device_count()) if ON_GPU else torch.device("cpu")
LENGTHS = [2 * rank for rank in range(SIZE)]  # rank 0 has nothing, as a rank without requests
VOCABULARY, CALLS, ROUNDS = 128256, 50, 15


def gathered(x: Any, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """By torch.distributed."""
    shapes = [[*x.shape] for _ in range(SIZE)]
    for shape, length in zip(shapes, sizes or (), strict=False):
        shape[dim] = length
    most = max(shape[dim] for shape in shapes)
    padded = x.new_zeros([*x.shape[:dim], most, *x.shape[dim + 1 :]])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    every = [torch.empty_like(padded) for _ in range(SIZE)]
    dist.all_gather(every, padded)
    return torch.cat([one.narrow(dim, 0, shape[dim]) for one, shape in zip(every, shapes, strict=True)], dim)


def scattered(x: torch.Tensor, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """By torch.distributed: the values are whole numbers, so that every order of the sum has the same bits."""
    total = x.contiguous().clone()
    dist.all_reduce(total)
    lengths = sizes or [x.shape[dim] // SIZE] * SIZE
    return total.narrow(dim, sum(lengths[:RANK]), lengths[RANK]).contiguous()


class Own:
    """How often a server's own method ran."""

    calls = 0

    def count(self, result: Any) -> Any:
        Own.calls += 1
        return result


class CudaCommunicator(Own):
    """vLLM's."""

    def __init__(self, cpu_group: Any, device: torch.device, unique_name: str) -> None:
        self.cpu_group, self.device, self.unique_name, self.world_size = cpu_group, device, unique_name, SIZE
        self.pynccl_comm = SimpleNamespace(disabled=False)
        self.ca_comm = ServingAllReduce(cpu_group, device) if "tp" in unique_name else None

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.count(gathered(input_, dim % input_.dim()))

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
        if isinstance(input_, list):
            return self.count([gathered(one, dim, sizes) for one in input_])
        return self.count(gathered(input_, dim, sizes))

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.count(scattered(input_, dim % input_.dim()))

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: Any = None) -> torch.Tensor:
        return self.count(scattered(input_, dim % input_.dim(), sizes))

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: Any = None
    ) -> torch.Tensor:
        return self.count(output.copy_(scattered(input_, dim % input_.dim(), sizes)))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(tensor, src)
        return self.count(tensor)


class GroupCoordinator(Own):
    """vLLM's."""

    def __init__(self, unique_name: str) -> None:
        self.device_communicator = CudaCommunicator(WORLD, DEVICE, unique_name)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(input_, src)
        return self.count(input_)


SGLANG: list[Any] = []


@torch.library.custom_op("ipcreduce_reducers::into_tensor", mutates_args=["output"])
def into_tensor(output: torch.Tensor, input: torch.Tensor) -> None:
    """SGLang's operator, which finds the group when it runs."""
    SGLANG[0]._all_gather_into_tensor(output, input)


class SGLangGroup(Own):
    """SGLang's GroupCoordinator, where it is deterministic."""

    def __init__(self) -> None:
        self.cpu_group, self.device, self.unique_name, self.world_size = WORLD, DEVICE, "tp:0", SIZE
        self.ca_comm: Any = ServingAllReduce(WORLD, DEVICE)

    def all_gather(self, input_: torch.Tensor, dim: int = -1, output_tensor_list: Any = None) -> Any:
        if output_tensor_list is not None:
            return self.count(dist.all_gather(output_tensor_list, input_))
        if torch.compiler.is_compiling() and dim == 0:
            output = input_.new_empty([SIZE * input_.shape[0], *input_.shape[1:]])
            self.all_gather_into_tensor(output, input_)
            return output
        return self.count(gathered(input_, dim % input_.dim()))

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        into_tensor(output, input)

    def _all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.count(output.copy_(gathered(input.reshape(-1), 0).view(output.shape)))

    def all_gatherv(self, input_: Any, sizes: Any = None, output: Any = None) -> list[torch.Tensor]:
        every = [gathered(one, 0, sizes) for one in (input_ if isinstance(input_, list) else [input_])]
        return self.count(every if output is None else [output.copy_(every[0])])

    def _reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return self.count(output.copy_(scattered(input.reshape(-1), 0).view(output.shape)))

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._reduce_scatter_tensor(output, input)

    def reduce_scatterv(self, input_: torch.Tensor, output: Any = None, sizes: Any = None) -> torch.Tensor:
        found = scattered(input_, 0, sizes)
        return self.count(found if output is None else output.copy_(found))

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(input_, src)
        return self.count(input_)


def values(*shape: int, turn: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small whole numbers of this rank's and turn's own."""
    generator = torch.Generator().manual_seed(100 * turn + RANK)
    return torch.randint(0, 9, shape, generator=generator).to(DEVICE, dtype)


def same(found: Any, right: Any) -> bool:
    if isinstance(right, (list, tuple)):
        return len(found) == len(right) and all(map(same, found, right))
    found, right = (one.contiguous().view(torch.uint8) for one in (found, right))
    return torch.equal(found, right)


Call = Callable[[torch.Tensor], Any]


def check(name: str, x: torch.Tensor, call: Call, right: Call, *, ours: bool = True) -> None:
    """Make the call eagerly, then in a graph, which is replayed with other values."""
    before = Own.calls
    wanted = right(x.clone())
    assert same(call(x.clone()), wanted), f"{name}: wrong"
    if ON_GPU and ours:
        kept = x.clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = call(kept)
        for turn in range(1, 4):
            fresh = values(*x.shape, turn=turn).to(x.dtype) if x.is_contiguous() else x
            kept.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            assert same(result, right(fresh.clone())), f"{name}: wrong in replay {turn}"
    assert Own.calls - before == (0 if ours else 1), f"{name}: {Own.calls - before} calls of the server's own"


def sent(x: torch.Tensor, root: int) -> torch.Tensor:
    dist.broadcast(x, root)
    return x


def vllm() -> None:
    group: Any = GroupCoordinator("tp:0")
    comm, last = group.device_communicator, SIZE - 1
    x, mine, whole = values(2 * SIZE, 4 * SIZE, 3 * SIZE), values(LENGTHS[RANK], 5), values(sum(LENGTHS), 5)
    for dim in (-3, -2, -1, 0, 1, 2):
        check(
            f"all_gather {dim}", x, lambda x, dim=dim: comm.all_gather(x, dim), lambda x, dim=dim: gathered(x, dim % 3)
        )
        check(
            f"reduce_scatter {dim}", x, lambda x, dim=dim: comm.reduce_scatter(x, dim),
            lambda x, dim=dim: scattered(x, dim % 3),
        )  # fmt: skip
    strided = values(6, 4 * SIZE).t()
    check("of strides", strided, lambda x: comm.all_gather(x, 1), lambda x: gathered(x, 1))
    check("all_gatherv", mine, lambda x: comm.all_gatherv(x, 0, LENGTHS), lambda x: gathered(x, 0, LENGTHS))
    check("equal parts", x, lambda x: comm.all_gatherv(x), lambda x: gathered(x, 0))
    check(
        "a list", mine, lambda x: comm.all_gatherv([x, x[:, :2].float()], sizes=LENGTHS),
        lambda x: [gathered(x, 0, LENGTHS), gathered(x[:, :2].float(), 0, LENGTHS)],
    )  # fmt: skip
    check("reduce_scatterv", whole, lambda x: comm.reduce_scatterv(x, 0, LENGTHS), lambda x: scattered(x, 0, LENGTHS))
    check(
        "into output", whole,
        lambda x: comm.reduce_scatterv_into_output(x, x.new_empty(LENGTHS[RANK], 5), 0, LENGTHS),
        lambda x: scattered(x, 0, LENGTHS),
    )  # fmt: skip
    check("broadcast", x, lambda x: comm.broadcast(x, last), lambda x: sent(x, last))
    check("of the group", x, lambda x: group.broadcast(x, last), lambda x: sent(x, last))
    check("bytes", values(4, dtype=torch.bool), lambda x: comm.all_gather(x), lambda x: gathered(x, 0))
    small = values(4, dtype=torch.float8_e4m3fn)
    check("8-bit floats", small, lambda x: comm.all_gather(x), lambda x: gathered(x.view(torch.uint8), 0))
    whole_numbers = values(2 * SIZE, dtype=torch.complex64)
    check("declined", whole_numbers, comm.reduce_scatter, lambda x: scattered(x, 0), ours=False)
    comm.pynccl_comm.disabled = True
    with pytest.raises(UnsupportedError, match="VLLM_DISABLE_PYNCCL leaves vLLM no other"):
        comm.reduce_scatter(whole_numbers)
    comm.pynccl_comm.disabled = False
    comm.ca_comm.close()
    check("closed", x, comm.all_gather, lambda x: gathered(x, 2), ours=False)
    other: Any = GroupCoordinator("ep:0")
    check("another group", x, other.device_communicator.all_gather, lambda x: gathered(x, 2), ours=False)
    check("another group's broadcast", x, other.broadcast, lambda x: sent(x, 0), ours=False)


def sglang() -> None:
    group: Any = SGLangGroup()
    groups.take(group, SGLangMethods)
    SGLANG[:] = [group]
    x, mine, whole = values(2 * SIZE, 4 * SIZE), values(LENGTHS[RANK], 5), values(sum(LENGTHS), 5)
    for dim in (-1, 0):
        check(
            f"all_gather {dim}", x, lambda x, dim=dim: group.all_gather(x, dim), lambda x, dim=dim: gathered(x, dim % 2)
        )

    def into(method: Callable[..., Any], *shape: int) -> Call:
        def call(x: torch.Tensor) -> torch.Tensor:
            output = x.new_empty(shape)
            method(output, x)
            return output

        return call

    check("into tensor", x, into(group.all_gather_into_tensor, 2 * SIZE * SIZE, 4 * SIZE), lambda x: gathered(x, 0))
    for method in (group.reduce_scatter_tensor, group._reduce_scatter_tensor):
        check("reduce_scatter_tensor", x, into(method, 2, 4 * SIZE), lambda x: scattered(x, 0))
    check("all_gatherv", mine, lambda x: group.all_gatherv(x, LENGTHS), lambda x: [gathered(x, 0, LENGTHS)])
    check(
        "into output", mine, lambda x: group.all_gatherv(x, LENGTHS, x.new_empty(sum(LENGTHS), 5)),
        lambda x: [gathered(x, 0, LENGTHS)],
    )  # fmt: skip
    check(
        "a list", mine, lambda x: group.all_gatherv([x, x.int()], LENGTHS),
        lambda x: [gathered(x, 0, LENGTHS), gathered(x.int(), 0, LENGTHS)],
    )  # fmt: skip
    check(
        "reduce_scatterv", whole, lambda x: group.reduce_scatterv(x, None, LENGTHS), lambda x: scattered(x, 0, LENGTHS)
    )
    check("broadcast", x, lambda x: group.broadcast(x, SIZE - 1), lambda x: sent(x, SIZE - 1))

    def in_place(x: torch.Tensor) -> torch.Tensor:  # as attention over data-parallel ranks
        part = x.tensor_split(SIZE)[RANK]
        group.reduce_scatter_tensor(part, x)
        group.all_gather_into_tensor(x, part)
        return x

    check("in place", x, in_place, lambda x: gathered(scattered(x, 0), 0))
    columns = x.new_empty(4 * SIZE, 2 * SIZE * SIZE).t()
    check(
        "a strided output", x, lambda x: (group._all_gather_into_tensor(columns, x), columns)[1],
        lambda x: gathered(x, 0), ours=False,
    )  # fmt: skip
    compiled = torch.compile(lambda x: group.all_gather(x * 2, 0) + 1, backend="aot_eager", fullgraph=True)
    check("compiled", x, compiled, lambda x: gathered(x * 2, 0) + 1)
    theirs = partial(serving._normalise, lambda input_tensor: input_tensor * 2)
    compiled = torch.compile(lambda x: theirs(input_tensor=x + 1), backend="aot_eager", fullgraph=True)
    check("a fused call, compiled", x, compiled, lambda x: (x + 1) * 2)
    reducer, group.ca_comm = group.ca_comm, None  # as SGLang does for a time
    check("no all-reduce", x, lambda x: group.all_gather(x, 0), lambda x: gathered(x, 0), ours=False)
    reducer.close()


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds of one call in a graph of :data:`CALLS`, on the slower rank."""
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        WORLD.Barrier()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return max(WORLD.allgather(begin.elapsed_time(end) * 1000 / CALLS))

    return replay


def logits(out: Path) -> None:
    """The all-gather of logits along the last axis, as vLLM's communicator makes it; NCCL's with its copy, and bare."""
    comm: Any = CudaCommunicator(WORLD, DEVICE, "tp:0")
    groups.take(comm, CommunicatorMethods)
    rows = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        x = values(batch, VOCABULARY // SIZE)
        whole = x.new_empty(SIZE * batch, x.shape[1])

        def by_nccl(x: torch.Tensor = x, whole: torch.Tensor = whole) -> torch.Tensor:
            dist.all_gather_into_tensor(whole, x)
            return whole.view(SIZE, *x.shape).movedim(0, 1).reshape(x.shape[0], -1)

        assert same(comm.all_gather(x), by_nccl())
        ways = {
            "ipcreduce": timed(lambda x=x: comm.all_gather(x)), "nccl": timed(by_nccl),
            "nccl_without_copy": timed(lambda x=x, whole=whole: dist.all_gather_into_tensor(whole, x)),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                times[name].append(way())
        row: dict[str, Any] = {"batch": batch, "bytes": x.numel() * 2}
        for name, one in times.items():
            row[name] = round(statistics.median(one), 2)
            row[f"{name}_half_spread"] = round((max(one) - min(one)) / 2, 2)
        rows.append(row)
        if RANK == 0:
            print(row, flush=True)
    comm.ca_comm.close()
    if RANK == 0:
        head = report.header(["tests/gpu/serving.py", *sys.argv[1:]])
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        out.write_text(json.dumps(head | {"ranks": SIZE, "nccl": nccl, "rows": rows}, indent=1) + "\n")


def join() -> None:
    """Make PyTorch's default group of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = WORLD.bcast(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(RANK), "WORLD_SIZE": str(SIZE)}
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if ON_GPU else "gloo")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    options = parser.parse_args()
    join()
    groups.serve(GroupCoordinator, CudaCommunicator)
    vllm()
    sglang()
    if options.out and ON_GPU:
        logits(options.out)
    WORLD.Barrier()
    dist.destroy_process_group()
    print("right", flush=True)


if __name__ == "__main__":
    worker.run(main)
