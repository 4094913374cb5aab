"""One NCCL communicator after the other: a failed call aborts it, and the next resynchronisation makes a new one."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from ..errors import CudaError
from ..handles import Stream
from . import library

_ENQUEUE_SECONDS = 1.0  # for a call that is being put on a stream, before the communicator is aborted under it


class NcclCommunicator:
    """The current NCCL communicator of this rank, which the program's threads use and the guard aborts.

    ``generation`` counts aborts: graphs recorded before the last one hold a communicator that is gone.
    """

    def __init__(self) -> None:
        self._comm: Any = None
        self._all_reduce = library.load().all_reduce
        self._busy = False
        self._aborting = threading.Lock()
        self.generation = 0

    @property
    def is_open(self) -> bool:
        """False once it is aborted or destroyed."""
        return self._comm is not None

    def use(self, comm: Any) -> None:
        """Use a communicator from :func:`library.join`, which all ranks have joined, from now on."""
        self._comm = comm

    def all_reduce(self, argument: tuple[int, int, int, int, int], stream: Stream) -> None:
        """Put an all-reduce on ``stream``.

        :param argument: source, target, count, dtype and op, the last two as NCCL's codes.
        :raises CudaError: if NCCL refuses it, or the communicator is gone.
        """
        self._busy = True  # before the communicator is looked up: see abort()
        try:
            self._all_reduce(*argument, self._comm, stream)
        except Exception as error:
            if self._comm is None:
                raise CudaError("ncclAllReduce", -1, "the NCCL communicator has been aborted") from error
            raise library.failure("ncclAllReduce", error) from error
        finally:
            self._busy = False

    def abort(self) -> None:
        """End what runs, and free the communicator. Idempotent; from any thread."""
        with self._aborting:
            comm, self._comm = self._comm, None
            if comm is None:
                return
            self.generation += 1
            deadline = time.monotonic() + _ENQUEUE_SECONDS
            while self._busy and time.monotonic() < deadline:  # NCCL must not free what a call is using
                time.sleep(1e-4)
            with suppress(CudaError):  # it is gone in any case
                library.abort(comm)

    def destroy(self) -> None:
        """Free the communicator, which no rank uses any more."""
        with self._aborting:
            comm, self._comm = self._comm, None
            if comm is not None:
                library.destroy(comm)

    def problem(self) -> str | None:
        """See :func:`library.problem`."""
        with self._aborting:
            return None if self._comm is None else library.problem(self._comm)
