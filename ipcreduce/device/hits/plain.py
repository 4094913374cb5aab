"""Repeated calls on one array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...cuda import cupy_runtime, torch_runtime
from ..launch_cache import MISS, Entry, Form, Found, LaunchCache, Limited, given_stream, library_of
from ..prepared import BoundLaunch, Prepared
from .lists import ListHits

_Addresses = tuple[int, int]  # of source and target
_Key = tuple[int, int, Any]  # the ids of array and out, and op


@dataclass(frozen=True)
class _Layout:
    """The bytes of the array and of an element, by which addresses are checked. It is a :class:`Layout`."""

    nbytes: int
    itemsize: int

    def settle(self, addresses: _Addresses, new: bool) -> _Addresses | None:
        source, target = addresses
        fits = (source | target) % self.itemsize == 0 and not 0 < abs(target - source) < self.nbytes
        return addresses if fits else None


class PlainHits:
    """The calls on one array that have come before. The communicator's lock is held around every method."""

    def __init__(self, cache: LaunchCache, lists: ListHits) -> None:
        self._cache, self._device, self._objects, self._lists = cache, cache.device, cache.objects, lists

    def lookup(self, array: Any, op: Any, out: Any, stream: Any) -> Found:
        """Look up a call on an array or a list. Returns its launch, or None, its result and its stream."""
        if type(op) is not str and type(op) is not Limited:
            return MISS
        key = id(array), id(out), op
        entry = self._objects.get(key)
        if entry is None:
            if type(array) is list or type(array) is tuple:
                return self._lists.lookup(array, op, out, stream)
            return self._by_place(key, array, op, out, stream)
        if entry.read is None:
            shape = entry.more
            if array.shape != shape or (out is not array and out is not None and out.shape != shape):
                return MISS
            current = cupy_runtime.get_current_stream().ptr
        else:
            if entry.read((array,) if out is array or out is None else (array, out)) != entry.addresses:
                self._cache.evict(key)
                return self._by_place(key, array, op, out, stream)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or entry.read is not None)
            if current is None:
                return MISS
        if out is not None:
            return entry.bound, out, current
        if not self._cache.can_allocate(current):
            return MISS
        result, target = entry.library.empty_like(array, self._device)
        if not target:
            return MISS
        bound = entry.to_new.get(target) or self._cache.to_new(entry, (entry.source, target), target)
        return bound, result, current

    def _by_place(self, key: _Key, array: Any, op: Any, out: Any, stream: Any) -> Found:
        """Look up a call by the addresses of its arrays, when it is not found by the arrays. See :meth:`lookup`."""
        looked = self._look(array, op, out)
        if looked is None:
            return MISS
        cache, (library, of, source, target) = self._cache, looked
        form = cache.forms.get(of)
        if form is None:
            return MISS
        current = library.stream_handle(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or library is torch_runtime)
            if current is None:
                return MISS
        result = out
        if out is None:
            if not cache.can_allocate(current):
                return MISS
            result, target = library.empty_like(array, self._device)
            if not target:
                return MISS
        addresses = source, target
        bound = cache.places.get((form, addresses))
        if bound is None:
            bound = cache.at(form, addresses, out is None, partial(self._insert, key, array, out, source))
            if bound is None:
                return MISS
        return bound, result, current

    def _look(self, array: Any, op: Any, out: Any) -> tuple[Any, Any, int, int] | None:
        """Library, key of the form, and both addresses of a call; None if it has no form."""
        library = library_of(array)
        place = library.plain(array, self._device)
        if place is None:
            return None
        source, shape, dtype = place
        if out is array or out is None:
            return library, (op, shape, dtype), source, source
        other = library.plain(out, self._device)
        if other is None or other[1] != shape or other[2] != dtype:
            return None
        return library, (op, shape, dtype), source, other[0]

    def _insert(self, key: _Key, array: Any, out: Any, source: int, form: Form, bound: BoundLaunch) -> None:
        if form.library.can_be_cached(array.dtype):
            objects = (array,) if out is None or out is array else (array, out)
            self._cache.insert(key, Entry(form, bound, source, array.shape), objects, objects)

    def form_of(self, given: Any, _result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path."""
        array, op, out, sms = given
        if type(op) is not str or not prepared.nbytes:
            return None
        looked = self._look(array, op if sms is None else Limited(op, sms), out)
        if looked is None:
            return None
        library, of, _, _ = looked
        return of, Form(prepared, library, _Layout(prepared.nbytes, library.dtype_of(array.dtype).itemsize))
