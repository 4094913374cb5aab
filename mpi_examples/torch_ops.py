# mpirun -n 2 python mpi_examples/torch_ops.py
"""A tensor-parallel MLP trained with PyTorch's autograd and torch.compile: all-reduces as operators of a graph.

The first layer is split by columns, the second by rows. The sum of the partial results is one all-reduce; the gradient
of the input, of which each rank has a part, is another. The gradients are compared with those of the unsplit MLP.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import torch
    from torch.nn.functional import gelu
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)
from mpi4py import MPI

import ipcreduce
import ipcreduce.torch

TOKENS, HIDDEN, MLP = 32, 64, 240
TOLERANCE = 1e-4  # relative to the largest element: float32 sums are taken in another order

comm = ipcreduce.Communicator(device="auto")
ipcreduce.torch.register("tp", comm)
on_gpus = comm.backend != "host"
device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


class CopyToRanks(torch.autograd.Function):
    """The input of a split layer: the same on every rank. Each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ipcreduce.torch.all_reduce(gradient, "sum", "tp")


class ReduceFromRanks(torch.autograd.Function):
    """The sum of the ranks' partial results. What follows is the same on every rank, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return ipcreduce.torch.all_reduce(x, "sum", "tp")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def split(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    hidden = gelu(CopyToRanks.apply(x) @ first)
    return ReduceFromRanks.apply(hidden @ second)


def unsplit(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return gelu(x @ first) @ second


def trained(step: Any, *values: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the arguments for the sum of its squares."""
    arguments = [value.clone().requires_grad_() for value in values]
    y = step(*arguments)
    (y**2).sum().backward()
    return [y.detach(), *(argument.grad for argument in arguments)]


def main() -> bool:
    generator = torch.Generator().manual_seed(7)
    shapes = ((TOKENS, HIDDEN), (HIDDEN, MLP), (MLP, HIDDEN))
    x, first, second = ((torch.randn(shape, generator=generator) / shape[0] ** 0.5).to(device) for shape in shapes)

    def mine(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.tensor_split(comm.size, dim)[comm.rank].contiguous()

    y, of_x, of_first, of_second = trained(unsplit, x, first, second)
    due = [y, of_x, mine(of_first, 1), mine(of_second, 0)]
    worst = 0.0
    for step in (split, torch.compile(split, fullgraph=True)):
        found = trained(step, x, mine(first, 1), mine(second, 0))
        errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, due, strict=True)]
        worst = max(worst, *map(float, errors))
    print(
        f"rank {comm.rank} of {comm.size}, backend {comm.backend}: eager and compiled within {worst:.1e} of the "
        f"unsplit MLP, at most {TOLERANCE:g}",
        flush=True,
    )
    return worst <= TOLERANCE


if comm.rank == 0 and not on_gpus:
    print("no GPUs here: with GPUs the all-reduces run there, on PyTorch's current stream")
ok = main()
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(ok, MPI.LAND) else 1)
