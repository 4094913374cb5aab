"""The operators of ipcreduce.torch on ranks without GPUs, against one process's arithmetic.

``mpirun -n 2 python tests/mpi/torch_ops_worker.py scenario ...``: each function among the scenarios runs on every rank.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

import ipcreduce
import ipcreduce.torch as operators
from ipcreduce import ArgumentError
from tests.shared import worker

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
OPERATOR, IN_PLACE = torch.ops.ipcreduce.all_reduce.default, torch.ops.ipcreduce.all_reduce_.default
comm = ipcreduce.Communicator(timeout=60)
operators.register("world", comm)


def brought(rank: int, *shape: int) -> torch.Tensor:
    """The float64 tensor of a rank, which every rank can make."""
    return torch.randn(shape or (2, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def summed(*shape: int) -> torch.Tensor:
    total = brought(0, *shape)
    for rank in range(1, SIZE):
        total = total + brought(rank, *shape)
    return total


def refused(words: str, call: Callable[[], Any], kind: type[Exception] = ArgumentError) -> None:
    with pytest.raises(kind, match=words):
        call()


def results() -> None:
    x = brought(RANK)
    kept = x.clone()
    assert operators.all_reduce is torch.ops.ipcreduce.all_reduce
    assert torch.equal(operators.all_reduce(x, "sum", "world"), summed())
    assert torch.equal(operators.all_reduce(x, communicator="world"), summed())
    assert torch.equal(operators.all_reduce(x, "mean"), summed() / SIZE), "on the default communicator"
    assert torch.equal(x, kept), "the input was changed"
    turned = operators.all_reduce(x.t(), "sum", "world")
    assert turned.is_contiguous()
    assert torch.equal(turned, summed().t())
    assert operators.all_reduce(torch.empty(0, 4), "sum", "world").shape == (0, 4)
    half = operators.all_reduce(torch.full((3,), RANK + 1.0, dtype=torch.bfloat16), "max", "world")
    assert half.dtype is torch.bfloat16
    assert half.tolist() == [SIZE] * 3
    lazy = torch.complex(x, x).conj()
    assert torch.equal(operators.all_reduce(lazy, "sum", "world"), torch.complex(summed(), -summed()))
    alone = operators.all_reduce(x, "max", "world")
    alone.zero_()
    assert torch.equal(x, kept), "the result shares the input's memory"


def gradients() -> None:
    """The loss is the sum of the ranks' losses, of which each weighs its own copy of the result."""
    for op, share in (("sum", 1.0), ("avg", 1 / SIZE)):
        x = brought(RANK).requires_grad_()
        y = operators.all_reduce(x * 3, op, "world")
        (y**3 * (RANK + 1)).sum().backward()
        weights = SIZE * (SIZE + 1) / 2
        expected = weights * 3 * (3 * share * summed()) ** 2 * 3 * share
        torch.testing.assert_close(x.grad, expected)
    x = brought(RANK).requires_grad_()
    total = operators.all_reduce(x).sum()  # its gradient is expanded: all strides are 0
    [once] = torch.autograd.grad(total, x, create_graph=True)
    assert once.tolist() == [[SIZE] * 3] * 2
    [twice] = torch.autograd.grad(operators.all_reduce((x**3).sum(), "sum", "world"), x, create_graph=True)
    [second] = torch.autograd.grad(twice.sum(), x)
    torch.testing.assert_close(second, 6 * SIZE * x.detach())
    largest = operators.all_reduce(x, "max", "world")
    refused("op must be sum or avg for a gradient; found max", largest.sum().backward)
    with torch.no_grad():
        assert not operators.all_reduce(x, "max", "world").requires_grad


def in_place() -> None:
    x = brought(RANK)
    operators.all_reduce_(x, "sum", "world")
    assert torch.equal(x, summed())
    x = brought(RANK)
    IN_PLACE(x.t(), "sum", "world")
    assert torch.equal(x, summed())
    x.requires_grad_()
    refused("all_reduce_ has no gradient", lambda: operators.all_reduce_(x, "sum", "world"))
    with torch.no_grad():
        operators.all_reduce_(x, "avg", "world")
    torch.testing.assert_close(x.detach(), summed())
    inner = x * 2
    saved = inner.sin()
    operators.all_reduce_(inner.detach(), "sum", "world")
    refused("modified by an inplace operation", saved.sum().backward, RuntimeError)
    with torch.inference_mode():
        y = brought(RANK)
        operators.all_reduce_(y, "sum", "world")
        assert torch.equal(y, summed())


def names() -> None:
    x = brought(RANK)
    second = ipcreduce.Communicator(timeout=60)
    refused("'world' is the name of <Communicator", lambda: operators.register("world", second))
    refused("name must be a str other than 'default'", lambda: operators.register("default", second))
    refused("comm must be an ipcreduce.Communicator; found int", lambda: operators.register("three", 3))  # type: ignore
    refused("found 'none': no communicator has been given", lambda: OPERATOR(x, "sum", "none"))
    refused("op must be one of sum, .* found 'total'", lambda: OPERATOR(x, "total", "world"))
    OPERATOR(x, "sum", "world")  # all ranks meet again after a call that each of them refused
    operators.register("second", second)
    operators.register("another", second)
    assert torch.equal(OPERATOR(x, "sum", "another"), summed())
    second.close()
    refused("closed", lambda: OPERATOR(x, "sum", "second"))
    third = ipcreduce.Communicator(timeout=60)
    operators.register("second", third)
    assert torch.equal(OPERATOR(x, "sum", "second"), summed())
    third.close()
    del third
    gc.collect()
    refused("its communicator is gone. Register one", lambda: OPERATOR(x, "sum", "second"))


def checks_of_pytorch() -> None:
    """Schema, fake implementation, autograd registration and dynamic shapes, as PyTorch itself tests operators."""
    x = brought(RANK)
    for tensor in (x, x.t(), x.clone().requires_grad_(), torch.ones(0), x.bfloat16(), torch.complex(x, x).conj()):
        found = torch.library.opcheck(OPERATOR, (tensor, "avg", "world"))
        assert set(found.values()) == {"SUCCESS"}, found
    for tensor in (x, x.t()):
        found = torch.library.opcheck(IN_PLACE, (tensor, "max", "world"))
        assert set(found.values()) == {"SUCCESS"}, found


def compiled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = operators.all_reduce(x @ x.t(), "sum", "world")
        operators.all_reduce_(y, "max", "world")
        return torch.relu(y) + operators.all_reduce(x).sum()

    x = brought(RANK)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        graph = torch.compile(step, fullgraph=True, backend=backend)
        for y in (x, 2 * x, brought(RANK, 4, 6)):
            torch.testing.assert_close(graph(y), step(y))


def compiled_training() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (operators.all_reduce(torch.tanh(x @ w), "avg", "world") ** 2).sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True), torch.compile(loss, fullgraph=True, dynamic=True)):
        w = brought(7, 3, 5).requires_grad_()
        function(brought(RANK), w).backward()
        found.append(w.grad)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0])


def exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return operators.all_reduce(x * 2, "sum", "world")

    program = torch.export.export(Model(), (brought(RANK),))
    assert [node.target for node in program.graph.nodes].count(OPERATOR) == 1
    assert torch.equal(program.module()(brought(RANK)), 2 * summed())


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        results, gradients, in_place, names, checks_of_pytorch, compiled, compiled_training, exported,
    )
}  # fmt: skip


def main() -> None:
    for name in sys.argv[1:]:
        SCENARIOS[name]()
        MPI.COMM_WORLD.Barrier()
        if RANK == 0:
            print(f"{name}: right", flush=True)


if __name__ == "__main__":
    worker.run(main)
