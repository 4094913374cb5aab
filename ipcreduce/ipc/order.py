"""One order for the calls of a communicator, whatever streams they are made on: two of our kernels never overlap.

Eager calls, our replays included, follow the last eager call, by an event. Captured calls follow the last one of the
same capture, by an edge. Graphs that others have captured are launched without our knowledge: each waits for an event
before its first call and records it behind its last one. While there are such graphs, eager calls wait for that event
and record it too, so that all of them run in the order in which the host launches them.

The driver crashes on the handle of a stream that was destroyed. So a stream is looked at after a call only if we hold
the object that keeps it; else the call's end is recorded at once, in an event of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from .. import surroundings
from ..cuda import driver, graph, streams
from ..cuda.within import using, within
from ..errors import CaptureError, CudaError
from .foreign import ForeignGraph, ForeignGraphs

IN_A_CAPTURE = "replay() on a stream that is being captured: a graph cannot be part of another one"
_RECORDED = -2  # in the place of a stream: the end of the last eager call is in an event
_MOST_CAPTURES = 1024  # that are remembered: nobody tells when one ends, and few are open at once


@dataclass
class _Captured:
    """The calls in one capture. ``last``: the nodes of the last one; ``end``: the node that records it, or 0."""

    last: tuple[int, ...] = ()
    end: int = 0
    foreign: ForeignGraph | None = None


class CallOrder:
    """Where the last call ran. The communicator's lock is held around every method.

    :param context: of the GPU: the default stream's handle means another stream in each.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._open = False  # a call is being launched
        self.fast = -1  # the stream on which the last eager call ran, if all that can have changed is that it captures
        self.shared = False  # graphs of others take part
        self._eager: int | None = None  # the stream of the last eager call, or _RECORDED
        self._owner: Any = None  # keeps it
        self._captures: dict[int, _Captured] = {}  # by the captures' ids, the latest last
        self._foreign = ForeignGraphs()
        self._events: list[int] = []
        try:
            while len(self._events) < 2:
                self._events.append(streams.create_event())
        except CudaError:
            self.release()
            raise
        self._between, self._end = self._events

    @contextmanager
    def behind(self, stream: int, owner: Any, capturable: bool = True, recorded: bool = False) -> Iterator[None]:
        """The block launches a call on ``stream``, behind the last one. Not needed where ``fast`` is ``stream``.

        :param owner: the object that ``stream`` is the handle of, if there is one.
        :param capturable: whether such a call can be part of a capture.
        :param recorded: whether a capture is a recording of this communicator, of which every launch is ordered.
        :raises CaptureError: if it cannot, and ``stream`` captures; or if an eager call would have to follow one on a
            stream that is being captured now.
        """
        with using(self._context):
            capture = streams.capture_id(stream)
            if capture and not capturable:
                raise CaptureError(IN_A_CAPTURE)
            captured = self._follow_captured(capture, stream, recorded) if capture else None
            recording_end = captured is None and self._follow(stream, owner)
            self._open = True
            try:
                yield
            except BaseException:  # what came before the call still has its end
                with suppress(CudaError):
                    self._ended(captured, recording_end, stream)
                raise
            else:
                self._ended(captured, recording_end, stream)
            finally:
                self._open = False

    def _follow(self, stream: int, owner: Any) -> bool:
        """Puts an eager call behind the last one; whether its end has to be recorded."""
        self._collect()
        if self._eager == _RECORDED:
            streams.wait_event(stream, self._end)
        elif self._eager is not None and self._eager != stream:
            if streams.capture_id(self._eager):
                raise CaptureError(
                    f"an eager call on stream {stream:#x} has to follow an earlier one on stream {self._eager:#x}, "
                    "which is now being captured. Call synchronize() before that capture begins."
                )
            self.chain(self._eager, stream)
        if self.shared or not surroundings.keeps(owner, stream):
            self._eager, self.fast, self._owner = _RECORDED, -1, None
            return True
        self._eager, self.fast, self._owner = stream, stream, owner
        return False

    def _follow_captured(self, capture: int, stream: int, recorded: bool) -> _Captured:
        self.fast = -1
        captured = self._of_capture(capture, stream, recorded)
        if captured.foreign is not None and not captured.end:
            self._share()
            streams.wait_external_event(stream, self._end)
            captured.end = graph.add_event_record(captured.foreign.graph, self._end)
        # Right behind the last call there is an edge. With others between, ours costs nothing (NOTES.md).
        elif missing := {*captured.last} - {*streams.capture_nodes(stream)}:
            streams.follow_nodes(stream, tuple(missing))
        return captured

    def _of_capture(self, capture: int, stream: int, recorded: bool) -> _Captured:
        captured = self._captures.get(capture)
        if captured is None:
            foreign = None if recorded else self._foreign.of(capture, streams.captured_graph(stream))
            captured = self._captures[capture] = _Captured(foreign=foreign)
            if len(self._captures) > _MOST_CAPTURES:
                del self._captures[next(iter(self._captures))]
        return captured

    def captured_by_others(self, stream: int) -> ForeignGraph | None:
        """The graph that ``stream`` captures into, if it captures; not for recordings of this communicator."""
        with using(self._context):
            capture = streams.capture_id(stream)
            return self._of_capture(capture, stream, recorded=False).foreign if capture else None

    def _share(self) -> None:
        """From now on every eager call's end is in the event that graphs of others wait for."""
        if self._eager is not None and self._eager != _RECORDED:
            try:
                capturing = streams.capture_id(self._eager) != 0
            except CudaError:  # the default stream, which cannot be asked while one that blocks it captures
                capturing = True
            if capturing:  # its end can be neither recorded nor asked for by now
                with within(self._context):
                    driver.synchronize()
            else:
                streams.record_event(self._end, self._eager)
        self.shared, self._eager, self.fast, self._owner = True, _RECORDED, -1, None

    def _collect(self) -> None:
        self._foreign.collect()
        self.shared = self.shared and bool(self._foreign)

    def _ended(self, captured: _Captured | None, recording_end: bool, stream: int) -> None:
        """A call has been launched, or captured, on ``stream``."""
        if captured is None:
            if recording_end:
                streams.record_event(self._end, stream)
            return
        before, captured.last = captured.last, streams.capture_nodes(stream)
        if captured.foreign is not None and captured.last != before:  # one edge: an edge from every call costs more
            graph.add_edges(captured.foreign.graph, captured.last, captured.end)
            if before:
                graph.remove_edges(captured.foreign.graph, before, captured.end)

    def launch_shared(self, start: Callable[[int], None], stream: int) -> None:
        """Makes an eager call by ``start(stream)`` while ``shared``: what :meth:`behind` does, without looking around.

        :raises CudaError: if it fails, also for a stream that captures.
        """
        self._open = True
        try:
            surroundings.wait_event(stream, self._end)
            try:
                start(stream)
            finally:
                surroundings.record_event(self._end, stream)
        finally:
            self._open = False

    def extend(self, stream: int) -> None:
        """What was put on ``stream`` since belongs to the last call too."""
        if self._eager == _RECORDED and not streams.capture_id(stream):
            streams.record_event(self._end, stream)

    def chain(self, before: int, after: int) -> None:
        """What comes on stream ``after`` waits for what is on ``before``."""
        streams.record_event(self._between, before)
        streams.wait_event(after, self._between)

    # ---- waiting
    def synchronize(self, stream: int | None) -> None:
        """Waits for the calls made so far: on ``stream``, or for the last one."""
        self._collect()
        with within(self._context):
            if stream is not None:
                streams.synchronize_stream(stream)
            elif self._eager == _RECORDED:
                streams.synchronize_event(self._end)
            elif self._eager is not None:
                streams.synchronize_stream(self._eager)
        if stream is None or stream == self._eager:
            self.forget()

    def forget(self) -> None:
        """No eager call runs any more: the next one follows none, nor a stream on which a launch failed."""
        self._eager, self.fast, self._owner = _RECORDED if self.shared else None, -1, None

    def ends_by(self, deadline: float) -> bool:
        """Waits for the eager calls, at most until ``deadline`` on ``time.monotonic()``'s clock; whether they ended.

        Those of which that cannot be known count as ended.
        """
        while not self.is_over(unknown=True):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-4)
        return True

    def is_over(self, unknown: bool = False) -> bool:
        """Whether no eager call runs any more; ``unknown`` if their stream captures by now and cannot be asked."""
        if self._open:
            return False
        with within(self._context):
            try:
                if self._eager is None:
                    return True
                if self._eager == _RECORDED:
                    return streams.is_over(self._end)
                return unknown if streams.capture_id(self._eager) else streams.is_idle(self._eager)
            except CudaError:
                return unknown

    def release(self) -> None:
        """Gives the events back, and forgets the graphs of others."""
        self._foreign.collect(now=True)
        for event in self._events:
            with suppress(CudaError):
                streams.destroy_event(event)
