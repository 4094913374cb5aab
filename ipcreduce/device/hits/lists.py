"""Repeated calls on lists of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from struct import Struct
from typing import Any

import numpy as np

from ...calls.addresses import Places, numbers_of
from ...cuda import cupy_runtime, torch_lists, torch_runtime
from ..arguments import Words
from ..launch_cache import NOT_READY, Form, Found, Known, LaunchCache, Limited, given_stream, library_of
from ..prepared import Prepared, Ready, keep

_MAX_LENGTHS = 256
_MANY = 48  # members from which on NumPy is faster than Python
_Ends = tuple[Any, int, int, int, int]  # op, length, ids of the first and last array and of the first output, if other


class _Layout:
    """See :class:`Layout`.

    :ivar read: the addresses of a list, if it is of this form; else None.
    :ivar pack: the addresses of a list as the bytes of words.
    """

    def __init__(
        self, read: Callable[[Sequence[Any]], list[int] | None], sizes: list[int], itemsizes: list[int]
    ) -> None:  # fmt: skip
        self.read, self._sizes, self._itemsizes = read, sizes, itemsizes
        self.pack = Struct(f"{len(sizes)}P").pack  # as pointers, which takes half of the time of other numbers
        self._lengths: Words = np.array(sizes, np.uint64)
        self._largest, self._longest = max(itemsizes), max(sizes)

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
        if bits % self._largest == 0 or all(
            at % size == 0 for at, size in zip(addresses, self._itemsizes, strict=True)
        ):  # fmt: skip
            return bits
        return 0

    def _are_apart(self, sources: list[int], targets: list[int], froms: bytes, tos: bytes) -> bool:
        """True if no output overlaps another one, or a source that is not its own. False if that is not certain."""
        if len(sources) < _MANY:
            firsts, nbytes = targets, self._sizes
            if targets is not sources:
                others = [at for at, source in enumerate(sources) if source != targets[at]]
                firsts, nbytes = targets + [sources[at] for at in others], nbytes + [nbytes[at] for at in others]
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
        begin, length = np.frombuffer(tos, np.uint64), self._lengths
        if targets is not sources:
            read = np.frombuffer(froms, np.uint64)
            moved = read != begin
            begin, length = np.concatenate([begin, read[moved]]), np.concatenate([length, length[moved]])
        order = begin.argsort()
        begin = begin[order]
        return not np.count_nonzero(begin[:-1] + length[order[:-1]] > begin[1:])


class ListHits:
    """The calls on lists that have come before. The communicator's lock is held around every method."""

    def __init__(self, cache: LaunchCache) -> None:
        self._cache, self._device = cache, cache.device
        # By op and length: the form, if there is one alone, which takes half a microsecond less to find. None: several.
        self._of_length: dict[tuple[Any, int], Form | None] = {}

    def find(self, arrays: Sequence[Any], op: Any, out: Any, stream: Any) -> Found:
        """A call on a list or a tuple of arrays, if it can be ready."""
        if not arrays:
            return NOT_READY
        if out is arrays:
            ends = op, len(arrays), id(arrays[0]), id(arrays[-1]), 0
        elif out is None:
            return self._unknown(None, arrays, op, out, stream)
        elif (type(out) is list or type(out) is tuple) and out:
            ends = op, len(arrays), id(arrays[0]), id(arrays[-1]), id(out[0])
        else:
            return NOT_READY
        known = self._cache.objects.get(ends)
        if known is None:
            return self._unknown(ends, arrays, op, out, stream)
        if known.read is None:
            ids, others, have_shapes = known.more
            same = [*map(id, arrays)] == ids and have_shapes(arrays)
            if others is not None:  # out is arrays, if it was so in the first call
                same = same and [*map(id, out)] == others and have_shapes(out)
            current = cupy_runtime.get_current_stream().ptr
        else:  # tensors may change in any way: all is compared, but how to is known
            sources, targets = known.more
            read = known.form.layout.read
            same = read(arrays) == sources and (out is arrays or read(out) == targets)
            current = torch_runtime.stream_handle(self._device)
        if not same:
            self._cache.evict(ends)
            return self._unknown(ends, arrays, op, out, stream)
        if stream is not None:
            current = given_stream(stream, current, known.read is not None)
        return NOT_READY if current is None else (known.ready, out, current)

    def _unknown(self, ends: _Ends | None, arrays: Sequence[Any], op: Any, out: Any, stream: Any) -> Found:
        """Find the launch for a list that is not known by its arrays: see :meth:`find`.

        :param ends: by what it may become known.
        """
        cache, form = self._cache, self._of_length.get((op, len(arrays)))
        if form is None:
            key = _key(arrays, op)
            form = None if key is None else cache.forms.get(key)
        current = None if form is None else cache.current(form.library, stream, out is None)
        sources = None if form is None or current is None else form.layout.read(arrays)
        if form is None or current is None or sources is None:
            return NOT_READY
        result, targets = out, sources
        if out is None:
            if not cache.can_allocate(current):
                return NOT_READY
            made = [form.library.empty_like(array, self._device) for array in arrays]
            result, targets = [one for one, _ in made], [address for _, address in made]
        elif out is not arrays:
            others = form.layout.read(out)
            if others is None:
                return NOT_READY
            targets = others
        froms = form.layout.pack(*sources)
        addresses = froms, froms if targets is sources else form.layout.pack(*targets)
        ready = cache.places.get((form, addresses))
        if ready is None:
            know = None if ends is None else partial(self._know, ends, arrays, out, sources, targets)
            ready = cache.at(form, addresses, out is None, know)
            if ready is None:
                return NOT_READY
        return ready, result, current

    def _know(
        self, ends: _Ends, arrays: Sequence[Any], out: Sequence[Any], sources: list[int], targets: list[int],
        form: Form, ready: Ready,
    ) -> None:  # fmt: skip
        every = [*arrays] if out is arrays else [*arrays, *out]
        if form.library is torch_runtime:
            known = Known(form, ready, 0, (sources, targets))
        else:
            others = None if out is arrays else [*map(id, out)]
            known = Known(form, ready, 0, ([*map(id, arrays)], others, cupy_runtime.same_shapes(arrays)))
        self._cache.insert(ends, known, every, every)

    def form_of(self, given: Any, _result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path."""
        arrays, op, _, sms = given
        key = None
        if type(op) is str and prepared.nbytes:
            op = op if sms is None else Limited(op, sms)
            key = _key(arrays, op)
        if key is None:
            return None
        length, library, known = (op, len(arrays)), library_of(arrays[0]), self._cache.forms.get(key)
        if known is not None and known.layout.read(arrays) is not None:
            if self._of_length.get(length) is not known:
                keep(self._of_length, length, None, _MAX_LENGTHS)
            return None
        read = (cupy_runtime if library is cupy_runtime else torch_lists).reader(arrays, self._device)
        if read is None:
            return None
        sizes, itemsizes = [one.nbytes for one in arrays], [library.dtype_of(one.dtype).itemsize for one in arrays]
        form = Form(prepared, library, _Layout(read, sizes, itemsizes))
        keep(self._of_length, length, None if length in self._of_length else form, _MAX_LENGTHS)
        self._cache.forms.pop(key, None)  # one whose members between the ends are others
        return key, form


def _key(arrays: Sequence[Any], op: Any) -> tuple[Any, ...] | None:
    """By what a form of lists is found; None if its first and last array are not plain and of one library."""
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
