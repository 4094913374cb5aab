"""The memory of calls on lists: a list of arrays that has come before, or is like one before, is ready at once."""

from __future__ import annotations

import weakref
from array import array as packed
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from struct import Struct
from typing import Any

import numpy as np

from ..cuda import cupy_runtime, torch_lists, torch_runtime
from ..types import Stream
from .known_calls import NOT_READY, PreparedList, Ready, given_stream, keep
from .stream_order import StreamOrder

_MOST = 256  # lists that are known; each may have a thousand members
_MANY = 48  # members from which on NumPy is faster than Python

Words = np.ndarray[Any, np.dtype[np.uint64]]


# The addresses of a list's members: as the bytes of 64-bit words, and the bits that are set in any of them. Of the bits
# only the lowest matter, which say how the addresses are aligned.
Addresses = tuple[bytes, int]
Places = tuple[Addresses, Addresses]  # of sources and targets; in place, both are the same object
Start = Callable[[Places, Stream], Any]  # puts an all-reduce of a list on a stream
MakeStart = Callable[[PreparedList], Start]
MakeReadyList = Callable[[PreparedList, Places], Ready]  # the call at places that have come before


def addresses_of(members: Sequence[int]) -> Addresses:
    """These addresses, by member."""
    return packed("Q", members).tobytes(), reduce(or_, members, 0)


def numbers_of(addresses: Addresses) -> list[int]:
    """The addresses as numbers, by member."""
    return memoryview(addresses[0]).cast("Q").tolist()


@dataclass(frozen=True, eq=False)
class Kind:
    """The common part of all lists of one kind.

    :ivar library: cupy_runtime or torch_runtime.
    :ivar read: the addresses of a list, if it is of this kind; else None.
    :ivar pack: the addresses of a list as the bytes of words.
    :ivar anew: the call at places that have not come before. It is one object, whose argument is set for each call.
    :ivar sizes: of the members, in bytes.
    """

    library: Any
    prepared: PreparedList
    read: Callable[[Sequence[Any]], list[int] | None]
    pack: Callable[..., bytes]
    anew: Ready
    sizes: list[int]
    lengths: Words  # the sizes once more, for NumPy
    itemsizes: list[int]
    largest: int  # of the itemsizes
    longest: int  # of the sizes

    def fits(self, addresses: list[int], words: bytes) -> int:
        """The bits that are set in any address, if these are addresses of elements, for all members; else 0.

        Allocators give multiples of 256, whose other bits do not matter: for few of them it is 256.

        :param words: the addresses once more, as the bytes of 64-bit words.
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
        if bits % self.largest == 0 or all(at % size == 0 for at, size in zip(addresses, self.itemsizes, strict=True)):
            return bits
        return 0

    def are_apart(self, sources: list[int], targets: list[int], froms: bytes, tos: bytes) -> bool:
        """True if no output overlaps another one, or a source that is not its own. False if that is not certain.

        :param froms: the sources once more, as the bytes of words, and ``tos`` the targets.
        """
        if len(sources) < _MANY:
            firsts, nbytes = targets, self.sizes
            if targets is not sources:
                others = [at for at, source in enumerate(sources) if source != targets[at]]
                firsts, nbytes = targets + [sources[at] for at in others], nbytes + [nbytes[at] for at in others]
            past = 0
            for first in sorted(firsts):  # half as long as to sort the sizes with them
                if first < past:
                    break
                past = first + self.longest
            else:
                return True
            past = 0
            for first, size in sorted(zip(firsts, nbytes, strict=True)):
                if first < past:
                    return False
                past = first + size
            return True
        begin, length = np.frombuffer(tos, np.uint64), self.lengths
        if targets is not sources:
            read = np.frombuffer(froms, np.uint64)
            moved = read != begin
            begin, length = np.concatenate([begin, read[moved]]), np.concatenate([length, length[moved]])
        order = begin.argsort()
        begin = begin[order]
        return not np.count_nonzero(begin[:-1] + length[order[:-1]] > begin[1:])


_NEVER: Any = object()  # stands for places that have not come before
_Ends = tuple[str, int, int, int, int]  # op, length, ids of the first and last array and of the first output, if other


class _KnownArrays:
    """A call on CuPy's arrays, of which only the shape may change while they live.

    :ivar ids: of the arrays and of the outputs, where these are others.
    """

    __slots__ = ("_alive", "_have_shapes", "ids", "library", "ready")

    def __init__(self, ready: Ready, arrays: Sequence[Any], out: Sequence[Any], forget: Callable[[Any], None]) -> None:
        """``forget`` is called when one of the arrays dies, so that its id may become another one's."""
        every = arrays if out is arrays else (*arrays, *out)
        self.library, self.ready = cupy_runtime, ready
        self.ids = [*map(id, arrays)], None if out is arrays else [*map(id, out)]
        self._alive = [weakref.ref(array, forget) for array in every]
        self._have_shapes = cupy_runtime.same_shapes(arrays)

    def is_of(self, arrays: Sequence[Any], out: Sequence[Any]) -> bool:
        """True if it is a call on these arrays. ``out`` is ``arrays`` if it was so in the first call."""
        ids, others = self.ids
        if [*map(id, arrays)] != ids or not self._have_shapes(arrays):
            return False
        return others is None or ([*map(id, out)] == others and self._have_shapes(out))


class _KnownTensors:
    """A call on PyTorch's tensors, which may change in any way: all is compared, but how to is known."""

    __slots__ = ("_kind", "_sources", "_targets", "library", "ready")

    def __init__(self, ready: Ready, kind: Kind, sources: list[int], targets: list[int]) -> None:
        self.library, self.ready = torch_runtime, ready
        self._kind, self._sources, self._targets = kind, sources, targets

    def is_of(self, tensors: Sequence[Any], out: Sequence[Any]) -> bool:
        """True if it is a call on these tensors. ``out`` is ``tensors`` if it was so in the first call."""
        read = self._kind.read
        return read(tensors) == self._sources and (out is tensors or read(out) == self._targets)


class KnownLists:
    """The calls on lists that have come before. The communicator's lock is held around every method."""

    def __init__(
        self, device: int, order: StreamOrder, make_start: MakeStart, make_ready: MakeReadyList
    ) -> None:  # fmt: skip
        self._device, self._order, self._make_start, self._make_ready = device, order, make_start, make_ready
        self._kinds: dict[tuple[Any, ...], Kind] = {}  # by op, length, and the first and last member's shape and dtype
        # By op and length: the kind, if there is one alone, which takes half a microsecond less to find. None: several.
        self._of_length: dict[tuple[str, int], Kind | None] = {}
        # By kind and the addresses of sources and targets, as bytes. None: it has come once.
        self._by_places: dict[tuple[Kind, bytes, bytes], Ready | None] = {}
        # By op, length, and a few of the arrays' ids. None: tensors whose memory changes.
        self._by_ends: dict[_Ends, _KnownArrays | _KnownTensors | None] = {}
        # Weak references to the first arrays of lists that may be known so.
        self._firsts: dict[_Ends, Callable[[], Any]] = {}

    def learn(self, arrays: Sequence[Any], op: Any, prepared: PreparedList) -> None:
        """Remember a call that was made by the usual way, if lists like this can be ready."""
        if type(op) is not str or any(through is not None for through in prepared.through):
            return
        library = _library(arrays)
        key = None if library is None else _key(library, arrays, op)
        if key is None:
            return
        length = op, len(arrays)
        known = self._kinds.get(key)
        if known is not None and known.read(arrays) is not None:
            if self._of_length.get(length) is not known:
                keep(self._of_length, length, None, _MOST)
            return
        read = (cupy_runtime if library is cupy_runtime else torch_lists).reader(arrays, self._device)
        if read is None:
            return
        sizes, itemsizes = [one.nbytes for one in arrays], [library.dtype_of(one.dtype).itemsize for one in arrays]
        if not any(sizes):  # nothing is launched
            return
        lengths = np.array(sizes, np.uint64)
        # As pointers, which pack in half of the time of other numbers of 64 bits.
        pack, anew = Struct(f"{len(arrays)}P").pack, Ready(prepared.what, self._make_start(prepared), None)
        kind = Kind(library, prepared, read, pack, anew, sizes, lengths, itemsizes, max(itemsizes), max(sizes))
        keep(self._kinds, key, kind, _MOST)
        keep(self._of_length, length, None if length in self._of_length else kind, _MOST)

    def find(self, arrays: Sequence[Any], op: str, out: Any, stream: Any) -> tuple[Ready | None, Any, Stream]:
        """Do the same as :meth:`KnownCalls.find` for a list or a tuple of arrays."""
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
        known = self._by_ends.get(ends)
        if known is None:
            return self._unknown(ends, arrays, op, out, stream)
        library = known.library
        current = library.stream_handle(self._device)
        if stream is not None:
            given = given_stream(stream, current, library is torch_runtime)
            if given is None:
                return NOT_READY
            current = given
        if known.is_of(arrays, out):
            return known.ready, out, current
        if library is torch_runtime:
            self._by_ends[ends] = None
        else:
            self.forget(ends)
        return self._unknown(ends, arrays, op, out, stream)

    def _unknown(
        self, ends: _Ends | None, arrays: Sequence[Any], op: str, out: Any, stream: Any
    ) -> tuple[Ready | None, Any, Stream]:  # fmt: skip
        """Do the same as :meth:`find` for a list that is not known by its arrays.

        :param ends: by what it may become known.
        """
        kind = self._of_length.get((op, len(arrays)))
        library = _library(arrays) if kind is None else kind.library
        if library is None:
            return NOT_READY
        current = library.stream_handle(self._device)
        if stream is not None:
            given = given_stream(stream, current, out is None or library is torch_runtime)
            if given is None:
                return NOT_READY
            current = given
        if kind is None:
            key = _key(library, arrays, op)
            kind = None if key is None else self._kinds.get(key)
        sources = None if kind is None else kind.read(arrays)
        if kind is None or sources is None:
            return NOT_READY
        result, targets = out, sources
        if out is None:
            if current > 1 and self._order.quick(current) is None:
                return NOT_READY  # a capture, say, into which allocations go their own way
            made = [library.empty_like(array, self._device) for array in arrays]
            result, targets = [one for one, _ in made], [address for _, address in made]
        elif out is not arrays:
            others = kind.read(out)
            if others is None:
                return NOT_READY
            targets = others
        froms = kind.pack(*sources)
        place = kind, froms, froms if targets is sources else kind.pack(*targets)
        ready = self._by_places.get(place, _NEVER)
        if ready is _NEVER or ready is None:
            ready = self._at(place, sources, targets, out is None, ready is None)
        elif ends is not None and ends not in self._by_ends:
            self._watch(ends, ready, arrays, out, (kind, sources, targets))
        return ready, result, current

    def _at(
        self, place: tuple[Kind, bytes, bytes], sources: list[int], targets: list[int], new: bool, again: bool
    ) -> Ready | None:  # fmt: skip
        """The launch at a place: made anew the first time, and kept from the second one on. None: by the usual way.

        :param new: the targets were made for this call. :param again: the place has come before.
        """
        kind, froms, tos = place
        read = kind.fits(sources, froms)
        written = read if targets is sources else kind.fits(targets, tos)
        if not read or not written or not (new or kind.are_apart(sources, targets, froms, tos)):
            return None
        at = froms, read
        places = at, at if targets is sources else (tos, written)
        if again:
            return keep(self._by_places, place, self._make_ready(kind.prepared, places), _MOST)
        keep(self._by_places, place, None, _MOST)
        ready = kind.anew
        ready.argument = places
        return ready

    def _watch(
        self, ends: _Ends, ready: Ready, arrays: Sequence[Any], out: Sequence[Any],
        read: tuple[Kind, list[int], list[int]],
    ) -> None:  # fmt: skip
        """Know a list by its arrays, if they come again: those of CuPy until one of them dies.

        Gradients are new arrays each time, at the addresses of others before them. To know these would be for nothing.
        """
        first = self._firsts.get(ends)
        if first is None or first() is not arrays[0]:
            reference: Callable[[], Any] = weakref.ref(arrays[0])
            keep(self._firsts, ends, reference, _MOST)
            return
        known: _KnownArrays | _KnownTensors
        if read[0].library is torch_runtime:
            known = _KnownTensors(ready, *read)
        else:
            known = _KnownArrays(ready, arrays, out, partial(_forget, weakref.ref(self), ends))
        keep(self._by_ends, ends, known, _MOST)

    def forget(self, ends: _Ends) -> None:
        """Forget a list of which an array has died, or changed. Python may call this at any time, in any thread."""
        self._by_ends.pop(ends, None)


def _forget(known: Callable[[], KnownLists | None], ends: _Ends, _: Any) -> None:
    lists = known()
    if lists is not None:
        lists.forget(ends)


def _library(arrays: Sequence[Any]) -> Any:
    """The library of the first array, which all others have to be of, too."""
    if not arrays:
        return None
    if type(arrays[0]) is getattr(cupy_runtime.cupy, "ndarray", None):
        return cupy_runtime
    return torch_runtime if torch_runtime.works() and torch_runtime.is_plain_type(type(arrays[0])) else None


def _key(library: Any, arrays: Sequence[Any], op: str) -> tuple[Any, ...] | None:
    """By what a kind of lists is found. None if the last array is not of the library, or an end has no shape."""
    first, last = arrays[0], arrays[-1]
    if type(last) is not type(first) and _library((last,)) is not library:
        return None
    try:
        return op, len(arrays), first.shape, first.dtype, last.shape, last.dtype
    except RuntimeError:  # PyTorch's, of a nested tensor
        return None
