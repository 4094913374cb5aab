"""Repeated calls on lists of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, or_
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from ...calls.addresses import Places, numbers_of
from ...cuda import cupy_runtime, torch_lists, torch_runtime
from ..arguments import Words
from ..launch_cache import MISS, Entry, Form, Found, LaunchCache, Limited, given_stream, library_of
from ..prepared import BoundLaunch, Prepared, keep

_MAX_LENGTHS = 256
_MANY = 48  # members from which on NumPy is faster than Python
NOWHERE = 1 << 62  # the place of a part that has gaps in its whole array: no address is so large
_Ends = tuple[Any, int, int, int, int]  # op, length, ids of the first and last array and of the first output, if other
_Read = Callable[[Sequence[Any]], list[int] | None]


class Members(NamedTuple):
    """The arrays of a list, by member. In an all-reduce and a broadcast a part is the whole array.

    :ivar units: addresses are multiples of these. :ivar parts: bytes of this rank's part. :ivar wholes: of all parts.
    :ivar places: where this rank's part lies in the whole array; None for 0 in all of them.
    :ivar gathers: parts are read, and whole arrays are written. False: the other way round.
    :ivar shapes: of the results; None for those of the arrays.
    """

    units: list[int]
    parts: list[int]
    wholes: list[int]
    places: list[int] | None = None
    gathers: bool = True
    shapes: list[tuple[int, ...]] | None = None


class _Layout:
    """The readers of addresses, and the sizes of the members, by which these are checked. It is a :class:`Layout`.

    :ivar read: the addresses of a list, if it is of this form; else None. ``read_out``: those of its outputs.
    :ivar pack: the addresses of a list as the bytes of words.
    """

    def __init__(self, read: _Read, read_out: _Read, members: Members) -> None:
        self.read, self.read_out, self._of = read, read_out, members
        self.pack = Struct(f"{len(members.units)}P").pack  # pointers are packed in half of the time of other numbers
        self._parts, self._wholes = (np.array(sizes, np.uint64) for sizes in (members.parts, members.wholes))
        self._places: Words = np.array(members.places or 0, np.uint64)
        self._largest, self._longest = max(members.units), max(members.wholes)

    def results(self, library: Any, arrays: Sequence[Any], device: int) -> list[tuple[Any, int]]:
        """New results, and their addresses."""
        if self._of.shapes is None:
            return [library.empty_like(array, device) for array in arrays]
        pairs = zip(arrays, self._of.shapes, strict=True)
        return [library.empty(array, shape, array.dtype, device) for array, shape in pairs]

    def settle(self, addresses: tuple[bytes, bytes], new: bool) -> Places | None:
        froms, tos = addresses
        sources = numbers_of(froms)
        targets = sources if tos is froms else numbers_of(tos)
        read = self._fits(sources, froms)
        written = read if tos is froms else self._fits(targets, tos)
        if not read or not written or not (new or self._are_apart(sources, targets, froms, tos)):
            return None
        at = froms, read
        return at, at if tos is froms else (tos, written)

    def _fits(self, addresses: list[int], words: bytes) -> int:
        """The bits that are set in any address, if these are addresses of elements, for all members; else 0.

        Allocators give multiples of 256, whose other bits do not matter: for few of them it is 256.
        """
        if len(addresses) < _MANY:
            if not all(addresses):
                return 0
            if not words[::8].strip(b"\0"):  # the lowest bytes
                return 256
            bits = reduce(or_, addresses)
        else:
            every = np.frombuffer(words, np.uint64)
            bits = int(np.bitwise_or.reduce(every)) if np.count_nonzero(every) == len(every) else 0
        if bits % self._largest == 0 or all(at % unit == 0 for at, unit in zip(addresses, self._of.units, strict=True)):
            return bits
        return 0

    def _are_apart(self, sources: list[int], targets: list[int], froms: bytes, tos: bytes) -> bool:
        """True if no output overlaps another one, or a source other than in its own place. False if not certain."""
        _, sizes, nbytes, places, gathers, _ = self._of
        parts, wholes = (sources, targets) if gathers else (targets, sources)
        if len(sources) < _MANY:
            firsts = wholes
            if parts is not wholes:
                own = wholes if places is None else map(add, wholes, places)
                others = [at for at, place in enumerate(own) if place != parts[at]]
                firsts, nbytes = wholes + [parts[at] for at in others], nbytes + [sizes[at] for at in others]
            past = 0
            for first in sorted(firsts):  # half as long as to sort the sizes with them
                if first < past:
                    break
                past = first + self._longest
            else:
                return True
            past = 0
            for first, size in sorted(zip(firsts, nbytes, strict=True)):
                if first < past:
                    return False
                past = first + size
            return True
        begin, length = np.frombuffer(tos if gathers else froms, np.uint64), self._wholes
        if parts is not wholes:
            part = np.frombuffer(froms if gathers else tos, np.uint64)
            moved = part != begin + self._places
            begin, length = np.concatenate([begin, part[moved]]), np.concatenate([length, self._parts[moved]])
        order = begin.argsort()
        begin = begin[order]
        return not np.count_nonzero(begin[:-1] + length[order[:-1]] > begin[1:])


class ListHits:
    """The calls on lists that have come before. The communicator's lock is held around every method."""

    def __init__(self, cache: LaunchCache) -> None:
        self._cache, self._device = cache, cache.device
        # By op and length: the form, if there is one alone, which takes half a microsecond less to find. None: several.
        self._of_length: dict[tuple[Any, int], Form | None] = {}

    def lookup(self, arrays: Sequence[Any], op: Any, out: Any, stream: Any) -> Found:
        """Look up a call on a list or a tuple of arrays. Returns its launch, or None, its result and its stream."""
        if not arrays:
            return MISS
        if out is arrays:
            ends = op, len(arrays), id(arrays[0]), id(arrays[-1]), 0
        elif out is None:
            return self._by_place(None, arrays, op, out, stream)
        elif (type(out) is list or type(out) is tuple) and out:
            ends = op, len(arrays), id(arrays[0]), id(arrays[-1]), id(out[0])
        else:
            return MISS
        entry = self._cache.objects.get(ends)
        if entry is None:
            return self._by_place(ends, arrays, op, out, stream)
        if entry.read is None:
            ids, have_shapes, others, have_others = entry.more
            same = [*map(id, arrays)] == ids and have_shapes(arrays)
            if others is not None:  # out is arrays, if it was so in the first call
                same = same and [*map(id, out)] == others and have_others(out)
            current = cupy_runtime.get_current_stream().ptr
        else:  # tensors may change in any way: all is compared, by a reader that is kept
            sources, targets = entry.more
            layout = entry.form.layout
            same = layout.read(arrays) == sources and (out is arrays or layout.read_out(out) == targets)
            current = torch_runtime.stream_handle(self._device)
        if not same:
            self._cache.evict(ends)
            return self._by_place(ends, arrays, op, out, stream)
        if stream is not None:
            current = given_stream(stream, current, entry.read is not None)
        return MISS if current is None else (entry.bound, out, current)

    def _by_place(self, ends: _Ends | None, arrays: Sequence[Any], op: Any, out: Any, stream: Any) -> Found:
        """Look up a call by the addresses of its arrays, when it is not found by the arrays. See :meth:`lookup`.

        :param ends: the key under which the call may be inserted.
        """
        cache, form = self._cache, self._of_length.get((op, len(arrays)))
        if form is None:
            key = _key(arrays, op)
            form = None if key is None else cache.forms.get(key)
        current = None if form is None else cache.current(form.library, stream, out is None)
        sources = None if form is None or current is None else form.layout.read(arrays)
        if form is None or current is None or sources is None:
            return MISS
        result, targets = out, sources
        if out is None:
            if not cache.can_allocate(current):
                return MISS
            made = form.layout.results(form.library, arrays, self._device)
            result, targets = [one for one, _ in made], [address for _, address in made]
        elif out is not arrays or form.layout.read_out is not form.layout.read:
            others = form.layout.read_out(out)
            if others is None:
                return MISS
            targets = others
        froms = form.layout.pack(*sources)
        addresses = froms, froms if targets is sources else form.layout.pack(*targets)
        bound = cache.places.get((form, addresses))
        if bound is None:
            insert = None if ends is None else partial(self._insert, ends, arrays, out, sources, targets)
            bound = cache.at(form, addresses, out is None, insert)
            if bound is None:
                return MISS
        return bound, result, current

    def _insert(
        self, ends: _Ends, arrays: Sequence[Any], out: Sequence[Any], sources: list[int], targets: list[int],
        form: Form, bound: BoundLaunch,
    ) -> None:  # fmt: skip
        every = [*arrays] if out is arrays else [*arrays, *out]
        if form.library is torch_runtime:
            entry = Entry(form, bound, 0, (sources, targets))
        else:
            others = (None, None) if out is arrays else ([*map(id, out)], cupy_runtime.same_shapes(out))
            entry = Entry(form, bound, 0, ([*map(id, arrays)], cupy_runtime.same_shapes(arrays), *others))
        self._cache.insert(ends, entry, every, every)

    def form_of(self, given: Any, _result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path."""
        arrays, op, _, sms = given
        if type(op) is not str or not prepared.nbytes:
            return None

        def members() -> Members:
            library, sizes = library_of(arrays[0]), [one.nbytes for one in arrays]
            return Members([library.dtype_of(one.dtype).itemsize for one in arrays], sizes, sizes)

        return self.form(arrays, op if sms is None else Limited(op, sms), arrays, prepared, members)

    def form(
        self, arrays: Sequence[Any], op: Any, results: Sequence[Any], prepared: Prepared,
        members: Callable[[], Members | None],
    ) -> tuple[Any, Form] | None:  # fmt: skip
        """The key and the form of lists like this one; None for no form. ``op``: all arguments but arrays, in one."""
        key = _key(arrays, op) if type(arrays) in (list, tuple) else None  # lookup() takes no others
        if key is None:
            return None
        length, entry = (op, len(arrays)), self._cache.forms.get(key)
        if entry is not None and entry.layout.read(arrays) is not None:
            if self._of_length.get(length) is not entry:
                keep(self._of_length, length, None, _MAX_LENGTHS)
            return None
        library = library_of(arrays[0])
        reader = (cupy_runtime if library is cupy_runtime else torch_lists).reader
        read = reader(arrays, self._device)
        read_out = read if results is arrays else reader(results, self._device)
        of = None if read is None or read_out is None else members()
        if read is None or read_out is None or of is None:
            return None
        form = Form(prepared, library, _Layout(read, read_out, of))
        keep(self._of_length, length, None if length in self._of_length else form, _MAX_LENGTHS)
        self._cache.forms.pop(key, None)  # one whose members between the ends are others
        return key, form


def _key(arrays: Sequence[Any], op: Any) -> tuple[Any, ...] | None:
    """The key of a form of lists; None if the first and last array are not plain and of one library."""
    if not arrays:
        return None
    first, last = arrays[0], arrays[-1]
    library = library_of(first)
    if library is torch_runtime and not (torch_runtime.works() and torch_runtime.is_plain_type(type(first))):
        return None
    if type(last) is not type(first) and not (
        library is torch_runtime and torch_runtime.is_plain_type(type(last))
    ):  # fmt: skip
        return None
    try:
        return op, len(arrays), first.shape, first.dtype, last.shape, last.dtype
    except RuntimeError:  # PyTorch's, of a nested tensor
        return None
