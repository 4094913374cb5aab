"""Repeated all-reduces with RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from ...arrays.norms import FP8
from ...calls.addresses import NormAddresses
from ...calls.request import ITEMSIZES
from ...cuda import cupy_runtime, torch_runtime
from ..launch_cache import MISS, Entry, Form, Found, LaunchCache, given_stream, library_of
from ..prepared import BoundLaunch, Prepared

_Arguments = Sequence[Any]  # of a call, in the order of NormCall
_ARRAYS = 0, 1, 3, 4, 5, 8, 9  # the indices of arrays among the arguments
_SCALES = 6  # the index of the scales among NormAddresses, in whose order _ARRAYS come
# By the index of an output there: its name, and the input that it may be.
_OUTPUTS = {3: ("out", 0), 4: ("residual_out", 2), 5: ("quant_out", None), 6: ("scales_out", None)}


@dataclass(frozen=True)
class _Layout:
    """The sizes of the arrays, by which addresses are checked. It is a :class:`Layout`.

    :ivar made: by the index among NormAddresses, the shape and dtype of each new array. None: those of x.
    :ivar written: the indices of outputs that are given.
    :ivar sizes: the bytes of the arrays that are given.
    :ivar alignments: of the addresses of arrays of the dtype of x, and of the quantised array.
    """

    made: tuple[tuple[int, tuple[Any, Any] | None], ...]
    written: tuple[int, ...]
    sizes: tuple[int, ...]
    alignments: tuple[int, int]

    def settle(self, addresses: NormAddresses, new: bool) -> NormAddresses | None:
        source, weight, residual, out, residual_out, quantised, scales = addresses
        alignment, of_bytes = self.alignments
        if (source | weight | residual | out | residual_out) % alignment or quantised % of_bytes or scales % 4:
            return None
        return addresses if self._is_apart(addresses) else None

    def _is_apart(self, addresses: Sequence[int]) -> bool:
        """True if no output that is given shares memory with an argument that it may not be."""
        for at in self.written:
            first, past = addresses[at], addresses[at] + self.sizes[at]
            for other, begin in enumerate(addresses):
                if other == at or (begin == first and other == _OUTPUTS[at][1]):
                    continue
                if begin < past and first < begin + self.sizes[other]:
                    return False
        return True


class NormHits:
    """The calls with RMSNorm that have come before. The communicator's lock is held around every method."""

    def __init__(self, cache: LaunchCache) -> None:
        self._cache, self._device, self._objects = cache, cache.device, cache.objects

    def lookup(self, given: _Arguments, _op: None, _out: Any, stream: Any) -> Found:
        """Look up a call with RMSNorm. Returns its launch, or None, its result and its stream.

        Its result comes with y, whose memory has to live until the launch, even if nobody gets it.
        """
        x, weight, eps, residual, out, residual_out, bias, how, quant_out, scales_out = given
        in_place = how is None and out is x and residual_out is residual and quant_out is scales_out is None
        key = (id(x), id(weight), id(residual)) if in_place else _key_of(given)
        entry = None if key is None else self._objects.get(key)
        if entry is None:
            return self._by_place(key, given, stream)
        at_eps, at_bias, forms, tensors_of = entry.more
        if not (eps is at_eps or (type(eps) is float and eps == at_eps)):
            return self._by_place(None, given, stream)
        if not (bias is at_bias or (type(bias) is float and bias == at_bias)):
            return self._by_place(None, given, stream)
        if entry.read is None:
            for index, axes, length, shape in forms:
                array = given[index]
                if array.ndim != axes or len(array) != length or (shape is not None and array.shape != shape):
                    return MISS
            current = cupy_runtime.get_current_stream().ptr
        else:
            tensors = (x, weight, residual) if in_place else tensors_of(given)
            if how is not None and how._scale is not None:
                tensors = (*tensors, how._scale)
            if entry.read(tensors) != entry.addresses:
                self._cache.evict(key)
                return self._by_place(key, given, stream)
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            current = given_stream(stream, current, entry.read is not None)
        if current is None:
            return MISS
        if how is None:
            return entry.bound, ((out, residual_out), out), current
        scales = how._scale if scales_out is None else scales_out
        return entry.bound, ((quant_out, scales, residual_out), out), current

    def _by_place(self, key: Any, given: _Arguments, stream: Any) -> Found:
        """Look up a call by the addresses of its arrays, when it is not found by the arrays. See :meth:`lookup`.

        :param key: the key under which the call may be inserted; None for none.
        """
        cache, looked = self._cache, self._look(given)
        if looked is None:
            return MISS
        of, addresses = looked
        form = cache.forms.get(of)
        if form is None:
            return MISS
        made, library = form.layout.made, form.library
        current = library.stream_handle(self._device)
        if stream is not None:
            current = given_stream(stream, current, bool(made) or library is torch_runtime)
        if current is None or (made and not cache.can_allocate(current)):
            return MISS
        x, _, _, _, out, total, _, how, numbers, scales = given
        results: list[Any] = [None, None, None, out, total, numbers, scales]
        for at, like in made:
            new = library.empty_like(x, self._device) if like is None else library.empty(x, *like, self._device)
            results[at], addresses[at] = new
            if not addresses[at]:
                return MISS
        there = NormAddresses(*addresses)
        bound = cache.places.get((form, there))
        if bound is None:
            insert = None if made or key is None else partial(self._insert, key, given)
            bound = cache.at(form, there, bool(made), insert)
            if bound is None:
                return MISS
        _, _, _, out, total, numbers, scales = results
        if how is None:
            return bound, ((out, total), out), current
        return bound, ((numbers, scales if how._scale is None else how._scale, total), out), current

    def _look(self, given: _Arguments) -> tuple[Any, list[int]] | None:
        """The key of a call's form, and the addresses of its arrays, 0 where there is none. None if it has no form."""
        eps, bias, how, device, plain = given[2], given[6], given[7], self._device, library_of(given[0]).plain
        if type(eps) is not float or type(bias) is not float:
            return None
        if how is not None and (type(how) is not FP8 or how._column_major):
            return None
        key: list[Any] = [eps, bias]
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
            key.append(how._per)
            if how._scale is not None:
                place = plain(how._scale, device)
                if place is None or given[9] is not None:
                    return None
                addresses[_SCALES], shape, dtype = place
                key += shape, dtype
        return tuple(key), addresses

    def _insert(self, key: Any, given: _Arguments, form: Form, bound: BoundLaunch) -> None:
        scale = None if given[7] is None else given[7]._scale
        apart = {id(given[index]): index for index in _ARRAYS if given[index] is not None}  # two may be one array
        every = [*(given[index] for index in apart.values()), *([] if scale is None else [scale])]
        forms: tuple[Any, ...] = ()
        if form.library is cupy_runtime:
            forms = tuple((index, *cupy_runtime.form(given[index])) for index in apart.values())
        more = given[2], given[6], forms, itemgetter(*apart.values())
        self._cache.insert(key, Entry(form, bound, 0, more), every, every)

    def form_of(self, given: Any, result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path."""
        shape, looked = prepared.request.epilogue, self._look(given)
        arrays = [given[index] for index in _ARRAYS]
        if looked is None or not prepared.nbytes:
            return None
        written = tuple(at for at in _OUTPUTS if arrays[at] is not None)
        numbers = () if not shape.scales else ((5, result[0]), (6, result[1]))
        needs_y = shape.keeps_y or (prepared.hands_on and arrays[4] is not None)  # nobody gets the latter: see lookup()
        made: list[tuple[int, tuple[Any, Any] | None]] = [(3, None)] * (needs_y and arrays[3] is None)
        made += [(4, None)] * (arrays[4] is None)
        if shape.scales == "given":
            arrays[_SCALES] = given[7].scale
        made += [(at, (one.shape, one.dtype)) for at, one in numbers if arrays[at] is None]
        sizes = tuple(0 if array is None else array.nbytes for array in arrays)
        itemsize = ITEMSIZES[shape.dtype]
        alignment = prepared.alignment or itemsize
        layout = _Layout(tuple(made), written, sizes, (alignment, max(1, alignment // itemsize)))
        return looked[0], Form(prepared, library_of(given[0]), layout)


def _key_of(given: _Arguments) -> Any:
    """The key of a call: the ids of its arrays, and the quantisation. None if that is of a subclass."""
    x, weight, _, residual, out, residual_out, _, how, quant_out, scales_out = given
    if how is None:
        return id(x), id(weight), id(residual), id(out), id(residual_out), id(quant_out), id(scales_out)
    if type(how) is not FP8:
        return None
    return (
        id(x), id(weight), id(residual), id(out), id(residual_out), id(quant_out), id(scales_out), id(how._scale),
        how._per, how._column_major,
    )  # fmt: skip
