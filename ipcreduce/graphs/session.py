"""The part of a communicator that graphs work with."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays
from ..coordination import exchange
from ..coordination.calls import Faults
from ..coordination.fingerprint import Signature
from ..coordination.flight_recorder import RING
from ..coordination.votes import agree
from ..cuda import cupy_runtime
from ..errors import ArgumentError, GraphStateError, IpcReduceError, PeerLostError, UnsupportedError
from ..ipc.engine import Engine
from .direct.registration import register
from .pool import GraphPool

if TYPE_CHECKING:
    from .graph import Graph
    from .recording import Recording, Segment

_CAPTURE = Signature.of("the end of capture()")


class GraphSupport(ABC):
    """Recordings, their registration, and memory that peers can map. A base of ``Communicator``, which has the rest."""

    recording: Recording | None  # of the graph that is being recorded
    memory: GraphPool | None  # of empty()
    _recorded: list[Graph]  # not registered yet
    _capturing: int  # depth of capture()
    _lock: threading.RLock
    _mpi: Any
    _engine: Engine | None
    _faults: Faults | None
    _reasons: dict[str, str]
    _timeout: float
    _sync: bool
    _call: int
    _unusable: IpcReduceError | None

    @abstractmethod
    def _failed(self, error: BaseException) -> None: ...

    @abstractmethod
    def synchronize(self, stream: Any = None) -> None: ...

    def _no_recording(self) -> None:
        self.recording, self.memory, self._recorded, self._capturing = None, None, [], 0

    def check_usable(self) -> None:
        """:raises IpcReduceError: if the communicator is closed or lost."""
        if self._unusable is not None:
            raise type(self._unusable)(str(self._unusable))

    def require_engine(self, what: str) -> Engine:
        """The engine. :raises UnsupportedError: with no GPUs: ``what`` needs them."""
        self.check_usable()
        if self._engine is None:
            raise UnsupportedError(f"{what} needs backend ipc: {self._reasons['ipc']}")
        return self._engine

    @contextmanager
    def _calling(self) -> Iterator[tuple[Engine, Faults]]:
        """A call that every rank has to make: what it raises here is told to the others."""
        with self._lock:
            self.check_usable()
            assert self._engine is not None
            assert self._faults is not None
            self._call += 1
            try:
                yield self._engine, self._faults
            except BaseException as error:
                self._failed(error)
                raise

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank does not make a call. The caller raises ``error``."""
        with self._lock, suppress(IpcReduceError):
            if self._unusable is None:
                self._call += 1
                self._failed(error)

    def leave(self, error: BaseException) -> None:
        """Tells the others that this rank goes no further, unless they know that something went wrong.

        Then it must not meet them in a resynchronisation: they may be waiting for its vote.
        """
        if self._faults is not None and not self._faults.told:
            self.refuse(error)

    # ---- recording
    def begin_recording(self, recording: Recording, check: Callable[[], None]) -> None:
        """Opens a recording, as one call. ``check`` raises if this rank cannot. Collective."""
        with self._calling() as (_, faults):
            check()
            if self.recording is not None:
                raise GraphStateError("record() while this communicator is recording already: end that one first")
            self._call = recording.number = faults.enter(
                self._call, Signature.of(f"recording of {recording.name}"), recording.caller
            )
            self.recording = recording

    def end_recording(self, recording: Recording, error: BaseException | None) -> None:
        """The vote at its end: every rank goes on with it, or every rank raises. Collective.

        :raises BaseException: ``error``, or :class:`PeerFailedError` or :class:`RankMismatchError`: see agreement.py.
        """
        with self._lock:
            self.recording = None
            if error is not None:
                self.leave(error)  # a rank may wait in the body, in a break say
            self._agree(recording.number, recording.segments, error)

    def _agree(self, number: int, segments: list[Segment], error: BaseException | None) -> None:
        calls = [call.what for segment in segments for call in segment.calls]
        if self._faults is None:  # closed in the meantime
            raise error or ArgumentError("the communicator was closed during the recording")
        theirs: Exception | None
        try:
            deadline = time.monotonic() + self._timeout
            self._call, theirs = agree(self._faults, self._mpi, number, calls, error, self._call, deadline)
        except IpcReduceError as shared:
            self._failed(shared)
            theirs = shared
        if error is not None or theirs is not None:
            try:
                self._faults.raise_pending(self._call)  # the same trouble, told more exactly
            except IpcReduceError as exactly:
                theirs = exactly
            raise error or theirs  # type: ignore[misc]

    def recorded(self, graph: Graph) -> None:
        """A recording is complete: it is registered now, or at the end of :meth:`capture`. Collective."""
        self._recorded.append(graph)
        if not self._capturing:
            self._register()

    def _register(self) -> None:
        graphs, self._recorded = self._recorded, []
        with self._lock:
            if self._engine is not None:
                try:
                    with exchange.losing():
                        register(self._mpi, self._engine, graphs, self._timeout)
                except PeerLostError as error:
                    self._unusable = error
                    raise

    def order(self, before: int, after: int) -> None:
        """What comes on stream ``after`` waits for what is on ``before``."""
        with self._lock:
            if self._engine is not None:
                self._engine.order.chain(before, after)

    def run_recording(self, last: Segment | None, recording: Recording) -> None:
        """Launches the last segment, and lets the caller's stream wait for it."""
        with self._lock:
            if last is not None:
                self.launch(last, recording.stream, None)
            self.order(recording.stream, recording.caller)

    def replayer(self, segment: Segment) -> Callable[[], bool] | None:
        """A function that launches a segment with all-reduces on CuPy's current stream, unless there is more to do.

        It returns whether it did; if not, with no effect, :meth:`launch` has to. None where each call is waited for.

        One function, with what it needs at hand: a replay should take 1 us beside its launch, and each of Python's
        calls takes 0.1. It does not look for a capture, 0.2 more: the driver refuses a graph's launch there.
        """
        if self._sync:
            return None
        engine, what = self.require_engine("replay()"), segment.signature
        order, context, recorder, keys = engine.order, engine.context, engine.page.calls, engine.page.calls.agreed(what)
        page, keys_offset, slot_bytes = recorder.page, recorder.keys_offset, recorder.slot_bytes
        number, recorded = recorder.number, recorder.recorded
        get_current_stream, launch_graph = cupy_runtime.get_current_stream, cupy_runtime.launch_graph
        current_context, abort_word = cupy_runtime.current_context, engine.page.abort_word

        def default_is_ours() -> bool:  # each context has a default stream
            try:
                return bool(current_context() == context)
            except RuntimeError:  # CuPy's, of the driver: launch() asks it too
                return False

        def again() -> bool:
            try:
                self._lock.acquire()  # as in allreduce()
                if self._unusable is not None:
                    return False
                self._call = call = self._call + 1
                try:
                    executable, stream = segment.executable, get_current_stream().ptr
                    follows = stream == order.fast
                    ready = (follows or order.shared) and not abort_word[0]
                    if ready and executable is not None and (stream > 1 or default_is_ours()):
                        slot = call % RING  # as FlightRecorder.enter()
                        if recorded[slot] is not what:
                            recorder.write(slot, what)
                        number[0] = call
                        at = keys_offset + slot * slot_bytes
                        if page[at : at + slot_bytes] == keys or recorder.differing(call) is None:
                            try:
                                if follows:
                                    launch_graph(executable.handle, stream)
                                else:
                                    order.launch_shared(partial(launch_graph, executable.handle), stream)
                            except RuntimeError as error:
                                start: Callable[[int], None] = partial(cupy_runtime.launch, executable)
                                start = start if follows else partial(order.launch_shared, start)
                                engine.repeats.start_anyway(start, stream, cupy_runtime.launch_error(error))
                            return True
                except BaseException as error:
                    self._failed(error)
                    raise
                self._call -= 1
                return False
            finally:
                try:  # noqa: SIM105  (0.3 us)
                    self._lock.release()
                except RuntimeError:
                    pass

        return again

    def launch(self, segment: Segment, stream: int, owner: Any) -> None:
        """Launches a segment; as one call, ordered and compared as all-reduces are, if it has some. Collective."""
        with self._lock:
            if self._unusable is not None:
                self.check_usable()
            engine, faults = self._engine, self._faults
            assert engine is not None
            assert faults is not None
            try:
                if segment.executable is None:
                    self._call += 1
                    raise GraphStateError("replay() of a graph that another thread has closed meanwhile")
                if segment.calls:
                    self._call += 1
                    self._call = faults.enter(self._call, segment.signature, stream)
                engine.launch_graph(segment.executable, stream, owner)
            except BaseException as error:
                self._failed(error)
                raise
            if self._sync and segment.calls:
                self.synchronize(stream)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around several recordings: they are registered together, at the end of the outermost block. Collective.

        Within it, graphs are "staged" and can be replayed. If a rank's block raises, they stay so.

        :raises UnsupportedError: on a communicator without GPUs.
        :raises GraphStateError: within a recording.
        :raises PeerFailedError: if another rank's block raised. An exception in the block passes unchanged.
        """
        self.require_engine("capture()")
        if self.recording is not None and self.recording.here:
            raise GraphStateError("capture() within a recording: record within capture(), not the other way round")
        self._capturing += 1
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        self._capturing -= 1
        if self._capturing:
            if error is not None:
                raise error
            return
        with self._lock:
            graphs, self._recorded = self._recorded, []
            if error is not None:
                self.leave(error)
                raise error
            with self._calling() as (_, faults):
                self._call = number = faults.enter(self._call, _CAPTURE, 0)
            self._agree(number, [segment for graph in graphs for segment in graph.segments], None)
            self._recorded = graphs
            self._register()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """A new C-contiguous array in memory that peers can map: outputs of recorded all-reduces in it can be direct.

        CuPy, or NumPy with backend "mpi". Not collective. Valid as long as it lives, also after close().
        """
        with self._lock:
            self.check_usable()
            if self._engine is None:
                return np.empty(shape, dtype)
            if self.memory is None:
                self.memory = GraphPool(self._engine.context, self._engine.device.ordinal)
                self.memory.retain()
            stream, device = cupy_runtime.stream_of()[0], self._engine.device.ordinal
            shape = (shape,) if isinstance(shape, int) else shape
            with cupy_runtime.allocating(self.memory.allocator, stream):
                return arrays.empty(shape, np.dtype(dtype), stream, device)
