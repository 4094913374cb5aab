"""One order for the calls of a communicator, on whatever streams they are made: no two of its kernels overlap.

Each call follows the call that the host launched before it, but not what the program put after that call. By
induction it follows all earlier ones. The lock is held from the wait to the record, so no thread comes between.

    this call            the call before it                    how this call follows it
    eager, or a replay   on the same stream, as all before     the stream orders them; no event is needed
                         on another stream, the first time     by an event that is recorded only now: this call waits
                                                               for what the program put there meanwhile, too
                         its end is in the event               it waits for the event
    captured             in the same capture, on any stream    by an edge of the graph, or as the stream orders them
    a graph of others    any                                   its first node waits for the event at each launch
    the first one        none that still runs                  it follows nothing

"The event" is the one event of the order. A call's end is recorded in it before the lock is released, so before the
program can put more work after the call:

- from the first change of streams on, since another may come. Programs that use one stream pay for no event. The
  stream of recordings is not the program's, and does not count.
- where the object of the stream is unknown. The driver crashes on the handle of a destroyed stream, so the order looks
  at a stream after a call only if it holds the object that keeps it. A thread's default stream is unknown, too.
- once the program has captured a call in a graph of its own ("a graph of others"). It launches that graph without our
  knowledge, so the graph records the event after its last call, and eager calls wait for it. (A user object could tell
  when the graph is destroyed. But it costs each launch 4 us, and the host waits for the launch before: H200.)

A replay is one call. What a recording has after its last all-reduce is part of it, and so is the work of a break at
its end, by :meth:`StreamOrder.extend`. Calls wait for earlier calls only, and a call's kernels for the same call of the
peers. So the waits form no circle if all ranks make their calls in one order.

NCCL orders its captured calls itself, among each other and with eager ones. There a graph of others waits for nothing,
and records an event that only the host looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from .. import clock
from ..cuda import cupy_runtime, driver, graph, streams, torch_runtime
from ..cuda.contexts import using, using_relaxed
from ..errors import CaptureError, CudaError
from ..originals import time
from ..types import Event, Stream
from .last_call import ALWAYS_IN_EVENT, BEHIND_CAPTURE, NOTHING, ON_STREAM, Last, State

IN_A_CAPTURE = "replay() on a stream that is being captured: a graph cannot be part of another one"
_MAX_CAPTURES = 1024  # remembered captures: nobody tells when one ends, and few are open at once


@dataclass
class _Captured:
    """The calls in one capture. ``last``: the nodes that the next one follows, and ``stream``: that of the last call.

    In a graph of others, ``end`` is the node of ``graph`` that records the last call's end. Elsewhere both are 0.
    """

    last: tuple[int, ...] = ()
    graph: int = 0
    end: int = 0
    stream: Stream | None = None


class StreamOrder:
    """The order of one communicator's calls. The communicator's lock is held around every method.

    :ivar last: the state of the order, with the table of :class:`ipcreduce.device.last_call.State`.
    :param context: of the GPU: the default stream's handle means another stream in each.
    :param captured_in_order: captured calls are ordered without us, among each other and with eager ones, as by NCCL.
    """

    def __init__(self, context: int, captured_in_order: bool = False) -> None:
        self._context = context
        self._open = False  # a call is being launched
        self.launched = 0  # number of the last call that was launched; written by who launches
        self.right = 0  # number of the last call that is known to have ended with its data; written by who waits
        self.last = Last(NOTHING)
        self.shared = False  # there are graphs of others
        self.recording_stream: Stream | None = None  # that of all recordings
        self._captures: dict[int, _Captured] = {}  # by the captures' ids, the latest last
        self._events: list[Event] = []
        try:
            while len(self._events) < 2 + captured_in_order:
                self._events.append(streams.create_event())
        except BaseException:
            self.close()
            raise
        self._between, self._end = self._events[:2]
        self._replayed = self._events[2] if captured_in_order else None  # the end of the last replay of others

    # ---- launching
    def quick(self, stream: Stream, looked: bool = False) -> State | None:
        """The state in which a call on ``stream`` takes the fast path. None: only :meth:`launch` can make it.

        In ON_STREAM a call is launched as it is, in RESTING after :meth:`resume`, else by :meth:`launch_shared`. It
        has to run at once, and in our context, since each context has a default stream.

        :param looked: the caller has checked that a stream other than the default ones is not being captured.
        """
        last = self.last
        state = last.state
        if stream == last.stream:
            if state is BEHIND_CAPTURE:
                return None
        elif state is not ALWAYS_IN_EVENT:
            return None
        try:
            if stream < 2:  # the default streams capture nothing
                return state if cupy_runtime.current_context() == self._context else None
            return None if not looked and cupy_runtime.is_capturing(stream) else state
        except RuntimeError:  # CuPy's: no context, or a capture that has failed
            return None

    def launch(
        self,
        start: Callable[[Stream], Any],
        stream: Stream,
        owner: Any,
        capturable: bool = True,
        recorded: bool = False,
    ) -> None:
        """Launch a call on ``stream`` by ``start(stream)``, after the last one.

        :param owner: the object that ``stream`` is the handle of, if there is one.
        :param capturable: such a call can be part of a capture.
        :param recorded: a capture is a recording of this communicator, in which every launch is ordered.
        :raises CaptureError: if it cannot, and ``stream`` captures; or if an eager call would have to follow one on a
            stream that is being captured now.
        """
        if self.last.state is ON_STREAM and self.quick(stream) is not None:
            start(stream)
            return
        with using(self._context):
            capture = streams.capture_id(stream)
            if capture and not capturable:
                raise CaptureError(IN_A_CAPTURE)
            captured, records_end = None, False
            self._open = True
            try:
                captured = self._follow_captured(capture, stream, recorded) if capture else None
                records_end = captured is None and self._follow(stream, owner)
                start(stream)
            except BaseException:  # the calls before this one still have their end in the event
                with suppress(CudaError):
                    in_event = self.last.in_event and self.last.stream == stream
                    self._ended(captured, records_end or (not capture and in_event), stream)
                raise
            else:
                self._ended(captured, records_end, stream)
            finally:
                self._open = False

    def resume(self) -> None:
        """Leave the state RESTING, since a call is launched on its stream."""
        self.last = replace(self.last, state=ON_STREAM)

    def _follow(self, stream: Stream, owner: Any) -> bool:
        """Put an eager call after the last one. True if its end has to be recorded in the event."""
        last = self.last
        if not self._waits_for_last(stream):
            if self._replayed is None:
                raise CaptureError(
                    f"an eager call on stream {stream:#x} has to follow an earlier one on stream {last.busy:#x}, "
                    "which is now being captured. Call synchronize() before that capture begins."
                )
            self.wait_for_device()  # NCCL orders its calls; a replay is more than those
        before = last.stream if last.in_event else last.busy
        always = last.state is ALWAYS_IN_EVENT or self._changes(before, stream)
        if always or not (cupy_runtime.keeps(owner, stream) or torch_runtime.keeps(owner)):
            self.last = last.recorded(stream, always)
            return True
        self.last = Last(ON_STREAM, stream, owner)
        return False

    def _waits_for_last(self, stream: Stream) -> bool:
        """Let ``stream`` wait for the last eager call. False if it cannot, since that call's stream is captured now."""
        busy = self.last.busy
        if self.last.in_event:
            streams.wait_event(stream, self._end)
        elif busy is not None and busy != stream:
            if streams.capture_id(busy):
                return False
            self.chain(busy, stream)
        return True

    def _changes(self, before: Stream | None, stream: Stream) -> bool:
        """True if the program has changed streams. A recording does not count: it puts nothing after its calls."""
        return before not in (None, stream) and self.recording_stream not in (before, stream)

    def _follow_captured(self, capture: int, stream: Stream, recorded: bool) -> _Captured:
        self.last = self.last.behind_capture()
        captured = self._captures.get(capture)
        if captured is None:
            captured = _Captured() if recorded else self._open_to_others(streams.captured_graph(stream))
            self._captures[capture] = captured
            if len(self._captures) > _MAX_CAPTURES:
                del self._captures[next(iter(self._captures))]
        # Right after the last call there is an edge. After other work of the same stream one more makes this call
        # start 0.3 us sooner. But a kernel that starts early after the last call would be 1 us later (NOTES.md).
        missing = {*captured.last} - {*streams.capture_nodes(stream)}
        if stream == captured.stream:
            missing = {node for node in missing if not graph.lets_start_early(node)}
        if missing:
            streams.follow_nodes(stream, tuple(missing))
        return captured

    def _open_to_others(self, captured_graph: int) -> _Captured:
        """Add the nodes that order a graph of another library. Its wait follows no node: that would cost 1 us."""
        self.shared = True
        if self._replayed is not None:
            return _Captured((), captured_graph, graph.add_event_record(captured_graph, self._replayed))
        self._record_from_now_on()
        wait, end = graph.add_event_wait(captured_graph, self._end), graph.add_event_record(captured_graph, self._end)
        graph.move_edges(captured_graph, (), (wait,), end)
        return _Captured((wait,), captured_graph, end)

    def _record_from_now_on(self) -> None:
        """Record the end of the last eager call, and of all that follow."""
        busy = self.last.busy
        if busy is not None:
            try:
                capturing = streams.capture_id(busy) != 0
            except CudaError:  # the default stream, which cannot be asked while one that blocks it captures
                capturing = True
            if capturing:  # its end can be neither recorded nor asked for by now
                self.wait_for_device()
            else:
                streams.record_event(self._end, busy)
        self.last = self.last.recorded(None, always=True)

    def _ended(self, captured: _Captured | None, records_end: bool, stream: Stream) -> None:
        """Note the end of a call that was launched, or captured, on ``stream``."""
        if captured is None:
            if records_end:
                streams.record_event(self._end, stream)
            return
        before, captured.last, captured.stream = captured.last, streams.capture_nodes(stream), stream
        if captured.end:  # one edge, from the last call: an edge from each would cost a replay 0.25 us a call
            graph.move_edges(captured.graph, before, captured.last, captured.end)

    def launch_shared(self, start: Callable[[Stream], Any], stream: Stream) -> None:
        """Make an eager call by ``start(stream)`` where :meth:`quick` says that its end goes into the event.

        It is :meth:`launch` with fewer questions.

        :raises CudaError: if it fails, also for a stream that captures. :raises RuntimeError: what ``start`` raises.
        """
        self._open, doing = True, "cudaStreamWaitEvent"
        try:
            cupy_runtime.wait_event(stream, self._end)
            doing = ""
            start(stream)
            doing = "cudaEventRecord"
            cupy_runtime.record_event(self._end, stream)
        except BaseException as error:  # the call may have been launched
            with suppress(RuntimeError):
                cupy_runtime.record_event(self._end, stream)
            if doing and isinstance(error, RuntimeError):
                raise cupy_runtime.runtime_error(doing, error) from None
            raise
        finally:
            self._open = False

    def extend(self, stream: Stream) -> None:
        """Count the work put on ``stream`` since the last call as part of that call, wherever that was made."""
        if self.last.state is ON_STREAM and self.last.stream == stream:
            return
        with using(self._context):
            capture = streams.capture_id(stream)
            if capture:
                if capture in self._captures:
                    self._ended(self._captures[capture], False, stream)
                return
            self.follow(stream)
            streams.record_event(self._end, stream)  # first: the guard of NCCL's calls reads the state without the lock
            self.last = self.last.recorded(None)

    def follow(self, stream: Stream) -> None:
        """Let the work that follows on ``stream`` wait for the calls so far, unless it is captured and runs later."""
        if not self.last.in_event and self.last.busy in (None, stream):
            return
        with using(self._context):
            if not streams.capture_id(stream) and not self._waits_for_last(stream):
                self.wait_for_device()

    def precede(self, stream: Stream, recorded: bool) -> None:
        """Let what a call puts before its kernels, a copy of its input, follow the last call. See :meth:`launch`."""
        with using(self._context):
            capture = streams.capture_id(stream)
            if capture:
                self._follow_captured(capture, stream, recorded)
                return
            if self.shared and self._replayed is not None:
                streams.wait_event(stream, self._replayed)
            self.follow(stream)

    def wait_for_device(self) -> None:
        """Wait until nothing runs on the GPU in this context, also where a stream can be neither recorded nor asked."""
        with using_relaxed(self._context):
            driver.synchronize()

    def chain(self, before: Stream, after: Stream) -> None:
        """Let work that follows on stream ``after`` wait for the work on ``before``."""
        streams.record_event(self._between, before)
        streams.wait_event(after, self._between)

    # ---- waiting
    def synchronize(self, stream: Stream | None) -> bool:
        """Wait for the calls made so far on ``stream``, or for all, and for replays of other libraries' graphs.

        :returns: True if all have ended.
        """
        launched, last = self.launched, self.last
        with using_relaxed(self._context):
            if stream is not None:
                streams.synchronize_stream(stream)
            elif last.in_event:
                streams.synchronize_event(self._end)
            elif last.busy is not None:
                streams.synchronize_stream(last.busy)
            if stream is None and self.shared and self._replayed is not None:
                streams.synchronize_event(self._replayed)
        if self.launched != launched or self.last is not last:  # a signal handler has made a call meanwhile
            return False
        is_last = stream is None or stream == last.busy
        if is_last:
            self.last = last.waited_for()
        return is_last

    def reset(self) -> None:
        """Begin anew, since no eager call runs any more: the next call follows none, nor a stream that has failed."""
        self.last = self.last.after_reset()

    def ends_by(self, deadline: float) -> bool:
        """Wait for the eager calls until ``deadline``, on the clock of :mod:`ipcreduce.clock`. True if they have ended.

        Calls whose stream cannot be asked count as ended.
        """
        while not self.is_over(unknown=True):
            if clock.now() > deadline:
                return False
            time.sleep(1e-4)
        return True

    def is_over(self, unknown: bool = False) -> bool:
        """True if no eager call runs any more; ``unknown`` if their stream cannot be asked, since it is being captured.

        Any thread may ask, without the lock.
        """
        if self._open:
            return False
        last = self.last  # once: calls go on meanwhile, and it keeps the stream
        with using_relaxed(self._context):
            try:
                if self._replayed is not None and not streams.is_over(self._replayed):
                    return False
                if last.in_event:
                    return streams.is_over(self._end)
                if last.busy is None:
                    return True
                return unknown if streams.capture_id(last.busy) else streams.is_idle(last.busy)
            except CudaError:
                return unknown

    def mark(self, event: Event, between: Stream) -> bool:
        """Record in ``event`` the end of the eager calls so far. Another thread may ask, without the lock.

        :param between: a stream that nothing else uses.
        :returns: False if there is no call, one is being launched, or their stream is being captured.
        """
        last = self.last  # once: it keeps the stream meanwhile
        if self._open:
            return False
        if last.in_event:
            streams.wait_event(between, self._end)
            streams.record_event(event, between)
            return True
        if last.busy is None or streams.capture_id(last.busy):
            return False
        streams.record_event(event, last.busy)
        return True

    def close(self) -> None:
        """Free the events and the stream of recordings."""
        for event in self._events:
            with suppress(CudaError):
                streams.close_event(event)
        if self.recording_stream is not None:
            streams.close_stream(self.recording_stream)
