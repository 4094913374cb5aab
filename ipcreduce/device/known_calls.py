"""The memory of eager calls: a call on arrays that have come before, or lie where others have, is ready at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..calls.fingerprint import Fingerprint
from ..cuda import cupy_runtime, torch_lists, torch_runtime
from ..types import DEFAULT_STREAM, Stream
from .stream_order import StreamOrder

_K = TypeVar("_K")
_V = TypeVar("_V")
MOST = 4096  # entries of a table
MOST_TARGETS = 8  # of the results of one known call: an allocator uses few in turn
NOT_READY = None, None, DEFAULT_STREAM


class Mapped:
    """The op of a call with an expression, and the expression: a ``Map``."""

    __slots__ = "op", "then"

    def __init__(self, op: Any, then: Any) -> None:
        self.op, self.then = op, then


class Ready:
    """A call whose launch is ready: ``launch(argument, stream)``. Without an argument it cannot be made any more."""

    __slots__ = ("__weakref__", "argument", "launch", "what")

    def __init__(self, what: Fingerprint, launch: Callable[[Any, Stream], Any], argument: Any) -> None:
        self.what, self.launch, self.argument = what, launch, argument


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a backend knows of an all-reduce before its addresses are given.

    :ivar by: the names of the kernels, or of the library, that run it.
    :ivar fast: it has bytes, and its kernels take the arrays as they are.
    :ivar through: the dtype as which it is reduced, if not the array's own.
    """

    what: Fingerprint
    by: str
    nbytes: int
    fast: bool
    through: np.dtype[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedList:
    """All that a backend knows of an all-reduce of a list of arrays before their addresses are given.

    :ivar through: by member, as for :class:`Prepared`.
    """

    what: Fingerprint
    by: str
    through: tuple[np.dtype[Any] | None, ...]


# From a prepared call, the addresses of source and target, and whether these have come before.
MakeReady = Callable[[Any, int, int, bool], Ready]
_Place = tuple[int, int, Any, Any, str]  # of a call: source, target, shape, dtype, op


def keep(table: dict[_K, _V], key: _K, value: _V, most: int | None = None) -> _V:
    """Put an entry into a table. A full one is emptied first: calls that go on soon fill it again."""
    if len(table) >= (most or MOST) and key not in table:
        table.clear()
    table[key] = value
    return value


class _KnownCall:
    """An eager call from one array into another, the same or a new one, as long as these live.

    :ivar library: cupy_runtime or torch_runtime.
    :ivar places: address, shape and dtype of array and out; of CuPy's arrays only the shape may change.
    :ivar read: for tensors from their second call on: see :func:`torch_lists.reader`.
    :ivar addresses: what it has to return.
    :ivar to_out: the launch to out; None until this call has come twice.
    :ivar to_new: the launches to new results, by their addresses.
    """

    __slots__ = "addresses", "array", "library", "out", "places", "prepared", "read", "shape", "to_new", "to_out"

    def __init__(self, array: Any, out: Any, prepared: Prepared, library: Any, places: tuple[Any, Any]) -> None:
        self.array: Callable[[], Any] = weakref.ref(array)
        self.out: Callable[[], Any] = nothing if out is None else weakref.ref(out)
        self.shape: tuple[int, ...] = array.shape
        self.prepared, self.library, self.places = prepared, library, places
        self.read: Callable[[Sequence[Any]], list[int] | None] | None = None
        self.addresses: list[int] = []
        self.to_out: Ready | None = None
        self.to_new: dict[int, Ready] = {}

    def look(self, tensors: Sequence[Any], device: int) -> Callable[[Sequence[Any]], list[int] | None]:
        """Make :attr:`read`. In a trace these tensors are not plain."""
        self.addresses = [address for address, *_ in self.places[: len(tensors)]]
        self.read = torch_lists.reader(tensors, device)
        return self.read or nothing


def nothing(*_: Any) -> None:
    """Stand in for the reference to an ``out`` that is not given, and for the addresses of tensors that have none."""


class KnownCalls:
    """The eager calls on one backend that have come before. The communicator's lock is held around :meth:`find`.

    :param prepared: the backend's calls by shape, dtype and op.
    """

    def __init__(
        self, device: int, order: StreamOrder, prepared: Mapping[tuple[Any, ...], Prepared], make_ready: MakeReady
    ) -> None:  # fmt: skip
        self._device, self._order, self._prepared, self._make_ready = device, order, prepared, make_ready
        # By the ids of array and out, and op. None: these ids belong to short-lived arrays, whose calls are not kept.
        self.by_objects: dict[tuple[int, int, str], _KnownCall | None] = {}
        self.by_places: dict[_Place, Ready | None] = {}  # for any objects there. None: it has come once
        self.find_list: Callable[..., tuple[Ready | None, Any, Stream]] | None = None  # see known_lists.py
        self.find_map: Callable[..., tuple[Ready | None, Any, Stream]] | None = None  # see known_maps.py

    def find(self, array: Any, op: Any, out: Any, stream: Any) -> tuple[Ready | None, Any, Stream]:
        """An eager call, its result and its stream, if it can be ready.

        For speed it reads the attributes of arrays by their own libraries, not by ``ipcreduce.arrays``.
        """
        if type(op) is not str:
            return self.find_map(array, op, out, stream) if self.find_map and type(op) is Mapped else NOT_READY
        key = id(array), id(out), op
        known = self.by_objects.get(key)
        if known is None:
            if self.find_list is not None and (type(array) is list or type(array) is tuple):
                return self.find_list(array, op, out, stream)
            return self._unknown(key, array, op, out, stream)
        if known.array() is not array or (out is not array and known.out() is not out):  # in place: one id
            self.by_objects[key] = None
            return self._unknown(key, array, op, out, stream)
        library = known.library
        if library is cupy_runtime:
            shape = known.shape
            if array.shape != shape or (out is not array and out is not None and out.shape != shape):
                return NOT_READY
            current = cupy_runtime.get_current_stream().ptr
        else:
            tensors = (array,) if out is array or out is None else (array, out)
            read = known.read or known.look(tensors, self._device)
            if read(tensors) != known.addresses:
                del self.by_objects[key]
                return self._unknown(key, array, op, out, stream)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or library is torch_runtime)
            if current is None:
                return NOT_READY
        if out is not None:
            return known.to_out or self._to_target(known, known.places[1][0], op, out), out, current
        if current > 1 and self._order.quick(current) is None:
            return NOT_READY  # a capture, into which allocations go their own way
        result, target = library.empty_like(array, self._device)
        if not target:
            return NOT_READY
        return known.to_new.get(target) or self._to_target(known, target, op, out), result, current

    def _to_target(self, known: _KnownCall, target: int, op: str, out: Any) -> Ready:
        """The launch of a known call to a target that has not come twice."""
        source, shape, kind = known.places[0]
        at = source, target, shape, kind, op
        ready = self._at(at, known.prepared, source, target)
        if self.by_places[at] is not None:
            if out is None:
                keep(known.to_new, target, ready, MOST_TARGETS)
            else:
                known.to_out = ready
        return ready

    def _at(self, at: _Place, prepared: Prepared, source: int, target: int) -> Ready:
        """The launch at a place: made anew the first two times, and then kept."""
        ready = self.by_places.get(at)
        if ready is None:
            again = at in self.by_places
            ready = self._make_ready(prepared, source, target, again)
            keep(self.by_places, at, ready if again else None)
        return ready

    def _unknown(
        self, key: tuple[int, int, str], array: Any, op: str, out: Any, stream: Any
    ) -> tuple[Ready | None, Any, Stream]:  # fmt: skip
        """Do the same as :meth:`find` for arrays that have not come before."""
        library: Any = cupy_runtime if type(array) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime
        place = library.plain(array, self._device)
        if place is None:
            return NOT_READY
        current = library.stream_handle(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or library is torch_runtime)
        source, shape, kind = place
        other = place if out is array or out is None else library.plain(out, self._device)
        if current is None or other is None or other[1] != shape or other[2] != kind:
            return NOT_READY
        if out is not None:
            at = source, other[0], shape, kind, op
            ready = self.by_places.get(at)
            if ready is not None:
                return ready, out, current
        dtype = library.dtype_of(kind)
        prepared = None if dtype is None else self._prepared.get((shape, dtype, op))
        if prepared is None or not prepared.fast:
            return NOT_READY
        result, target = out, other[0]
        if out is None:
            if current > 1 and self._order.quick(current) is None:
                return NOT_READY
            result, target = library.empty_like(array, self._device)
            at = source, target, shape, kind, op
        elif 0 < abs(target - source) < prepared.nbytes:
            return NOT_READY
        if not target or (source | target) % dtype.itemsize:
            return NOT_READY
        if key not in self.by_objects and library.can_be_known(kind):
            keep(self.by_objects, key, _KnownCall(array, out, prepared, library, (place, other)))
        return self._at(at, prepared, source, target), result, current


def given_stream(stream: Any, current: Stream, only_current: bool) -> Stream | None:
    """The handle of the stream of a call. None if it is another one than the current one, on which memory is made."""
    given = cupy_runtime.stream_of(stream)[0]
    return None if given != current and only_current else given
