"""``Graph``: a function's GPU work, all-reduces included, recorded once and replayed by one launch.

A recording is a real run: the captured work is launched when the recording ends, so the outputs are filled as after an
eager run. The kernels in it push into the peers' workspaces, never into memory of the graph, so nothing has to be
exchanged before a replay and nothing can be missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..cuda import cupy_runtime, current_streams, streams, torch_runtime
from ..device import deferred_free
from ..device.backend import DeviceBackend
from ..device.stream_order import StreamOrder
from ..errors import ArgumentError, CaptureError, GraphStateError, IpcReduceError, Reach
from ..interrupts import uninterrupted
from ..process import refuse_copies
from ..texts import kind_of
from ..types import Stream
from .address_check import CHECKS, AddressCheck, Inputs, named
from .breaks import Break, check_task, current, open_recordings
from .forward_context import check_word
from .pool import GraphPool
from .recording import Recording, Resources, Segment, explained, warn_about
from .session import HasSession, session_of


class Graph:
    """A recording of GPU work with all-reduces of one communicator, which can be replayed.

    :param comm: None for the default communicator. Every rank makes, records, replays and closes its graphs in the
        same order.
    :param pool: ``other.pool`` shares that graph's memory: an output is then valid until the next replay of any graph
        of that pool. None for memory of its own.
    :param check: when the addresses of the arrays in ``replay(inputs)`` are compared with those in ``record(inputs)``:
        in the "first" replay that names them, "always", or "never".
    :param breaks: True runs functions decorated by :func:`ipcreduce.eager_break`, and those given to :meth:`add_eager`,
        between segments. False calls them within the capture.
    :param name: for messages; the same on every rank.

    ``state`` is "empty", "recording", "staged" (recorded, ready for replay), "registered" (the same, and all-reduces
    write straight into the peers' outputs: ``Communicator(algorithm="direct")``), "failed" or "closed". Arrays that
    all-reduces read and write are kept alive; arrays that only other libraries' kernels touch are unknown here: name
    them in ``record(inputs=...)``.
    """

    def __init__(
        self, comm: HasSession | None = None, *, pool: GraphPool | None = None, check: str = "first",
        breaks: bool = True, name: str = "",
    ) -> None:  # fmt: skip
        if pool is not None and not issubclass(type(pool), GraphPool):
            raise ArgumentError(f"pool must be another graph's .pool, not {kind_of(pool)}")
        if not issubclass(type(name), str):
            raise ArgumentError(f"name must be a str, not {kind_of(name)}")
        check_word("check", check, CHECKS)
        self._comm, self._session = comm, session_of(comm)  # a communicator that nobody has is closed
        self._pool, self._check, self._breaks, self._name = pool, check, breaks, str.__str__(name)
        self._inputs: AddressCheck | None = None
        self._state = "empty"
        self._parts: list[Segment | Break] = []
        self._again: Any = None  # of a graph of one segment: see GraphSession.replayer
        self._held: list[Any] = []
        self._recording: Recording | None = None
        self._resources: Resources | None = None

    @property
    def state(self) -> str:
        """The state of the graph, in one word: see the class."""
        return self._resources.state if self._state == "staged" and self._resources is not None else self._state

    @property
    def checks_inputs(self) -> bool:
        """True if a replay still compares its inputs with the recording's."""
        return self._inputs is not None and self._inputs.due

    @property
    def pool(self) -> GraphPool:
        """The memory of this graph, which other graphs may share. :raises GraphStateError: before a recording."""
        if self._pool is None:
            raise GraphStateError("this graph is empty and has no pool yet. Record it first")
        return self._pool

    def describe(self) -> str:
        """State, memory, and for each segment its nodes and calls; several lines."""
        lines = [f"graph {self._name}: {self.state}, {len(self.segments)} segments".replace(" :", ":")]
        if self._pool is not None:
            lines.append(f"pool: {self._pool.nbytes} bytes in {self._pool.slabs} slabs")
        for part in self._parts:
            if isinstance(part, Break):
                lines.append(f"break: {part}")
            else:
                lines.append(f"segment: {part.nodes.kernels} kernel nodes, {part.nodes.others} other nodes")
                lines += [f"  {call}" for call in part.calls]
        return "\n".join(lines)

    # ---- recording
    @contextmanager
    def record(self, inputs: Any = None) -> Iterator[Graph]:
        """Capture the work that the block launches on the current stream, then run it. Collective.

        Within the block CuPy, and PyTorch if the program has imported it, work on a stream of the communicator and
        allocate from the graph's memory. At its end the ranks compare their all-reduces; the outputs are filled, in the
        order of the caller's streams.

        :param inputs: any nest of arrays that the body reads and that must live as long as the graph. See
            :func:`ipcreduce.collect_addresses` for the objects that are searched.
        :raises GraphStateError: if the graph is not empty, or this thread is recording already.
        :raises UnsupportedError: on a communicator without GPUs, or where PyTorch allocates by cudaMallocAsync.
        :raises CaptureError: if something in the body cannot be captured.
        :raises RankMismatchError: if the ranks' all-reduces differ: the first that does, on all ranks.
        :raises PeerFailedError: if another rank's body raised. An exception in the body passes unchanged.
        """
        session, inputs = self._session, named(inputs)
        session.calls.check_usable()
        if session.backend is None:
            self._check_record(None, [], inputs)
        backend = session.require_backend("a Graph", "Call the function itself, or a GraphRunner, which calls it here")
        recording = Recording(self._name, current_streams.streams(backend.device.ordinal))
        deferred_free.flush()
        error: BaseException | None = None
        number, ended = 0, False  # number: of the call in which the peers may wait for this rank
        try:
            session.begin_recording(recording, backend, lambda: self._check_record(backend, recording.callers, inputs))
            self._state, self._recording, current.graph, number = "recording", recording, self, recording.number
            try:
                open_recordings.append(self)
                self._open(backend, recording)
                recording.begin_segment()
                yield self
                if recording.error is not None:  # the body has caught it
                    raise recording.error
                last = self._end_segment(recording)
            except BaseException as caught:
                error = caught
                recording.abandon()
            self._leave_recording()
            if error is not None:
                error = explained(error, behind_a_break=bool(recording.segments))
            session.end_recording(recording, error)
            self._held, self._state, ended = [*recording.held, inputs], "staged", True
            assert self._resources is not None
            session.recorded(self, self._resources, number)
            number = session.calls.number + 1  # in which the peers launch the last segment
            session.run_recording(last, recording)
        except BaseException as failed:
            self._tell(recording, number, failed, error)
            if number and not ended:
                self._leave_recording()
                self._end("failed")
            raise
        if last is not None and last.calls and len(self._parts) == 1:
            self._again = session.replayer(last)
        warn_about(self.segments)

    def _tell(
        self, recording: Recording, number: int, error: BaseException, known: BaseException | None
    ) -> None:  # fmt: skip
        """Tell the peers, who know of ``known``, that ``error`` ends record() in call ``number``; 0: none has begun."""
        session, calls = self._session, self._session.calls
        if calls.recording is recording:  # interrupted between its begin and its end
            recording.abandon()
            try:
                session.end_recording(recording, error)
            except BaseException as second:
                calls.left(recording.number, second, error)
                if not isinstance(second, (type(error), IpcReduceError)):
                    raise
        elif number:
            calls.left(number, error, known)

    def _check_record(self, backend: DeviceBackend | None, callers: list[Stream], inputs: Inputs) -> None:
        if backend is not None:
            backend.use_context()
            torch_runtime.check_allocator()
        check_task()
        self._expect("record()", ("empty",), "make a new Graph for another recording")
        if current.graph is not None:
            raise GraphStateError(
                "record() was called within another recording of the same thread. End that recording first"
            )
        if any(streams.capture_id(stream) for stream in callers):
            text = "record() was called while the current stream is being captured. End that capture first"
            raise CaptureError(text, reach=Reach.CAPTURED)
        self._inputs = AddressCheck(inputs, self._check)

    def _open(self, backend: DeviceBackend, recording: Recording) -> None:
        self._pool = self._session.pool_of(self._pool)
        with uninterrupted():
            self._resources = Resources(self._pool, backend.context, recording.segments)
            weakref.finalize(self, self._resources.release).atexit = False  # then the process gives everything back
        recording.pool, recording.stream = self._pool, backend.recording_stream()
        for caller in recording.callers:
            self._session.order(StreamOrder.chain, caller, recording.stream)

    def _leave_recording(self) -> None:
        self._recording = current.graph = None
        if self in open_recordings:
            open_recordings.remove(self)

    def _end_segment(self, recording: Recording) -> Segment | None:
        segment = recording.end_segment()
        if segment.executable is None:
            return None
        self._parts.append(segment)
        return segment

    def check_task(self) -> None:
        """Check that no other asyncio task of this thread records the graph. :raises CaptureError: if one does."""
        if self._recording is not None and not self._recording.is_own:
            raise CaptureError(
                "another asyncio task of this thread is recording a graph, which this call would become part of. Make "
                "the call before or behind that record() block, or let the block await nothing"
            )

    def add_eager(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` between two segments of this graph's recording, and again in each replay.

        The segment ends before the function, and another one begins after it. The function runs with real data, on the
        recording's stream and with the caller's allocator. A replay runs it on the stream of the
        replay. See :func:`ipcreduce.eager_break` for what it may return.

        Join side streams before the break: record an event there, and let the recording's stream wait for the event.
        Fork them again by an event that is recorded after the break.

        :returns: its result. With ``breaks=False``, the result of a plain call within the capture.
        :raises GraphStateError: outside of this graph's recording, in another thread, or within another break.
        """
        if current.graph is not self:
            raise GraphStateError(
                "add_eager() was called outside of this graph's recording, in another thread, or within a break. The "
                f"graph is {self.state}. Call add_eager() in its record() block"
            )
        return self.add_break(function, (), {})

    def add_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """:meth:`add_eager` for a function with arguments."""
        self.check_task()
        recording = self._recording
        if not self._breaks or recording is None:
            return function(*args, **kwargs)
        try:
            segment = self._end_segment(recording)
            if segment is not None:
                self._session.launch(segment, recording.stream, None)
            part = Break(function, args, kwargs, self.pool)
            current.graph = None
            try:
                with current_streams.on_stream(recording.stream, self.pool.device):  # with the caller's allocators, too
                    result = part.record(args, kwargs, recording.stream)
            finally:
                current.graph = self
            self._parts.append(part)
            recording.begin_segment()
            return result
        except BaseException as error:
            recording.error = recording.error or error  # also if the body catches it: nothing is captured any more
            self._session.calls.fail(error, begun=False, foreign=True)
            raise

    # ---- replay
    def replay(self, inputs: Any = None, *, stream: Any = None) -> None:
        """Launch the recorded work on the current stream, or on ``stream``, and run its breaks between.

        The current stream is CuPy's. If that is the default stream, it is PyTorch's.

        Every rank has to replay. Returns before the work is done. Replays and eager calls of a communicator run in the
        order in which they are made, whatever their streams are.

        :param inputs: the same nest as at the recording, to be checked; None for no check.
        :raises AddressChangedError: before anything is launched, if ``inputs`` are not the recording's.
        :raises GraphStateError: if the graph is not recorded, has failed or is closed, or within a recording.
        :raises CaptureError: on a stream that is being captured: that capture may have ended by this.
        :raises IpcReduceError: for the ranks' other calls, see :meth:`Communicator.allreduce`. An exception in a break
            passes unchanged; the other ranks get :class:`PeerFailedError`.
        """
        again = self._again
        if again is not None and inputs is None and stream is None and not open_recordings:
            make, bound, usual = again  # not by partial(), which takes 0.1 us more
            make(bound, usual)
            return
        session = self._session
        session.calls.check_usable()
        try:
            if self._state != "staged" or current.graph is not None or inputs is not None:
                self._check_replay(inputs, stream)
            handle, owner = current_streams.stream_of(session.device, stream)
        except BaseException as error:
            session.calls.fail(error, begun=False)
            raise
        for part in self._parts:
            if isinstance(part, Segment):
                session.launch(part, handle, owner)
            else:
                try:
                    part.replay(handle)
                except BaseException as error:
                    session.calls.fail(error, begun=False, foreign=True)
                    raise
        if self._parts and isinstance(self._parts[-1], Break):
            session.order(StreamOrder.extend, handle)

    def _check_replay(self, inputs: Any, stream: Any) -> None:
        if stream is not None:
            cupy_runtime.stream_of(stream)
        check_task()
        self._expect("replay()", ("staged",), "record it first, once, and do not close it")
        if current.graph is not None:
            raise GraphStateError("replay() was called within a recording. A graph cannot be part of another graph")
        if inputs is not None and self._inputs is not None:
            self._inputs.verify(named(inputs))

    @property
    def segments(self) -> list[Segment]:
        """The parts of the graph between breaks."""
        return [part for part in self._parts if isinstance(part, Segment)]

    # ---- ends
    __reduce__ = refuse_copies

    def __repr__(self) -> str:
        own = vars(self)  # also of a graph whose __init__ has raised
        name, state = own.get("_name", ""), self.state if "_resources" in own else "not made"
        segments = [part for part in own.get("_parts", ()) if isinstance(part, Segment)]
        calls = sum(len(segment.calls) for segment in segments)
        text = f", {calls} calls in {len(segments)} segments" if segments else ""
        return f"<Graph{f' {name!r}' if name else ''}: {state}{text}>"

    def close(self) -> None:
        """Close the graph, and free its memory. Idempotent. Arrays from its recording stay valid while they live."""
        if self._state == "recording":
            raise GraphStateError("close() was called within the recording. Leave the with block first")
        self._end("closed")

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _expect(self, what: str, states: tuple[str, ...], advice: str) -> None:
        if self._state not in states:
            raise GraphStateError(f"{what} needs a graph that is {states[0]}. This one is {self.state}: {advice}")

    def _end(self, state: str) -> None:
        self._parts, self._held, self._again, self._state = [], [], None, state
        if self._resources is not None:  # last: after an interrupt close() comes here again
            self._resources.release()
