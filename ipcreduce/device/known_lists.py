"""The memory of calls on lists: a list of arrays that has come before, or is like one before, is ready at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from operator import or_
from typing import Any

import numpy as np

from ..cuda import cupy_runtime, torch_runtime
from ..types import Stream
from .known_calls import NOT_READY, PreparedList, Ready, given_stream, keep
from .stream_order import StreamOrder

_MOST = 256  # lists that are known; each may have a thousand members
_MANY = 32  # members from which on NumPy is faster than Python

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
# From a prepared call, the addresses of sources and targets, and whether these have come before. None: the usual way.
MakeReadyList = Callable[[PreparedList, Addresses, Addresses, bool], "Ready | None"]


@dataclass(frozen=True, eq=False)
class _Kind:
    """The common part of all lists of one kind.

    :ivar shapes: of the members, and ``dtypes``: of the members, of their library.
    """

    prepared: PreparedList
    shapes: list[Any]
    dtypes: list[Any]
    sizes: list[int]  # bytes of the members
    itemsizes: list[int]

    def fits(self, addresses: list[int]) -> bool:
        """True if these are addresses of elements, for all members."""
        if reduce(or_, addresses) % max(self.itemsizes) == 0:
            return 0 not in addresses
        return all(address and address % size == 0 for address, size in zip(addresses, self.itemsizes, strict=True))


_Places = tuple[_Kind, tuple[int, ...], tuple[int, ...] | None]  # of a call: sources and targets, None in place


class KnownLists:
    """The calls on lists that have come before. The communicator's lock is held around every method."""

    def __init__(self, device: int, order: StreamOrder, make_ready: MakeReadyList) -> None:
        self._device, self._order, self._make_ready = device, order, make_ready
        self._kinds: dict[tuple[Any, ...], _Kind] = {}  # by op, length, and the first and last member's shape and dtype
        self._by_places: dict[_Places, Ready | None] = {}  # None: it has come once
        # By op and the ids of CuPy's arrays, of which only the shape may change while they live: launch and shapes.
        self._by_objects: dict[tuple[Any, ...], tuple[Ready, list[Any]]] = {}
        self._watched: dict[tuple[Any, ...], list[Any]] = {}  # references to the arrays of _by_objects

    def learn(self, arrays: Sequence[Any], op: Any, prepared: PreparedList) -> None:
        """Remember a call that was made by the usual way, if lists like this can be ready."""
        if type(op) is not str or not arrays or any(through is not None for through in prepared.through):
            return
        library = _library(arrays)
        plain = library and library.plain_list(arrays, self._device)
        if not plain:
            return
        _, shapes, dtypes = plain
        key = _key(op, shapes, dtypes)
        known = self._kinds.get(key)
        if known is not None and known.shapes == shapes and known.dtypes == dtypes:
            return
        itemsizes = [library.dtype_of(dtype).itemsize for dtype in dtypes]
        sizes = [array.nbytes for array in arrays]
        keep(self._kinds, key, _Kind(prepared, shapes, dtypes, sizes, itemsizes), _MOST)

    def find(self, arrays: Sequence[Any], op: str, out: Any, stream: Any) -> tuple[Ready | None, Any, Stream]:
        """Do the same as :meth:`KnownCalls.find` for a list or a tuple of arrays."""
        library = _library(arrays)
        if library is None or not (out is None or type(out) is list or type(out) is tuple):
            return NOT_READY
        current = library.stream_handle(self._device)
        if stream is not None:
            given = given_stream(stream, current, out is None or library is torch_runtime)
            if given is None:
                return NOT_READY
            current = given
        objects: tuple[Any, ...] | None = None
        if out is not None and library is cupy_runtime:
            objects = op, tuple(map(id, arrays)), out is arrays or tuple(map(id, out))
            found = self._by_objects.get(objects)
            if found is not None:
                ready, shapes = found
                same = [array.shape for array in arrays] == shapes
                if same and (out is arrays or [one.shape for one in out] == shapes):
                    return ready, out, current
        plain = library.plain_list(arrays, self._device)
        if plain is None:
            return NOT_READY
        sources, shapes, dtypes = plain
        kind = self._kinds.get(_key(op, shapes, dtypes))
        if kind is None or kind.shapes != shapes or kind.dtypes != dtypes:
            return NOT_READY
        result, targets = out, sources
        if current > 1 and self._order.quick(current) is None:
            return NOT_READY  # a capture, say, into which allocations go their own way
        if out is None:
            made = [library.empty_like(array, self._device) for array in arrays]
            result, targets = [one for one, _ in made], [address for _, address in made]
        elif out is not arrays:
            others = library.plain_list(out, self._device)
            if others is None or others[1] != shapes or others[2] != dtypes:
                return NOT_READY
            targets = others[0]
        place = kind, tuple(sources), None if targets is sources else tuple(targets)
        kept = self._by_places.get(place)
        if kept is not None and objects is not None:
            self._watch(objects, (kept, shapes), arrays, out)
        return kept or self._at(place, sources, targets, new=out is None), result, current

    def _at(self, place: _Places, sources: list[int], targets: list[int], new: bool) -> Ready | None:
        """The launch at these addresses: made anew the first two times, and then kept. None: by the usual way."""
        kind = place[0]
        if not kind.fits(sources) or (targets is not sources and not kind.fits(targets)):
            return None
        if not new and not _are_apart(sources, targets, kind.sizes):
            return None
        froms = np.array(sources, np.uint64)
        tos = froms if targets is sources else np.array(targets, np.uint64)
        again = place in self._by_places
        ready = self._make_ready(kind.prepared, froms, tos, again)
        if ready is not None:
            keep(self._by_places, place, ready if again else None, _MOST)
        return ready

    def _watch(
        self, objects: tuple[Any, ...], found: tuple[Ready, list[Any]], arrays: Sequence[Any], out: Sequence[Any]
    ) -> None:  # fmt: skip
        """Know the list by its arrays, until one of them dies."""
        forget = partial(_forget, weakref.ref(self), objects)
        every = arrays if out is arrays else (*arrays, *out)
        keep(self._watched, objects, [weakref.ref(array, forget) for array in every], _MOST)
        keep(self._by_objects, objects, found, _MOST)

    def forget(self, objects: tuple[Any, ...]) -> None:
        """Forget a list of which an array has died, so that its id may become another one's."""
        self._by_objects.pop(objects, None)
        self._watched.pop(objects, None)


def _forget(known: Callable[[], KnownLists | None], objects: tuple[Any, ...], _: Any) -> None:
    lists = known()
    if lists is not None:
        lists.forget(objects)


def _library(arrays: Sequence[Any]) -> Any:
    """The library of the first array, which all others have to be of, too."""
    if not arrays:
        return None
    if type(arrays[0]) is getattr(cupy_runtime.cupy, "ndarray", None):
        return cupy_runtime
    return torch_runtime if torch_runtime.works() and torch_runtime.is_plain_type(type(arrays[0])) else None


def _key(op: str, shapes: list[Any], dtypes: list[Any]) -> tuple[Any, ...]:
    return op, len(shapes), shapes[0], shapes[-1], dtypes[0], dtypes[-1]


def _are_apart(sources: list[int], targets: list[int], sizes: list[int]) -> bool:
    """True if no output overlaps another one, or a source that is not its own. False if that is not certain."""
    firsts, nbytes = targets, sizes
    if targets is not sources:
        others = [at for at, source in enumerate(sources) if source != targets[at]]
        firsts, nbytes = targets + [sources[at] for at in others], sizes + [sizes[at] for at in others]
    if len(firsts) < _MANY:
        ends = sorted(zip(firsts, nbytes, strict=True))
        return all(first + size <= later for (first, size), (later, _) in pairwise(ends))
    begin, length = np.array(firsts, np.uint64), np.array(nbytes, np.uint64)
    order = begin.argsort()
    begin, length = begin[order], length[order]
    return bool((begin[:-1] + length[:-1] <= begin[1:]).all())
