"""The guard of a NCCL communicator: a thread that ends waits, since NCCL's kernels know no deadline and no abort word.

Once any rank has raised the abort word, it aborts the communicator if a call does not end by itself. It tells the
others of NCCL's own errors, and posts a timeout when calls have not ended in time. The watchdog makes no CUDA call, and
so cannot do this.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from contextlib import suppress

from .. import clock
from ..cuda import streams
from ..cuda.contexts import using_relaxed
from ..device.stream_order import StreamOrder
from ..errors import CudaError
from ..page.control_page import REFUSED, Page
from .comm import NcclCommunicator

_log = logging.getLogger("ipcreduce")
_TICK_SECONDS = 0.05
# For a call that all ranks have made: an abort costs a new communicator, and recorded graphs hold the old one.
_GRACE_SECONDS = 0.1
_LAST_TURN_SECONDS = 1.0
_NOTICE_SECONDS = 0.5  # for the watchdog to notice the end of a rank, before NCCL's error for it is told
_NAME = "ipcreduce-nccl"


class Guard:
    """The guard's thread, from :meth:`start` to :meth:`stop`.

    A call's time counts from the moment at which the guard has seen it, at most a tick after it was made. Work that
    the program has put on the stream before it counts too, as on the other ranks, which wait for it.
    """

    def __init__(self, context: int, page: Page, order: StreamOrder, nccl: NcclCommunicator, timeout: float) -> None:
        self._context, self._page, self._order, self._nccl, self._timeout = context, page, order, nccl, timeout
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()  # has something once it is: see background.Job
        run = weakref.ref(self), self._stopped
        self._thread = threading.Thread(target=_run, args=run, name=_NAME, daemon=True)
        self._event, self._stream = streams.create_event(), streams.create_stream()
        self._aborting = 0.0  # when the abort word was seen beside a call that runs
        self._problem_at = 0.0  # when NCCL's error was seen first
        self._marked = 0  # number of the last call before the event; 0: none is waited for
        self._since = 0.0  # when the event was recorded
        self._ended = 0  # number of the last call that is known to have ended
        self._enqueuing: object | None = None  # in the last turn, with the number of the rank's last call then
        self._enqueuing_at = 0
        self._enqueuing_since = 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and give event and stream back, unless the thread hangs in a call that uses them."""
        self._stopped.put(None)
        if self._thread.is_alive():
            self._thread.join(_LAST_TURN_SECONDS)
        if self._thread.is_alive():
            return
        with using_relaxed(self._context), suppress(CudaError):
            streams.close_event(self._event)
            streams.close_stream(self._stream)

    def forget(self) -> None:
        """Begin anew, since no call runs."""
        self._marked, self._enqueuing, self._aborting, self._problem_at = 0, None, 0.0, 0.0
        self._ended = self._page.calls.number[0]

    def look(self) -> None:
        """One turn."""
        page, nccl, era = self._page, self._nccl, self._page.era
        if not nccl.is_open:
            return
        if page.aborted:
            if self._order.is_over() and nccl.enqueuing is None:
                self._aborting = 0.0
            elif not self._aborting:
                self._aborting = clock.now()
            elif clock.now() - self._aborting > _GRACE_SECONDS:
                self._aborting = 0.0
                with page.in_era(era) as current:
                    if current:  # else the calls of that era have ended
                        page.note_ended_without_data()
                        nccl.abort()
            return
        self._aborting = 0.0
        problem = nccl.problem()
        if problem is not None:
            self._problem_at = self._problem_at or clock.now()
            if clock.now() - self._problem_at < _NOTICE_SECONDS:
                return  # it may be the end of a rank, which the watchdog names
            with page.in_era(era) as current:
                if current:
                    page.post_fault(REFUSED, max(1, page.calls.number[0]), problem)
                    page.note_ended_without_data()
                    nccl.abort()  # it is of no use any more, whether a call waits or not
            return
        try:
            with using_relaxed(self._context):
                self._watch_calls(era)
        except CudaError:
            self._marked = 0  # the next turn begins anew
        self._watch_enqueuing(era)

    def _watch_calls(self, era: int) -> None:
        """Post a timeout for a call on a stream that takes too long."""
        if self._marked:
            if streams.is_over(self._event):
                self._marked, self._ended = 0, self._marked
            elif clock.now() - self._since > self._timeout:
                self._post_timeout(self._marked, era)
                return
        number = self._order.launched  # before the event, which then stands behind that call
        if not self._marked and number > self._ended and self._order.mark(self._event, self._stream):
            self._marked, self._since = number, clock.now()

    def _watch_enqueuing(self, era: int) -> None:
        """Post a timeout for a call that NCCL does not put on its stream: it makes its links in the first calls."""
        enqueuing, number = self._nccl.enqueuing, self._page.calls.number[0]
        if enqueuing is not self._enqueuing or number != self._enqueuing_at:
            self._enqueuing, self._enqueuing_at, self._enqueuing_since = enqueuing, number, clock.now()
        elif enqueuing is not None and clock.now() - self._enqueuing_since > self._timeout:
            self._post_timeout(number, era)

    def _post_timeout(self, number: int, era: int) -> None:
        page = self._page
        with page.in_era(era) as current:
            if current:
                page.post_timeout([rank for rank in range(page.n) if page.calls.call_of(rank) < number])


def _run(guard: weakref.ref[Guard], stopped: queue.SimpleQueue[None]) -> None:
    while True:
        with suppress(queue.Empty):
            stopped.get(timeout=_TICK_SECONDS)
            return
        alive = guard()
        if alive is None:
            return
        try:
            alive.look()
        except Exception:  # the next turn may do better; without one nothing would end a wait
            _log.exception("the guard of a NCCL communicator has failed in a turn")
        del alive
