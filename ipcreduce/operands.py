"""What a call may be given, checked before anything is launched. The communicator adds rank and call to messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .errors import ArgumentError
from .numerics import DTYPES, OPS


def check_kind(array: Any, op: Any) -> str:
    """The name of the array's dtype. :raises ArgumentError: if dtype or op is none of ours."""
    if not isinstance(op, str) or op not in OPS:
        raise ArgumentError(f"op must be one of {', '.join(OPS)}; found {op!r}")
    name = DTYPES.get(array.dtype)
    if name is None:
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES.values())}; found {array.dtype}")
    return name


def check_host(array: np.ndarray[Any, Any], op: Any) -> str:
    """:func:`check_kind` for a NumPy array, which must have no mask."""
    name = check_kind(array, op)
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError("array must have no mask; found a masked array. Fill it first")
    return name


def check_out(array: Any, out: Any) -> None:
    """:raises ArgumentError: if ``out`` has not ``array``'s shape and dtype."""
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ArgumentError(
            f"out must have array's shape {array.shape} and dtype {array.dtype}; found {out.shape} and {out.dtype}"
        )


def check_host_out(array: Any, out: Any) -> None:
    """:raises ArgumentError: if ``out`` cannot take the result for a NumPy array."""
    if not isinstance(out, np.ndarray):
        raise ArgumentError(f"out must be a NumPy array, as array is; found {type(out).__qualname__}")
    check_out(array, out)
    if arrays.is_readonly(out):
        raise ArgumentError("out must be writable; found a read-only array")
    if not out.flags.c_contiguous:
        check_apart(out)


def check_apart(out: Any) -> None:
    """:raises ArgumentError: if elements of ``out`` share memory."""
    if arrays.has_shared_elements(out):
        raise ArgumentError(
            f"out must have memory of its own for each element; found shape {out.shape} with strides {out.strides}, "
            "by which elements share it. Pass a copy: out.copy()"
        )


def check_device(ordinal: int, array: Any, name: str) -> None:
    """:raises ArgumentError: if a device array (argument ``name``) lies on another GPU than the communicator's."""
    if arrays.device_of(array) != ordinal:
        raise ArgumentError(
            f"{name} must lie on this communicator's GPU {ordinal}; found one on GPU "
            f"{arrays.device_of(array)}. Move it, or make the communicator with device="
        )


def device_out(ordinal: int, source: Any, out: Any, stream: int, ordered: bool) -> Any:
    """The CuPy array over ``out``: see :func:`arrays.view`. :raises ArgumentError: if it does not fit ``source``."""
    if not arrays.is_device(out, "out"):
        raise ArgumentError("out must lie on the device, as array does; found a NumPy array")
    target = arrays.view(out, stream, ordered)
    check_out(source, target)
    check_device(ordinal, target, "out")
    if target is not out and arrays.is_readonly(out):
        raise ArgumentError("out must be writable; found a read-only array")
    return target


def check_aligned(*used: Any) -> None:
    """:raises ArgumentError: if an array's address is no multiple of its itemsize, which a GPU cannot read."""
    for array in used:
        if arrays.pointer(array) % array.itemsize:
            raise ArgumentError(
                f"array and out must lie at multiples of their itemsize, {array.itemsize}; found address "
                f"{arrays.pointer(array):#x}. Copy it to a new array first"
            )


def overlap_in_part(source: Any, target: Any) -> bool:
    """Whether writing ``target`` could change parts of ``source`` that are not read yet. In place is safe."""
    first, other = arrays.pointer(source), arrays.pointer(target)
    if arrays.is_contiguous(source) and arrays.is_contiguous(target):
        return first != other and abs(first - other) < source.nbytes
    (first, past), (other, other_past) = arrays.extent(source), arrays.extent(target)
    return first < other_past and other < past
