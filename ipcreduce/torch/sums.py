"""The operators torch.ops.ipcreduce.all_reduce and all_reduce_, with their derivatives.

The derivative of a sum is the sum of the ranks' derivatives, and the derivative of an average is their average,
backward and forward. Other ops have no derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import default
from ..dtypes import op_name
from .dispatch import changed
from .linear import define, define_in_place, linear_op
from .names import DEFAULT, find

_REST = f'str op="sum", str communicator="{DEFAULT}"'


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


def _of_all_reduce(gradient: torch.Tensor, op: Any, communicator: str) -> torch.Tensor:
    """The derivative backward, of the gradient of the result and the arguments of the call."""
    linear_op(op)
    return all_reduce(gradient, op, communicator)


all_reduce = define("all_reduce", f"(Tensor x, {_REST}) -> Tensor", _all_reduce, _fake, _of_all_reduce)
all_reduce_ = define_in_place(
    "all_reduce_", f"(Tensor(a!) x, {_REST}) -> ()", _all_reduce_in_place, _fake_in_place, all_reduce,
    "Use all_reduce, or call within torch.no_grad()",
)  # fmt: skip
