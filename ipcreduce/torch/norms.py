"""The operators torch.ops.ipcreduce.all_reduce_rmsnorm and its forms: all-reduce, residual, RMSNorm, and e4m3.

They return new tensors, apart from all_reduce_rmsnorm_. They have no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import default
from ..arrays.norms import FP8
from ..calls.request import GROUP
from ..errors import ArgumentError, UnsupportedError
from ..texts import shown
from .dispatch import changed, defined, has_derivative, is_plain, library
from .names import DEFAULT, find

_NUMBERS = f'float eps=1e-6, float weight_bias=0.0, str communicator="{DEFAULT}"'
_FLOAT8 = torch.float8_e4m3fn
_COLUMNS = f"{GROUP} column-major"
_PER = {
    "token": FP8(per="token"),
    str(GROUP): FP8(per=GROUP),
    _COLUMNS: FP8(per=GROUP, column_major=True),
}  # the words of "per", since a graph holds no other objects


# ---- the kernels. They need the schema's defaults: PyTorch does not pass arguments that equal them.
def _rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6,
    weight_bias: float = 0.0, communicator: str = DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    found: tuple[torch.Tensor, torch.Tensor] = default.allreduce_rmsnorm(
        x, weight, eps, residual=residual, weight_bias=weight_bias, comm=find(communicator)
    )
    return found


def _rmsnorm_in_place(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, eps: float = 1e-6, weight_bias: float = 0.0,
    communicator: str = DEFAULT,
) -> None:  # fmt: skip
    default.allreduce_rmsnorm(
        x, weight, eps, residual=residual, out=x, residual_out=residual, weight_bias=weight_bias,
        comm=find(communicator),
    )  # fmt: skip
    changed(x)
    changed(residual)


def _static(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor | None = None,
    eps: float = 1e-6, weight_bias: float = 0.0, communicator: str = DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    quantised, _, residual_out = default.allreduce_rmsnorm(
        x, weight, eps, residual=residual, weight_bias=weight_bias, quantize=FP8(scale=scale), comm=find(communicator)
    )
    return quantised, residual_out  # an operator must not return an argument, as the scale is


def _dynamic(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, per: str = "token",
    eps: float = 1e-6, weight_bias: float = 0.0, communicator: str = DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = default.allreduce_rmsnorm(
        x, weight, eps, residual=residual, weight_bias=weight_bias, quantize=_quantize(per), comm=find(communicator)
    )
    return found


def _quantize(per: str) -> FP8:
    if per not in _PER:
        words = ", ".join(f'"{word}"' for word in _PER)
        raise ArgumentError(f"there are no scales per {shown(per)}. Pass one of {words}")
    return _PER[per]


# ---- the shapes, dtypes and strides of their results
def _like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_rmsnorm(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x), _like(x)


def _fake_in_place(*_: Any, **__: Any) -> None:
    return None


def _fake_static(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x, _FLOAT8), _like(x)


def _fake_dynamic(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, per: str = "token", *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _like(x, _FLOAT8), _fake_scales(x, _quantize(per)), _like(x)


def _fake_scales(x: torch.Tensor, quantize: FP8) -> torch.Tensor:
    if quantize.per == "token":
        return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if x.shape[-1] % GROUP:
        raise ArgumentError(f'x has rows of {x.shape[-1]} elements, no multiple of {GROUP}. Pass per="token"')
    form = (*x.shape[:-1], x.shape[-1] // GROUP)
    if not quantize.column_major:
        return x.new_empty(form, dtype=torch.float32)
    rows, strides = math.prod(form[:-1]), []
    step: Any = 1
    for length in reversed(form[:-1]):
        strides.append(step)
        step = step * torch.sym_max(1, length)
    return x.new_empty_strided(form, (*reversed(strides), -(-rows // 4) * 4), dtype=torch.float32)


# ---- the operators
def _operator(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    operator = defined(name, schema, kernel, fake)
    overload = operator.default
    names = [argument.name for argument in overload._schema.arguments]

    def without_derivative(*arguments: Any) -> Any:
        plain = not torch._C._are_functorch_transforms_active()
        for position, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                if has_derivative(argument):
                    raise ArgumentError(_no_derivative(name, names[position]))
                plain = plain and is_plain(argument)
        if plain:
            return kernel(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*arguments)

    def of_batches(*arguments: Any) -> Any:
        raise UnsupportedError(
            f"{name} within torch.func.vmap. Pass the whole batch: x may have any number of dimensions before the last"
        )

    library.impl(name, without_derivative, "Autograd")
    library.impl(name, of_batches, "FuncTorchBatched")
    return operator


def _no_derivative(name: str, argument: str) -> str:
    return (
        f"{argument} requires grad or has a tangent, and {name} has no derivative. Pass {argument}.detach(), call "
        "within torch.no_grad(), or use all_reduce, which has a derivative, and a norm of PyTorch behind it"
    )


all_reduce_rmsnorm = _operator(
    "all_reduce_rmsnorm",
    f"(Tensor x, Tensor weight, Tensor? residual=None, {_NUMBERS}) -> (Tensor, Tensor)",
    _rmsnorm,
    _fake_rmsnorm,
)
all_reduce_rmsnorm_ = _operator(
    "all_reduce_rmsnorm_",
    f"(Tensor(a!) x, Tensor weight, Tensor(b!) residual, {_NUMBERS}) -> ()",
    _rmsnorm_in_place,
    _fake_in_place,
)
all_reduce_rmsnorm_static_fp8 = _operator(
    "all_reduce_rmsnorm_static_fp8",
    f"(Tensor x, Tensor weight, Tensor scale, Tensor? residual=None, {_NUMBERS}) -> (Tensor, Tensor)",
    _static,
    _fake_static,
)
all_reduce_rmsnorm_dynamic_fp8 = _operator(
    "all_reduce_rmsnorm_dynamic_fp8",
    f'(Tensor x, Tensor weight, Tensor? residual=None, str per="token", {_NUMBERS}) -> (Tensor, Tensor, Tensor)',
    _dynamic,
    _fake_dynamic,
)
