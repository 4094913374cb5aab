"""The arguments of a call on the host as NumPy arrays that can be reduced: of numbers, CPU tensors, bool and complex.

The error messages here name neither rank nor call: the communicator adds both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from ..calls.request import Request
from ..cuda import torch_runtime
from ..dtypes import kind_name, op_name, reduced_as
from ..errors import ArgumentError, reading
from ..texts import kind_of
from . import views
from .operands import check_own_elements, check_same_kind, check_writable

Array = np.ndarray[Any, Any]
Part = tuple[Array, str, Array | None]  # an array to be reduced, the op, and the array for the result if there is one


class HostCall(Protocol):
    """The arguments of any kind of call on the host as NumPy arrays, checked.

    :ivar request: what the ranks compare.
    """

    @property
    def request(self) -> Request: ...

    def parts(self) -> Iterable[Any]:
        """The all-reduces to make, one after the other: each a :data:`Part`. Or, of a split call, ``SplitParts``."""

    def result(self, reduced: Sequence[Any], /) -> Any:
        """The call's result. ``reduced``: the result of each part, in the part's third member if that is not None."""


def _int64(value: int) -> np.int64:
    try:
        return np.int64(value)
    except OverflowError:
        raise ArgumentError(
            f"an int of {value.bit_length()} bits does not fit into int64. Pass float(it)"
            + (", or numpy.uint64(it)" if 0 < value < 1 << 64 else "")
        ) from None


# Python's number types, and how each becomes NumPy's. A bool is also an int, so bool comes first.
_NUMBERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, np.bool_),
    (int, _int64),
    (float, np.float64),
    (complex, np.complex128),
)


class HostOperands:
    """The arrays of a host all-reduce.

    ``source`` is reduced by ``op`` into ``target``, or into a new array if ``target`` is None. Both are NumPy arrays in
    the caller's memory, of the same shape and of a dtype in ``dtypes.DTYPES``. ``kind`` and ``shape`` are those of the
    array that the caller passed: the ranks compare them.
    """

    __slots__ = ("_array", "_out", "_viewed", "kind", "op", "shape", "source", "target")

    def __init__(self, array: Any, op: Any, out: Any) -> None:
        """Take the arguments of ``allreduce(array, op, out=out)``. :raises ArgumentError: if one is wrong."""
        self._array, self._out = array, out
        source = as_numpy(array, "array")
        self.op = op_name(op, source.dtype)
        self.kind = kind_name(source.dtype, self.op)
        target = None
        if out is not None:  # a number cannot hold a result, even if out is array
            in_place = out is array and not isinstance(array, views.NUMBERS)
            target = source if in_place else _target(array, source, out)
            check_writable(target, out)
            if not target.flags.c_contiguous:
                check_own_elements(target)
        self.shape = source.shape
        dtype = reduced_as(self.kind)
        self._viewed = dtype != self.kind
        if self._viewed:
            source = _parts(source, dtype)
            target = None if target is None else _parts(target, dtype)
        self.source, self.target = source, target

    def result(self, reduced: Array) -> Any:
        """The object to return: ``out`` if there is one, or else ``reduced`` as the library and dtype of ``array``.

        :param reduced: the result, C-contiguous.
        """
        if self._out is not None:
            return self._out
        if self._viewed:
            reduced = reduced.view(self.kind).reshape(self.shape)
        if isinstance(self._array, np.ndarray):
            return reduced
        if not isinstance(self._array, views.NUMBERS):
            return torch_runtime.of_numpy(reduced) if torch_runtime.is_tensor(self._array) else reduced
        return reduced[()] if isinstance(self._array, np.generic) else reduced.item()


def as_numpy(array: Any, what: str) -> Array:
    """A plain NumPy array that holds a number, or that lies over the memory of an array of any kind.

    It is of no subclass: numpy.matrix, say, indexes and reshapes in its own way.

    :raises ArgumentError: for an array whose memory is not its whole value, such as a masked one.
    """
    if type(array) is np.ndarray:
        return array
    module = sys.modules.get("numpy.ma")  # reading np.ma would import that module, perhaps within a signal handler
    if isinstance(array, getattr(module, "MaskedArray", ())):
        remedy = "Fill it first" if what == "array" else "Pass its .data"
        raise ArgumentError(f"{what} is a masked array, whose masked elements have no value. {remedy}")
    if isinstance(array, np.ndarray):
        views.check_plain(array, np.ndarray, what)
    if isinstance(array, (np.ndarray, np.generic)):
        return np.asarray(array)
    for number, convert in _NUMBERS:
        if isinstance(array, number):
            with reading(what, array):
                return np.asarray(convert(array))
    return views.host_view(array, what)


def _target(array: Any, source: Array, out: Any) -> Array:
    """The NumPy array over ``out``. :raises ArgumentError: if ``out`` is not on the host or does not fit ``source``."""
    if isinstance(array, views.NUMBERS):
        raise ArgumentError(
            f"the result of a number is a number, which cannot go into out, {kind_of(out)}. Leave out= "
            "away, or pass array as an array without dimensions: numpy.asarray(it)"
        )
    target = view_of_out(out)
    check_same_kind(source, target)
    return target


def view_of_out(out: Any) -> Array:
    """The NumPy array over ``out``. :raises ArgumentError: if it lies on a GPU, or is a number."""
    if views.is_device(out, "out") or isinstance(out, views.NUMBERS):
        raise ArgumentError(
            f"array lies on the host, but out is {kind_of(out)}. Pass a NumPy array or a CPU tensor as "
            "out, or leave out= away for a new array"
        )
    return as_numpy(out, "out")


def _parts(array: Array, dtype: str) -> Array:
    """The same memory as numbers of ``dtype``: a bool's byte, or the two parts of a complex on a new last axis."""
    if array.dtype == bool:
        return array.view(dtype)
    parts = array.real  # array.view(dtype) would need a contiguous last axis
    return np.lib.stride_tricks.as_strided(parts, (*array.shape, 2), (*array.strides, parts.itemsize))
