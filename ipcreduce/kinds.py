"""Kinds of elements and ops as people write them, as the names that kernels, plans and the other ranks know."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from .errors import ArgumentError
from .numerics import DTYPES, KIND_NAMES, OPS, VIEWS

_INSTEAD = {
    "bool": 'Pass "max" for any or "min" for all; to count, pass ints',
    "complex64": "Reduce array.real and array.imag, or abs(array)",
    "complex128": "Reduce array.real and array.imag, or abs(array)",
    "a product": "Take numpy.exp of the sum of numpy.log(array)",
}
_KINDS = DTYPES | {np.dtype(name): name for name in VIEWS}
_OPS = dict(zip(OPS, OPS, strict=True)) | {"mean": "avg"}
_MPI_OPS = ("SUM", "PROD", "MIN", "MAX")


def op_name(op: Any) -> str:
    """The member of :data:`OPS` that ``op`` means: a name, "mean" or an op of mpi4py.

    :raises ArgumentError: if it is none of these.
    """
    if isinstance(op, str) and op in _OPS:
        return _OPS[op]
    mpi: Any = sys.modules.get("mpi4py.MPI")  # nobody has an op of it who has not imported it
    is_mpis = mpi is not None and isinstance(op, mpi.Op)
    for name in _MPI_OPS if is_mpis else ():
        if op == getattr(mpi, name):
            return name.lower()
    found, advice = repr(op), "Pass one of these"
    if is_mpis:
        others = {name for name, other in vars(mpi).items() if isinstance(other, mpi.Op) and other == op}
        found = f"MPI.{min(others)}" if others else "an MPI.Op of the program's own"
    else:  # also one of PyTorch's, which has a name
        named = op if isinstance(op, str) else getattr(op, "name", None)
        if isinstance(named, str) and named.strip().lower() in _OPS:
            advice = f'Pass "{named.strip().lower()}"'
    raise ArgumentError(f"op must be one of {', '.join(_OPS)}, or MPI's {', '.join(_MPI_OPS)}; found {found}. {advice}")


@cache
def kind_name(dtype: np.dtype[Any], op: str) -> str:
    """The name of a dtype, of which ``op``, one of :data:`OPS`, can be made. :raises ArgumentError: if it cannot."""
    name = _KINDS.get(dtype)
    if name is None:
        raise ArgumentError(
            f"dtype must be one of {', '.join(KIND_NAMES)}; found {dtype}. Convert the array to one of these, as by "
            'array.astype("float32")'
        )
    _, ops = VIEWS.get(name, (name, OPS))
    if op not in ops:
        advice = _INSTEAD["a product" if op == "prod" and name != "bool" else name]
        raise ArgumentError(f"op must be {' or '.join(ops)} for {name}; found {op}. {advice}")
    return name


def reduced_as(kind: str) -> str:
    """The name of the dtype, one of :data:`DTYPE_NAMES`, as which kernels reduce a kind: bool as uint8, say."""
    return VIEWS[kind][0] if kind in VIEWS else kind
