"""The graph session of a communicator: recordings, replays, and memory for their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import index
from typing import Any, Protocol

import numpy as np

from ..arrays import views
from ..calls import call_lock
from ..calls.sequence import CallSequence
from ..calls.votes import agree
from ..cuda import cupy_runtime, current_streams
from ..device import deferred_free
from ..device.backend import DeviceBackend
from ..device.prepared import BoundLaunch, Prepared
from ..device.stream_order import StreamOrder
from ..errors import ArgumentError, CaptureError, GraphStateError, IpcReduceError, Reach, UnsupportedError, reading
from ..ipc.backend import IpcBackend
from ..logs import INFO, log
from ..page.fingerprint import Fingerprint
from ..texts import kind_of, text_of
from ..types import Stream
from .direct.registration import DirectGraphs
from .pool import CapturedMemory, GraphPool
from .pools import Pools
from .recording import RecordedCall, Recording, Resources, Segment

_STALE = (
    "this graph can no longer be replayed. A call failed after its recording, and NCCL's communicator, which the graph "
    "uses, was replaced. Record the graph again"
)
_STALE_RECORDING = (
    "recording failed: another call failed meanwhile, in a break or in another thread, and NCCL's communicator was "
    "replaced. Record the graph again"
)


_WRONG = TypeError, ValueError, OverflowError  # of NumPy and CuPy, for a wrong shape or dtype


class HasSession(Protocol):
    """A communicator, as graphs know it: see :func:`session_of`. Its class stands in a higher layer."""

    @property
    def _graph_session(self) -> GraphSession: ...


_default: list[Callable[[], HasSession]] = []


def provide_default(make: Callable[[], HasSession]) -> None:
    """Let ``make()`` give the communicator of graphs that name none."""
    _default[:] = [make]


def default_communicator() -> HasSession:
    """The communicator of graphs that name none."""
    return _default[0]()


def session_of(comm: HasSession | None) -> GraphSession:
    """The session of a communicator, or of the default communicator for None.

    :raises ArgumentError: if ``comm`` is not a communicator.
    """
    comm = default_communicator() if comm is None else comm
    with reading("comm", comm):
        session: GraphSession | None = getattr(comm, "_graph_session", None)
        if session is None or isinstance(comm, type):
            raise ArgumentError(
                f"comm is {kind_of(comm)}, which is no ipcreduce.Communicator. Make one: Communicator()"
            )
    return session


class GraphSession:
    """Everything that graphs share of one communicator.

    :param backend: None for ranks without GPUs, and once it is closed.
    :param reason: why there is no backend.
    :param sync: each call is waited for (``IPCREDUCE_SYNC``).
    :param direct: with backend ipc, graphs are to write straight into the peers' outputs: see direct/.
    """

    def __init__(
        self, calls: CallSequence, backend: DeviceBackend | None, reason: str, sync: bool, direct: bool
    ) -> None:
        self.calls = calls
        self.backend, self._reason, self._sync = backend, reason, sync
        self._capturing = 0  # depth of capture()
        self._said = False
        self.direct: DirectGraphs | None = None
        if backend is not None:
            virtual = isinstance(backend, IpcBackend) and backend.is_virtual
            self.pools = Pools(backend.context, backend.device.ordinal, virtual)
            self._captured_memory = CapturedMemory(backend.context, self.pools.new)
            self._memory = GraphPool(backend.context, backend.device.ordinal)  # of empty()
            self._memory.retain()
            if direct and isinstance(backend, IpcBackend):
                self.direct = self.pools.elsewhere = DirectGraphs(backend, calls, self._agree, self._memory)

    @property
    def device(self) -> int:
        """The ordinal of the GPU. :raises UnsupportedError: without one."""
        return self.require_backend("a Graph").device.ordinal

    @property
    def is_capturing(self) -> bool:
        """True in a recording, of any thread, and in capture()."""
        return self.calls.recording is not None or self._capturing > 0

    def require_backend(self, what: str, advice: str = "") -> DeviceBackend:
        """The backend. :raises UnsupportedError: without GPUs, which ``what`` needs."""
        self.calls.check_usable()
        if self.backend is None:
            raise UnsupportedError(f"{what} needs backend ipc or nccl: {self._reason}" + (advice and f". {advice}"))
        return self.backend

    def say_eager(self) -> None:
        """Log that nothing is recorded here: once for each communicator.

        This is no warning. The results are right, and some programs run without GPUs on purpose. A warning would end
        a program for which warnings are errors, as in many tests.
        """
        if not self._said and self.calls.unusable is None:
            self._said = True
            log(
                INFO, "rank %d: nothing is recorded with backend host: a GraphRunner calls its function, capture() "
                "only runs its block, and Graph.record() raises UnsupportedError", self.calls.rank
            )  # fmt: skip

    # ---- recording
    def begin_recording(self, recording: Recording, backend: DeviceBackend, check: Callable[[], None]) -> None:
        """Open a recording, as one call. ``check`` raises if this rank cannot record. Collective."""
        calls = self.calls

        def begin() -> None:
            check()
            if calls.recording is not None:
                raise GraphStateError("this communicator is already recording a graph: end that recording first")
            calls.enter(Fingerprint.of(f"recording of {recording.name}"), recording.callers[0])
            recording.number, calls.recording = calls.number, recording
            recording.validity = backend.validity

        call_lock.make(calls, begin)

    def end_recording(self, recording: Recording, error: BaseException | None) -> None:
        """End a recording by a vote: every rank goes on with it, or every rank raises. Collective.

        :raises BaseException: ``error``, or :class:`PeerFailedError` or :class:`RankMismatchError`: see votes.py.
        """
        with self.calls.lock:
            self.calls.recording = None
            stale: GraphStateError | None = None
            if error is not None:
                # A peer may wait in the body, in a break for instance.
                self.calls.fail(error, begun=False, foreign=True)
            elif recording.validity.ended:
                stale = GraphStateError(_STALE_RECORDING)  # the others hear of it by the vote
            call_lock.alone(self.calls, self._agree, recording.number, recording.segments, error, stale)

    def _agree(
        self, number: int, segments: list[Segment], error: BaseException | None, stale: Exception | None = None
    ) -> None:
        """Do :meth:`_vote`, as part of call ``number``."""
        try:
            self._vote(number, segments, error, stale)
        except BaseException:
            self.calls.spoil(number)
            raise

    def _vote(
        self, number: int, segments: list[Segment], error: BaseException | None, stale: Exception | None
    ) -> None:  # fmt: skip
        """Vote on a recording. :param stale: raised unless a fault is pending, which then is its cause."""
        calls = self.calls
        if self.backend is None:  # closed in the meantime
            raise error or ArgumentError("the communicator was closed during the recording")
        theirs: Exception | None
        try:
            theirs = agree(
                calls, number, [call.fingerprint for segment in segments for call in segment.calls], error or stale
            )
        except IpcReduceError as shared:
            calls.fail(shared)
            theirs, stale = shared, None
        for segment in segments:
            if segment.calls:
                segment.validity.replays.add(segment.bound)
        if error is not None or theirs is not None:
            try:
                calls.raise_pending()  # the same fault, more exactly
            except IpcReduceError as exactly:
                theirs, stale = exactly, None
            raise error or stale or theirs  # type: ignore[misc]

    def note(self, prepared: Prepared, *used: Any) -> Prepared:
        """Note a call of the open recording, which uses these arrays. Returns what is to be launched for it."""
        call = RecordedCall(prepared.fingerprint, prepared.kernels)
        self.calls.recording.note(call, *used)
        return prepared if self.direct is None else self.direct.noted(prepared, call)

    def recorded(self, graph: Any, resources: Resources, number: int) -> None:
        """Take over a complete recording, which was call ``number``. Collective only where graphs are direct."""
        if self.direct is not None:
            self.direct.recorded.append((graph, resources))
            if not self._capturing:
                self.direct.register(number)

    def pool_of(self, pool: GraphPool | None) -> GraphPool:
        """The pool of a graph, which is new for None.

        :raises GraphStateError: if another communicator has given its memory back.
        :raises ArgumentError: if its memory is on another GPU.
        """
        if pool is None:
            pool = self.pools.new()
        elif pool.device != self.device:
            raise ArgumentError(
                f"the pool's memory is on GPU {pool.device}, but this communicator uses GPU {self.device}. Pass a "
                "pool of that GPU"
            )
        elif pool.is_suspended:
            raise GraphStateError("the pool's memory was given back by suspend(pools=True). Call resume() first")
        pool.sessions.add(self)
        return pool

    def order(self, method: Callable[..., None], *streams: Stream) -> None:
        """Order the work on streams by a method of :class:`StreamOrder`, unless the communicator is closed."""
        with self.calls.lock:
            if self.backend is not None:
                method(self.backend.order, *streams)

    def run_recording(self, last: Segment | None, recording: Recording) -> None:
        """Launch the last segment, and let the caller's streams wait for it."""
        with self.calls.lock:
            if last is not None:
                self.launch(last, recording.stream, None)
            else:  # a break is at its end
                self.order(StreamOrder.extend, recording.stream)
            for caller in recording.callers:
                self.order(StreamOrder.chain, recording.stream, caller)

    # ---- replay
    def replayer(self, segment: Segment) -> tuple[Callable[..., Any], BoundLaunch, Callable[..., Any]] | None:
        """``FastPath.make`` and its arguments, which replay a graph of one segment with calls. Graphs keep them.

        None where each call is waited for.
        """
        fast = self.require_backend("replay()").fast
        if fast is None:
            return None
        return fast.make, segment.bound, lambda *_: self._launch(segment, *current_streams.stream_of(self.device))

    def launch(self, segment: Segment, stream: Stream, owner: Any) -> None:
        """Launch a segment. If it has calls it is one call, compared and ordered as these are. Collective."""
        calls = self.calls
        fast = None if self.backend is None else self.backend.fast
        if fast is not None and segment.calls and current_streams.stream_of(self.device)[0] == stream:
            fast.make(segment.bound, lambda *_: self._launch(segment, stream, owner))
            return
        with calls.lock:
            if segment.calls or segment.executable is None:
                call_lock.make(calls, self._launch, segment, stream, owner)
                if self._sync:
                    self.wait(stream)
                return
            calls.check_usable()
            try:
                self._launch(segment, stream, owner)
            except BaseException as error:
                calls.fail(error)
                raise

    def _launch(self, segment: Segment, stream: Stream, owner: Any) -> None:
        if segment.executable is None:
            raise GraphStateError("another thread closed the graph while replay() ran. Close it after its last replay")
        assert self.backend is not None
        if segment.calls:
            self.calls.enter(segment.fingerprint, stream)
            if segment.validity.ended:
                where = f"rank {self.calls.rank}, call {self.calls.number}"
                raise GraphStateError(f"{where}: {_STALE}", reach=Reach.ALL)
        self.backend.run(partial(cupy_runtime.launch, segment.executable), stream, owner, capturable=False)

    def synchronize(self, stream: Stream | None) -> None:
        """Wait for the calls, and raise their errors. :raises UnsupportedError: within a call of the same thread."""
        with self.calls.lock:
            self._check_not_within("synchronize()")  # the order of streams is about to change
            self.wait(stream)

    def _check_not_within(self, what: str) -> None:
        if self.calls.within:
            raise UnsupportedError(f"rank {self.calls.rank}: {call_lock.is_within(f'{what} was called', self.calls)}")

    def recover(self) -> int:
        """Meet all ranks after an error, and start anew. :raises UnsupportedError: within a call of the same thread."""
        calls, backend = self.calls, self.backend
        with calls.lock:
            self._check_not_within("recover()")
            calls.check_usable()
            if calls.recording is not None and calls.recording.in_this_thread:
                raise GraphStateError("recover() was called within a recording. Leave the with block first")
            if backend is not None:
                backend.check_not_captured("recover()", CaptureError)
            return calls.recover()

    def wait(self, stream: Stream | None) -> None:
        """Wait for the calls, and raise what went wrong in them. Without GPUs there is nothing to wait for."""
        with self.calls.lock:
            self.calls.check_usable()
            if self.backend is not None:
                order, launched = self.backend.order, self.backend.order.launched
                have_ended = order.synchronize(stream)
                if self.direct is not None:
                    self.direct.mappings.collect()
                deferred_free.flush()
                self.calls.check_faults()
                if have_ended:
                    order.right = launched

    # ---- several recordings
    @contextmanager
    def capture(self) -> Iterator[None]:
        """Surround several recordings, to register their graphs together at the end: :meth:`Communicator.capture`."""
        calls = self.calls
        calls.check_usable()
        if self.backend is None:
            self.say_eager()
            yield
            return
        if calls.recording is not None and calls.recording.in_this_thread:
            raise GraphStateError("capture() cannot begin within a recording: open it first, and record within it")
        self._capturing += 1
        try:
            yield
        except BaseException as error:
            if self._capturing == 1:
                if self.direct is not None:
                    self.direct.recorded.clear()  # they stay staged
                calls.fail(error, begun=False, foreign=True)
            raise
        finally:
            self._capturing -= 1
        if self.direct is not None and not self._capturing:
            number = calls.number + 1
            try:  # no context manager, before whose block an interrupt could come
                self.direct.register()
            except BaseException as error:
                calls.left(number, error)
                raise

    # ---- memory
    def allocating(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context in which a call on ``stream`` allocates. That for another library's capture stays until close()."""
        return self._captured_memory.allocating(stream)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """A new array in memory that peers can map: :meth:`Communicator.empty`."""
        with self.calls.lock:
            self.calls.check_usable()
            try:
                with reading("dtype", dtype, *_WRONG):
                    kind = np.dtype(dtype)
                with reading("shape", shape, *_WRONG):
                    lengths = tuple(map(index, shape)) if np.iterable(shape) else (index(shape),)
                if self.backend is None:
                    return np.empty(lengths, kind)
                stream, device = cupy_runtime.stream_of()[0], self.backend.device.ordinal
                with cupy_runtime.allocating(self._memory.allocator, stream):
                    return views.empty(lengths, kind, stream, device)
            except _WRONG as error:
                raise ArgumentError(
                    f"rank {self.calls.rank}: no array has the shape or dtype that empty() got: {text_of(error)}. Pass "
                    "a tuple of ints from 0, and a dtype"
                ) from error

    def close(self, wait: float) -> None:
        """Close the backend, and free the memory of graphs with it. See :meth:`DeviceBackend.close`."""
        if self.backend is not None:
            free = [self._captured_memory.release]
            if self._memory.slabs:
                free.append(self._memory.release)
            self.backend.close(wait, free)
            self.backend = self.direct = None  # last: after an interrupt close() comes here again
            del self._captured_memory, self._memory, self.pools

    def forked(self) -> None:
        """Forget everything in a forked child, which must not touch what its parent owns."""
        self.backend = None
