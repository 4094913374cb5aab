"""The memory of calls on lists: a list of arrays that has come before, or is like one before, is ready at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..cuda import cupy_runtime, torch_runtime
from ..types import Stream
from .known_calls import NOT_READY, PreparedList, Ready, given_stream, keep
from .stream_order import StreamOrder

_MOST = 256  # lists that are known; each may have a thousand members

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
# From a prepared call, the addresses of sources and targets, and whether these have come before. None: the usual way.
MakeReadyList = Callable[[PreparedList, Addresses, Addresses, bool], "Ready | None"]


@dataclass(frozen=True, eq=False)
class _Kind:
    """What lists of one kind have in common.

    :ivar shapes: of the members, and ``dtypes``: of the members, of their library.
    """

    prepared: PreparedList
    shapes: list[Any]
    dtypes: list[Any]
    sizes: Addresses  # bytes of the members
    unaligned: Addresses  # bits that must be 0 in the members' addresses


class KnownLists:
    """The calls on lists that have come before. The communicator's lock is held around every method."""

    def __init__(self, device: int, order: StreamOrder, make_ready: MakeReadyList) -> None:
        self._device, self._order, self._make_ready = device, order, make_ready
        self._kinds: dict[tuple[Any, ...], _Kind] = {}  # by op, length, and the first and last member's shape and dtype
        self._by_places: dict[tuple[Any, ...], Ready | None] = {}  # None: it has come once
        # By op and the ids of CuPy's arrays: their memory stays the same as long as they live. Their shapes may change,
        # which changes neither the bytes nor the order of their elements.
        self._by_objects: dict[tuple[Any, ...], Ready | None] = {}
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
        sizes = np.fromiter((array.nbytes for array in arrays), np.uint64, len(arrays))
        unaligned = np.fromiter((library.dtype_of(dtype).itemsize - 1 for dtype in dtypes), np.uint64, len(arrays))
        keep(self._kinds, _key(op, shapes, dtypes), _Kind(prepared, shapes, dtypes, sizes, unaligned), _MOST)

    def find(self, arrays: Sequence[Any], op: str, out: Any, stream: Any) -> tuple[Ready | None, Any, Stream]:
        """As :meth:`KnownCalls.find`, for a list or a tuple of arrays."""
        library = _library(arrays)
        if library is None:
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
            ready = self._by_objects.get(objects)
            if ready is not None:
                return ready, out, current
        plain = library.plain_list(arrays, self._device)
        if plain is None:
            return NOT_READY
        sources, shapes, dtypes = plain
        kind = self._kinds.get(_key(op, shapes, dtypes))
        if kind is None or kind.shapes != shapes or kind.dtypes != dtypes:
            return NOT_READY
        result, targets = out, sources
        if out is None:
            if current > 1 and self._order.quick(current) is None:
                return NOT_READY  # a capture, into which allocations go their own way
            made = [library.empty_like(array, self._device) for array in arrays]
            result, targets = [one for one, _ in made], [address for _, address in made]
        elif out is not arrays:
            others = library.plain_list(out, self._device)
            if others is None or others[1] != shapes or others[2] != dtypes:
                return NOT_READY
            targets = others[0]
        ready = self._at(kind, sources, targets, new=out is None)
        if ready is not None and objects is not None:
            self._watch(objects, ready, arrays, out)
        return ready, result, current

    def _at(self, kind: _Kind, sources: list[int], targets: list[int], new: bool) -> Ready | None:
        """The launches at these addresses: made anew the first two times, and then kept. None: by the usual way."""
        place = kind, tuple(sources), None if targets is sources else tuple(targets)
        ready = self._by_places.get(place)
        if ready is not None:
            return ready
        froms = np.fromiter(sources, np.uint64, len(sources))
        tos = froms if targets is sources else np.fromiter(targets, np.uint64, len(targets))
        if not tos.all() or ((froms | tos) & kind.unaligned).any() or not (new or _are_apart(froms, tos, kind.sizes)):
            return None
        again = place in self._by_places
        ready = self._make_ready(kind.prepared, froms, tos, again)
        if ready is not None:
            keep(self._by_places, place, ready if again else None, _MOST)
        return ready

    def _watch(self, objects: tuple[Any, ...], ready: Ready, arrays: Sequence[Any], out: Sequence[Any]) -> None:
        """Know the list by its arrays from the second time on, until one of them dies."""
        if objects not in self._by_objects:
            keep(self._by_objects, objects, None, _MOST)
            return
        forget = partial(_forget, weakref.ref(self), objects)
        every = arrays if out is arrays else (*arrays, *out)
        self._watched[objects] = [weakref.ref(array, forget) for array in every]
        self._by_objects[objects] = ready

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


def _are_apart(sources: Addresses, targets: Addresses, sizes: Addresses) -> bool:
    """True if no output overlaps another one, or a source that is not its own. False if that is not certain."""
    first, nbytes = targets, sizes
    if targets is not sources:
        others = sources != targets
        first, nbytes = np.concatenate([targets, sources[others]]), np.concatenate([sizes, sizes[others]])
    order = first.argsort()
    first, past = first[order], first[order] + nbytes[order]
    return bool((first[1:] >= past[:-1]).all())
