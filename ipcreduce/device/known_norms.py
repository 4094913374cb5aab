"""The memory of all-reduces with RMSNorm: a call that has come before is ready at once, as in known_calls.py.

It is known by its arrays, or else by their places, as tensors that come and go have the same ones again and again. All
results have to go into the caller's arrays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from sys import modules
from typing import Any

from ..calls.norm_shape import NormAddresses
from ..cuda import cupy_runtime, torch_runtime
from ..errors import ArgumentError
from ..types import Stream
from .known_calls import Ready, given_stream, keep
from .norms import PreparedNorm

_MOST = 4096  # calls that are known: two for each layer of a model, and batch sizes

Arguments = Sequence[Any]  # of a call, in the order of NormArguments
Key = tuple[Any, ...]  # of a call: ids of its arrays, and what else makes it another call
_ARRAYS = 0, 1, 3, 4, 5, 8, 9  # the indices of arrays among the arguments
_HOW = 7  # the index of the quantisation


@dataclass(frozen=True, eq=False)
class _KnownNorm:
    """A call on arrays that have come before.

    :ivar library: cupy_runtime or torch_runtime, of which all arrays are.
    :ivar places: the index of each array among the arguments, and its place. CuPy's arrays may change only the shape.
    """

    ready: Ready
    library: Any
    places: tuple[tuple[int, Any], ...]
    scale: tuple[Any, Any] | None  # a reference to the given scale, and its place


class KnownNorms:
    """The calls on one backend that have come before. The communicator's lock is held, but not around :meth:`find`."""

    def __init__(self, device: int, make_ready: Callable[[PreparedNorm, NormAddresses], Ready]) -> None:
        self._device, self._make_ready = device, make_ready
        self.by_key: dict[Key | None, _KnownNorm] = {}
        self._by_places: dict[Key, Ready | None] = {}  # None: it has come once
        self._watched: dict[Key, list[Any]] = {}  # references to the arrays of by_key

    def find(self, given: Arguments, stream: Any) -> Ready | None:
        """The launch of a call, if it is ready and on the stream that :meth:`FastPath.make` takes for a launch.

        For speed it reads the attributes of arrays by their own libraries, not by ``ipcreduce.arrays``.
        """
        known = self.by_key.get(_key_of(given))
        if known is None:
            return self._find_by_places(given, stream)
        library = known.library
        if library is cupy_runtime:
            for index, shape in known.places:
                if given[index].shape != shape:
                    return None
        else:
            unmoved = torch_runtime.is_at
            for index, place in known.places:
                if not unmoved(given[index], place):
                    return self._find_by_places(given, stream)
            if known.scale is not None and not unmoved(known.scale[0](), known.scale[1]):
                return None
            if (
                torch_runtime.tracing_state() is not None
                or torch_runtime.modes._is_in_torch_dispatch_mode
                or torch_runtime.duals._current_level >= 0
            ):
                return None
        return known.ready if self._is_on(library, stream) else None

    def _is_on(self, library: Any, stream: Any) -> bool:
        """True if the call's stream is the one that :meth:`FastPath.make` takes for a launch."""
        current: Stream = cupy_runtime.get_current_stream().ptr
        if library is cupy_runtime:
            if not current and (torch_runtime.get_stream or ("torch" in modules and torch_runtime.works())):
                current = torch_runtime.get_stream(self._device)  # which FastPath.make would take
                if current:
                    return False
        else:
            of_torch = torch_runtime.get_stream(self._device)
            if current and current != of_torch:
                return False
            current = of_torch
        if stream is None:
            return True
        try:
            return given_stream(stream, current, True) is not None
        except ArgumentError:  # to be raised in a call, of which the peers hear
            return False

    def _find_by_places(self, given: Arguments, stream: Any) -> Ready | None:
        """Do the same as :meth:`find` for arrays that have not come before."""
        if not self._by_places:
            return None
        place = self._place(given)
        ready = None if place is None else self._by_places.get(place)
        if ready is None:
            return None
        library = _library(given)
        if library is cupy_runtime:
            self._watch(given, ready)
        return ready if self._is_on(library, stream) else None

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
        places = tuple((index, library.plain(one, self._device)) for index, one in arrays)
        if library is cupy_runtime:
            places = tuple((index, place[1]) for index, place in places)
        every, scale = [one for _, one in arrays], None
        if how is not None and how.scale is not None:
            every.append(how.scale)
            scale = weakref.ref(how.scale), library.plain(how.scale, self._device)
        assert key is not None
        forget = partial(_forget, weakref.ref(self), key)
        keep(self._watched, key, [weakref.ref(one, forget) for one in every], _MOST)
        keep(self.by_key, key, _KnownNorm(ready, library, places, scale), _MOST)

    def forget(self, key: Key) -> None:
        """Forget a call of which an array has died, so that its id may become another one's."""
        self.by_key.pop(key, None)
        self._watched.pop(key, None)


def _key_of(given: Arguments) -> Key | None:
    x, weight, eps, residual, out, residual_out, bias, how, quant_out, scales_out = given
    if type(eps) is not float or type(bias) is not float:
        return None
    if how is None:
        return id(x), id(weight), eps, id(residual), id(out), id(residual_out), bias
    return (
        id(x), id(weight), eps, id(residual), id(out), id(residual_out), bias, id(quant_out), id(scales_out), how._key
    )  # fmt: skip


def _library(given: Arguments) -> Any:
    """The library of x, which all other arrays have to be of, too."""
    return cupy_runtime if type(given[0]) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime


def _forget(known: Callable[[], KnownNorms | None], key: Key, _: Any) -> None:
    norms = known()
    if norms is not None:
        norms.forget(key)
