"""Repeated calls with a user's expression."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...arrays.maps import NUMBERS, Map, pack_of
from ...calls.addresses import MapAddresses
from ...cuda import cupy_runtime, torch_runtime
from ...types import Stream
from ..launch_cache import MISS, Entry, Form, Found, LaunchCache, given_stream, library_of
from ..prepared import BoundLaunch, Prepared

_Key = tuple[int, int, int, str]  # ids of array, out and Map, and op
_Place = tuple[int, Any, Any]  # address, shape and dtype of an array
_Given = tuple[int, int, tuple[int, ...]]  # addresses of source and target, and the words of the operands


@dataclass(frozen=True)
class _Layout:
    """The sizes of the arrays, by which addresses are checked. It is a :class:`Layout`.

    :ivar nbytes: of the result, and ``itemsize``: of its elements.
    :ivar arrays: of the operands that are arrays: index, bytes, itemsize, and if the operand may be the result itself.
    :ivar numbers: of the operands that are numbers: index, and a function that gives the bytes of a number.
    """

    nbytes: int
    itemsize: int
    arrays: tuple[tuple[int, int, int, bool], ...]
    numbers: tuple[tuple[int, Callable[[Any], bytes]], ...]

    def words(self, places: Sequence[_Place | None], values: Sequence[Any]) -> tuple[int, ...] | None:
        """The word of each operand: its array's address, or its number's bits. None for a number out of range."""
        words = [0 if place is None else place[0] for place in places]
        try:
            for index, pack in self.numbers:
                words[index] = int.from_bytes(pack(values[index]), "little")
        except (OverflowError, struct.error):
            return None
        return tuple(words)

    def settle(self, addresses: _Given, new: bool) -> MapAddresses | None:
        source, target, words = addresses
        if (source | target) % self.itemsize or 0 < abs(target - source) < self.nbytes:
            return None
        past = target + self.nbytes
        for index, size, itemsize, can_be_result in self.arrays:
            address = words[index]
            if address % itemsize:
                return None
            if address < past and target < address + size and not (can_be_result and address == target):
                return None
        return MapAddresses(source, target, words, target, target)


class MapHits:
    """The calls with an expression that have come before. The communicator's lock is held around every method."""

    def __init__(self, cache: LaunchCache) -> None:
        self._cache, self._device, self._objects = cache, cache.device, cache.objects

    def lookup(self, array: Any, mapped: tuple[Any, Any], out: Any, stream: Any) -> Found:
        """Look up a call with an expression. ``mapped``: op and Map. Returns its launch, or None, result and stream."""
        op, then = mapped
        if type(op) is not str or type(then) is not Map:
            return MISS
        key = id(array), id(out), id(then), op
        entry = self._objects.get(key)
        if entry is None:
            return self._by_place(key, array, op, out, stream, then)
        (shape, operands), values = entry.more, then._values
        if entry.read is None:
            if array.shape != shape or (out is not array and out is not None and out.shape != shape):
                return MISS
            for index, of in operands:
                if values[index].shape != of:
                    return MISS
            current = cupy_runtime.get_current_stream().ptr
        else:
            if entry.read(_tensors(array, out, values, operands)) != entry.addresses:
                self._cache.evict(key)
                return self._by_place(key, array, op, out, stream, then)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or entry.read is not None)
            if current is None:
                return MISS
        if out is not None:
            return entry.bound, out, current
        result, target = self._new(entry.form, array, current)
        if not target:
            return MISS
        source, words = entry.source
        bound = entry.to_new.get(target) or self._cache.to_new(entry, (source, target, words), target)
        return bound, result, current

    def _by_place(self, key: _Key, array: Any, op: str, out: Any, stream: Any, then: Map) -> Found:
        """Look up a call by the addresses of its arrays, when it is not found by the arrays. See :meth:`lookup`."""
        cache, looked = self._cache, self._look(array, op, out, then)
        if looked is None:
            return MISS
        of, source, target, places = looked
        form = cache.forms.get(of)
        current = None if form is None else cache.current(form.library, stream, out is None)
        words = None if form is None else form.layout.words(places, then._values)
        if form is None or current is None or words is None:
            return MISS
        result = out
        if out is None:
            result, target = self._new(form, array, current)
            if not target:
                return MISS
        addresses = source, target, words
        bound = cache.places.get((form, addresses))
        if bound is None:
            insert = partial(self._insert, key, array, out, then, (source, words))
            bound = cache.at(form, addresses, out is None, insert)
            if bound is None:
                return MISS
        return bound, result, current

    def _new(self, form: Form, array: Any, current: Stream) -> tuple[Any, int]:
        """A new result and its address, which is 0 if there is none."""
        if not self._cache.can_allocate(current):
            return None, 0
        made: tuple[Any, int] = form.library.empty_like(array, self._device)
        return made

    def _look(
        self, array: Any, op: Any, out: Any, then: Map
    ) -> tuple[Any, int, int, list[_Place | None]] | None:  # fmt: skip
        """The key of a call's form, the addresses of array and out, and the places of the operands."""
        device, plain = self._device, library_of(array).plain
        place = plain(array, device)
        other = place if out is array or out is None else plain(out, device)
        if place is None or other is None or other[1] != place[1] or other[2] != place[2]:
            return None
        key: list[Any] = [op, place[1], place[2], then._key]
        operands: list[_Place | None] = []
        for value in then._values:
            at = None
            if not issubclass(type(value), NUMBERS):
                at = plain(value, device)
                if at is None:
                    return None
                key += at[1], at[2]
            operands.append(at)
        return tuple(key), place[0], other[0], operands

    def _insert(
        self, key: _Key, array: Any, out: Any, then: Map, source: Any, form: Form, bound: BoundLaunch
    ) -> None:  # fmt: skip
        values = then._values
        operands = [(index, one.shape) for index, one in enumerate(values) if not issubclass(type(one), NUMBERS)]
        tensors = _tensors(array, out, values, operands)
        self._cache.insert(key, Entry(form, bound, source, (array.shape, operands)), [*tensors, then], tensors)

    def form_of(self, given: Any, _result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path."""
        array, op, out, then, sms = given
        if sms is not None:
            return None
        if type(op) is not str or type(then) is not Map or not prepared.nbytes:
            return None
        looked, library = self._look(array, op, out, then), library_of(array)
        if looked is None:
            return None
        key, _, _, places = looked
        arrays, numbers = [], []
        for index, (value, at) in enumerate(zip(then._values, places, strict=True)):
            if at is None:
                numbers.append((index, pack_of(type(value), prepared.request.epilogue.operands[index].dtype)))
            else:  # a kernel after another all-reduce reads it when that has written the result
                can_be_result = not prepared.hands_on and at[1:] == (array.shape, array.dtype)
                arrays.append((index, value.nbytes, library.dtype_of(at[2]).itemsize, can_be_result))
        itemsize = library.dtype_of(array.dtype).itemsize
        return key, Form(prepared, library, _Layout(prepared.nbytes, itemsize, tuple(arrays), tuple(numbers)))


def _tensors(array: Any, out: Any, values: Sequence[Any], operands: Sequence[tuple[int, Any]]) -> list[Any]:
    """The arrays of a call. ``operands``: the index among ``values`` and the shape of each operand that is an array."""
    found = [array, *(values[index] for index, _ in operands)]
    if out is not array and out is not None:
        found.append(out)
    return found
