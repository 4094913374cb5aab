"""Kinds of elements and ops as people write them, as the names that kernels, plans and the other ranks know."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from . import advice
from .errors import ArgumentError
from .numerics import DTYPES, KIND_NAMES, OPS, VIEWS
from .texts import shown

_INSTEAD = {
    "bool": 'Pass "any" or "all"; to count, pass ints',
    "complex64": "Reduce array.real and array.imag, or abs(array)",
    "complex128": "Reduce array.real and array.imag, or abs(array)",
    "a product": "Take numpy.exp of the sum of numpy.log(array)",
}
_KINDS = DTYPES | {np.dtype(name): name for name in VIEWS}
_LOGICAL = {"any": "max", "all": "min"}  # of bool only: elsewhere max and min say something else
_OPS = dict(zip(OPS, OPS, strict=True)) | {"mean": "avg", "product": "prod"} | {name: name for name in _LOGICAL}
_MPIS = {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max", "LOR": "any", "LAND": "all"}
_TORCHS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}
_ALL = f"one of {', '.join(_OPS)}, or such an op of MPI or torch.distributed"


def op_name(op: Any, dtype: np.dtype[Any] | None = None) -> str:
    """The member of :data:`OPS` that ``op`` means: a name, "mean" say, or an op of mpi4py or torch.distributed.

    :param dtype: of the arrays. None: it is not known yet.
    :raises ArgumentError: if it is none of these, or ``any`` or ``all`` of another dtype than bool.
    """
    name = _OPS.get(op) if isinstance(op, str) else next(_names_of(op), None)
    if name is None:
        raise ArgumentError(f"op must be {_ALL}; found {_shown(op)}. {advice.for_op(op, _OPS)}")
    if name in _LOGICAL:
        if dtype is not None and dtype != np.dtype(bool):
            raise ArgumentError(f"dtype must be bool for op {_shown(op)}; found {dtype}. Pass array != 0")
        name = _LOGICAL[name]
    return name


def _libraries() -> Iterator[tuple[str, Any, tuple[type, ...], dict[str, str]]]:
    """The libraries that have ops of their own: name, what holds them, their types, and what they mean here.

    Nobody has an op of one who has not imported it.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        yield "MPI", mpi, (mpi.Op,), _MPIS
    torchs: Any = getattr(sys.modules.get("torch.distributed"), "ReduceOp", None)  # a PyTorch may be built without
    if torchs is not None:
        yield "ReduceOp", torchs, (torchs, getattr(torchs, "RedOpType", torchs)), _TORCHS


def _names_of(op: Any) -> Iterator[str]:
    for _, holder, kinds, names in _libraries():
        if isinstance(op, kinds):
            yield from (meant for name, meant in names.items() if op == getattr(holder, name))


def _shown(op: Any) -> str:
    for library, holder, kinds, _ in _libraries():
        if isinstance(op, kinds):
            others = [name for name in dir(holder) if isinstance(getattr(holder, name), kinds)]
            found = [name for name in others if op == getattr(holder, name)]
            return f"{library}.{min(found)}" if found else f"an op of {library} that the program has made"
    return shown(op)


@cache
def kind_name(dtype: np.dtype[Any], op: str) -> str:
    """The name of a dtype, of which ``op``, one of :data:`OPS`, can be made. :raises ArgumentError: if it cannot."""
    name = _KINDS.get(dtype)
    if name is None:
        raise ArgumentError(f"dtype must be one of {', '.join(KIND_NAMES)}; found {dtype}. {advice.for_dtype(dtype)}")
    _, ops = VIEWS.get(name, (name, OPS))
    if op not in ops:
        instead = _INSTEAD["a product" if op == "prod" and name != "bool" else name]
        raise ArgumentError(f"op must be {' or '.join(ops)} for {name}; found {op}. {instead}")
    return name


def reduced_as(kind: str) -> str:
    """The name of the dtype, one of :data:`DTYPE_NAMES`, as which kernels reduce a kind: bool as uint8, say."""
    return VIEWS[kind][0] if kind in VIEWS else kind
