"""The operators of ipcreduce.torch on ranks without GPUs, against one process's arithmetic.

``mpirun -n 2 python tests/mpi/torch_ops_worker.py scenario ...``: each function among the scenarios runs on every rank.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import ipcreduce
import ipcreduce.torch as operators
from ipcreduce import ArgumentError
from tests.shared import torch_refusals, worker

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
    refused("op max has no derivative", largest.sum().backward)
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
    for leaf in (x, x[1:], x.t()):
        refused("x is a leaf that requires grad, or a view of one", lambda leaf=leaf: IN_PLACE(leaf, "sum", "world"))
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


def in_place_gradients() -> None:
    """As of the same call out of place, whole and in part."""
    for op, share in (("sum", 1.0), ("avg", 1 / SIZE)):
        x = brought(RANK).requires_grad_()
        y = x * 3
        IN_PLACE(y, op, "world")
        assert torch.equal(y.detach(), operators.all_reduce(x.detach() * 3, op, "world"))
        (y**2).sum().backward()
        torch.testing.assert_close(x.grad, 2 * 3 * share * summed() * SIZE * share * 3)
        x = brought(RANK).requires_grad_()
        y = x * 3
        IN_PLACE(y[1:], op, "world")
        (y**2).sum().backward()
        expected = 18 * x.detach()
        expected[1:] = 18 * share * summed()[1:] * SIZE * share
        torch.testing.assert_close(x.grad, expected)
    largest = brought(RANK).requires_grad_() * 1
    IN_PLACE(largest, "max", "world")
    refused("op max has no derivative", largest.sum().backward)
    first, _ = (brought(RANK).requires_grad_() * 1).unbind()
    refused("output of a function that returns multiple views", lambda: IN_PLACE(first, "sum", "world"), RuntimeError)


def forward_mode() -> None:
    """Tangents by ``forward_ad`` and by ``torch.func.jvp``: those of all ranks, summed or averaged."""
    x, tangent = brought(RANK), brought(RANK + 100)
    tangents = sum(brought(rank + 100) for rank in range(SIZE))
    due = 2 * sum(brought(rank) * brought(rank + 100) for rank in range(SIZE))
    squares = sum(brought(rank) ** 2 for rank in range(SIZE))
    for op, share in (("sum", 1.0), ("avg", 1 / SIZE), ("mean", 1 / SIZE)):

        def squared(a: torch.Tensor, op: str = op) -> torch.Tensor:
            return OPERATOR(a**2, op, "world")

        def squared_in_place(a: torch.Tensor, op: str = op) -> torch.Tensor:
            b = a**2
            IN_PLACE(b, op, "world")
            return b

        for function in (squared, squared_in_place):
            with forward_ad.dual_level():
                found = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
            for primal, derivative in (found, torch.func.jvp(function, (x,), (tangent,))):
                torch.testing.assert_close(primal, share * squares)
                torch.testing.assert_close(derivative, share * due)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone(), tangent.clone())
            IN_PLACE(dual, op, "world")
            primal, derivative = forward_ad.unpack_dual(dual)
            torch.testing.assert_close(primal, share * summed())
            torch.testing.assert_close(derivative, share * tangents)
    assert torch.equal(x, brought(RANK)), "the input was changed"
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(OPERATOR(x, "sum", "world")).tangent is None
        assert torch.equal(comm.allreduce(x), summed())
        dual = forward_ad.make_dual(x, tangent)
        for call in (
            lambda: comm.allreduce(dual),
            lambda: comm.allreduce(dual, out=dual),
            lambda: comm.allreduce(x, out=dual),
        ):
            refused("with a forward-mode derivative. .*torch.ops.ipcreduce, such as all_reduce", call)
        for op in ("max", "min", "prod"):
            for call in (OPERATOR, IN_PLACE):
                words = f"op {op} has no derivative"
                refused(words, lambda call=call, op=op: call(forward_ad.make_dual(x.clone(), tangent), op, "world"))
    refused("op max has no derivative", lambda: torch.func.jvp(lambda a: OPERATOR(a, "max", "world"), (x,), (tangent,)))
    if SIZE == 1:
        given = x.clone().requires_grad_()
        torch.autograd.gradcheck(
            lambda a: OPERATOR(a, "avg", "world"), (given,), check_forward_ad=True, check_batched_grad=True,
            check_batched_forward_grad=True,
        )  # fmt: skip
    assert torch.equal(OPERATOR(x, "sum", "world"), summed())


def transforms() -> None:
    """torch.func: gradients, of every order, in both modes, and batches."""
    x, tangent = brought(RANK, 3), brought(RANK + 100, 3)
    tangents = sum(brought(rank + 100, 3) for rank in range(SIZE))

    def cubed(a: torch.Tensor) -> torch.Tensor:
        return (OPERATOR(a, "sum", "world") ** 3).sum()

    def along(a: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda b: OPERATOR(b, "sum", "world") ** 3, (a,), (tangent,))[1]

    once, twice = SIZE * 3 * summed(3) ** 2, SIZE * SIZE * 6 * summed(3)
    torch.testing.assert_close(torch.func.grad(cubed)(x), once)
    torch.testing.assert_close(torch.func.grad(lambda a: torch.func.grad(cubed)(a).sum())(x), twice)
    for hessian in (torch.func.hessian(cubed), torch.func.jacrev(torch.func.jacfwd(cubed))):
        torch.testing.assert_close(hessian(x), twice.diag())
    torch.testing.assert_close(along(x), 3 * summed(3) ** 2 * tangents)
    torch.testing.assert_close(torch.func.jvp(along, (x,), (tangent,))[1], 6 * summed(3) * tangents**2)
    torch.testing.assert_close(torch.func.grad(lambda a: along(a).sum())(x), SIZE * 6 * summed(3) * tangents)
    for inner, due in ((lambda a: along(a).sum(), SIZE * 6 * summed(3) * tangents), (torch.func.grad(cubed), twice)):
        outside = x.clone().requires_grad_()  # under a transform
        inner(outside).sum().backward()
        torch.testing.assert_close(outside.grad, due)

    def in_place(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        IN_PLACE(b, "avg", "world")
        return (b**2).sum()

    torch.testing.assert_close(torch.func.grad(in_place)(x), 8 * summed(3) / SIZE)
    pair = torch.stack([x, 2 * x], 1)
    calls = comm._state.calls.number
    batched = torch.func.vmap(lambda a: OPERATOR(a, "sum", "world"), in_dims=1)(pair)
    assert comm._state.calls.number == calls + 1, "a call for each element of the batch"
    assert torch.equal(batched, torch.stack([summed(3), 2 * summed(3)]))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(cubed), in_dims=1)(pair), torch.stack([once, 4 * once]))
    refused("op max has no derivative", lambda: torch.func.grad(lambda a: OPERATOR(a, "max", "world").sum())(x))
    words = "a tensor of torch.func's transforms, without memory of its own. Use the call's operator in torch.ops"
    for transform in (torch.func.grad, torch.func.vmap, torch.func.functionalize):
        refused(words, lambda transform=transform: transform(lambda a: comm.allreduce(a).sum())(x))
    refused(words, lambda: torch.func.jvp(comm.allreduce, (x,), (tangent,)))
    torch.testing.assert_close(torch.func.linearize(lambda a: OPERATOR(a, "sum", "world"), x)[1](tangent), tangents)
    assert torch.equal(comm.allreduce(x), summed(3))


def traced() -> None:
    """The operator is part of a trace. A call of the communicator, whose result is a constant there, is refused."""
    x = brought(RANK)
    other = brought(RANK + 100)
    due = sum(brought(rank + 100) for rank in range(SIZE)) + 1

    def through(a: torch.Tensor) -> torch.Tensor:
        return OPERATOR(a, "sum", "world") + 1

    torch.testing.assert_close(torch.jit.trace(through, x)(other), due)
    torch.testing.assert_close(make_fx(through)(x)(other), due)
    for call, words in torch_refusals.within_traces(comm, x, other.clone()):
        refused(re.escape(words), call)
    refused("is a FakeTensor", partial(make_fx(lambda a: comm.allreduce(a), tracing_mode="fake"), x))
    refused("by torch.jit.trace, which", partial(torch.jit.trace, lambda a: comm.allreduce(x.numpy(), out=a) + 1, x))
    with FlopCounterMode(display=False):  # which only looks on
        assert torch.equal(comm.allreduce(x), summed())
    assert torch.equal(comm.allreduce(x), summed())


def without_memory() -> None:
    """Tensors that hold others, or nothing: refused as array and as out, with the way; the operators take them."""
    x, out = torch.full((4,), RANK + 1.0), torch.zeros(4)
    total = [SIZE * (SIZE + 1) / 2] * 4
    with torch_refusals.a_group():
        jagged = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
        for made, words in (*torch_refusals.without_memory(x), (jagged, "NestedTensor, which overrides")):
            words = f"is a .*{re.escape(words)}"
            refused(f"array {words}", lambda made=made: comm.allreduce(made))
            refused(f"array {words}", lambda made=made: comm.allreduce(made, out=made))
            refused(f"out {words}", lambda made=made: comm.allreduce(x, out=made))
            assert comm.allreduce(x, out=out).tolist() == total
        with FakeTensorMode():
            refused(f"FakeTensorMode, which .*{re.escape(torch_refusals.OPERATOR)}", lambda: comm.allreduce(x))
        assert OPERATOR(torch_refusals.AsyncCollectiveTensor(x), "sum", "world").tolist() == total
        assert OPERATOR(torch_refusals.TwoTensor(x, x), "sum", "world").a.tolist() == total
        assert OPERATOR(torch._efficientzerotensor((4,)), "sum", "world").tolist() == [0] * 4


def names() -> None:
    x = brought(RANK)
    second = ipcreduce.Communicator(timeout=60)
    refused("'world' is the name of <Communicator", lambda: operators.register("world", second))
    refused("'default' cannot name a communicator", lambda: operators.register("default", second))
    refused("comm is an int, which is no ipcreduce.Communicator", lambda: operators.register("three", 3))  # type: ignore
    refused("there is no communicator 'none': no communicator has been given", lambda: OPERATOR(x, "sum", "none"))
    refused("there is no op 'total'", lambda: OPERATOR(x, "total", "world"))
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
    refused("its communicator is gone. Call ipcreduce.torch.register", lambda: OPERATOR(x, "sum", "second"))


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

    def loss_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w) * 1  # tanh keeps its result for the backward
        operators.all_reduce_(y, "avg", "world")
        return (y**2).sum()

    found = []
    for function in (
        loss, loss_in_place, torch.compile(loss_in_place, fullgraph=True, backend="aot_eager"),
        torch.compile(loss, fullgraph=True), torch.compile(loss, fullgraph=True, dynamic=True),
    ):  # fmt: skip
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


SCENARIOS = [
    results, gradients, in_place, in_place_gradients, forward_mode, transforms, traced, without_memory, names,
    checks_of_pytorch, compiled, compiled_training, exported,
]  # fmt: skip


if __name__ == "__main__":
    worker.run(lambda: worker.play(SCENARIOS, sys.argv[1:]))
