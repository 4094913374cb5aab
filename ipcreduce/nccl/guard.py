"""The guard of a NCCL communicator: a thread that aborts calls which wait too long.

NCCL's kernels know neither a deadline nor the abort word of the control page. So the guard does three things. It aborts
the communicator if a rank has raised the abort word and a call does not end by itself. It tells the other ranks of
NCCL's errors. It posts a timeout when calls do not end in time. The watchdog cannot do this, as it makes no CUDA call.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial

from .. import clock
from ..cuda import streams
from ..cuda.contexts import using_relaxed
from ..device.stream_order import StreamOrder
from ..errors import CudaError
from ..logs import ERROR, log
from ..originals import Thread, queue
from ..page.control_page import REFUSED, Page
from .comm import NcclCommunicator

_TICK_SECONDS = 0.05
# How long a call may still run after the abort word. A call that all ranks have made ends by itself. An abort would
# cost a new communicator, and recorded graphs would have to be recorded again.
_GRACE_SECONDS = 0.1
_LAST_TURN_SECONDS = 1.0
_NOTICE_SECONDS = 0.5  # after so long the watchdog has noticed the end of a rank; NCCL's error for it comes second
_NAME = "ipcreduce-nccl"


class Guard:
    """The guard's thread, from :meth:`start` to :meth:`close`.

    The time of a call counts from the moment at which the guard sees the call, at most 0.05 s after it was made. It
    includes work that the program has put on the stream before the call, because the other ranks wait for that, too.
    """

    def __init__(self, context: int, page: Page, order: StreamOrder, nccl: NcclCommunicator, timeout: float) -> None:
        self._context, self._page, self._order, self._nccl, self._timeout = context, page, order, nccl, timeout
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()  # holds an item after close(): see background.Job
        self._thread = Thread(partial(_run, weakref.ref(self), self._stopped), _NAME)
        self._event, self._stream = streams.create_event(), streams.create_stream()
        self._aborting = 0.0  # when the abort word was seen while a call runs; 0: not seen
        self._problem_at = 0.0  # when NCCL's error was seen first; 0: not seen
        self._marked = 0  # the number of the last call before the event; 0: the guard waits for no event
        self._since = 0.0  # when the event was recorded
        self.ended = 0  # the number of the last call that is known to have ended
        self._enqueuing: object | None = None  # the call that was being put on a stream in the last turn
        self._enqueuing_at = 0  # the number of the rank's last call in that turn
        self._enqueuing_since = 0.0

    def start(self) -> None:
        """Start the thread. :raises OSError: if the system has none."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close event and stream, unless the thread hangs in a call that uses them."""
        self._stopped.put(None)
        self._thread.join(_LAST_TURN_SECONDS)
        if self._thread.is_alive:
            return
        with using_relaxed(self._context), suppress(CudaError):
            streams.close_event(self._event)
            streams.close_stream(self._stream)

    def reset(self) -> None:
        """Forget all calls. No call may be running."""
        self._marked, self._enqueuing, self._aborting, self._problem_at = 0, None, 0.0, 0.0
        self.ended = self._page.calls.number[0]

    def look(self) -> None:
        """Look once for all that the guard has to do."""
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
                    if current:  # otherwise the calls of that era have ended
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
                    nccl.abort()  # the communicator is broken, whether a call waits or not
            return
        try:
            with using_relaxed(self._context):
                self._watch_calls(era)
        except CudaError:
            self._marked = 0  # the next turn begins anew
        self._watch_enqueuing(era)

    def _watch_calls(self, era: int) -> None:
        """Post a timeout if a call on a stream takes too long."""
        if self._marked:
            if streams.is_over(self._event):
                self._marked, self.ended = 0, self._marked
            elif clock.now() - self._since > self._timeout:
                self._post_timeout(self._marked, era)
                return
        number = self._order.launched  # read before the event is recorded, which then comes after that call
        if not self._marked and number > self.ended and self._order.mark(self._event, self._stream):
            self._marked, self._since = number, clock.now()

    def _watch_enqueuing(self, era: int) -> None:
        """Post a timeout if NCCL takes too long to put a call on its stream, as in the first calls, which connect."""
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
        except Exception:  # the thread goes on, because without it a wait could last for ever
            log(ERROR, "the guard of a NCCL communicator has failed in a turn", trace=True)
        del alive
