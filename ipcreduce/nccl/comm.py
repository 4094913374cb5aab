"""One NCCL communicator after the other: a failed call aborts it, and the next resynchronisation makes a new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from .. import clock
from ..cuda.contexts import using_relaxed
from ..device.backend import Life
from ..device.background import Job
from ..errors import CudaError, Reach
from ..types import Stream
from . import library

_ENQUEUE_SECONDS = 1.0  # for a call that is being put on a stream, before the communicator is aborted under it


class NcclCommunicator:
    """The current NCCL communicator of this rank, which the program's threads use and the guard aborts.

    :ivar life: of this communicator, which graphs hold that record its calls.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._comm: Any = None
        self._ending = 0  # communicators that NCCL has still to free
        self._end_of_last: Job | None = None
        self._then: Callable[[], None] | None = None
        self._all_reduce = library.load().all_reduce
        self._enqueuing: tuple[int, ...] | None = None
        self._aborting = threading.Lock()
        self.life = Life()

    @property
    def is_open(self) -> bool:
        """False once it is aborted or destroyed."""
        return self._comm is not None

    @property
    def enqueuing(self) -> object | None:
        """An object for the call that is being put on a stream, else None. A first one may wait for the others here."""
        return self._enqueuing

    def use(self, comm: Any) -> None:
        """Use a communicator from :func:`library.join`, which all ranks have joined, from now on."""
        self._comm, self.life = comm, Life()

    def all_reduce(self, argument: tuple[int, int, int, int, int], stream: Stream) -> None:
        """Put an all-reduce on ``stream``.

        :param argument: source, target, count, dtype and op, the last two as NCCL's codes.
        :raises CudaError: if NCCL refuses it, or the communicator is gone.
        """
        self._enqueuing = argument  # before the communicator is looked up: see abort()
        try:
            self._all_reduce(*argument, self._comm, stream)
        except Exception as error:
            if self._comm is None:
                aborted = CudaError("ncclAllReduce", -1, "the NCCL communicator has been aborted")
                aborted.reach = Reach.ENDED
                raise aborted from error
            raise library.failure("ncclAllReduce", error) from error
        finally:
            self._enqueuing = None

    def abort(self) -> None:
        """End what runs, and let the communicator be freed. Idempotent; from any thread; does not wait.

        NCCL ends the calls at once, but frees a communicator only when no graph holds a call of it any more.
        """
        self._end(library.abort)

    def destroy(self) -> None:
        """Let the communicator be freed, which no rank uses any more. Does not wait."""
        self._end(library.destroy)

    def _end(self, end: Callable[[Any], None]) -> None:
        with self._aborting:
            comm, self._comm = self._comm, None
            if comm is None:
                return
            self.life.ended = True
            self._ending += 1
        self._end_of_last = Job(partial(self._end_now, end, comm))  # without the lock: it may run at once

    def _end_now(self, end: Callable[[Any], None], comm: Any) -> None:
        deadline = clock.now() + _ENQUEUE_SECONDS
        while self._enqueuing is not None and clock.now() < deadline:  # NCCL must not free what a call is using
            time.sleep(1e-4)
        with using_relaxed(self._context), suppress(CudaError):  # it is gone in any case
            end(comm)
        then = None
        with self._aborting:
            self._ending -= 1
            if not self._ending:
                then, self._then = self._then, None
        if then is not None:
            then()

    def is_freed(self, seconds: float) -> bool:
        """True if NCCL has freed what was ended last; waits for it up to ``seconds``."""
        return self._end_of_last is None or self._end_of_last.wait(seconds)

    def when_freed(self, then: Callable[[], None], seconds: float) -> bool:
        """Call ``then()`` once NCCL has freed all communicators that were ended; in the background if it is not yet.

        :returns: True if it has been called, for which it waits up to ``seconds``.
        """
        with self._aborting:
            is_freed, job = not self._ending, self._end_of_last
            if not is_freed:
                self._then = then
        if is_freed:
            then()
            return True
        return job is not None and job.wait(seconds) and not self._ending  # another one may still be freed

    def problem(self) -> str | None:
        """See :func:`library.problem`."""
        with self._aborting:
            return None if self._comm is None else library.problem(self._comm)
