"""The fast path: repeated eager calls and replays, which have only to be compared with the peers' and launched.

Whatever takes more (another stream, a fault to settle, arrays of another kind) takes the usual path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..coordination.calls import CallSequence
from ..coordination.control_page import Page
from ..coordination.fingerprint import Fingerprint
from ..coordination.flight_recorder import RING
from ..cuda import cupy_runtime, driver
from ..cuda.contexts import using
from ..errors import CaptureError, CudaError
from ..handles import Stream
from .stream_order import IN_A_CAPTURE, StreamOrder

_MOST = 4096  # pairs of arrays that are remembered
_NOT_READY = None, None
_CAPTURING = (900, 905)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, _ISOLATION: for an event from outside


class Ready:
    """A call whose launch is ready: ``launch(argument, stream)``. Without an argument it cannot be made any more.

    :param capturable: a launch would become part of a capture. If not, the driver refuses it there.
    """

    __slots__ = ("__weakref__", "argument", "capturable", "launch", "what")

    def __init__(
        self, what: Fingerprint, launch: Callable[[Any, Stream], Any], argument: Any, capturable: bool
    ) -> None:
        self.what, self.launch, self.argument, self.capturable = what, launch, argument, capturable


class Prepared(Protocol):
    """All that a backend knows of an all-reduce before its addresses are given."""

    @property
    def what(self) -> Fingerprint: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fast(self) -> bool:
        """True if it is one launch, from the arrays as they are."""

    @property
    def through(self) -> np.dtype[Any] | None:
        """The dtype as which it is reduced, if not the array's own."""


Find = Callable[[tuple[int, ...], "np.dtype[Any]", str], "Prepared | None"]  # a call by shape, dtype and op
MakeReady = Callable[[Any, int, int], Ready]  # from what Find returns, and the addresses of source and target


class _KnownCall:
    """An eager call from one CuPy array into another or the same, as long as these live."""

    __slots__ = ("array", "out", "place", "prepared", "ready", "shape")

    def __init__(self, array: Any, out: Any, prepared: Prepared, place: tuple[int, int]) -> None:
        self.array: Callable[[], Any] = weakref.ref(array)
        self.out: Callable[[], Any] = weakref.ref(out)
        self.shape: tuple[int, ...] = array.shape  # programs can assign to it
        self.prepared, self.place = prepared, place
        self.ready: Ready | None = None


class FastPath:
    """The repeated calls on one engine. :meth:`make` takes the communicator's lock, and holds it around the rest.

    Calls on contiguous CuPy arrays, of a shape, dtype and op that came before, are launched by what the backend makes
    ready for their addresses. With the same two array objects, only the shapes are looked at.
    """

    def __init__(
        self, calls: CallSequence, device: int, context: int, order: StreamOrder, page: Page, find: Find,
        make_ready: MakeReady,
    ) -> None:  # fmt: skip
        self._calls, self._device, self._context, self._order = calls, device, context, order
        self._abort_word, self._recorder, self._find = page.abort_word, page.calls, find
        self._make_ready = make_ready
        parts = "recorded", "number", "page", "keys_offset", "slot_bytes", "agreed"  # none of them is ever replaced
        self._recorder_parts = tuple(getattr(page.calls, name) for name in parts)
        # By the ids of array and out, and op. None: these ids belong to short-lived arrays; do not cache.
        self._known: dict[tuple[int, int, str], _KnownCall | None] = {}

    def make(
        self, ready: Ready | None, usual: Callable[[Any, Any, Any, Any], Any],
        array: Any = None, op: Any = None, out: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Make one call under the lock: launch ``ready``, or the eager call of these arguments; else by ``usual``.

        One function, on the path of every eager call and replay, with its part of :class:`CallSequence` and
        :class:`FlightRecorder`: each of Python's calls takes 0.1 to 0.2 us, a ``with`` block 0.13, ``*args`` 0.06. The
        driver refuses a graph's launch in a capture, so for replays the capture is not looked for, 0.2 us.

        :param usual: takes the other arguments, which a replay leaves out.
        :returns: the result of the eager call, or of ``usual``; True for ``ready``.
        """
        calls = self._calls
        try:
            calls.lock.acquire()  # here, so that an interrupt behind it still releases the lock
            if calls.unusable is not None:
                calls.check_usable()
            calls.number = number = calls.number + 1
            try:
                result: Any = True
                if ready is None:
                    ready, result = self._eager(array, op, out, stream)
                    if ready is None:
                        return usual(array, op, out, stream)
                current, order, argument = cupy_runtime.get_current_stream().ptr, self._order, ready.argument
                follows = current == order.event_free_stream
                if (
                    argument
                    and (follows or order.shared)
                    and not self._abort_word[0]
                    and ((current > 1 and not ready.capturable) or order.runs(current))
                ):
                    recorded, number_word, page, at, nbytes, agreed = self._recorder_parts  # as FlightRecorder.enter()
                    what = ready.what
                    slot = number % RING
                    if recorded[slot] is not what:
                        self._recorder.write(slot, what)
                    number_word[0] = number
                    at += slot * nbytes
                    if page[at : at + nbytes] == agreed[what.crc] or self._recorder.differing(number) is None:
                        try:
                            if follows:
                                ready.launch(argument, current)
                            else:
                                order.launch_shared(partial(ready.launch, argument), current)
                        except RuntimeError as error:
                            start: Callable[[Stream], Any] = partial(ready.launch, argument)
                            start = start if follows else partial(order.launch_shared, start)
                            self._launch_anyway(start, current, error)
                        return result
                return usual(array, op, out, stream)
            except BaseException as error:
                calls.failed(error)
                raise
        finally:
            try:  # noqa: SIM105  (suppress() takes 0.3 us)
                calls.lock.release()
            except RuntimeError:  # interrupted before we had it
                pass

    def _launch_anyway(self, start: Callable[[Stream], Any], stream: Stream, error: Exception) -> None:
        """Launch in our context, if the error was for want of that. :raises CudaError: if not, or CaptureError."""
        error = cupy_runtime.launch_error(error)
        wants_ours = isinstance(error, CudaError) and error.code in driver.INVALID_CONTEXT
        if wants_ours and driver.current_context() != self._context:
            try:
                with using(self._context):  # this thread has another one, or none
                    start(stream)
                return
            except RuntimeError as again:
                error = cupy_runtime.launch_error(again)
        if isinstance(error, CudaError) and error.code in _CAPTURING:
            raise CaptureError(IN_A_CAPTURE) from error
        raise error

    def _eager(self, array: Any, op: Any, out: Any, stream: Any) -> tuple[Ready | None, Any]:
        """An eager call on the current stream, and its result, if it can be ready; not while a recording is open.

        Reads the arrays' attributes here, and not by arrays.py, for speed.
        """
        if stream is not None or type(op) is not str or self._calls.recording is not None:
            return _NOT_READY
        key = id(array), id(out), op
        known = self._known.get(key)
        if known is not None:
            shape = known.shape
            if known.array() is array and known.out() is out and array.shape == shape:
                if out is not array and out.shape != shape:
                    return _NOT_READY
                ready = known.ready
                if ready is None:
                    ready = known.ready = self._make_ready(known.prepared, *known.place)
                return ready, out
            self._known[key] = None
        cupy = cupy_runtime.cupy
        if cupy is None or type(array) is not cupy.ndarray:
            return _NOT_READY
        shape, dtype, place, device = array.shape, array.dtype, array.data, self._device
        prepared = self._find(shape, dtype, op)
        if prepared is None or not prepared.fast or not array._c_contiguous or place.device_id != device:
            return _NOT_READY
        source = target = place.ptr
        result = cupy.empty(shape, dtype) if out is None else out
        if result is not array:
            if type(result) is not cupy.ndarray or result.shape != shape or result.dtype != dtype:
                return _NOT_READY
            place = result.data
            target = place.ptr
            if place.device_id != device or not result._c_contiguous or abs(target - source) < prepared.nbytes:
                return _NOT_READY
        if (source | target) % dtype.itemsize:
            return _NOT_READY
        if out is not None and key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _KnownCall(array, out, prepared, (source, target))
        return self._make_ready(prepared, source, target), result
