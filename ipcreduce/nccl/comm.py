"""The NCCL communicator of a rank. A failed call aborts it, and the next resynchronisation makes a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from .. import clock
from ..cuda.contexts import using_relaxed
from ..device.backend import Validity
from ..device.background import Job
from ..errors import CudaError, Reach
from ..originals import Lock, time
from ..types import Stream
from . import library

_ENQUEUE_SECONDS = 1.0  # how long an abort waits for a thread that is putting a call on a stream


class NcclCommunicator:
    """The current NCCL communicator of this rank. The program's threads use it, and the guard may abort it.

    :ivar validity: the validity of this communicator's calls: graphs with such calls hold it.
    :ivar enqueuing: the call that is being put on a stream, else None. A first call may wait here for the ranks.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._comm: Any = None
        self._closing = 0  # the number of communicators that NCCL has not freed yet
        self._last_close: Job | None = None
        self._then: Callable[[], None] | None = None
        self._all_reduce = library.load().all_reduce
        self.enqueuing: tuple[int, ...] | None = None
        self._aborting = Lock()
        self.validity = Validity()

    @property
    def is_open(self) -> bool:
        """False once the communicator is aborted or closed."""
        return self._comm is not None

    def use(self, comm: Any) -> None:
        """Use a communicator that :func:`library.join` has made, from now on."""
        self._comm, self.validity = comm, Validity()

    def all_reduce(self, argument: tuple[int, int, int, int, int], stream: Stream) -> None:
        """Put an all-reduce on ``stream``.

        :param argument: source address, target address, count, and NCCL's codes of dtype and op.
        :raises CudaError: if NCCL fails, or if the communicator is gone.
        """
        self.enqueuing = argument  # before the communicator is looked up: see abort()
        try:
            self._all_reduce(*argument, self._comm, stream)
        except Exception as error:
            raise self._failure("ncclAllReduce", error) from error
        finally:
            self.enqueuing = None

    def _failure(self, name: str, error: Exception) -> BaseException:
        if self._comm is None:
            aborted = CudaError(name, -1, "the NCCL communicator has been aborted")
            aborted.reach = Reach.ENDED
            return aborted
        return library.failure(name, error)

    def group(self, calls: Sequence[tuple[str, tuple[int, ...]]], stream: Stream) -> None:
        """Put several calls on ``stream`` as one operation of NCCL. See :meth:`all_reduce`.

        :param calls: a function of the binding, and its arguments but for communicator and stream.
        """
        if not calls:
            return
        nccl = library.load()
        self.enqueuing = calls[0][1]  # until the end: only there NCCL puts them on the stream
        is_open = True  # first: Python handles Ctrl-C behind a call, so not before the next one
        try:
            nccl.group_start()
            for name, argument in calls:
                getattr(nccl, name)(*argument, self._comm, stream)
            is_open = False
            nccl.group_end()
        except Exception as error:
            raise self._failure("ncclGroupEnd", error) from error
        finally:
            if is_open:
                with suppress(nccl.NCCLError):  # no call of the program may be within this group
                    nccl.group_end()
            self.enqueuing = None

    def abort(self) -> None:
        """Abort the running calls, and let NCCL free the communicator. Idempotent, for any thread, without waiting.

        NCCL aborts the calls at once. It frees the communicator when no graph holds a call of it any more.
        """
        self._close(library.abort)

    def close(self) -> None:
        """Let NCCL free the communicator, which no rank uses any more. This does not wait."""
        self._close(library.close)

    def _close(self, close: Callable[[Any], None]) -> None:
        with self._aborting:
            comm, self._comm = self._comm, None
            if comm is None:
                return
            self.validity.ended = True
            self._closing += 1
        self._last_close = Job(partial(self._close_now, close, comm)).start()  # not under the lock: it may run now

    def _close_now(self, close: Callable[[Any], None], comm: Any) -> None:
        deadline = clock.now() + _ENQUEUE_SECONDS
        while self.enqueuing is not None and clock.now() < deadline:  # NCCL must not free what a call is using
            time.sleep(1e-4)
        with using_relaxed(self._context), suppress(CudaError):  # after an error the communicator is gone, too
            close(comm)
        then = None
        with self._aborting:
            self._closing -= 1
            if not self._closing:
                then, self._then = self._then, None
        if then is not None:
            then()

    def is_freed(self, seconds: float) -> bool:
        """Wait up to ``seconds``. True if NCCL has freed the communicator that was closed last."""
        return self._last_close is None or self._last_close.wait(seconds)

    def when_freed(self, then: Callable[[], None], seconds: float) -> bool:
        """Call ``then()`` once NCCL has freed all closed communicators: now, or later in another thread.

        :param seconds: how long to wait for the call.
        :returns: True if ``then()`` has been called.
        """
        with self._aborting:
            is_freed, job = not self._closing, self._last_close
            if not is_freed:
                self._then = then
        if is_freed:
            then()
            return True
        return job is not None and job.wait(seconds) and not self._closing  # NCCL may still free another communicator

    def suspend(self) -> None:
        """Let NCCL give its memory back. :raises CudaError: if that fails."""
        with using_relaxed(self._context):
            library.suspend(self._comm)

    def resume(self) -> None:
        """Let NCCL get its memory again. It waits for all ranks. :raises CudaError: if that fails."""
        with using_relaxed(self._context):
            library.resume(self._comm)

    def problem(self) -> str | None:
        """The error that NCCL has met; None if there is none, or if the communicator is closed."""
        with self._aborting:
            return None if self._comm is None else library.problem(self._comm)
