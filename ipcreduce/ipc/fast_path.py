"""Eager calls that are made again: all that is left to do is to compare and start them.

What takes more than that (another stream, a fault to settle, arrays of another kind) takes the way that every call can
take: the rest of ``Communicator.allreduce``. For that the quick way has no effect. Replays: ``GraphSupport.replayer``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from ..coordination.control_page import Page
from ..coordination.fingerprint import Signature
from ..cuda import cupy_runtime, driver, graph
from ..cuda.contexts import using, within
from ..errors import CaptureError, CudaError
from . import plan
from .launches import IN, OUT, Launches, Prepared
from .stream_order import IN_A_CAPTURE, CallOrder

Start = Callable[[int], None]  # launches on a stream

_MOST = 4096  # pairs of arrays, and of addresses, that are remembered
_MOST_GRAPHS = 256  # of 0.1 MB each, the first ones
_CAPTURING = (900, 905)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, _ISOLATION: of an event from outside


class Repeat:
    """An eager call from one CuPy array into another or the same, as long as these live."""

    __slots__ = ("array", "out", "place", "prepared", "shape", "start")

    def __init__(self, array: Any, out: Any, prepared: Prepared, place: tuple[int, int]) -> None:
        self.array: Callable[[], Any] = weakref.ref(array)
        self.out: Callable[[], Any] = weakref.ref(out)
        self.shape: tuple[int, ...] = array.shape  # which can be assigned to
        self.prepared, self.place = prepared, place
        self.start: Start | None = None


class Repeats:
    """The eager calls on an engine that are made again. Not thread-safe.

    Those of contiguous CuPy arrays, of a shape, dtype and op that came before, are launched; with the same
    addresses again, short messages are a graph of one kernel (:func:`plan.eager_as_graph`); with the same two array
    objects, nothing of these is looked at but their shapes.
    """

    def __init__(self, device: int, context: int, launches: Launches, order: CallOrder, page: Page) -> None:
        self._device, self._context, self._order = device, context, order
        self._abort_word, self._enter, self._find = page.abort_word, page.calls.enter, launches.find
        # By the ids of array and out, and op. None: other arrays have these ids each time.
        self._known: dict[tuple[int, int, str], Repeat | None] = {}
        self._starts: dict[tuple[driver.Launch, int, int], Start | None] = {}  # by addresses. None: seen once
        self._graphs: list[graph.Executable] = []

    def _again(self, call: int, what: Signature, start: Start) -> bool:
        """Makes a call by ``start(stream)`` on CuPy's current stream, if nothing else is to be done; whether it did."""
        current, order = cupy_runtime.get_current_stream(), self._order
        stream = current.ptr
        follows = stream == order.fast
        if not (follows or order.shared) or self._abort_word[0]:
            return False
        try:
            if stream < 2:  # the default stream: it captures nothing, and each context has its own
                if cupy_runtime.current_context() != self._context:
                    return False
            elif current.is_capturing():
                return False
        except RuntimeError:  # a capture that has failed
            return False
        if self._enter(call, what) is not None:
            return False
        if not follows:
            start = partial(order.launch_shared, start)
        try:
            start(stream)
        except CudaError as error:
            self.start_anyway(start, stream, error)
        return True

    def start_anyway(self, start: Start, stream: int, error: Exception) -> None:
        """In our context, if the error was for want of that. :raises CudaError: if not, or CaptureError."""
        wants_ours = isinstance(error, CudaError) and error.code in driver.INVALID_CONTEXT
        if wants_ours and driver.current_context() != self._context:
            try:
                with using(self._context):  # this thread has another one, or none
                    start(stream)
                return
            except CudaError as again:
                error = again
        if isinstance(error, CudaError) and error.code in _CAPTURING:
            raise CaptureError(IN_A_CAPTURE) from error
        raise error

    def make(self, call: int, array: Any, op: Any, out: Any) -> Any:
        """Makes an eager call; its result. None, with no effect, if it has to go the long way.

        Only quicker than that: so the arrays' attributes are read here, and not through arrays.py.
        """
        if type(op) is not str:
            return None
        key = id(array), id(out), op
        known = self._known.get(key)
        if known is not None:
            shape = known.shape
            if known.array() is array and known.out() is out and array.shape == shape:
                if out is not array and out.shape != shape:
                    return None
                start = known.start
                if start is None:
                    start = known.start = self._starter(known.prepared, *known.place)
                return out if self._again(call, known.prepared.what, start) else None
            self._known[key] = None
        cupy = cupy_runtime.cupy
        if cupy is None or type(array) is not cupy.ndarray:
            return None
        shape, dtype, place, device = array.shape, array.dtype, array.data, self._device
        prepared = self._find(shape, dtype, op)
        if prepared is None or len(prepared.launches) != 1 or not array._c_contiguous or place.device_id != device:
            return None
        source = target = place.ptr
        result = cupy.empty(shape, dtype) if out is None else out
        if result is not array:
            if type(result) is not cupy.ndarray or result.shape != shape or result.dtype != dtype:
                return None
            place = result.data
            target = place.ptr
            if place.device_id != device or not result._c_contiguous or abs(target - source) < prepared.nbytes:
                return None
        if (source | target) % dtype.itemsize:
            return None
        if out is not None and key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = Repeat(array, out, prepared, (source, target))
        return result if self._again(call, prepared.what, self._starter(prepared, source, target)) else None

    def _starter(self, prepared: Prepared, source: int, target: int) -> Start:
        """What starts a call of one launch, from address ``source`` to ``target``: a graph from the second time on."""
        ((launch, words, step),) = prepared.launches
        place = launch, source, target
        known = self._starts.get(place)
        if known is not None:
            return known
        if plan.eager_as_graph(step):
            if place not in self._starts:
                if len(self._starts) - len(self._graphs) >= _MOST:
                    self._starts = {one: start for one, start in self._starts.items() if start is not None}
                self._starts[place] = None
            elif len(self._graphs) < _MOST_GRAPHS:
                with within(self._context), suppress(CudaError):  # it is only quicker
                    words[IN], words[OUT] = source, target
                    executable = graph.executable_of(launch)
                    self._graphs.append(executable)
                    self._starts[place] = begin = partial(cupy_runtime.launch, executable)
                    return begin

        def start(stream: int) -> None:
            words[IN], words[OUT] = source, target
            launch.run(stream)

        return start

    def destroy_steps(self) -> Iterator[Callable[[], None]]:
        """What gives the graphs back: before the kernels in them, and after these have run."""
        while self._graphs:
            yield self._graphs.pop().destroy
