"""Repeated all-gathers, reduce-scatters and broadcasts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...arrays.splits import SplitKey, is_simple
from ...calls.request import Split, unit_of
from ...cuda import cupy_runtime, torch_runtime
from ..launch_cache import MISS, Entry, Form, Found, LaunchCache, given_stream, library_of
from ..prepared import BoundLaunch, Prepared
from .lists import NOWHERE, ListHits, Members

_Ids = tuple[int, int, SplitKey]  # of array and out


@dataclass(frozen=True)
class _Layout:
    """The sizes of part and whole array, by which addresses are checked. It is a :class:`Layout`.

    :ivar shape: of the result. :ivar part: bytes of this rank's part, which begins at byte ``place`` of the whole.
    :ivar unit: addresses are multiples of so many bytes.
    """

    shape: tuple[int, ...]
    part: int
    whole: int
    place: int
    unit: int
    gathers: bool

    def settle(self, addresses: tuple[int, int], new: bool) -> tuple[int, int] | None:
        part, whole = addresses if self.gathers else addresses[::-1]
        apart = part + self.part <= whole or whole + self.whole <= part
        in_place = part == whole + self.place
        return addresses if (part | whole) % self.unit == 0 and (apart or in_place) else None


class SplitHits:
    """The calls that have come before. The communicator's lock is held around every method."""

    def __init__(self, cache: LaunchCache, lists: ListHits, rank: int, n: int) -> None:
        self._cache, self._device, self._objects, self._lists = cache, cache.device, cache.objects, lists
        self._rank, self._n = rank, n

    def lookup(self, array: Any, key: SplitKey, out: Any, stream: Any) -> Found:
        """Look up a call. Returns its launch, or None, result and stream. ``out`` of a broadcast is its array."""
        if not is_simple(key):
            return MISS
        ids = id(array), id(out), key
        entry = self._objects.get(ids)
        if entry is None:
            if type(array) is list or type(array) is tuple:
                return self._lists.lookup(array, key, out, stream)
            return self._by_place(ids, array, out, stream)
        if entry.read is None:
            shape, shape_of_out = entry.more
            if array.shape != shape or (out is not None and out.shape != shape_of_out):
                return MISS
            current = cupy_runtime.get_current_stream().ptr
        else:
            if entry.read((array,) if out is array or out is None else (array, out)) != entry.addresses:
                self._cache.evict(ids)
                return self._by_place(ids, array, out, stream)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = given_stream(stream, current, out is None or entry.read is not None)
            if current is None:
                return MISS
        if out is not None:
            return entry.bound, out, current
        if not self._cache.can_allocate(current):
            return MISS
        result, target = entry.library.empty(array, entry.form.layout.shape, array.dtype, self._device)
        if not target:
            return MISS
        bound = entry.to_new.get(target) or self._cache.to_new(entry, (entry.source, target), target)
        return bound, result, current

    def _by_place(self, ids: _Ids, array: Any, out: Any, stream: Any) -> Found:
        """Look up a call by the addresses of its arrays, when it is not found by the arrays. See :meth:`lookup`."""
        cache, key = self._cache, ids[2]
        looked = self._look(array, out)
        form = None if looked is None else cache.forms.get((key, *looked[1:3]))
        if looked is None or form is None or (out is not None and looked[4] != form.layout.shape):
            return MISS
        library, shape, _, source, _, target = looked
        current = cache.current(library, stream, out is None)
        if current is None:
            return MISS
        result = out
        if out is None:
            if not cache.can_allocate(current):
                return MISS
            result, target = library.empty(array, form.layout.shape, array.dtype, self._device)
            if not target:
                return MISS
        addresses = source, target
        bound = cache.places.get((form, addresses))
        if bound is None:
            bound = cache.at(form, addresses, out is None, partial(self._insert, ids, array, out, source, shape))
            if bound is None:
                return MISS
        return bound, result, current

    def _look(self, array: Any, out: Any) -> tuple[Any, Any, Any, int, Any, int] | None:
        """Library, shape, dtype and address of the array, and shape and address of the output; None without a form."""
        library = library_of(array)
        place = library.plain(array, self._device)
        if place is None:
            return None
        source, shape, dtype = place
        if out is array or out is None:
            return library, shape, dtype, source, shape, source
        other = library.plain(out, self._device)
        if other is None or other[2] != dtype:
            return None
        return library, shape, dtype, source, other[1], other[0]

    def _insert(self, ids: _Ids, array: Any, out: Any, source: int, shape: Any, form: Form, bound: BoundLaunch) -> None:
        if form.library.can_be_cached(array.dtype):
            objects = (array,) if out is None or out is array else (array, out)
            entry = Entry(form, bound, source, (shape, None if out is None else out.shape))
            self._cache.insert(ids, entry, objects, objects)

    def form_of(self, given: Any, result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path."""
        key, split, members = given.key, prepared.request.split, prepared.request.members
        if not is_simple(key) or not prepared.nbytes or prepared.packed or split is None:
            return None
        gathers = split.collective.gathers

        def of_list() -> Members | None:
            if not all(_is_known(one) for one in result):
                return None
            parts, wholes, places = zip(*(self._extent(split, one) for one in members), strict=True)
            units, shapes = [unit_of(one.itemsize) for one in members], [tuple(one.shape) for one in result]
            return Members(units, [*parts], [*wholes], [*places], gathers, shapes)

        if given.is_list:
            return self._lists.form(given.array, key, result, prepared, of_list)
        looked = self._look(given.array, given.out)
        if looked is None or not looked[1] or not _is_known(result):
            return None
        (member,) = members
        layout = _Layout(tuple(result.shape), *self._extent(split, member), unit_of(member.itemsize), gathers)
        return (key, *looked[1:3]), Form(prepared, looked[0], layout)

    def _extent(self, split: Split, member: Any) -> tuple[int, int, int]:
        """The bytes of this rank's part and of the whole array, and where the part lies in that."""
        rows = split.rows(member.shape, member.itemsize, self._n)
        whole = rows.rows * rows.pitch
        return rows.rows * rows.widths[self._rank], whole, rows.offsets[self._rank] if rows.rows == 1 else NOWHERE


def _is_known(array: Any) -> bool:
    """False for a dtype of PyTorch that NumPy lacks."""
    return library_of(array).dtype_of(array.dtype) is not None
