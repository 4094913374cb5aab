"""The operators all_gather, reduce_scatter and broadcast_ and the classes for FSDP, on ranks without GPUs.

``mpirun -n 2 python tests/mpi/torch_splits_worker.py scenario ...``: each scenario runs on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.func import grad, jvp, vmap

import ipcreduce
import ipcreduce.torch as operators
from ipcreduce import ArgumentError
from tests.shared import worker

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = sum(range(1, SIZE + 1))  # the sum of rank + 1
comm = ipcreduce.Communicator(timeout=60)
operators.register("world", comm)


def gathered(x: torch.Tensor, axis: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    return operators.all_gather(x, axis, sizes, "world")


def scattered(x: torch.Tensor, op: str = "sum", axis: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    return operators.reduce_scatter(x, op, axis, sizes, "world")


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) + 100 * rank


def results() -> None:
    x = of_rank(RANK, 2, 3)
    assert torch.equal(gathered(x), torch.cat([of_rank(r, 2, 3) for r in range(SIZE)]))
    assert torch.equal(gathered(x, -1), torch.cat([of_rank(r, 2, 3) for r in range(SIZE)], -1))
    sizes = [*range(SIZE)]
    uneven = gathered(of_rank(RANK, RANK, 3), 0, sizes)
    assert torch.equal(uneven, torch.cat([of_rank(r, r, 3) for r in range(SIZE)]))
    whole = sum(of_rank(r, 2 * SIZE, 3) for r in range(SIZE))
    assert torch.equal(scattered(of_rank(RANK, 2 * SIZE, 3)), whole[2 * RANK : 2 * RANK + 2])
    operators.broadcast_(x, SIZE - 1, "world")
    assert torch.equal(x, of_rank(SIZE - 1, 2, 3))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64):
        one = torch.ones(3).to(dtype)
        assert gathered(one).dtype is dtype
        assert torch.equal(gathered(one).float(), torch.ones(3 * SIZE)), dtype


def gradients() -> None:
    x = of_rank(RANK, 2, 3).requires_grad_()
    weights = of_rank(0, 2 * SIZE, 3)
    (gathered(x) * weights * (RANK + 1)).sum().backward()
    assert torch.equal(x.grad, RANKS * weights[2 * RANK : 2 * RANK + 2])
    for op, divisor in (("sum", 1), ("mean", SIZE)):
        y = of_rank(RANK, 2 * SIZE).requires_grad_()
        (scattered(y, op) * (RANK + 1)).sum().backward()
        assert torch.equal(y.grad, torch.tensor([at // 2 + 1 for at in range(2 * SIZE)]).double() / divisor)
    with pytest.raises(ArgumentError, match="op max has no derivative"):
        scattered(of_rank(RANK, 2 * SIZE).requires_grad_(), "max").sum().backward()
    z = torch.ones(3, dtype=torch.float64, requires_grad=True)
    within = z * 1
    operators.broadcast_(within, SIZE - 1, "world")
    (within * (RANK + 1)).sum().backward()
    assert torch.equal(z.grad, torch.full((3,), float(RANKS if RANK == SIZE - 1 else 0)).double())
    with pytest.raises(ArgumentError, match="a leaf that requires grad"):
        operators.broadcast_(z, 0, "world")


def transforms() -> None:
    batch = of_rank(RANK, 4, 3)
    assert torch.equal(vmap(gathered)(batch), gathered(batch, 1))
    result, tangent = jvp(gathered, (batch,), (torch.full_like(batch, RANK + 1),))
    assert torch.equal(result, gathered(batch))
    assert (tangent[0, 0], tangent[-1, 0]) == (1, SIZE)
    assert (grad(lambda x: (gathered(x, 1) * (RANK + 1)).sum())(batch) == RANKS).all()
    square = torch.full((2 * SIZE, 2), 1.0)
    assert torch.equal(vmap(scattered, in_dims=1, out_dims=1)(square), torch.full((2, 2), float(SIZE)))


def axes_of_a_batch() -> None:
    """Each axis is one of the tensors in the batch, and never the batch's own. Numbers are arrays of one element."""
    batch = of_rank(RANK, 4, 2 * SIZE)
    for axis in (0, -1):
        assert torch.equal(vmap(lambda x, axis=axis: gathered(x, axis))(batch), gathered(batch, 1))
        assert torch.equal(vmap(lambda x, axis=axis: scattered(x, "sum", axis))(batch), scattered(batch, axis=1))
        found = vmap(lambda x, axis=axis: gathered(x, axis))(batch[:, 0])
        assert torch.equal(found, gathered(batch[:, :1], 1)), (axis, found)
    numbers = torch.ones(2 * SIZE)
    for make in (gathered, lambda x, axis: scattered(x, "sum", axis)):
        for wrong, axes in ((batch, (1, -2, -3)), (numbers, (1, -2) if make is gathered else (0, 1, -1, -2))):
            for axis in axes:
                with pytest.raises(ArgumentError, match="axis is"):
                    vmap(lambda x, make=make, axis=axis: make(x, axis))(wrong)


def compiled() -> None:
    layer = torch.compile(lambda x: scattered(torch.relu(x) + 1) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(layer(torch.full((2 * SIZE,), float(RANK))), torch.full((2,), 2.0 * RANKS))
    columns = torch.compile(lambda x: gathered(x + 1, -1), backend="aot_eager", fullgraph=True)
    assert columns(of_rank(RANK, 4, 3)).shape == (4, 3 * SIZE)
    for make in (gathered, lambda x, axis: scattered(x, "sum", axis)):
        with pytest.raises(Exception, match=r"axis is 2, and array has 1 dimensions\. Pass an axis from -1 to 0"):
            torch.compile(make, backend="aot_eager", fullgraph=True)(torch.ones(2 * SIZE), 2)


def checks_of_pytorch() -> None:
    operator: Any = torch.ops.ipcreduce
    torch.library.opcheck(operator.all_gather, (of_rank(RANK, 2, 3).requires_grad_(), 0, None, "world"))
    torch.library.opcheck(operator.reduce_scatter, (of_rank(RANK, SIZE, 3).requires_grad_(), "sum", 0, None, "world"))
    torch.library.opcheck(operator.broadcast_, (of_rank(RANK, 3), 0, "world"))


@contextmanager
def joined(rank: int) -> Iterator[None]:
    """PyTorch's default group, in which this process has another rank."""
    store = dist.HashStore() if SIZE == 1 else dist.TCPStore("127.0.0.1", 0, 1, True) if RANK == 0 else None
    port = MPI.COMM_WORLD.bcast(getattr(store, "port", 0))
    store = store or dist.TCPStore("127.0.0.1", port, 1, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    yield
    dist.destroy_process_group()


def fsdp_refuses() -> None:
    """The factor of FSDP's own, on all ranks and on one, and a group that is not the communicator's ranks."""
    scatter, gather = operators.FSDPReduceScatter(comm), operators.FSDPAllGather(comm)
    whole, part = torch.ones(2 * SIZE), torch.ones(2)
    factor, advice = dist._make_nccl_premul_sum(0.5), r"set_force_sum_reduction_for_comms\(True\)"
    with joined(RANK):
        with pytest.raises(ArgumentError, match=advice):
            scatter(part, whole, dist.group.WORLD, factor)
        scatter(part, whole, dist.group.WORLD, dist.ReduceOp.SUM)
        assert (part == SIZE).all()
        heard = (ArgumentError, advice) if RANK == 0 else (ipcreduce.PeerFailedError, "there is no op")
        with pytest.raises(heard[0], match=heard[1]):
            scatter(part, whole, dist.group.WORLD, dist.ReduceOp.SUM if RANK else factor)
    if SIZE > 1:
        with joined(SIZE - 1 - RANK), pytest.raises(ArgumentError, match="is not the communicator's ranks"):
            gather(whole, part, dist.group.WORLD)
    with pytest.raises(ArgumentError, match=r"Call FSDPAllGather\(comm\)"):
        operators.FSDPAllGather(dist.group.WORLD)  # type: ignore[arg-type]


SCENARIOS = [results, gradients, transforms, axes_of_a_batch, compiled, checks_of_pytorch, fsdp_refuses]


if __name__ == "__main__":
    worker.run(lambda: worker.play(SCENARIOS, sys.argv[1:]))
