"""The memory of calls with an expression: a call that has come before is ready at once, as in known_calls.py.

A call on arrays and with a ``Map`` that have come before is known by these objects. Any other call is known by its
kind: by all that is the same for other addresses and other numbers, too.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.maps import NUMBERS, Map, pack_of
from ..cuda import cupy_runtime, torch_lists, torch_runtime
from ..cuda.expressions import Expression
from ..types import Stream
from .known_calls import MOST_TARGETS, NOT_READY, Mapped, Ready, given_stream, keep, nothing
from .maps import PreparedMap
from .stream_order import StreamOrder

Key = tuple[Any, ...]
_Objects = tuple[int, int, int, str]  # ids of array, out and Map, and op
_Place = tuple[int, Any, Any]  # address, shape and dtype of an array
# From a prepared call, the addresses of source and target, the words of the operands, and whether all have come before.
MakeReadyMap = Callable[[PreparedMap, int, int, Sequence[int], bool], Ready]


@dataclass(frozen=True, eq=False)
class _Kind:
    """A call without its addresses and numbers.

    :ivar nbytes: of the result, and ``itemsize``: of its elements.
    :ivar arrays: of the operands: index, bytes, itemsize, and whether the result itself can be this operand.
    :ivar numbers: of the operands: index, and what gives the bytes of a number.
    """

    prepared: PreparedMap
    nbytes: int
    itemsize: int
    arrays: tuple[tuple[int, int, int, bool], ...]
    numbers: tuple[tuple[int, Callable[[Any], bytes]], ...]

    def words(self, places: Sequence[_Place | None], values: Sequence[Any]) -> tuple[int, ...] | None:
        """The words of the operands: see :class:`ipcreduce.arrays.maps.DeviceMap`. None for a number out of range."""
        words = [0 if place is None else place[0] for place in places]
        try:
            for index, pack in self.numbers:
                words[index] = int.from_bytes(pack(values[index]), "little")
        except (OverflowError, struct.error):
            return None
        return tuple(words)

    def fits(self, source: int, target: int, words: Sequence[int]) -> bool:
        """True if kernels take arrays at these addresses as they are, and write to none before they have read it."""
        if (source | target) % self.itemsize or 0 < abs(target - source) < self.nbytes:
            return False
        past = target + self.nbytes
        for index, size, itemsize, can_be_result in self.arrays:
            address = words[index]
            if address % itemsize:
                return False
            if address < past and target < address + size and not (can_be_result and address == target):
                return False
        return True


class _KnownMap:
    """A call from one array into another, the same or a new one, with one Map, as long as these live.

    :ivar library: cupy_runtime or torch_runtime, of which all arrays are.
    :ivar places: of array and out. CuPy's arrays may change only the shape.
    :ivar operands: the index and the place of each operand that is an array. The Map holds it.
    :ivar read: for tensors from their second call on: see :func:`torch_lists.reader`.
    :ivar addresses: what it has to return.
    :ivar ready: the launches to out, or to new results, by their addresses.
    """

    __slots__ = (
        "addresses", "array", "kind", "library", "operands", "out", "places", "read", "ready", "then", "words",
    )  # fmt: skip

    def __init__(
        self, array: Any, out: Any, then: Map, library: Any, places: tuple[_Place, _Place],
        operands: Sequence[_Place | None], kind: _Kind, words: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.array: Callable[[], Any] = weakref.ref(array)
        self.out: Callable[[], Any] = nothing if out is None else weakref.ref(out)
        self.then: Callable[[], Any] = weakref.ref(then)
        self.library, self.places, self.kind, self.words = library, places, kind, words
        self.operands = tuple((index, place) for index, place in enumerate(operands) if place is not None)
        self.read: Callable[[Sequence[Any]], list[int] | None] | None = None
        self.addresses = [places[0][0], *(place[0] for _, place in self.operands)]
        if out is not array and out is not None:
            self.addresses.append(places[1][0])
        self.ready: dict[int, Ready] = {}

    def are_unmoved(self, array: Any, out: Any, values: Sequence[Any], device: int) -> bool:
        """True if the tensors of a call are as they were, and not in a trace."""
        tensors = [array, *(values[index] for index, _ in self.operands)]
        if out is not array and out is not None:
            tensors.append(out)
        if self.read is None:
            self.read = torch_lists.reader(tensors, device)
        return self.read is not None and self.read(tensors) == self.addresses


class KnownMaps:
    """The calls with an expression on one backend that have come before. The communicator's lock is held."""

    def __init__(self, device: int, order: StreamOrder, make_ready: MakeReadyMap) -> None:
        self._device, self._order, self._make_ready = device, order, make_ready
        self._kinds: dict[Key, _Kind] = {}
        # None: these ids belong to short-lived objects, whose calls are not kept.
        self.by_objects: dict[_Objects, _KnownMap | None] = {}
        self.by_places: dict[tuple[_Kind, int, int, tuple[int, ...]], Ready | None] = {}  # None: it has come once

    def find(self, array: Any, mapped: Mapped, out: Any, stream: Any) -> tuple[Ready | None, Any, Stream]:
        """Do the same as :meth:`KnownCalls.find` for a call with an expression."""
        op, then = mapped.op, mapped.then
        if type(op) is not str:
            return NOT_READY
        key = id(array), id(out), id(then), op
        known = self.by_objects.get(key)
        if known is None:
            return self._unknown(key, array, op, out, stream, then)
        if known.array() is not array or known.out() is not out or known.then() is not then:
            self.by_objects[key] = None
            return self._unknown(key, array, op, out, stream, then)
        library, values, (place, other) = known.library, then._values, known.places
        if library is cupy_runtime:
            shape = place[1]
            if array.shape != shape or (out is not array and out is not None and out.shape != shape):
                return NOT_READY
            for index, at in known.operands:
                if values[index].shape != at[1]:
                    return NOT_READY
            current = cupy_runtime.get_current_stream().ptr
        else:
            if not known.are_unmoved(array, out, values, self._device):
                del self.by_objects[key]
                return self._unknown(key, array, op, out, stream, then)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or library is torch_runtime)
            if current is None:
                return NOT_READY
        result, target = out, other[0]
        if out is None:
            result, target = self._new(array, library, current)
            if not target:
                return NOT_READY
        ready = known.ready.get(target)
        if ready is None:
            ready = self._at(known.kind, place[0], target, known.words)
            if self.by_places[known.kind, place[0], target, known.words] is not None:
                keep(known.ready, target, ready, MOST_TARGETS)
        return ready, result, current

    def _unknown(
        self, key: _Objects, array: Any, op: str, out: Any, stream: Any, then: Map
    ) -> tuple[Ready | None, Any, Stream]:  # fmt: skip
        """Do the same as :meth:`find` for objects that have not come before."""
        library = _library(array)
        looked = self._look(array, op, out, then, library)
        if looked is None:
            return NOT_READY
        of, places, operands = looked
        kind = self._kinds.get(of)
        if kind is None:
            return NOT_READY
        current = library.stream_handle(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or library is torch_runtime)
        words = kind.words(operands, then._values)
        if current is None or words is None:
            return NOT_READY
        source, result, target = places[0][0], out, places[1][0]
        if out is None:
            result, target = self._new(array, library, current)
        if not target or not kind.fits(source, target, words):
            return NOT_READY
        if key not in self.by_objects:
            keep(self.by_objects, key, _KnownMap(array, out, then, library, places, operands, kind, words))
        return self._at(kind, source, target, words), result, current

    def _look(
        self, array: Any, op: Any, out: Any, then: Map, library: Any
    ) -> tuple[Key, tuple[_Place, _Place], list[_Place | None]] | None:  # fmt: skip
        """The key of a call's kind, and the places of array and out, and of the operands. None if it has no kind."""
        device, plain = self._device, library.plain
        place = plain(array, device)
        other = place if out is array or out is None else plain(out, device)
        if place is None or other is None or other[1] != place[1] or other[2] != place[2]:
            return None
        key: list[Any] = [op, place[1], place[2], then._key]
        operands: list[_Place | None] = []
        for value in then._values:
            at = None
            if not isinstance(value, NUMBERS):
                at = plain(value, device)
                if at is None:
                    return None
                key += at[1], at[2]
            operands.append(at)
        return tuple(key), (place, other), operands

    def _new(self, array: Any, library: Any, current: Stream) -> tuple[Any, int]:
        """A new result and its address, which is 0 if there is none."""
        if current > 1 and self._order.quick(current) is None:
            return None, 0  # a capture, say, into which allocations go their own way
        made: tuple[Any, int] = library.empty_like(array, self._device)
        return made

    def _at(self, kind: _Kind, source: int, target: int, words: tuple[int, ...]) -> Ready:
        """The launch at a place: made anew the first two times, and then kept."""
        at = kind, source, target, words
        ready = self.by_places.get(at)
        if ready is None:
            again = at in self.by_places
            ready = self._make_ready(kind.prepared, source, target, words, again)
            keep(self.by_places, at, ready if again else None)
        return ready

    def learn(self, array: Any, op: Any, out: Any, then: Map, prepared: PreparedMap, expression: Expression) -> None:
        """Remember the kind of a call that was made by the usual way, if calls like it can be ready."""
        first = prepared.first
        if type(op) is not str or type(then) is not Map or (first is not None and first.through is not None):
            return
        library = _library(array)
        looked = self._look(array, op, out, then, library)
        if looked is None or looked[0] in self._kinds:
            return
        key, (place, _), operands = looked
        arrays, numbers = [], []
        for index, (value, at) in enumerate(zip(then._values, operands, strict=True)):
            if at is None:
                numbers.append((index, pack_of(type(value), expression.operands[index].dtype)))
            else:  # the kernel behind another all-reduce reads it when that has written the result
                can_be_result = first is None and at[1:] == place[1:]
                arrays.append((index, value.nbytes, library.dtype_of(at[2]).itemsize, can_be_result))
        itemsize = library.dtype_of(place[2]).itemsize
        keep(self._kinds, key, _Kind(prepared, prepared.nbytes, itemsize, tuple(arrays), tuple(numbers)))


def _library(array: Any) -> Any:
    """The library of an array, which all others have to be of, too."""
    return cupy_runtime if type(array) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime
