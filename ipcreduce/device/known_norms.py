"""The memory of all-reduces with RMSNorm: a call on the same arrays, into the caller's arrays, is ready at once."""

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


@dataclass(frozen=True, eq=False)
class _KnownNorm:
    """A call that has come before.

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
        self._by_key: dict[Key | None, _KnownNorm | None] = {}  # None: it has come once
        self._watched: dict[Key, list[Any]] = {}  # references to the arrays

    def find(self, given: Arguments, stream: Any) -> Ready | None:
        """The launch of a call, if it is ready and on the stream that :meth:`FastPath.make` takes for a launch.

        For speed it reads the attributes of arrays by their own libraries, not by ``ipcreduce.arrays``.
        """
        known = self._by_key.get(_key_of(given))
        if known is None:
            return None
        current: Stream = cupy_runtime.get_current_stream().ptr
        if known.library is cupy_runtime:
            if not current and (torch_runtime.get_stream or ("torch" in modules and torch_runtime.works())):
                current = torch_runtime.get_stream(self._device)  # which FastPath.make would take
                if current:
                    return None
            for index, shape in known.places:
                if given[index].shape != shape:
                    return None
        else:
            if current and current != torch_runtime.get_stream(self._device):
                return None
            unmoved = torch_runtime.is_at
            for index, place in known.places:
                if not unmoved(given[index], place):
                    return None
            if known.scale is not None and not unmoved(known.scale[0](), known.scale[1]):
                return None
            if (
                torch_runtime.tracing_state() is not None
                or torch_runtime.modes._is_in_torch_dispatch_mode
                or torch_runtime.duals._current_level >= 0
            ):
                return None
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            try:
                if given_stream(stream, current, True) is None:
                    return None
            except ArgumentError:  # to be raised in a call, of which the peers hear
                return None
        return known.ready

    def learn(self, given: Arguments, scale: Any, prepared: PreparedNorm, addresses: NormAddresses) -> None:
        """Remember a call that was made by the usual way on arrays as they are, into the caller's arrays.

        :param scale: the given one, or None.
        """
        key = _key_of(given)
        if key is None:
            return
        apart = {id(given[index]): (index, given[index]) for index in _ARRAYS if given[index] is not None}
        arrays = list(apart.values())  # in place, two arguments are one array
        of_cupy = all(type(one) is cupy_runtime.cupy.ndarray for _, one in arrays)
        library: Any = cupy_runtime if of_cupy else torch_runtime
        of_scale = None if scale is None else library.plain(scale, self._device)
        places = tuple((index, library.plain(one, self._device)) for index, one in arrays)
        if any(place is None for _, place in places) or (scale is not None and of_scale is None):
            return
        if key not in self._by_key:
            keep(self._by_key, key, None, _MOST)
            return
        if of_cupy:
            places = tuple((index, place[1]) for index, place in places)
        every = [one for _, one in arrays] + ([] if scale is None else [scale])
        forget = partial(_forget, weakref.ref(self), key)
        known_scale = None if scale is None else (weakref.ref(scale), of_scale)
        known = _KnownNorm(self._make_ready(prepared, addresses), library, places, known_scale)
        keep(self._watched, key, [weakref.ref(one, forget) for one in every], _MOST)
        keep(self._by_key, key, known, _MOST)

    def forget(self, key: Key) -> None:
        """Forget a call of which an array has died, so that its id may become another one's."""
        self._by_key.pop(key, None)
        self._watched.pop(key, None)


_ARRAYS = 0, 1, 3, 4, 5, 8, 9  # the indices of arrays among the arguments


def _key_of(given: Arguments) -> Key | None:
    x, weight, eps, residual, out, residual_out, bias, how, quant_out, scales_out = given
    if type(eps) is not float or type(bias) is not float:
        return None
    if how is None:
        return id(x), id(weight), eps, id(residual), id(out), id(residual_out), bias
    return (
        id(x), id(weight), eps, id(residual), id(out), id(residual_out), bias, id(quant_out), id(scales_out), how._key
    )  # fmt: skip


def _forget(known: Callable[[], KnownNorms | None], key: Key, _: Any) -> None:
    norms = known()
    if norms is not None:
        norms.forget(key)
