"""The operators torch.ops.ipcreduce.all_gather, reduce_scatter and broadcast_, with their derivatives.

Each half of an all-reduce is the derivative of the other one, backward: a gradient of what was gathered is summed and
scattered, and one of a part is gathered. That of a broadcast is the sum of the ranks' at the root, and zero elsewhere.
Forward each is its own derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import default
from ..arrays.splits import counted
from ..communicator import Communicator
from ..dtypes import op_name
from .dispatch import changed
from .linear import define, define_in_place, linear_op
from .names import DEFAULT, find
from .sums import all_reduce

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
    axis = counted(axis, len(shape))
    shape[axis] = shape[axis] * _found(communicator).size if sizes is None else sum(sizes)
    return x.new_empty(shape)


def _fake_reduce_scatter(
    x: torch.Tensor, op: Any = "sum", axis: int = 0, sizes: Sizes = None, communicator: str = DEFAULT
) -> torch.Tensor:
    op_name(op)
    shape, comm = [*x.shape], _found(communicator)
    axis = counted(axis, len(shape))
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
    return gathered if linear_op(op) == "sum" else gathered / _found(communicator).size


def _of_broadcast(gradient: torch.Tensor, root: int, communicator: str) -> torch.Tensor:
    total = all_reduce(gradient, "sum", communicator)
    return total if _found(communicator).rank == root else torch.zeros_like(total)


# ---- the operators
def _next(axis: int, batch: torch.Tensor) -> int:
    """The axis in a batch of tensors along axis 0; for one that they have not, an axis that the batch has not."""
    return axis + 1 if axis >= 0 else axis - (axis <= -batch.dim())


def _gathering(batch: torch.Tensor, axis: int, *rest: Any) -> tuple[Any, ...]:
    batch = batch if batch.dim() > 1 else batch[:, None]  # a number counts as an array of one element
    return batch, _next(axis, batch), *rest


all_gather = define(
    "all_gather", f"(Tensor x, {_SPLIT}) -> Tensor", _all_gather, _fake_all_gather, _of_all_gather,
    _gathering,
)  # fmt: skip
reduce_scatter = define(
    "reduce_scatter", f'(Tensor x, str op="sum", {_SPLIT}) -> Tensor', _reduce_scatter, _fake_reduce_scatter,
    _of_reduce_scatter, lambda batch, op, axis, *rest: (batch, op, _next(axis, batch), *rest),
)  # fmt: skip
_broadcast_of = define(
    "broadcast", f'(Tensor x, int root=0, str communicator="{DEFAULT}") -> Tensor', _broadcast, _fake_broadcast,
    _of_broadcast,
)  # fmt: skip
broadcast_ = define_in_place(
    "broadcast_", f'(Tensor(a!) x, int root=0, str communicator="{DEFAULT}") -> ()', _broadcast_in_place,
    _fake_in_place, _broadcast_of, "Call within torch.no_grad()",
)  # fmt: skip
