"""What a call may be given, checked before anything is launched. The communicator adds rank and call to messages."""

from __future__ import annotations

from typing import Any

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


def check_out(array: Any, out: Any) -> None:
    """:raises ArgumentError: if ``out`` has not ``array``'s shape and dtype."""
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ArgumentError(
            f"out must have array's shape {array.shape} and dtype {array.dtype}; found {out.shape} and {out.dtype}"
        )


def check_device(ordinal: int, array: Any, name: str) -> None:
    """:raises ArgumentError: if a device array (argument ``name``) lies on another GPU than the communicator's."""
    if arrays.device_of(array) != ordinal:
        raise ArgumentError(
            f"{name} must lie on this communicator's GPU {ordinal}; found one on GPU "
            f"{arrays.device_of(array)}. Move it, or make the communicator with device="
        )


def overlap_in_part(source: Any, target: Any) -> bool:
    """Whether writing ``target`` could change parts of ``source`` that are not read yet. In place is safe."""
    first, other = arrays.pointer(source), arrays.pointer(target)
    if arrays.is_contiguous(source) and arrays.is_contiguous(target):
        return first != other and abs(first - other) < source.nbytes
    (first, past), (other, other_past) = arrays.extent(source), arrays.extent(target)
    return first < other_past and other < past
