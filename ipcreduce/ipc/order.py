"""One order for the calls of a communicator, whatever streams they are made on: two of our kernels never overlap.

Eager calls follow the last eager call, by an event; captured calls the last one of the same capture, which becomes an
edge of the graph. Between an eager call and a captured one there is nothing to order.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from ..cuda import driver
from ..errors import CaptureError, CudaError
from .release import hold

_ENDED = -2  # after a stream that means another one in each thread: the call's end was recorded at once


class CallOrder:
    """Where the last call ran. The communicator's lock is held around every method but :meth:`drain` and hold_last."""

    def __init__(self) -> None:
        self.fast = -1  # the stream on which the last eager call ran, if nothing has to be looked at there
        self._eager: int | None = None  # the stream of the last eager call, or _ENDED
        self._owner: Any = None  # keeps it
        self._captured = (0, 0)  # the last captured call: (capture id, stream)
        self._event = driver.create_event()
        try:
            self._end = driver.create_event()  # of the last eager call, if it is _ENDED
        except CudaError:
            driver.destroy_event(self._event)
            raise

    def follow(self, stream: int, owner: Any) -> None:
        """Before a call on ``stream``, unless that is ``fast``.

        :raises CaptureError: if an eager call would have to follow one on a stream that is being captured now.
        """
        capture = driver.capture_id(stream)
        if not capture:
            if self._eager == _ENDED:
                driver.wait_event(stream, self._end)
            elif self._eager is not None and self._eager != stream:
                if driver.capture_id(self._eager):
                    raise CaptureError(
                        f"an eager call on stream {stream:#x} has to follow an earlier one on stream {self._eager:#x}, "
                        "which is now being captured. Call synchronize() before that capture begins."
                    )
                self.chain(self._eager, stream)
            self._eager, self._owner = stream, owner
            self.fast = -1 if stream == driver.PER_THREAD_STREAM else stream
            return
        hold(stream)
        previous = self._captured[1] if self._captured[0] == capture else None
        if previous is None and self.fast != -1 and driver.capture_id(self.fast) == capture:
            previous = self.fast  # it began to capture since, and its calls took the quick way
        if previous is not None and previous != stream:
            self.chain(previous, stream)
        self._captured, self.fast = (capture, stream), -1

    def launched(self, stream: int) -> None:
        """After a call that has followed: the stream that is another one in each thread cannot be asked later."""
        if self._eager == stream == driver.PER_THREAD_STREAM:
            driver.record_event(self._end, stream)
            self._eager = _ENDED

    def chain(self, before: int, after: int) -> None:
        """What comes on stream ``after`` waits for what is on ``before``."""
        driver.record_event(self._event, before)
        driver.wait_event(after, self._event)

    def hand_over(self, before: int, after: int, owner: Any) -> None:
        """Stream ``after`` waits for ``before`` and is now where the last call ran: ``before`` may capture again."""
        self.chain(before, after)
        self._eager, self.fast, self._owner = after, -1, owner
        self.launched(after)

    # ---- waiting
    def synchronize(self, stream: int | None) -> None:
        """Waits for the calls made so far: on ``stream``, or on the last one's."""
        if stream is not None:
            driver.synchronize_stream(stream)
        elif self._eager == _ENDED:
            driver.synchronize_event(self._end)
        elif self._eager is not None:
            driver.synchronize_stream(self._eager)
        if stream is None or stream == self._eager:
            self.forget()

    def forget(self) -> None:
        """No eager call runs any more: the next one follows none, nor a stream on which a launch failed."""
        self._eager, self.fast, self._owner = None, -1, None

    def drain(self) -> None:
        """Waits for the eager calls made so far, unless their stream is being captured, which that would spoil.

        Changes nothing: finalisers call it, in any thread.
        """
        eager = self._eager
        if eager == _ENDED:
            driver.synchronize_event(self._end)
        elif eager is not None and not driver.capture_id(eager):
            driver.synchronize_stream(eager)

    def hold_last(self) -> None:
        """Nothing is freed while the stream of the last eager call captures: it cannot be waited for."""
        if self._eager is not None and self._eager != _ENDED:
            hold(self._eager)

    def ends_by(self, deadline: float) -> bool:
        """Waits for the eager calls, at most until ``deadline`` on ``time.monotonic()``'s clock; whether they ended."""
        with suppress(CudaError):  # a stream that captures cannot be asked
            while self._eager is not None and self._eager != _ENDED and not driver.is_idle(self._eager):
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-4)
        return True

    def release(self) -> None:
        """Gives the events back."""
        for event in (self._event, self._end):
            with suppress(CudaError):
                driver.destroy_event(event)
