"""One order for the calls of a communicator, whatever streams they are made on: two of our kernels never overlap.

Each call follows the one that the host has launched before it, and nothing that the program puts behind that. So by
induction it follows all of them. The lock is held from the wait to the record: threads cannot come between.

    the call             the one before it                     it follows that by
    eager, or a replay   on the same stream, all along         the stream: no event is needed
                         on another stream, the first time     an event, recorded only now: it stands behind what the
                                                               program has put there meanwhile
                         with its end in our event             waiting for that event
    captured             in the same capture, on any stream    an edge
    a graph of others    anything                              its first node, which waits for our event at each launch
    the first, or one
    behind a fault       none that runs                        nothing

The end of a call goes into our event right behind it, before the lock is released and the program can put more there:

- from the first change of streams on, since another one may come (programs on one stream pay for no event, and the
  stream of recordings is not theirs);
- where the stream's object is unknown: the driver crashes on the handle of a stream that was destroyed, so a stream is
  looked at after a call only if we hold the object that keeps it. A default stream of each thread is unknown too;
- once others have captured a call. Their graphs are launched without our knowledge, so each records the event behind
  its last call, and eager calls wait for it. (A user object would tell when the graph has gone. But it costs each
  launch 4 us, and the host waits for the one before: H200, driver 580.)

A replay is one call: what a recording has behind its last all-reduce is part of it, and so is the work of a break at
its end, by :meth:`StreamOrder.extend`. The waits are for calls launched earlier, and a call's
kernels wait for the same call of the peers. So no circle of waits can close, as long as all ranks make their calls in
one order.

NCCL orders its captured calls itself, among each other and with eager ones. There the graphs of others wait for nothing
of ours, and record an event that only the host looks at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import clock
from ..cuda import cupy_runtime, driver, graph, streams, torch_runtime
from ..cuda.contexts import using, using_relaxed
from ..errors import CaptureError, CudaError
from ..types import Event, Stream

IN_A_CAPTURE = "replay() on a stream that is being captured: a graph cannot be part of another one"
_NONE = Stream(-1)
_RECORDED = Stream(-2)  # in the place of a stream: the end of the last eager call is in an event
_MOST_CAPTURES = 1024  # that are remembered: nobody tells when one ends, and few are open at once


@dataclass
class _Captured:
    """The calls in one capture. ``last``: the nodes that the next one follows.

    In a capture of others ``end`` is the node that records the last one's end in ``graph``; else they are 0.
    """

    last: tuple[int, ...] = ()
    graph: int = 0
    end: int = 0


class StreamOrder:
    """The order of one communicator's calls. The communicator's lock is held around every method.

    :param context: of the GPU: the default stream's handle means another stream in each.
    :param captured_in_order: the calls order themselves where captured ones are among them, as NCCL's do.
    """

    def __init__(self, context: int, captured_in_order: bool = False) -> None:
        self._context = context
        self._open = False  # a call is being launched
        self.launched = 0  # number of the last call that was launched; written by who launches
        # The stream of the last eager call: if a launch on it that runs at once needs no event; if it needs our event;
        # if that call has been waited for, and the next one on it will need none.
        self.event_free_stream = self.event_stream = self.resting_stream = _NONE
        self.shared = False  # there are graphs of others
        self.by_event = False  # the end of every eager call is in our event: any stream may follow
        self.recording_stream = _NONE  # that of all recordings
        self._eager: Stream | None = None  # the stream of the last eager call, or _RECORDED
        self._owner: Any = None  # keeps it
        self._captures: dict[int, _Captured] = {}  # by the captures' ids, the latest last
        self._events: list[Event] = []
        try:
            while len(self._events) < 2 + captured_in_order:
                self._events.append(streams.create_event())
        except CudaError:
            self.release()
            raise
        self._between, self._end = self._events[:2]
        self._replayed = self._events[2] if captured_in_order else None  # the end of the last replay of others

    # ---- launching
    def runs(self, stream: Stream) -> bool:
        """True if a launch on ``stream`` runs at once, and in our context: each context has a default stream."""
        try:
            if stream < 2:  # which captures nothing
                return bool(cupy_runtime.current_context() == self._context)
            return not cupy_runtime.is_capturing(stream)
        except RuntimeError:  # CuPy's: no context, or a capture that has failed
            return False

    def launch(
        self,
        start: Callable[[Stream], Any],
        stream: Stream,
        owner: Any,
        capturable: bool = True,
        recorded: bool = False,
    ) -> None:
        """Launch a call on ``stream`` by ``start(stream)``, behind the last one.

        :param owner: the object that ``stream`` is the handle of, if there is one.
        :param capturable: such a call can be part of a capture.
        :param recorded: a capture is a recording of this communicator, in which every launch is ordered.
        :raises CaptureError: if it cannot, and ``stream`` captures; or if an eager call would have to follow one on a
            stream that is being captured now.
        """
        if stream == self.event_free_stream and self.runs(stream):
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
            except BaseException:  # what came before the call still has its end
                with suppress(CudaError):
                    self._ended(captured, records_end or (not capture and stream == self.event_stream), stream)
                raise
            else:
                self._ended(captured, records_end, stream)
            finally:
                self._open = False

    def resume(self) -> None:
        """Follow the calls on the resting stream again, since one is launched there."""
        self._eager = self.event_free_stream = self.resting_stream
        self.resting_stream = _NONE

    def _follow(self, stream: Stream, owner: Any) -> bool:
        """Put an eager call behind the last one. True if its end has to be recorded in our event."""
        self.resting_stream = _NONE
        if self._eager == _RECORDED:
            streams.wait_event(stream, self._end)
            self.by_event = self.by_event or self._changes(self.event_stream, stream)
        elif self._eager is not None and self._eager != stream:
            if not streams.capture_id(self._eager):
                self.chain(self._eager, stream)
            elif self._replayed is None:
                raise CaptureError(
                    f"an eager call on stream {stream:#x} has to follow an earlier one on stream {self._eager:#x}, "
                    "which is now being captured. Call synchronize() before that capture begins."
                )
            else:  # NCCL orders its calls; a replay is more than those
                self._wait_for_device()
            self.by_event = self._changes(self._eager, stream)
        if self.by_event or not (cupy_runtime.keeps(owner, stream) or torch_runtime.keeps(owner)):
            self._eager, self.event_free_stream, self.event_stream, self._owner = _RECORDED, _NONE, stream, None
            return True
        self._eager, self.event_free_stream, self.event_stream, self._owner = stream, stream, _NONE, owner
        return False

    def _changes(self, before: Stream, stream: Stream) -> bool:
        """True if the program has changed streams. A recording does so for it, and puts nothing behind its calls."""
        return before not in (stream, _NONE) and self.recording_stream not in (before, stream)

    def _follow_captured(self, capture: int, stream: Stream, recorded: bool) -> _Captured:
        self.event_free_stream = self.event_stream = _NONE
        captured = self._captures.get(capture)
        if captured is None:
            captured = _Captured() if recorded else self._open_to_others(streams.captured_graph(stream))
            self._captures[capture] = captured
            if len(self._captures) > _MOST_CAPTURES:
                del self._captures[next(iter(self._captures))]
        # Right behind the last call there is an edge. With others between, ours costs nothing (NOTES.md).
        if missing := {*captured.last} - {*streams.capture_nodes(stream)}:
            streams.follow_nodes(stream, tuple(missing))
        return captured

    def _open_to_others(self, captured_graph: int) -> _Captured:
        """Add the nodes that order the graph. The wait follows no node: behind one it costs 1 us."""
        self.shared = True
        if self._replayed is not None:
            return _Captured((), captured_graph, graph.add_event_record(captured_graph, self._replayed))
        self._record_from_now_on()
        wait, end = graph.add_event_wait(captured_graph, self._end), graph.add_event_record(captured_graph, self._end)
        graph.move_edges(captured_graph, (), (wait,), end)
        return _Captured((wait,), captured_graph, end)

    def _record_from_now_on(self) -> None:
        """Record the last eager call's end, and those of all that follow."""
        if self._eager is not None and self._eager != _RECORDED:
            try:
                capturing = streams.capture_id(self._eager) != 0
            except CudaError:  # the default stream, which cannot be asked while one that blocks it captures
                capturing = True
            if capturing:  # its end can be neither recorded nor asked for by now
                self._wait_for_device()
            else:
                streams.record_event(self._end, self._eager)
        self.by_event, self._eager, self._owner = True, _RECORDED, None
        self.event_free_stream = self.event_stream = self.resting_stream = _NONE

    def _ended(self, captured: _Captured | None, records_end: bool, stream: Stream) -> None:
        """Note the end of a call that was launched, or captured, on ``stream``."""
        if captured is None:
            if records_end:
                streams.record_event(self._end, stream)
            return
        before, captured.last = captured.last, streams.capture_nodes(stream)
        if captured.end:  # one edge, from the last call: with one from every call a replay takes 0.25 us a call more
            graph.move_edges(captured.graph, before, captured.last, captured.end)

    def launch_shared(self, start: Callable[[Stream], Any], stream: Stream) -> None:
        """Make an eager call by ``start(stream)`` where the last one's end is in our event, as that of this will be.

        It is :meth:`launch` with less to ask: :meth:`runs` has to hold.

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
        if self._eager == stream:
            return
        with using(self._context):
            if streams.capture_id(stream):
                return
            self.follow(stream)
            streams.record_event(self._end, stream)  # first: the guard of NCCL's calls looks at it without the lock
            self._eager, self._owner = _RECORDED, None
            self.event_free_stream = self.event_stream = self.resting_stream = _NONE

    def follow(self, stream: Stream) -> None:
        """Let the work that follows on ``stream`` wait for the calls so far. Not if it captures: it runs later."""
        if self._eager in (None, stream):
            return
        with using(self._context):
            if streams.capture_id(stream):
                return
            if self._eager == _RECORDED:
                streams.wait_event(stream, self._end)
            elif not streams.capture_id(self._eager):
                self.chain(self._eager, stream)
            else:
                self._wait_for_device()

    def _wait_for_device(self) -> None:
        """Let the host wait for the calls, whose stream captures by now and can be neither recorded nor asked for."""
        with using_relaxed(self._context):
            driver.synchronize()

    def chain(self, before: Stream, after: Stream) -> None:
        """Let work that follows on stream ``after`` wait for the work on ``before``."""
        streams.record_event(self._between, before)
        streams.wait_event(after, self._between)

    # ---- waiting
    def synchronize(self, stream: Stream | None) -> None:
        """Wait for the calls made so far: on ``stream``, or for the last one, replays of others included."""
        before = self.launched, self._eager
        with using_relaxed(self._context):
            if stream is not None:
                streams.synchronize_stream(stream)
            elif self._eager == _RECORDED:
                streams.synchronize_event(self._end)
            elif self._eager is not None:
                streams.synchronize_stream(self._eager)
            if stream is None and self.shared and self._replayed is not None:
                streams.synchronize_event(self._replayed)
        if (self.launched, self._eager) != before:  # a signal handler has made a call meanwhile
            return
        if stream is None or stream == self._eager:
            resting, owner = self.event_free_stream, self._owner
            if resting == _NONE:  # it may rest already
                resting, owner = self.resting_stream, self._owner
            self.forget()
            self.resting_stream, self._owner = resting, owner

    def forget(self) -> None:
        """Begin anew, since no eager call runs: the next one follows none, nor a stream with a failed launch."""
        self._eager, self._owner = _RECORDED if self.by_event else None, None
        self.event_free_stream = self.event_stream = self.resting_stream = _NONE

    def ends_by(self, deadline: float) -> bool:
        """Wait for the eager calls until ``deadline``, on the clock of :mod:`ipcreduce.clock`. True if they have ended.

        Calls that cannot be asked for count as ended.
        """
        while not self.is_over(unknown=True):
            if clock.now() > deadline:
                return False
            time.sleep(1e-4)
        return True

    def is_over(self, unknown: bool = False) -> bool:
        """True if no eager call runs any more; ``unknown`` if their stream captures by now and cannot be asked.

        From any thread, without the lock.
        """
        if self._open:
            return False
        eager, owner = self._eager, self._owner  # once: calls go on meanwhile; the owner keeps the stream
        with using_relaxed(self._context):
            try:
                if self._replayed is not None and not streams.is_over(self._replayed):
                    return False
                if eager is None:
                    return True
                if eager == _RECORDED:
                    return streams.is_over(self._end)
                return unknown if streams.capture_id(eager) else streams.is_idle(eager)
            except CudaError:
                return unknown
            finally:
                del owner

    def mark(self, event: Event, between: Stream) -> bool:
        """Record in ``event`` the end of the eager calls so far. False if there is none, or their stream captures.

        False too while one is being launched. From another thread, without the lock.

        :param between: a stream that nothing else uses.
        """
        eager, owner = self._eager, self._owner  # the owner keeps the stream meanwhile
        if eager is None or self._open:
            return False
        if eager == _RECORDED:
            streams.wait_event(between, self._end)
            streams.record_event(event, between)
        elif streams.capture_id(eager):
            return False
        else:
            streams.record_event(event, eager)
        del owner
        return True

    def release(self) -> None:
        """Give the events back."""
        for event in self._events:
            with suppress(CudaError):
                streams.close_event(event)
