"""The library of the operators, and what they ask of PyTorch's dispatcher. An operator has one kernel for all devices.

With torch.library.custom_op an eager call would take the host twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

library: Any = torch.library.Library("ipcreduce", "DEF")
_PLAIN = torch.Tensor, torch.nn.Parameter


def is_plain(x: torch.Tensor) -> bool:
    """True if a call may skip PyTorch's dispatcher below autograd, which saves 2 us."""
    return bool(
        type(x) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not (x.is_meta or x.is_conj() or x.is_neg() or x._is_zerotensor())
    )


def has_derivative(x: torch.Tensor) -> bool:
    """True if results of ``x`` would need a derivative, for autograd or for the present transform of torch.func."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def changed(x: torch.Tensor) -> None:
    """Say that a kernel has written to ``x``: a backward pass that needs the old values then raises."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def defined(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """A new operator. ``kernel`` serves tensors on GPUs and on the host; ``fake`` makes results without values.

    Both need the schema's defaults: PyTorch does not pass arguments that equal them.
    """
    library.define(f"{name}{schema}")
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipcreduce::{name}", fake, lib=library)
    return getattr(torch.ops.ipcreduce, name)
