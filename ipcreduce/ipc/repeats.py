"""Calls that are made again: all that is left to do is to number, compare and start them.

What takes more than that (another stream, a fault to settle, arrays of another kind) takes the way that every call can
take: ``Communicator.allreduce``, ``Graph.replay``. For that the quick way has no effect.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from .. import surroundings
from ..cuda import driver, graph
from ..cuda.within import using, within
from ..errors import CaptureError, CudaError, IpcReduceError
from . import plan, release
from .engine import Engine
from .launches import IN, OUT, Prepared
from .signature import Signature

Start = Callable[[int], None]  # launches on a stream
Again = Callable[[Signature, Start, bool], bool]

_MOST = 4096  # pairs of arrays, and of addresses, that are remembered
_MOST_GRAPHS = 256  # of 0.1 MB each
_CAPTURING = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


class Caller(Protocol):
    """The communicator, as far as it is needed here."""

    recording: Any
    _lock: threading.RLock
    _call: int
    _unusable: IpcReduceError | None

    def _failed(self, error: BaseException) -> None: ...


def make_again(comm: Caller, engine: Engine) -> Again:
    """``again(what, start, capturable)`` makes the call ``what`` by ``start(stream)`` on CuPy's current stream.

    It does so only if that is the stream of the last eager call, and says whether it did. ``capturable``: whether such
    a call may be captured. A graph's launch may not, says the driver: not to look for that saves 0.2 us.
    """
    lock, order, abort_word, enter = comm._lock, engine.order, engine.page.abort_word, engine.page.enter

    def again(what: Signature, start: Start, capturable: bool) -> bool:
        with lock:
            current = surroundings.get_current_stream()
            stream = current.ptr
            if stream != order.fast or abort_word[0] or comm.recording is not None or comm._unusable is not None:
                return False
            try:
                if stream < 2:  # the default stream: it captures nothing, and each context has its own
                    if not engine.has_context():
                        return False
                elif capturable and current.is_capturing():
                    return False
            except RuntimeError:  # a capture that has failed
                return False
            call = comm._call + 1
            if enter(call, what) is not None:
                return False
            comm._call = call
            try:
                start(stream)
            except BaseException as error:
                _start_otherwise(comm, engine, start, stream, error)
        return True

    return again


def _start_otherwise(comm: Caller, engine: Engine, start: Start, stream: int, error: BaseException) -> None:
    """After ``error``: in our context, if this thread has another one, or none."""
    try:
        code = error.code if isinstance(error, CudaError) else 0
        if code == _CAPTURING:
            raise CaptureError("replay() on a stream that was being captured: a graph cannot be part of another one")
        if code not in driver.INVALID_CONTEXT or engine.has_context():
            raise error
        with using(engine.context):
            start(stream)
    except BaseException as final:
        comm._failed(final)
        raise


class Repeat:
    """An eager call from one CuPy array into another or the same, as long as these live."""

    __slots__ = ("array", "out", "place", "prepared", "shape", "start")

    def __init__(self, array: Any, out: Any, prepared: Prepared, place: tuple[int, int]) -> None:
        self.array, self.out = weakref.ref(array), weakref.ref(out)
        self.shape: tuple[int, ...] = array.shape  # which can be assigned to
        self.prepared, self.place = prepared, place
        self.start: Start | None = None


_UNSEEN = object()


class Repeats:
    """The eager calls of a communicator that are made again, with contiguous CuPy arrays, on CuPy's current stream.

    A shape, dtype and op that came before are launched; with the same addresses again, short messages are a graph of
    one kernel (:func:`plan.eager_as_graph`); with the same two array objects, nothing of these is looked at.
    """

    def __init__(self, engine: Engine, again: Again, lock: threading.RLock) -> None:
        self._launches, self._device, self._context = engine.launches, engine.device.ordinal, engine.context
        self._again, self._lock = again, lock
        # By the ids of array and out, and op. None: other arrays have these ids each time.
        self._known: dict[tuple[int, int, str], Repeat | None] = {}
        self._places = 0  # pairs of addresses that are remembered
        self._graphs: list[graph.Executable] = []

    def make(self, array: Any, op: Any, out: Any) -> Any:
        """Makes a call; its result. None, with no effect, if it has to go the long way.

        Only quicker than that: so the arrays' attributes are read here, and not through arrays.py.
        """
        cupy = surroundings.cupy
        if cupy is None or type(array) is not cupy.ndarray or type(op) is not str:
            return None
        shape, key = array.shape, (id(array), id(out), op)
        known: Any = self._known.get(key, _UNSEEN)
        if known is not _UNSEEN and known is not None:
            if known.array() is array and known.out() is out and known.shape == shape:
                start = known.start
                if start is None:
                    start = known.start = self._starter(known.prepared, *known.place)
                return out if self._again(known.prepared.what, start, True) else None
            self._known[key] = None
        dtype, place, device = array.dtype, array.data, self._device
        prepared = self._launches.find(shape, dtype, op)
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
        if known is _UNSEEN and out is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = Repeat(array, out, prepared, (source, target))
        return result if self._again(prepared.what, self._starter(prepared, source, target), True) else None

    def _starter(self, prepared: Prepared, source: int, target: int) -> Start:
        """What starts a call of one launch, from address ``source`` to ``target``: a graph from the second time on."""
        place, starts = (source, target), prepared.starts
        known = starts.get(place)
        if known is not None:
            return known
        ((launch, words, step),) = prepared.launches

        def start(stream: int) -> None:
            words[IN], words[OUT] = source, target
            launch.run(stream)

        if place in starts:
            starts[place] = start
            if plan.eager_as_graph(step) and len(self._graphs) < _MOST_GRAPHS:
                with self._lock, within(self._context), suppress(CudaError):  # it is only quicker
                    words[IN], words[OUT] = source, target
                    self._graphs.append(graph.executable_of(launch))
                    starts[place] = self._graphs[-1].launch
            return starts[place] or start
        if self._places < _MOST:
            self._places += 1
            starts[place] = None
        return start

    def close(self) -> None:
        """Gives the graphs back: before the kernels in them."""
        self._known.clear()
        graphs, self._graphs = self._graphs, []
        release.attempt(self._context, *(executable.destroy for executable in graphs))
