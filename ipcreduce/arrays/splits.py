"""The arguments of ``allgather``, ``reduce_scatter`` and ``broadcast``: which part of an array each rank has."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..calls.request import Collective, Member, Moved, Split
from ..cuda import torch_runtime
from ..dtypes import kind_name, op_name
from ..errors import ArgumentError, naming_member, reading
from ..texts import shown
from . import lists, views
from .operands import check_own_elements, check_writable

_LONGEST = 1 << 47  # more elements than any array has along an axis
Shape = tuple[int, ...]
_Made = TypeVar("_Made", bound=Any)
_TOO_MANY_BYTES = 1 << 63  # for an array of any library
# The arguments of a call but for its arrays, as they are given: the collective, op, axis, sizes, root and sms. No
# NamedTuple, which would take each repeated call 0.2 us to make.
SplitKey = tuple[Collective, Any, Any, Any, Any, Any]


def is_simple(key: SplitKey) -> bool:
    """True if a call's arguments can be compared quickly, and safely: all are str, int, None or tuples of int."""
    _, op, axis, sizes, root, sms = key
    return (
        (op is None or type(op) is str)
        and type(axis) is int is type(root)
        and (sizes is None or (type(sizes) is tuple and {*map(type, sizes)} == {int}))
        and (sms is None or type(sms) is int)
    )


class SplitCall(NamedTuple):
    """The arguments, as the program gave them.

    :ivar out: if the collective is rooted, the array itself. :ivar rank: this process's, of ``n`` ranks.
    """

    array: Any
    out: Any
    key: SplitKey
    rank: int
    n: int

    @property
    def collective(self) -> Collective:
        """The collective, by which the arrays are split."""
        return self.key[0]

    @property
    def op(self) -> Any:
        """The op of a collective that reduces."""
        return self.key[1]

    @property
    def sms(self) -> Any:
        """The most blocks that exchange data; None for as many as are fastest alone."""
        return self.key[5]

    @property
    def is_list(self) -> bool:
        """True for a list of arrays."""
        return lists.is_list(self.array)

    @property
    def arrays(self) -> Sequence[Any]:
        """The arrays of the call."""
        return self.array if self.is_list else [self.array]

    @property
    def outputs(self) -> Sequence[Any]:
        """The output of each array: None for a new one. :raises ArgumentError: see :func:`lists.outputs`."""
        return lists.outputs(self.array, self.out) if self.is_list else [self.out]

    @property
    def first(self) -> Any:
        """The array whose library decides the current stream; None for an empty list."""
        return next(iter(self.arrays), None)

    def on_device(self) -> bool | None:
        """True if all arrays lie on a GPU, False if they lie on the host, None for an empty list."""
        return lists.on_device(self.array) if self.is_list else views.is_device(self.array)

    def check_streams(self) -> None:
        """Check that the arrays' libraries have one current stream. :raises ArgumentError: if not."""
        lists.check_streams(self.arrays)

    def checked(self, make: Callable[[SplitCall, Split, Any, Any], _Made]) -> tuple[list[_Made], Split]:
        """Check the arguments. Returns what ``make`` makes of each array and its output, and the split of the call.

        The axis of that is counted from 0, so that 1 and -1 are one call, unless a list's arrays differ in that.

        :raises ArgumentError: if an argument is wrong.
        """
        split, made = self._split(), []
        for index, (array, out) in enumerate(zip(self.arrays, self.outputs, strict=True)):
            with naming_member(index if self.is_list else None):
                made.append(make(self, split, array, out))
        if self.is_list and self.out is not None:
            lists.check_apart([(one.source, one.target) for one in made])
        found = {one.splitting.split for one in made}
        return made, found.pop() if len(found) == 1 else split

    def _split(self) -> Split:
        collective, _, axis, sizes, root, _ = self.key
        if collective.rooted:
            root = _whole_number(root, "root")
            if not 0 <= root < self.n:
                raise ArgumentError(f"root is {root}. Pass a rank from 0 to {self.n - 1}")
            return Split(collective, root=root)
        if sizes is not None:
            with reading("sizes", sizes):
                if not isinstance(sizes, (list, tuple, np.ndarray)) or len(sizes) != self.n:
                    given = f"has {len(sizes)} members" if isinstance(sizes, (list, tuple)) else f"is {shown(sizes)}"
                    raise ArgumentError(f"sizes {given}. Pass {self.n} ints, the length of each rank's part along axis")
                sizes = tuple(_whole_number(size, "a member of sizes") for size in sizes)
            if min(sizes) < 0:
                raise ArgumentError(f"sizes is {[*sizes]}. Pass lengths of 0 or more")
        return Split(collective, _whole_number(axis, "axis"), sizes)


def _whole_number(value: Any, name: str) -> int:
    with reading(name, value), suppress(TypeError):
        if not isinstance(value, (bool, np.bool_)) and abs(number := operator.index(value)) < _LONGEST:
            return number
    raise ArgumentError(f"{name} is {shown(value)}. Pass an int of at most 47 bits")


def counted(axis: int, ndim: int) -> int:
    """The axis counted from 0. :raises ArgumentError: if an array with ``ndim`` dimensions has it not."""
    if not -ndim <= axis < ndim:
        advice = f"Pass an axis from {-ndim} to {ndim - 1}" if ndim else "Pass an array with one"
        raise ArgumentError(f"axis is {axis}, and array has {ndim} dimensions. {advice}")
    return axis % ndim


class Splitting(NamedTuple):
    """One array of a call, and how it is split.

    :ivar split: with its axis counted from 0. :ivar source: NumPy's or CuPy's array.
    :ivar dtype: the name of its dtype; "" for that of ``source``.
    :ivar whole: the shape of the whole array. :ivar part: of this rank's part.
    """

    call: SplitCall
    split: Split
    source: Any
    dtype: str
    whole: Shape
    part: Shape

    @classmethod
    def of(cls, call: SplitCall, split: Split, source: Any, dtype: str) -> Splitting:
        """The split of this array.

        :raises ArgumentError: if it cannot be split so, or if there can be no such whole array.
        """
        if call.collective.rooted:
            return cls(call, split, source, dtype, source.shape, source.shape)
        if not source.ndim and call.collective.gathers:
            source = source.reshape(1)  # a number counts as an array of one element
        shape, axis = source.shape, counted(split.axis, source.ndim)
        whole, part = ((*shape[:axis], length, *shape[axis + 1 :]) for length in _lengths(call, split, shape[axis]))
        if math.prod(filter(None, whole)) * source.itemsize >= _TOO_MANY_BYTES:
            raise ArgumentError(f"the whole array would have shape {whole}, which no memory holds. Pass shorter parts")
        return cls(call, split._replace(axis=axis), source, dtype, whole, part)

    @property
    def result(self) -> Shape:
        """The shape of the result."""
        return self.whole if self.call.collective.gathers else self.part

    @property
    def places(self) -> list[tuple[slice, ...]]:
        """The index of each rank's part in the whole array."""
        return self.split.places(self.whole, self.call.n)

    def compared(self) -> tuple[str, Member | Moved]:
        """The op, "" where nothing is reduced, and the array as the ranks compare it.

        :raises ArgumentError: if it cannot be reduced so.
        """
        if not self.call.collective.reduces:
            part = self.part if self.split.sizes is None else None
            return "", Moved(self.whole, self.dtype or str(self.source.dtype), self.source.itemsize, part)
        op = op_name(self.call.op, self.source.dtype)
        return op, Member(self.whole, kind_name(self.source.dtype, op))

    def check_in_place(self, target: Any, array: Any) -> None:
        """Check an array that is its own output, as :func:`check_writable` does, unless this rank is the root.

        :raises ArgumentError: if it cannot be written.
        """
        if self.call.rank != self.split.root:
            check_writable(target, array, "array")
            check_own_elements(self.source, "array")

    def check_output(self, target: Any) -> None:
        """Check the form and the memory of an output.

        :param target: the array over its memory.
        :raises ArgumentError: if it has another form, or shares memory with ``source`` other than in this rank's part.
        """
        source, gathers = self.source, self.call.collective.gathers
        if target.shape != self.result or target.dtype != source.dtype:
            raise ArgumentError(
                f"out has shape {target.shape} and dtype {target.dtype}, but the result has shape {self.result} and "
                f"dtype {source.dtype}. Pass an out of that form, or leave out= away for a new array"
            )
        check_own_elements(target)
        part, whole = (source, target) if gathers else (target, source)
        if views.share_memory(source, target) and not views.same_elements(whole[self.places[self.call.rank]], part):
            what = "array this rank's part of out" if gathers else "out this rank's part of array"
            raise ArgumentError(f"out shares memory with array. Pass an out that shares none, or make {what}")


def _lengths(call: SplitCall, split: Split, length: int) -> tuple[int, int]:
    """The lengths of the whole array and of this rank's part along the axis. ``length``: that of the rank's array."""
    gathers, sizes, it = call.collective.gathers, split.sizes, f"array has length {length} along axis {split.axis}"
    if sizes is None:
        if gathers:
            return length * call.n, length
        if length % call.n:
            raise ArgumentError(
                f"{it}, which {call.n} ranks do not divide. Pass sizes=, the length of each rank's part"
            )
        return length, length // call.n
    whole, part = sum(sizes), sizes[call.rank]
    if gathers and part != length:
        raise ArgumentError(
            f"{it}, but sizes={[*sizes]} says {part} for rank {call.rank}. Pass the length of each rank's array"
        )
    if not gathers and whole != length:
        raise ArgumentError(f"{it}, but sizes={[*sizes]} makes {whole}. Pass lengths that make up the array's")
    return whole, part


def readable(call: SplitCall, array: Any) -> tuple[Any, str]:
    """The array to read, and its dtype's name; "" for that of its view. PyTorch's floats of 8 bits become bytes."""
    moved = array if call.collective.reduces else torch_runtime.float8_as_bytes(array)
    return moved, "" if moved is array else str(array.dtype).removeprefix("torch.")
