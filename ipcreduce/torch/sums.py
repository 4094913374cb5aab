"""The operators torch.ops.ipcreduce.all_reduce and all_reduce_, with their derivatives.

The derivative of a sum is the sum of the ranks' derivatives, and the derivative of an average is their average,
backward and forward. Other ops have no derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .. import default
from ..dtypes import op_name
from ..errors import ArgumentError
from .dispatch import changed, is_plain, library
from .names import DEFAULT, find

library.define(f'all_reduce(Tensor x, str op="sum", str communicator="{DEFAULT}") -> Tensor')
library.define(f'all_reduce_(Tensor(a!) x, str op="sum", str communicator="{DEFAULT}") -> ()')


# The functions need the schema's defaults: PyTorch does not pass arguments that equal them.
def _all_reduce(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    return default.allreduce(x.detach(), op, comm=find(communicator))


def _all_reduce_in_place(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> None:
    x = x.detach()
    default.allreduce(x, op, out=x, comm=find(communicator))
    changed(x)


def _fake(x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    op_name(op)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_in_place(x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT) -> None:
    op_name(op)


# ---- derivatives
def _forward(x: torch.Tensor, op: str, communicator: str) -> torch.Tensor:
    if torch._C._are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return all_reduce(x, op, communicator)  # with derivatives, for the outer transforms
    if is_plain(x):
        return _all_reduce(x, op, communicator)
    with torch._C._AutoDispatchBelowAutograd():
        return all_reduce(x, op, communicator)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.op, ctx.communicator = inputs


def _linear(ctx: Any, derivative: torch.Tensor) -> torch.Tensor:
    """The derivative of the result. For a sum and an average it is the same function, backward and forward."""
    if op_name(ctx.op) not in ("sum", "avg"):
        raise ArgumentError(
            f"op {ctx.op} has no derivative: only sum and avg have one. Pass x.detach(), or call within torch.no_grad()"
        )
    return all_reduce(derivative, ctx.op, ctx.communicator)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _linear(ctx, gradient), None, None


def _jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
    return _linear(ctx, tangent)


def _batched(
    info: Any, in_dims: tuple[int, None, None], x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Reduce the whole batch in one call."""
    return all_reduce(x.movedim(in_dims[0], 0), op, communicator), 0


# torch.library.register_autograd() would give a backward derivative only, and nothing that torch.func can use.
_Differentiable: Any = type(
    "AllReduce",
    (torch.autograd.Function,),
    {
        "forward": staticmethod(_forward), "setup_context": staticmethod(_save), "backward": staticmethod(_backward),
        "jvp": staticmethod(_jvp),
    },
)  # fmt: skip
_apply: Any = super(torch.autograd.Function, _Differentiable).apply  # Function.apply() would take 20 us more


def is_differentiated(x: torch.Tensor) -> bool:
    """True if autograd may need to record a call."""
    return bool(
        (x.requires_grad and torch.is_grad_enabled())
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def _differentiable(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    if not is_differentiated(x):
        return _forward(x, op, communicator)
    if not torch._C._are_functorch_transforms_active():
        return _apply(x, op, communicator)
    # The dispatcher calls this once for each transform of torch.func. This call is autograd for one of them.
    with enable_single_level_autograd_function():
        return _apply(x, op, communicator)


def _differentiable_in_place(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> None:
    if not is_differentiated(x):
        if is_plain(x):
            return _all_reduce_in_place(x, op, communicator)
        with torch._C._AutoDispatchBelowAutograd():
            return all_reduce_(x, op, communicator)
    base = x._base if x._is_view() else x
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        raise ArgumentError(
            "x is a leaf that requires grad, or a view of one, which PyTorch does not change in place. Use all_reduce, "
            "or call within torch.no_grad()"
        )
    x.copy_(all_reduce(x, op, communicator))


# These serve tensors on GPUs and on the host.
library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
library.impl("all_reduce_", _all_reduce_in_place, "CompositeExplicitAutograd")
library.impl("all_reduce", _differentiable, "Autograd")
library.impl("all_reduce_", _differentiable_in_place, "Autograd")
torch.library.register_fake("ipcreduce::all_reduce", _fake, lib=library)
torch.library.register_fake("ipcreduce::all_reduce_", _fake_in_place, lib=library)
if hasattr(torch.library, "register_vmap"):  # otherwise PyTorch makes one call for each element of the batch
    torch.library.register_vmap("ipcreduce::all_reduce", _batched, lib=library)
all_reduce: Any = torch.ops.ipcreduce.all_reduce
all_reduce_: Any = torch.ops.ipcreduce.all_reduce_
