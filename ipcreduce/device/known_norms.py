"""The memory of all-reduces with RMSNorm: a call that has come before is ready at once, as in known_calls.py.

A call into the caller's arrays is known by these, or else by their places, as tensors that come and go have the same
ones again and again. A call with new results is known by its kind: by all that is the same for other arrays, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from ..arrays.norms import FP8
from ..calls.norm_shape import ITEMSIZES, NormAddresses
from ..cuda import cupy_runtime, torch_lists, torch_runtime
from ..types import Stream
from .known_calls import NOT_READY, Ready, given_stream, keep
from .norms import PreparedNorm
from .stream_order import StreamOrder

_MOST = 4096  # calls that are known: two for each layer of a model, and batch sizes

Arguments = Sequence[Any]  # of a call, in the order of NormArguments
Key = tuple[Any, ...]  # of a call: ids of its arrays, and what else makes it another call
_ARRAYS = 0, 1, 3, 4, 5, 8, 9  # the indices of arrays among the arguments
_HOW = 7  # the index of the quantisation
_OUTPUTS = {3: ("out", 0), 4: ("residual_out", 2), 5: ("quant_out", None), 6: ("scales_out", None)}
# By the index of an output among NormAddresses, as which _ARRAYS come: its name, and the input that it may be.
_OUT, _SCALES = 3, 6


@dataclass(frozen=True, eq=False)
class _KnownNorm:
    """A call on arrays that have come before.

    :ivar eps, bias: the numbers, by which the key does not tell calls apart: most are the same objects each time.
    :ivar library: cupy_runtime or torch_runtime, of which all arrays are.
    :ivar forms: of CuPy's arrays, which may change only their shapes: the index of each among the arguments, its axes,
        its length, and its shape if that has more to say.
    :ivar tensors: gives the arguments that are tensors, each once. ``read``: see :func:`torch_lists.reader`.
    :ivar addresses: what ``read`` has to return.
    :ivar scale: a reference to a given scale that is a tensor. It comes behind the other tensors.
    """

    ready: Ready
    eps: float
    bias: float
    library: Any
    forms: tuple[tuple[int, int, int, Any], ...]
    tensors: Callable[[Arguments], tuple[Any, ...]]
    read: Callable[[Sequence[Any]], list[int] | None] | None
    addresses: list[int] | None
    scale: Callable[[], Any] | None


@dataclass(frozen=True, eq=False)
class _Kind:
    """A call with new results, without its addresses.

    :ivar made: by the index among NormAddresses, the shape and dtype of each new array. None: those of x.
    :ivar written: the indices of outputs that are given.
    :ivar sizes: the bytes of the arrays that are given.
    :ivar alignments: of the addresses of arrays of the dtype of x, and of the quantised array.
    """

    prepared: PreparedNorm
    made: tuple[tuple[int, tuple[Any, Any] | None], ...]
    written: tuple[int, ...]
    sizes: tuple[int, ...]
    alignments: tuple[int, int]

    def fits(self, addresses: Sequence[int]) -> bool:
        """True if kernels take arrays at these addresses as they are."""
        source, weight, residual, out, residual_out, quantised, scales = addresses
        alignment, of_bytes = self.alignments
        return not (
            (source | weight | residual | out | residual_out) % alignment or quantised % of_bytes or scales % 4
        )  # fmt: skip

    def is_apart(self, addresses: Sequence[int]) -> bool:
        """True if no output that is given shares memory with an argument that it may not be."""
        for at in self.written:
            first, past = addresses[at], addresses[at] + self.sizes[at]
            for other, begin in enumerate(addresses):
                if other == at or (begin == first and other == _OUTPUTS[at][1]):
                    continue
                if begin < past and first < begin + self.sizes[other]:
                    return False
        return True


_Place = tuple[_Kind, NormAddresses]
_MakeReady = Callable[[PreparedNorm, NormAddresses], Ready]
# The launch of a call; with the tuple to return comes y, whose memory has to be kept until the launch; and its stream.
Found = tuple[Ready | None, tuple[tuple[Any, ...], Any] | None, Stream]


class KnownNorms:
    """The calls on one backend that have come before. The communicator's lock is held around every method.

    :param make_once: makes the launch of a call. :param make_ready: the same for one that comes again and again.
    """

    def __init__(self, device: int, order: StreamOrder, make_once: _MakeReady, make_ready: _MakeReady) -> None:
        self._device, self._order, self._make_once, self._make_ready = device, order, make_once, make_ready
        self._kinds: dict[Key, _Kind] = {}
        self._of_kinds: dict[_Place, Ready | None] = {}  # with new results. None: it has come once
        self.by_key: dict[Key | None, _KnownNorm] = {}
        self._by_places: dict[Key, Ready | None] = {}  # None: it has come once
        self._watched: dict[Key, list[Any]] = {}  # references to the arrays of by_key

    def find(self, given: Arguments, _op: None, _out: Any, stream: Any) -> Found:
        """Do the same as :meth:`KnownCalls.find` for a call with RMSNorm."""
        x, weight, eps, residual, out, residual_out, bias, how, quant_out, scales_out = given
        if how is not None and type(how) is not FP8:
            return NOT_READY
        if residual_out is None:
            return self._find_new(given, stream)
        in_place = how is None and out is x and residual_out is residual and quant_out is scales_out is None
        known = self.by_key.get((id(x), id(weight), id(residual)) if in_place else _key_of(given))
        if known is None or not (eps is known.eps or (type(eps) is float and eps == known.eps)):
            return self._find_by_places(given, stream)
        if not (bias is known.bias or (type(bias) is float and bias == known.bias)):
            return self._find_by_places(given, stream)
        if known.read is None:
            for index, axes, length, shape in known.forms:
                array = given[index]
                if array.ndim != axes or len(array) != length or (shape is not None and array.shape != shape):
                    return self._find_new(given, stream)
            current = cupy_runtime.get_current_stream().ptr
        else:
            tensors = (x, weight, residual) if in_place else known.tensors(given)
            if known.scale is not None:
                tensors = (*tensors, known.scale())
            if known.read(tensors) != known.addresses:
                return self._find_by_places(given, stream)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = self._current(known.library, stream)
            if current is None:
                return NOT_READY
        if how is None:
            return known.ready, ((out, residual_out), None), current
        scales = how._scale if scales_out is None else scales_out
        return known.ready, ((quant_out, scales, residual_out), None), current

    def _current(self, library: Any, stream: Any) -> Stream | None:
        """The stream of a call; None if that is not the library's current one."""
        current: Stream = library.stream_handle(self._device)
        return current if stream is None else given_stream(stream, current, True)

    def _find_by_places(self, given: Arguments, stream: Any) -> Found:
        """Do the same as :meth:`find` for arrays that have not come before."""
        place = self._place(given) if self._by_places and _has_all_results(given) else None
        ready = None if place is None else self._by_places.get(place)
        if ready is None:
            return self._find_new(given, stream)
        library = _library(given)
        if library is cupy_runtime and _key_of(given) not in self.by_key:  # it may be known with another eps
            self._watch(given, ready)
        current = self._current(library, stream)
        if current is None:
            return NOT_READY
        _, _, _, _, out, residual_out, _, how, quant_out, scales_out = given
        if how is None:
            return ready, ((out, residual_out), None), current
        return ready, ((quant_out, how.scale if scales_out is None else scales_out, residual_out), None), current

    def _place(self, given: Arguments) -> Key | None:
        """Where a call's arrays lie, and what else makes it another call. None if it cannot be known."""
        if type(given[2]) is not float or type(given[6]) is not float:
            return None
        library, how = _library(given), given[_HOW]
        found: list[Any] = [given[2], given[6]]
        for index in _ARRAYS:
            place = None
            if given[index] is not None:
                place = library.plain(given[index], self._device)
                if place is None:
                    return None
            found.append(place)
        if how is not None:
            scale = None if how.scale is None else library.plain(how.scale, self._device)
            if scale is None and how.scale is not None:
                return None
            found += [scale, how.per, how.column_major]
        return tuple(found)

    # ---- new results
    def _find_new(self, given: Arguments, stream: Any) -> Found:
        """Do the same as :meth:`find` for a call with new results."""
        if not self._kinds:
            return NOT_READY
        library = _library(given)
        looked = self._look(given, library)
        if looked is None:
            return NOT_READY
        key, addresses = looked
        kind, current = self._kinds.get(key), self._current(library, stream)
        if kind is None or current is None or (kind.written and not kind.is_apart(addresses)):
            return NOT_READY
        if current > 1 and self._order.quick(current) is None:
            return NOT_READY  # a capture, say, into which allocations go their own way
        x, _, _, _, out, total, _, how, numbers, scales = given
        results: list[Any] = [None, None, None, out, total, numbers, scales]
        for at, like in kind.made:
            made = library.empty_like(x, self._device) if like is None else library.empty(x, *like, self._device)
            results[at], addresses[at] = made
            if not addresses[at]:
                return NOT_READY
        if not kind.fits(addresses):
            return NOT_READY
        place = kind, NormAddresses(*addresses)
        ready = self._of_kinds.get(place) or self._make(place)
        _, _, _, out, total, numbers, scales = results
        if how is None:
            return ready, ((out, total), None), current
        return ready, ((numbers, scales if how.scale is None else how.scale, total), out), current

    def _look(self, given: Arguments, library: Any) -> tuple[Key, list[int]] | None:
        """The key of a call's kind, and the addresses of its arrays, 0 where there is none. None if it has no kind."""
        how, device, plain = given[_HOW], self._device, library.plain
        if type(given[2]) is not float or type(given[6]) is not float or (how is not None and how.column_major):
            return None
        key: list[Any] = [given[2], given[6]]
        addresses: list[int] = []
        for index in _ARRAYS:
            array, address = given[index], 0
            if array is None:
                key.append(None)
            else:
                place = plain(array, device)
                if place is None:
                    return None
                address, shape, dtype = place
                key += shape, dtype
            addresses.append(address)
        if how is not None:
            key.append(how.per)
            if how.scale is not None:
                place = plain(how.scale, device)
                if place is None:
                    return None
                addresses[_SCALES], shape, dtype = place
                key += shape, dtype
        return tuple(key), addresses

    def _make(self, place: _Place) -> Ready:
        """The launch at a place that has not come twice. The second time it is kept."""
        again = place in self._of_kinds
        ready = (self._make_ready if again else self._make_once)(place[0].prepared, place[1])
        keep(self._of_kinds, place, ready if again else None, _MOST)
        return ready

    def learn_new(self, given: Arguments, prepared: PreparedNorm, results: Mapping[str, Any]) -> None:
        """Remember the kind of a call that was made by the usual way on arrays as they are.

        :param results: the given and the new ones, by name.
        """
        library = _library(given)
        looked = self._look(given, library)
        if looked is None or looked[0] in self._kinds:
            return
        arrays = [given[index] for index in _ARRAYS]
        written = tuple(at for at in _OUTPUTS if arrays[at] is not None)
        made: list[tuple[int, tuple[Any, Any] | None]] = []
        for at, (name, _) in _OUTPUTS.items():
            if arrays[at] is None and name in results:
                one = results[name]
                made.append((at, None if at < 5 else (one.shape, one.dtype)))
        if prepared.needs_out(in_place=arrays[4] is not None):
            made.append((_OUT, None))
        if arrays[_SCALES] is None and given[_HOW] is not None:
            arrays[_SCALES] = given[_HOW].scale
        sizes = tuple(0 if array is None else array.nbytes for array in arrays)
        alignments = prepared.alignment, max(1, prepared.alignment // ITEMSIZES[prepared.shape.dtype])
        keep(self._kinds, looked[0], _Kind(prepared, tuple(made), written, sizes, alignments), _MOST)

    # ---- results in the caller's arrays
    def learn(self, given: Arguments, prepared: PreparedNorm, addresses: NormAddresses) -> None:
        """Remember a call that was made by the usual way on arrays as they are, into the caller's arrays."""
        place = self._place(given)
        if place is None:
            return
        if place not in self._by_places:
            keep(self._by_places, place, None, _MOST)
            return
        ready = self._by_places[place] or self._make_ready(prepared, addresses)
        keep(self._by_places, place, ready, _MOST)
        self._watch(given, ready)

    def _watch(self, given: Arguments, ready: Ready) -> None:
        """Know a call by its arrays, until one of them dies."""
        key, library, how = _key_of(given), _library(given), given[_HOW]
        apart = {id(given[index]): (index, given[index]) for index in _ARRAYS if given[index] is not None}
        arrays = list(apart.values())  # in place, two arguments are one array
        every, scale = [one for _, one in arrays], None
        if how is not None and how.scale is not None:
            every.append(how.scale)
            scale = weakref.ref(how.scale)
        forms: tuple[tuple[int, int, int, Any], ...] = ()
        read = addresses = None
        if library is cupy_runtime:
            forms = tuple((index, *cupy_runtime.form(one)) for index, one in arrays)
        else:
            read = torch_lists.reader(every, self._device)
            addresses = None if read is None else read(every)
            if addresses is None:
                return
        forget = partial(_forget, weakref.ref(self), key)
        keep(self._watched, key, [weakref.ref(one, forget) for one in every], _MOST)
        tensors = itemgetter(*(index for index, _ in arrays))
        keep(
            self.by_key,
            key,
            _KnownNorm(ready, given[2], given[6], library, forms, tensors, read, addresses, scale),
            _MOST,
        )

    def forget(self, key: Key) -> None:
        """Forget a call of which an array has died, so that its id may become another one's."""
        self.by_key.pop(key, None)
        self._watched.pop(key, None)


def _key_of(given: Arguments) -> Key:
    x, weight, _, residual, out, residual_out, _, how, quant_out, scales_out = given
    if how is None and out is x and residual_out is residual and quant_out is scales_out is None:
        return id(x), id(weight), id(residual)  # as in KnownNorms.find()
    if how is None:
        return id(x), id(weight), id(residual), id(out), id(residual_out), id(quant_out), id(scales_out)
    return (
        id(x), id(weight), id(residual), id(out), id(residual_out), id(quant_out), id(scales_out), id(how._scale),
        how._per, how._column_major,
    )  # fmt: skip


def _has_all_results(given: Arguments) -> bool:
    """True if every array that the call returns is the caller's."""
    _, _, _, _, out, residual_out, _, how, quant_out, scales_out = given
    if residual_out is None or (how is None and out is None):
        return False
    return how is None or (quant_out is not None and (scales_out is not None or how.scale is not None))


def _library(given: Arguments) -> Any:
    """The library of x, which all other arrays have to be of, too."""
    return cupy_runtime if type(given[0]) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime


def _forget(known: Callable[[], KnownNorms | None], key: Key, _: Any) -> None:
    norms = known()
    if norms is not None:
        norms.forget(key)
