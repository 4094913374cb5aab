"""One order for the calls of a communicator, whatever streams they are made on: two of our kernels never overlap.

Eager calls follow the last eager call, by an event; captured calls the last one of the same capture, which becomes an
edge of the graph. Between an eager call and a captured one there is nothing to order.

The driver crashes on the handle of a stream that was destroyed. So a stream is looked at after a call only if we hold
the object that keeps it; else the call's end is recorded at once, in an event of ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .. import surroundings
from ..cuda import streams
from ..cuda.within import using, within
from ..errors import CaptureError, CudaError

IN_A_CAPTURE = "replay() on a stream that is being captured: a graph cannot be part of another one"
_RECORDED = -2  # in the place of a stream: the end of the last eager call is in an event


class CallOrder:
    """Where the last call ran. The communicator's lock is held around every method.

    :param context: of the GPU: the default stream's handle means another stream in each.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._open = False  # a call is being launched
        self.fast = -1  # the stream on which the last eager call ran, if all that can have changed is that it captures
        self._eager: int | None = None  # the stream of the last eager call, or _RECORDED
        self._owner: Any = None  # keeps it
        self._capture = 0  # the id of the last captured call's capture
        self._captured_last: tuple[int, ...] = ()  # its node
        self._events: list[int] = []
        try:
            while len(self._events) < 3:
                self._events.append(streams.create_event())
        except CudaError:
            self.release()
            raise
        self._between, self._end, self._captured_end = self._events

    @contextmanager
    def behind(self, stream: int, owner: Any, capturable: bool = True) -> Iterator[None]:
        """The block launches a call on ``stream``, behind the last one. Not needed where ``fast`` is ``stream``.

        :param owner: the object that ``stream`` is the handle of, if there is one.
        :param capturable: whether such a call can be part of a capture.
        :raises CaptureError: if it cannot, and ``stream`` captures; or if an eager call would have to follow one on a
            stream that is being captured now.
        """
        with using(self._context):
            end = self._follow(stream, owner, capturable)
            self._open = True
            try:
                yield
            except BaseException:  # what came before the call still has its end
                with suppress(CudaError):
                    self._record(end, stream)
                raise
            else:
                self._record(end, stream)
            finally:
                self._open = False

    def _follow(self, stream: int, owner: Any, capturable: bool) -> int:
        """The event to be recorded after the call; 0 for none."""
        capture = streams.capture_id(stream)
        if capture:
            if not capturable:
                raise CaptureError(IN_A_CAPTURE)
            # Right behind the last call there is an edge. With others between, ours costs nothing (NOTES.md).
            if capture == self._capture and streams.capture_nodes(stream) != self._captured_last:
                streams.wait_event(stream, self._captured_end)
            self._capture, self.fast = capture, -1
            return self._captured_end
        if self._eager == _RECORDED:
            streams.wait_event(stream, self._end)
        elif self._eager is not None and self._eager != stream:
            if streams.capture_id(self._eager):
                raise CaptureError(
                    f"an eager call on stream {stream:#x} has to follow an earlier one on stream {self._eager:#x}, "
                    "which is now being captured. Call synchronize() before that capture begins."
                )
            self.chain(self._eager, stream)
        if not surroundings.keeps(owner, stream):
            self._eager, self.fast, self._owner = _RECORDED, -1, None
            return self._end
        self._eager, self.fast, self._owner = stream, stream, owner
        return 0

    def _record(self, event: int, stream: int) -> None:
        if event:
            streams.record_event(event, stream)
        if event == self._captured_end:
            self._captured_last = streams.capture_nodes(stream)

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
        """Waits for the calls made so far: on ``stream``, or on the last one's."""
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
        self._eager, self.fast, self._owner = None, -1, None

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
        """Gives the events back."""
        for event in self._events:
            with suppress(CudaError):
                streams.destroy_event(event)
