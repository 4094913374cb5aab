"""Dtypes and ops: their names, the objects that programs pass for them, and the reduction of NumPy arrays.

The kernels give the same bits as :func:`reduce`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from . import advice
from .errors import ArgumentError, naming_member, reading
from .float_state import in_standard_state
from .texts import shown

# A name's index in these tuples is its code in messages and in the slots' offset (ipc/plan.py): never reorder them.
DTYPE_NAMES = (
    "float16", "bfloat16", "float32", "float64",
    "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
OPS = ("sum", "prod", "min", "max", "avg")
# Dtypes that are reduced as another one in the same memory: that one's name, and the ops that mean the same on it.
VIEWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bool": ("uint8", ("min", "max")),
    "complex64": ("float32", ("sum", "avg")),
    "complex128": ("float64", ("sum", "avg")),
}
KIND_NAMES = (*DTYPE_NAMES, *VIEWS)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)  # no array of it is reduced
_NAN_BITS = {"float16": 0x7FFF, "bfloat16": 0x7FFF, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}  # as in kernels/
DTYPES = {(BFLOAT16 if name == "bfloat16" else np.dtype(name)): name for name in DTYPE_NAMES}
_INSTEAD = {
    "bool": 'Pass "any" or "all"; to count, pass ints',
    "complex64": "Reduce array.real and array.imag, or abs(array)",
    "complex128": "Reduce array.real and array.imag, or abs(array)",
    "a product": "Take numpy.exp of the sum of numpy.log(array)",
}
_KINDS = DTYPES | {np.dtype(name): name for name in VIEWS}
KINDS = {name: dtype for dtype, name in _KINDS.items()}
_LOGICAL = {"any": "max", "all": "min"}  # for bool only: for numbers, max and min mean something else
_OPS = dict(zip(OPS, OPS, strict=True)) | {"mean": "avg", "product": "prod"} | {name: name for name in _LOGICAL}
_MPIS = {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max", "LOR": "any", "LAND": "all"}
_TORCHS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}
_ALL = f"{', '.join(_OPS)}, and such ops of MPI and torch.distributed"


def op_name(op: Any, dtype: np.dtype[Any] | None = None) -> str:
    """The member of :data:`OPS` that ``op`` means.

    :param op: a name in any case, such as "mean", or an op of mpi4py or torch.distributed.
    :param dtype: that of the arrays; None if it is not known yet.
    :raises ArgumentError: if ``op`` is none of these, or if it is ``any`` or ``all`` and ``dtype`` is not bool.
    """
    with reading("op", op):
        return _op_name(op, dtype)


def _op_name(op: Any, dtype: np.dtype[Any] | None) -> str:
    name = _OPS.get(str.lower(op)) if isinstance(op, str) else next(_names_of(op), None)
    if name is None:
        raise ArgumentError(f"there is no op {_shown(op)}. The ops are {_ALL}. {advice.for_op(op, _OPS)}")
    if name in _LOGICAL:
        if dtype is not None and dtype != np.dtype(bool):
            raise ArgumentError(f"op {_shown(op)} takes bool, and the array's dtype is {dtype}. Pass array != 0")
        name = _LOGICAL[name]
    return name


def _libraries() -> Iterator[tuple[str, Any, tuple[type, ...], dict[str, str]]]:
    """The libraries with ops that the program has imported.

    Each comes as its name, the object whose attributes its ops are, the ops' types, and the meaning of each name here.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        yield "MPI", mpi, (mpi.Op,), _MPIS
    torchs: Any = getattr(sys.modules.get("torch.distributed"), "ReduceOp", None)  # some builds of PyTorch have none
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
            return f"{library}.{min(found)}" if found else f"like this op of {library}, which the program has made"
    return shown(op)


@cache
def kind_name(dtype: np.dtype[Any], op: str) -> str:
    """The name of a dtype. :raises ArgumentError: if ``op``, one of :data:`OPS`, cannot reduce arrays of this dtype."""
    name = _KINDS.get(dtype)
    if name is None:
        kinds = ", ".join(KIND_NAMES)
        raise ArgumentError(f"dtype {dtype} cannot be reduced. The dtypes are {kinds}. {advice.for_dtype(dtype)}")
    _, ops = VIEWS.get(name, (name, OPS))
    if op not in ops:
        instead = _INSTEAD["a product" if op == "prod" and name != "bool" else name]
        raise ArgumentError(f"dtype {name} has no {op}, but {' and '.join(ops)}. {instead}")
    return name


def list_kinds(dtypes: Sequence[np.dtype[Any]], op: Any) -> list[tuple[str, str]]:
    """The name of each dtype, and the op for it: see :func:`kind_name` and :func:`op_name`.

    :raises ArgumentError: if one of these dtypes cannot be reduced so. It names the member of the list.
    """
    found: list[tuple[str, str]] = []
    known: dict[np.dtype[Any], tuple[str, str]] = {}
    for index, dtype in enumerate(dtypes):
        if dtype not in known:
            with naming_member(index):
                name = op_name(op, dtype)
                known[dtype] = kind_name(dtype, name), name
        found.append(known[dtype])
    return found


def reduced_as(kind: str) -> str:
    """The name of the dtype, one of :data:`DTYPE_NAMES`, as which kernels reduce ``kind``: uint8 for bool, say."""
    return VIEWS[kind][0] if kind in VIEWS else kind


def reduce(
    values: Sequence[np.ndarray[Any, Any]], op: str, out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Reduce ``values[0] op values[1] op ...`` elementwise, from left to right.

    float16 and bfloat16 accumulate in float32 and round once. Integer sums and products wrap. The average of floats
    is the sum divided by n. The average of integers is the exact sum divided by n, truncated toward zero. NaN
    propagates through min and max. Of equal values (-0, +0) the first is kept. Every NaN becomes the one NaN that the
    kernels use for the dtype.

    :param values: n arrays of one shape and dtype.
    :param op: one of :data:`OPS`.
    :param out: the array for the result, which overlaps none of ``values``; None for a new array.
    :returns: the result, of the same shape and dtype: ``out`` if it is given.
    """
    dtype = values[0].dtype
    out = np.empty_like(values[0]) if out is None else out
    if dtype.kind in "iu":
        if op == "avg":
            out[...] = _integer_average(values)
        else:
            _accumulate(values, op, out)
        return out
    return _reduce_floats(values, op, out) if out.size else out


@in_standard_state
@np.errstate(all="ignore")
def _reduce_floats(values: Sequence[np.ndarray[Any, Any]], op: str, out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if out.dtype in (np.float16, BFLOAT16):
        total = _accumulate([value.astype(np.float32) for value in values], op, np.empty(out.shape, np.float32))
    else:
        total = _accumulate(values, op, out)
    if op == "avg":
        np.divide(total, total.dtype.type(len(values)), out=total)
    if total is not out:
        out[...] = total
    set_nans(out, total)
    return out


def set_nans(out: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Give ``out``, which has the values of ``values``, the one NaN of its dtype wherever these are NaN.

    The bits of a NaN that NumPy makes depend on its place in a vector.
    """
    if _has_nan(values):
        bits = np.array(_NAN_BITS[DTYPES[out.dtype]], f"u{out.itemsize}")
        np.copyto(out, bits.view(out.dtype), where=np.isnan(values))


def _has_nan(values: np.ndarray[Any, Any]) -> bool:
    """True if a value is NaN: a NaN makes the values' product with themselves, and their maximum, NaN."""
    few = values.size <= _FEW  # then vdot takes 0.3 us and the maximum 1.3 us; for many values vdot uses threads
    return math.isnan(np.vdot(values, values) if few else np.maximum.reduce(values, axis=None))


_FEW = 2048
_UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def _accumulate(values: Sequence[np.ndarray[Any, Any]], op: str, out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reduce ``values``, which have the dtype of ``out``, into ``out``, and return it."""
    if len(values) == 1:
        out[...] = values[0]
        return out
    ufunc, total = _UFUNCS[op], values[0]
    for value in values[1:]:
        total = ufunc(total, value, out=out)
    if op in ("min", "max") and out.dtype.kind not in "iu":
        zero = out == 0
        if zero.any():  # whether NumPy takes -0 or +0 depends on the place in a vector: take the first one
            for value in reversed(values):
                np.copyto(out, value, where=zero & (value == 0))
    return out


def _integer_average(values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    # The sum may overflow, so quotients and remainders (floor division, 0 <= remainder < n) are summed separately.
    n, dtype = len(values), values[0].dtype
    if n > np.iinfo(dtype).max:  # of 8 or 16 bits
        total = sum((value.astype(np.int64) for value in values[1:]), values[0].astype(np.int64))
        return (np.sign(total) * (np.abs(total) // n)).astype(dtype)
    quotients = np.zeros_like(values[0])
    remainders = np.zeros(values[0].shape, np.int64)
    for value in values:
        floor = value // np.asarray(n, value.dtype)
        remainders += (value - floor * np.asarray(n, value.dtype)).astype(np.int64)
        quotients += floor
    quotients += (remainders // n).astype(quotients.dtype)
    quotients += ((quotients < 0) & (remainders % n > 0)).astype(quotients.dtype)  # from the floor toward zero
    return quotients
