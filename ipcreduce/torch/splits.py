"""The operators torch.ops.ipcreduce.all_gather, reduce_scatter and broadcast_, with their derivatives.

Each half of an all-reduce is the derivative of the other one, backward: a gradient of what was gathered is summed and
scattered, and one of a part is gathered. That of a broadcast is the sum of the ranks' at the root, and zero elsewhere.
Forward each is its own derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .. import default
from ..communicator import Communicator
from ..dtypes import op_name
from ..errors import ArgumentError
from .dispatch import changed, is_plain, library
from .names import DEFAULT, find
from .sums import all_reduce, is_differentiated

_SPLIT = f'int axis=0, int[]? sizes=None, str communicator="{DEFAULT}"'
Sizes = list[int] | None


def _found(communicator: str) -> Communicator:
    return find(communicator) or default.get_communicator()


# ---- the kernels. They need the schemas' defaults: PyTorch does not pass arguments that equal them.
def _all_gather(x: torch.Tensor, axis: int = 0, sizes: Sizes = None, communicator: str = DEFAULT) -> torch.Tensor:
    return default.allgather(x.detach(), axis=axis, sizes=_tuple(sizes), comm=find(communicator))


def _reduce_scatter(
    x: torch.Tensor, op: Any = "sum", axis: int = 0, sizes: Sizes = None, communicator: str = DEFAULT
) -> torch.Tensor:
    return default.reduce_scatter(x.detach(), op, axis=axis, sizes=_tuple(sizes), comm=find(communicator))


def _broadcast(x: torch.Tensor, root: int = 0, communicator: str = DEFAULT) -> torch.Tensor:
    return default.broadcast(x.detach().clone(memory_format=torch.contiguous_format), root, comm=find(communicator))


def _broadcast_in_place(x: torch.Tensor, root: int = 0, communicator: str = DEFAULT) -> None:
    default.broadcast(x.detach(), root, comm=find(communicator))
    changed(x)


def _tuple(sizes: Sizes) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


# ---- the shapes of their results
def _fake_all_gather(x: torch.Tensor, axis: int = 0, sizes: Sizes = None, communicator: str = DEFAULT) -> torch.Tensor:
    shape = [*x.shape] or [1]
    shape[axis] = shape[axis] * _found(communicator).size if sizes is None else sum(sizes)
    return x.new_empty(shape)


def _fake_reduce_scatter(
    x: torch.Tensor, op: Any = "sum", axis: int = 0, sizes: Sizes = None, communicator: str = DEFAULT
) -> torch.Tensor:
    op_name(op)
    shape, comm = [*x.shape], _found(communicator)
    shape[axis] = shape[axis] // comm.size if sizes is None else sizes[comm.rank]
    return x.new_empty(shape)


def _fake_broadcast(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_in_place(x: torch.Tensor, *_: Any) -> None:
    return None


# ---- derivatives, of the gradient of the result and the arguments of the call
def _of_all_gather(gradient: torch.Tensor, axis: int, sizes: Sizes, communicator: str) -> torch.Tensor:
    return reduce_scatter(gradient, "sum", axis, sizes, communicator)


def _of_reduce_scatter(gradient: torch.Tensor, op: Any, axis: int, sizes: Sizes, communicator: str) -> torch.Tensor:
    gathered = all_gather(gradient, axis, sizes, communicator)
    return gathered if _linear_op(op) == "sum" else gathered / _found(communicator).size


def _of_broadcast(gradient: torch.Tensor, root: int, communicator: str) -> torch.Tensor:
    total = all_reduce(gradient, "sum", communicator)
    return total if _found(communicator).rank == root else torch.zeros_like(total)


def _linear_op(op: Any) -> str:
    name = op_name(op)
    if name not in ("sum", "avg"):
        raise ArgumentError(
            f"op {op} has no derivative: only sum and avg have one. Pass x.detach(), or call within torch.no_grad()"
        )
    return name


# ---- the operators
def _operator(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], derivative: Callable[..., Any],
    batched: Callable[..., tuple[Any, ...]],
) -> Any:  # fmt: skip
    """Define an operator that is linear in its first argument.

    :param derivative: backward. :param batched: the arguments after the tensor for a batch of them, along axis 0.
    """
    library.define(f"{name}{schema}")
    operator: Any = getattr(torch.ops.ipcreduce, name)
    defaults = kernel.__defaults__ or ()

    def forward(x: torch.Tensor, *rest: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return operator(x, *rest)  # with derivatives, for the outer transforms
        if is_plain(x):
            return kernel(x, *rest)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(x, *rest)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[1:]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return (derivative(gradient, *ctx.rest), *(None,) * len(ctx.rest))

    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        if name == "reduce_scatter":
            _linear_op(ctx.rest[0])
        return operator(tangent, *ctx.rest)

    methods: dict[str, Any] = {"forward": forward, "setup_context": save, "backward": backward, "jvp": jvp}
    made: Any = type(name, (torch.autograd.Function,), {key: staticmethod(one) for key, one in methods.items()})
    apply: Any = super(torch.autograd.Function, made).apply  # as in sums.py

    def differentiable(x: torch.Tensor, *rest: Any) -> Any:
        rest += defaults[len(rest) :]
        if not is_differentiated(x):
            return forward(x, *rest)
        if not torch._C._are_functorch_transforms_active():
            return apply(x, *rest)
        with enable_single_level_autograd_function():
            return apply(x, *rest)

    def of_batch(info: Any, in_dims: tuple[int, ...], x: torch.Tensor, *rest: Any) -> tuple[Any, int]:
        rest += defaults[len(rest) :]
        return operator(x.movedim(in_dims[0], 0), *batched(*rest)), 0

    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, differentiable, "Autograd")
    torch.library.register_fake(f"ipcreduce::{name}", fake, lib=library)
    if hasattr(torch.library, "register_vmap"):
        torch.library.register_vmap(f"ipcreduce::{name}", of_batch, lib=library)
    return operator


def _next(axis: int) -> int:
    return axis + 1 if axis >= 0 else axis


all_gather = _operator(
    "all_gather", f"(Tensor x, {_SPLIT}) -> Tensor", _all_gather, _fake_all_gather, _of_all_gather,
    lambda axis, *rest: (_next(axis), *rest),
)  # fmt: skip
reduce_scatter = _operator(
    "reduce_scatter", f'(Tensor x, str op="sum", {_SPLIT}) -> Tensor', _reduce_scatter, _fake_reduce_scatter,
    _of_reduce_scatter, lambda op, axis, *rest: (op, _next(axis), *rest),
)  # fmt: skip
_broadcast_of = _operator(
    "broadcast", f'(Tensor x, int root=0, str communicator="{DEFAULT}") -> Tensor', _broadcast, _fake_broadcast,
    _of_broadcast, lambda *rest: rest,
)  # fmt: skip


def _differentiable_in_place(x: torch.Tensor, root: int = 0, communicator: str = DEFAULT) -> None:
    if not is_differentiated(x):
        if is_plain(x):
            return _broadcast_in_place(x, root, communicator)
        with torch._C._AutoDispatchBelowAutograd():
            return broadcast_(x, root, communicator)
    base = x._base if x._is_view() else x
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        raise ArgumentError(
            "x is a leaf that requires grad, or a view of one, which PyTorch does not change in place. Call within "
            "torch.no_grad()"
        )
    x.copy_(_broadcast_of(x, root, communicator))


library.define(f'broadcast_(Tensor(a!) x, int root=0, str communicator="{DEFAULT}") -> ()')
library.impl("broadcast_", _broadcast_in_place, "CompositeExplicitAutograd")
library.impl("broadcast_", _differentiable_in_place, "Autograd")
torch.library.register_fake("ipcreduce::broadcast_", _fake_in_place, lib=library)
broadcast_: Any = torch.ops.ipcreduce.broadcast_
