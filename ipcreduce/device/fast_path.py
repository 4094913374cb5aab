"""The fast path: repeated eager calls and replays, which have only to be compared with the peers' and launched.

Whatever takes more (another stream, a fault to settle, arrays of another kind) takes the usual path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from sys import modules
from typing import Any, Protocol

import numpy as np

from ..calls import turns
from ..calls.fingerprint import Fingerprint
from ..calls.sequence import CallSequence
from ..cuda import cupy_runtime, driver, torch_runtime
from ..cuda.contexts import using
from ..errors import CaptureError, CudaError
from ..page.control_page import Page
from ..page.flight_recorder import RING
from ..types import DEFAULT_STREAM, Stream
from .stream_order import IN_A_CAPTURE, StreamOrder

_MOST = 4096  # pairs of arrays that are remembered
_NOT_READY = None, None, DEFAULT_STREAM
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
    """An eager call from one array into another, the same or a new one, as long as these live.

    :ivar library: cupy_runtime or torch_runtime.
    :ivar places: address, shape and dtype of array and out; of CuPy's arrays only the shape may change.
    :ivar target: address of out, or of the last new result.
    """

    __slots__ = ("array", "library", "out", "places", "prepared", "ready", "shape", "target")

    def __init__(self, array: Any, out: Any, prepared: Prepared, library: Any, places: tuple[Any, Any]) -> None:
        self.array: Callable[[], Any] = weakref.ref(array)
        self.out: Callable[[], Any] = _nothing if out is None else weakref.ref(out)
        self.shape: tuple[int, ...] = array.shape
        self.prepared, self.library, self.places, self.target = prepared, library, places, places[1][0]
        self.ready: Ready | None = None


def _nothing() -> None:
    """In the place of a reference to an out that is not given."""


class FastPath:
    """The repeated calls on one backend. :meth:`make` takes the communicator's lock, and holds it around the rest.

    Calls on contiguous CuPy arrays or PyTorch tensors, of a shape, dtype and op that came before, are launched by what
    the backend makes ready for their addresses. With the same two CuPy arrays, only the shapes are looked at.
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
        # By addresses, shape, dtype and op, for other objects at the same places. None: made once, and to be better.
        self._placed: dict[tuple[Any, ...], Ready | None] = {}

    def make(
        self, ready: Ready | None, usual: Callable[[Any, Any, Any, Any], Any],
        array: Any = None, op: Any = None, out: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Make one call under the lock: launch ``ready``, or the eager call of these arguments; else by ``usual``.

        One function, on the path of every eager call and replay, with its part of :class:`CallSequence` and
        :class:`FlightRecorder`: each of Python's calls takes 0.1 to 0.2 us, a ``with`` block 0.13, ``*args`` 0.06. The
        driver refuses a graph's launch in a capture, so for replays the capture is not looked for, 0.2 us. For a call
        with a new result :meth:`_eager` has done so, before it was allocated.

        :param usual: takes the other arguments, which a replay leaves out.
        :returns: the result of the eager call, or of ``usual``; True for ``ready``.
        """
        calls = self._calls
        try:
            calls.lock.acquire()  # here, so that an interrupt behind it still releases the lock
            if calls.within or calls.nested:
                turns.make_way(calls)
            if calls.unusable is not None:
                calls.check_usable()
            try:
                calls.within = True
                calls.number = number = calls.number + 1
                result: Any = True
                if ready is None:
                    ready, result, current = self._eager(array, op, out, stream)
                    if ready is None:
                        return usual(array, op, out, stream)
                else:  # as current_streams.stream_of()
                    current = cupy_runtime.get_current_stream().ptr
                    if not current and (torch_runtime.get_stream or ("torch" in modules and torch_runtime.works())):
                        current = torch_runtime.get_stream(self._device)
                order, argument = self._order, ready.argument
                follows = current == order.event_free_stream
                if (
                    argument
                    and (follows or order.by_event or current == order.event_stream or current == order.resting_stream)
                    and not self._abort_word[0]
                    and ((current > 1 and (out is None or not ready.capturable)) or order.runs(current))
                ):
                    recorded, number_word, page, at, nbytes, agreed = self._recorder_parts  # as FlightRecorder.enter()
                    what = ready.what
                    slot = number % RING
                    if recorded[slot] is not what:
                        self._recorder.write(slot, what)
                    number_word[0] = number
                    at += slot * nbytes
                    if page[at : at + nbytes] == agreed[what.crc] or self._recorder.differing(number) is None:
                        if not follows and current == order.resting_stream:
                            order.resume()
                            follows = True
                        try:
                            if follows:
                                ready.launch(ready.argument, current)  # 0 by now if another thread closed the graph
                            else:
                                order.launch_shared(partial(ready.launch, ready.argument), current)
                        except RuntimeError as error:
                            start: Callable[[Stream], Any] = partial(ready.launch, argument)
                            start = start if follows else partial(order.launch_shared, start)
                            self._launch_anyway(start, current, error)
                        order.launched = number
                        return result
                return usual(array, op, out, stream)
            except BaseException as error:
                calls.fail(error)
                raise
            finally:
                calls.within = False
                if calls.nested:
                    turns.tell_nested(calls)
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

    def _eager(self, array: Any, op: Any, out: Any, stream: Any) -> tuple[Ready | None, Any, Stream]:
        """An eager call, its result and its stream, if it can be ready; not while a recording is open.

        Reads the arrays' attributes by their own libraries, and not by arrays.py, for speed.
        """
        if type(op) is not str or self._calls.recording is not None:
            return _NOT_READY
        key = id(array), id(out), op
        known = self._known.get(key)
        if known is None:
            return self._unknown(key, array, op, out, stream)
        if known.array() is not array or known.out() is not out:
            self._known[key] = None
            return self._unknown(key, array, op, out, stream)
        library = known.library
        if library is cupy_runtime:
            shape = known.shape
            if array.shape != shape or (out is not array and out is not None and out.shape != shape):
                return _NOT_READY
            current = cupy_runtime.get_current_stream().ptr
        else:
            place, other = known.places
            unmoved = torch_runtime.is_at
            if not unmoved(array, place) or (out is not array and out is not None and not unmoved(out, other)):
                del self._known[key]
                return self._unknown(key, array, op, out, stream)
            if (
                torch_runtime.tracing_state() is not None
                or torch_runtime.modes._is_in_torch_dispatch_mode
                or torch_runtime.duals._current_level >= 0
            ):
                return _NOT_READY
            current = torch_runtime.get_stream(self._device)
        if stream is not None:
            given = cupy_runtime.stream_of(stream)[0]
            if given != current and (out is None or library is torch_runtime):
                return _NOT_READY  # memory of another stream
            current = given
        if out is not None:
            return known.ready or self._second(known), out, current
        if current > 1 and not self._order.runs(current):
            return _NOT_READY  # a capture, into which allocations go their own way
        result, target = library.empty_like(array, self._device)
        if target == known.target:
            return known.ready or self._second(known), result, current
        if not target:
            return _NOT_READY
        known.target, known.ready = target, None
        return self._make_ready(known.prepared, known.places[0][0], target), result, current

    def _second(self, known: _KnownCall) -> Ready:
        """The launch to a target that has come before."""
        known.ready = self._make_ready(known.prepared, known.places[0][0], known.target)
        return known.ready

    def _unknown(
        self, key: tuple[int, int, str], array: Any, op: str, out: Any, stream: Any
    ) -> tuple[Ready | None, Any, Stream]:  # fmt: skip
        """As :meth:`_eager`, of arrays that have not come before."""
        library: Any = cupy_runtime if type(array) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime
        device = self._device
        place = library.plain(array, device)
        if place is None:
            return _NOT_READY
        current = library.stream_handle(device)
        if stream is not None:
            given = cupy_runtime.stream_of(stream)[0]
            if given != current and (out is None or library is torch_runtime):
                return _NOT_READY
            current = given
        source, shape, kind = place
        other = place if out is array or out is None else library.plain(out, device)
        if other is None or other[1] != shape or other[2] != kind:
            return _NOT_READY
        at = source, other[0], shape, kind, op
        if out is not None and (ready := self._placed.get(at)) is not None:
            return ready, out, current
        dtype = library.dtype_of(kind)
        prepared = None if dtype is None else self._find(shape, dtype, op)
        if dtype is None or prepared is None or not prepared.fast:
            return _NOT_READY
        target, result = other[0], out
        if out is None:
            if current > 1 and not self._order.runs(current):
                return _NOT_READY
            result, target = library.empty_like(array, device)
            if not target:
                return _NOT_READY
        elif 0 < abs(target - source) < prepared.nbytes:
            return _NOT_READY
        if (source | target) % dtype.itemsize:
            return _NOT_READY
        if key not in self._known and library.can_be_known(kind):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _KnownCall(array, out, prepared, library, (place, other))
        ready = self._make_ready(prepared, source, target)
        if out is not None:
            if len(self._placed) >= _MOST:
                self._placed.clear()
            self._placed[at] = ready if at in self._placed else None
        return ready, result, current
