"""The last sentence of an error message about an array, an op or a dtype that a call cannot take: what to do.

No function here prints, converts or reads an array: its text would be long, and reading it from a GPU would wait.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

_IN_PLACE = "In place is out=x, with the array itself: allreduce(x, out=x)"
_ALONE = "Pass the array alone, which knows its dtype: allreduce(x, out=y)"
_PROTOCOLS = "__dlpack__", "__cuda_array_interface__"
_OPS = {  # a function's name, or that of another library's op, and the op that is meant
    "add": "sum", "multiply": "prod", "minimum": "min", "maximum": "max", "average": "avg", "logical_or": "any",
    "logical_and": "all",
}  # fmt: skip


def for_array(value: Any, what: str) -> str:
    """The advice for a ``value`` that is not an array. ``what`` is the argument: "array" or "out"."""
    if _is_in_place(value):
        return _IN_PLACE
    if _is_mpi_datatype(value) or (isinstance(value, (list, tuple)) and any(map(_is_array, value))):
        return _ALONE
    if what == "out":
        return "Leave out= away for a new array"
    if value is None:
        return "Pass an array on every rank. A rank that has nothing to add passes zeros"
    if isinstance(value, dict):
        return "Pass a list of its values, in the same order on every rank"
    if isinstance(value, bytes):
        return "Pass numpy.frombuffer(it, dtype)"
    if isinstance(value, Iterator):
        return "Pass numpy.asarray(list(it))"
    if isinstance(value, numbers.Number):  # such as fractions.Fraction
        return "Pass float(it)"
    if hasattr(type(value), "toarray"):  # scipy.sparse's
        return "Pass it.toarray()"
    return "Pass numpy.asarray(it) or cupy.asarray(it)"


def for_member(value: Any, arrays: Sequence[Any]) -> str:
    """The advice for a ``value`` that is a number, a list or a str, in a list that a call takes as a list of arrays."""
    if not any(map(_is_array, arrays)):
        return "If the list stands for one array, pass numpy.array(list)"
    if isinstance(value, str) or any(map(_is_mpi_datatype, arrays)):
        return _ALONE
    return "Pass all arrays in one list" if isinstance(value, (list, tuple)) else "Pass numpy.array(it)"


def for_op(op: Any, known: dict[str, str]) -> str:
    """The advice for an ``op`` that is none of the names ``known``, nor an op of MPI or PyTorch."""
    if _is_in_place(op):
        return _IN_PLACE
    if _is_array(op) or (isinstance(op, (list, tuple)) and any(map(_is_array, op))):
        return "The array for the result is the argument out=: allreduce(x, out=y)"
    for name in _names(op):
        if isinstance(name, str):
            name = name.strip().lower()
            meant = _OPS.get(name, name)
            if meant in known:
                return f'Pass "{meant}"'
    return "Pass one of these"


def _names(op: Any) -> Iterator[Any]:
    yield op
    for name in ("name", "__name__"):
        with suppress(Exception):  # it may be of any class, whose attributes raise
            yield getattr(op, name)


def for_dtype(dtype: np.dtype[Any]) -> str:
    """The advice for an array of a ``dtype`` that cannot be reduced."""
    if dtype.kind == "O":
        return "Convert the objects to numbers first. Pass rows of different lengths as a list of arrays"
    if dtype.names is not None:
        return "Convert it to an array for each field: array[name]"
    if dtype.kind in "Mm":
        return 'Convert it by array.view("int64"), whose min and max mean the same'
    same = {"g": "float64", "G": "complex128"}.get(dtype.char, "" if dtype.isnative else dtype.newbyteorder("=").name)
    return f'Convert the array, as by array.astype("{same}")' if same else for_dtype_named(dtype.name)


def for_dtype_named(name: str) -> str:
    """The advice for a dtype that NumPy does not have, such as a float of 8 bits."""
    if name.startswith(("float8", "float6", "float4")):
        return "Convert the array to float16 or bfloat16: a sum needs more digits than this dtype has"
    if name.startswith(("int", "uint")):
        return f"Convert the array to {name.rstrip('0123456789')}8"
    return 'Convert the array to one of these, as by array.astype("float32")'


def _is_in_place(value: Any) -> bool:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and value is mpi.IN_PLACE


def _is_mpi_datatype(value: Any) -> bool:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(value, getattr(mpi, "Datatype", ()))


def _is_array(value: Any) -> bool:
    """True for an array of any library. Only its type is asked, because an object may compute its attributes."""
    return any(hasattr(type(value), name) for name in _PROTOCOLS)
