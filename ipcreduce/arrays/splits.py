"""The arguments of ``allgather``, ``reduce_scatter`` and ``broadcast``: which part of an array each rank has."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..calls.request import Split
from ..cuda import torch_runtime
from ..errors import ArgumentError, reading
from ..texts import shown
from . import lists, views
from .operands import check_own_elements

GATHER, SCATTER, BROADCAST = "all-gather", "reduce-scatter", "broadcast"
_LONGEST = 1 << 47  # more elements than any array has along an axis
Shape = tuple[int, ...]
_TOO_MANY_BYTES = 1 << 63  # for an array of any library
# The arguments of a call but for its arrays, as they are given: the collective, op, axis, sizes, root and sms.
SplitKey = tuple[str, Any, Any, Any, Any, Any]


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
    """The arguments, as the program gave them. :ivar rank: this process's, of ``n`` ranks."""

    array: Any
    out: Any
    key: SplitKey
    rank: int
    n: int

    @property
    def collective(self) -> str:
        """The name of the collective: :data:`GATHER`, :data:`SCATTER` or :data:`BROADCAST`."""
        return self.key[0]

    @property
    def reduces(self) -> bool:
        """True for a reduce-scatter: the others move bytes."""
        return self.key[0] == SCATTER

    @property
    def op(self) -> Any:
        """The op of a reduce-scatter."""
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
        if self.collective == BROADCAST:  # the output of a broadcast is its array
            return self.arrays
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

    def checked(self) -> Splitting:
        """Check the arguments that say how arrays are split. :raises ArgumentError: if one is wrong."""
        collective, _, axis, sizes, root, _ = self.key
        if collective == BROADCAST:
            root = _whole_number(root, "root")
            if not 0 <= root < self.n:
                raise ArgumentError(f"root is {root}. Pass a rank from 0 to {self.n - 1}")
            return Splitting(Split(BROADCAST, root=root), self.rank, self.n)
        if sizes is not None:
            with reading("sizes", sizes):
                if not isinstance(sizes, (list, tuple, np.ndarray)) or len(sizes) != self.n:
                    given = f"has {len(sizes)} members" if isinstance(sizes, (list, tuple)) else f"is {shown(sizes)}"
                    raise ArgumentError(f"sizes {given}. Pass {self.n} ints, the length of each rank's part along axis")
                sizes = tuple(_whole_number(size, "a member of sizes") for size in sizes)
            if min(sizes) < 0:
                raise ArgumentError(f"sizes is {[*sizes]}. Pass lengths of 0 or more")
        return Splitting(Split(collective, _whole_number(axis, "axis"), sizes), self.rank, self.n)


def _whole_number(value: Any, name: str) -> int:
    with reading(name, value), suppress(TypeError):
        if not isinstance(value, (bool, np.bool_)) and abs(number := operator.index(value)) < _LONGEST:
            return number
    raise ArgumentError(f"{name} is {shown(value)}. Pass an int of at most 47 bits")


class Splitting(NamedTuple):
    """A split, for the arrays of one rank."""

    split: Split
    rank: int
    n: int

    def of(self, array: Any) -> tuple[Splitting, Shape, Shape]:
        """The split of this array, its axis counted from 0; the shapes of the whole array and of the part.

        :raises ArgumentError: if it cannot be split so, or if there can be no such whole array.
        """
        shape = array.shape
        collective, axis, sizes, _ = self.split
        if collective == BROADCAST:
            return self, shape, shape
        if not shape and collective == GATHER:
            shape = (1,)  # a number counts as an array of one element
        if not -len(shape) <= axis < len(shape):
            raise ArgumentError(
                f"axis is {axis}, and array has {len(shape)} dimensions. "
                + (f"Pass an axis from {-len(shape)} to {len(shape) - 1}" if shape else "Pass an array with one")
            )
        axis %= len(shape)
        whole = part = shape[axis]
        if collective == GATHER:
            whole = self._gathered(part)
        else:
            part = self._scattered(whole)
        found = self._replace(split=self.split._replace(axis=axis, sizes=sizes))
        before, behind = shape[:axis], shape[axis + 1 :]
        everything = (*before, whole, *behind)
        if math.prod(filter(None, everything)) * array.itemsize >= _TOO_MANY_BYTES:
            raise ArgumentError(
                f"the whole array would have shape {everything}, which no memory holds. Pass shorter parts"
            )
        return found, everything, (*before, part, *behind)

    def _gathered(self, length: int) -> int:
        sizes = self.split.sizes
        if sizes is None:
            return length * self.n
        if sizes[self.rank] != length:
            raise ArgumentError(
                f"array has length {length} along axis {self.split.axis}, but sizes={[*sizes]} says "
                f"{sizes[self.rank]} for rank {self.rank}. Pass the length of each rank's array"
            )
        return sum(sizes)

    def _scattered(self, length: int) -> int:
        sizes = self.split.sizes
        if sizes is None:
            if length % self.n:
                raise ArgumentError(
                    f"array has length {length} along axis {self.split.axis}, which {self.n} ranks do not divide. Pass "
                    "sizes=, the length of each rank's part"
                )
            return length // self.n
        if sum(sizes) != length:
            raise ArgumentError(
                f"array has length {length} along axis {self.split.axis}, but sizes={[*sizes]} makes {sum(sizes)}. "
                "Pass lengths that make up the array's"
            )
        return sizes[self.rank]

    def place(self, shape: Shape, rank: int) -> tuple[slice, ...]:
        """The index of a rank's part in a whole array of this shape."""
        _, axis, sizes, _ = self.split
        lengths = sizes or (shape[axis] // self.n,) * self.n
        begin = [*accumulate(lengths, initial=0)][rank]
        return (*(slice(None),) * axis, slice(begin, begin + lengths[rank]))


def readable(call: SplitCall, array: Any) -> tuple[Any, str]:
    """The array to read, and its dtype's name; "" for that of its view. PyTorch's floats of 8 bits become bytes."""
    moved = array if call.reduces else torch_runtime.float8_as_bytes(array)
    return moved, "" if moved is array else str(array.dtype).removeprefix("torch.")


def check_output(call: SplitCall, splitting: Splitting, whole: Shape, source: Any, target: Any) -> None:
    """Check the output of an all-gather or a reduce-scatter: its form and its memory.

    :param whole: the shape of the whole array. :param target: the array over the memory of the output.
    :raises ArgumentError: if it has another form, or shares memory with ``source`` other than in this rank's own place.
    """
    place, gathers = splitting.place(whole, splitting.rank), call.collective == GATHER
    form = whole if gathers else source[place].shape
    if target.shape != form or target.dtype != source.dtype:
        raise ArgumentError(
            f"out has shape {target.shape} and dtype {target.dtype}, but the result has shape {form} and dtype "
            f"{source.dtype}. Pass an out of that form, or leave out= away for a new array"
        )
    check_own_elements(target)
    own, other = (target[place], source) if gathers else (source[place], target)
    if views.share_memory(source, target) and not views.same_elements(own, other):
        what = "array this rank's part of out" if gathers else "out this rank's part of array"
        raise ArgumentError(f"out shares memory with array. Pass an out that shares none, or make {what}")
