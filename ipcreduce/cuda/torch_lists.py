"""The addresses of several of PyTorch's tensors at once, for the fast path.

Gradients are new tensors at each step, and their shapes and dtypes are always the same. So tensors are compared with
those before them, without a look at each one from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from . import torch_runtime


def reader(tensors: Sequence[Any], device: int) -> Callable[[Sequence[Any]], list[int] | None] | None:
    """A function that reads addresses, as :func:`cupy_runtime.reader` makes it. In a trace, no tensor is plain.

    The memory of a tensor may change at any time, by ``set_()`` say, so its address is read at each call.
    """
    found = _plain_list(tensors, device)
    if found is None:
        return None
    alike, length, data_ptr = found[1:], len(tensors), torch_runtime.torch.Tensor.data_ptr
    is_tracing, modes, duals = torch_runtime.is_tracing, torch_runtime.modes, torch_runtime.duals
    check, few = _trusted_guard(tensors), length < 8  # map() is faster for more

    def read(others: Sequence[Any]) -> list[int] | None:
        nonlocal check
        if is_tracing() or modes._is_in_torch_dispatch_mode or duals._current_level >= 0:
            return None
        if check is not None and len(others) == length and check(*others):
            try:
                if few:
                    return [other.data_ptr() for other in others]
                return list(map(data_ptr, others))
            except RuntimeError:  # one that has lost its memory
                return None
        found = _plain_list(others, device)
        if found is None or found[1:] != alike:
            return None
        check = _trusted_guard(others)  # it also tells inference_mode() and autocast() apart
        return found[0]

    return read


def _plain_list(tensors: Sequence[Any], device: int) -> tuple[list[int], list[Any], list[Any]] | None:
    """Addresses, shapes and dtypes of tensors that are plain, but for traces and addresses of 0; else None."""
    torch, (kind, parameter) = torch_runtime.torch, torch_runtime.kinds
    if False in [type(tensor) is kind or type(tensor) is parameter for tensor in tensors]:
        return None
    if torch.is_grad_enabled() and True in [tensor.requires_grad for tensor in tensors]:
        return None
    try:  # by map(), which calls the methods in half of the time
        if {*map(kind.get_device, tensors)} != {device} or False in map(kind.is_contiguous, tensors):
            return None
        dtypes = [tensor.dtype for tensor in tensors]
        if True in map(kind.is_neg, tensors) or not all(map(torch_runtime.can_be_cached, {*dtypes})):
            return None
        return list(map(kind.data_ptr, tensors)), [tensor.shape for tensor in tensors], dtypes
    except RuntimeError:  # a sparse tensor, or one of torch.func, has no memory, and a nested tensor has no shape
        return None


def _trusted_guard(tensors: Sequence[Any]) -> Any:
    """:func:`_guard`, and that no tensor requires grad where grad is enabled. None where guards do not work."""
    if not _guards_work():
        return None
    check, enabled = _guard(tensors), torch_runtime.torch.is_grad_enabled
    if any(tensor.requires_grad for tensor in tensors):  # a guard does not notice no_grad()
        return lambda *others: not enabled() and check(*others)
    return check


def _guard(tensors: Sequence[Any]) -> Any:
    """A function that tells if others are like these tensors: in type, dtype, shape, strides, all but their memory.

    torch.compile looks at its arguments by it. It takes a fifth of the time of :func:`_plain_list`.
    """
    guards = torch_runtime.torch._C._dynamo.guards.TensorGuards
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@cache
def _guards_work() -> bool:
    """True if a guard tells tensors apart in this PyTorch, in which it has no public name, and may change."""
    torch, parameter = torch_runtime.torch, torch_runtime.kinds[1]
    try:
        one, same = torch.zeros(4, device="cpu"), torch.ones(4, device="cpu")
        others = [
            torch.zeros(2, device="cpu"), torch.zeros(2, 2, device="cpu"), torch.zeros(8, device="cpu")[::2],
            one.double(), one.detach().requires_grad_(), parameter(one, requires_grad=False), torch._neg_view(one),
            torch._efficientzerotensor(4, device="cpu"), one.to_sparse(), torch.empty(4, device="meta"), None,
        ]  # fmt: skip
        check = _guard([one])
        return bool(check(same)) and not any(check(other) for other in others)
    except Exception:
        return False
