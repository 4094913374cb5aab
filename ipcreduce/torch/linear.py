"""Operators that are linear in their first argument, with derivatives, and those that write such a result in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ..dtypes import op_name
from ..errors import ArgumentError
from .dispatch import defined, is_plain, library


def linear_op(op: Any) -> str:
    """The name of an op that has a derivative. :raises ArgumentError: if it has none."""
    name = op_name(op)
    if name not in ("sum", "avg"):
        raise ArgumentError(
            f"op {op} has no derivative: only sum and avg have one. Pass x.detach(), or call within torch.no_grad()"
        )
    return name


def _is_differentiated(x: torch.Tensor) -> bool:
    """True if autograd may need to record a call."""
    return bool(
        (x.requires_grad and torch.is_grad_enabled())
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def define(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], derivative: Callable[..., Any],
    batched: Callable[..., tuple[Any, ...]] = lambda *given: given,
) -> Any:  # fmt: skip
    """Define an operator that is linear in its first argument: its forward-mode derivative is the operator itself.

    :param derivative: the backward one, of the gradient and the arguments after the tensor.
    :param batched: the arguments for a batch of tensors along axis 0, from the batch and those after the tensor.
    """
    operator = defined(name, schema, kernel, fake)
    defaults = kernel.__defaults__ or ()
    has_op = "str op" in schema

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
        if has_op:
            linear_op(ctx.rest[0])
        return operator(tangent, *ctx.rest)

    # torch.library.register_autograd() would give a backward derivative only, and nothing that torch.func can use.
    methods: dict[str, Any] = {"forward": forward, "setup_context": save, "backward": backward, "jvp": jvp}
    made: Any = type(
        name.title().replace("_", ""), (torch.autograd.Function,),
        {key: staticmethod(one) for key, one in methods.items()},
    )  # fmt: skip
    apply: Any = super(torch.autograd.Function, made).apply  # Function.apply() would take 20 us more

    def differentiable(x: torch.Tensor, *rest: Any) -> Any:
        if not _is_differentiated(x):
            return forward(x, *rest)
        rest += defaults[len(rest) :]
        if not torch._C._are_functorch_transforms_active():
            return apply(x, *rest)
        # The dispatcher calls this once for each transform of torch.func. This call is autograd for one of them.
        with enable_single_level_autograd_function():
            return apply(x, *rest)

    def of_batch(info: Any, in_dims: tuple[int, ...], x: torch.Tensor, *rest: Any) -> tuple[Any, int]:
        """Make one call for the whole batch."""
        rest += defaults[len(rest) :]
        return operator(*batched(x.movedim(in_dims[0], 0), *rest)), 0

    library.impl(name, differentiable, "Autograd")
    if hasattr(torch.library, "register_vmap"):  # otherwise PyTorch makes one call for each element of the batch
        torch.library.register_vmap(f"ipcreduce::{name}", of_batch, lib=library)
    return operator


def define_in_place(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], other: Any, remedy: str
) -> Any:
    """Define an operator that writes the result of ``other`` into its first argument."""
    operator = defined(name, schema, kernel, fake)

    def differentiable(x: torch.Tensor, *rest: Any) -> None:
        if not _is_differentiated(x):
            if is_plain(x):
                return kernel(x, *rest)
            with torch._C._AutoDispatchBelowAutograd():
                return operator(x, *rest)
        base = x._base if x._is_view() else x
        if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
            raise ArgumentError(
                f"x is a leaf that requires grad, or a view of one, which PyTorch does not change in place. {remedy}"
            )
        x.copy_(other(x, *rest))

    library.impl(name, differentiable, "Autograd")
    return operator
