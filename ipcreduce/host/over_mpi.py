"""All-reduce of NumPy arrays over MPI, for ranks that share no memory, with the bits of the kernels.

Before the data, the ranks exchange a description of the call, so that a difference or a refused call is an
error on every rank and never a hang or a truncated message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from .. import clock
from ..dtypes import reduce
from ..errors import IpcReduceError, PeerFailedError, PeerLostError, RankMismatchError, report
from ..ranks import exchange
from ..ranks.mpi import MpiRanks, check_runs
from ..texts import described, encoded

_ONE_SHOT_BYTES = 64 << 10  # up to here every rank gets and folds everything; above, a chunk each
_SEGMENT_BYTES = 64 << 20  # bounds the temporary memory, and MPI's 32-bit counts


class MpiReducer:
    """All-reduce over one MPI communicator (our own). Every call is collective and blocks until it is done."""

    def __init__(self, ranks: MpiRanks, timeout: float) -> None:
        self._ranks, self._mpi, self._timeout = ranks, ranks.mpi, timeout
        self._rank, self._n = ranks.rank, ranks.size
        self.halfway = False  # within a call, or left it there: its messages would be taken for the next one's
        self._deadline, self._call = 0.0, 0
        self._interrupt: Callable[[], None] | None = None

    def allreduce(
        self, array: np.ndarray[Any, Any], op: str, call: int, what: str | None,
        interrupt: Callable[[], None] | None = None,
    ) -> np.ndarray[Any, Any]:  # fmt: skip
        """The reduction of every rank's ``array``: a new C-contiguous array of its shape and dtype.

        :param what: the call in words, which are compared; None if the ranks have agreed on it already.
        :raises RankMismatchError: if shape, dtype, op or call number differ. :raises PeerFailedError: if a rank
            refused this call. :raises PeerTimeoutError: if a rank did not come.

        After a timeout, or whatever else ends a call between its messages, ``halfway`` stays set: send no more.
        """
        check_runs()
        self._deadline, self._call, self._interrupt = clock.now() + self._timeout, call, interrupt
        if what is not None:
            self._agree(what)
        self.halfway = True
        flat = np.ascontiguousarray(array).reshape(-1)
        result = flat.copy()
        if self._n > 1:
            step = _SEGMENT_BYTES // flat.itemsize
            for begin in range(0, flat.size, step):
                part = flat[begin : begin + step]
                reduce = self._one_shot if part.nbytes <= _ONE_SHOT_BYTES else self._two_shot
                result[begin : begin + step] = reduce(part, op)
        self.halfway = False
        return result.reshape(array.shape)

    def left_halfway(self, call: int, error: BaseException) -> PeerLostError:
        """The error of all later calls once ``error`` has ended one while ``halfway``."""
        return PeerLostError(report(
            self._rank, call, expected="every rank to go through this call together",
            found=f"that this one left it halfway ({described(error)})",
            advice="The communicator can only be closed.",
        ))  # fmt: skip

    def refuse(self, error: BaseException, call: int) -> PeerLostError | None:
        """Take part in a call that this rank refuses, so that the others hear of it, if they come in time.

        :returns: why the communicator is lost, if that ended halfway.
        """
        if not self.halfway:
            self._deadline, self._call, self._interrupt = clock.now() + self._timeout, call, None
            with suppress(IpcReduceError):  # ``error`` is the one to raise
                self._tell(exchange.message(exchange.CALL, described(error), call=call))
                self.halfway = False
        return self.left_halfway(call, error) if self.halfway else None

    def _tell(self, record: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        check_runs()
        self.halfway = True
        what = f"call {self._call}"
        return exchange.allgather(self._ranks, record, self._deadline, what, call=self._call, interrupt=self._interrupt)

    def _agree(self, what: str) -> None:
        record = exchange.message(exchange.CALL, call=self._call)
        record["text"] = encoded(what, exchange.TEXT_BYTES)
        for rank, other in enumerate(self._tell(record)):
            text = exchange.text_of(other)
            if not other["ok"]:
                self.halfway = False  # on every rank alike
                raise PeerFailedError(report(
                    self._rank, self._call, expected="every rank to make this call",
                    found=f"that rank {rank} refused it ({text})",
                    advice="The communicator can be used again.",
                ))  # fmt: skip
            if text != exchange.text_of(record[0]) or other["call"] != self._call:
                self.halfway = False
                raise RankMismatchError(report(
                    self._rank, self._call, expected="the same call on every rank",
                    found=f"{what} here and {text} in call {other['call']} of rank {rank}",
                    advice="Make the ranks' programs agree; the communicator can be used again.",
                ))  # fmt: skip

    def _one_shot(self, flat: np.ndarray[Any, Any], op: str) -> np.ndarray[Any, Any]:
        parts = np.empty((self._n, flat.size), flat.dtype)
        self._wait(self._mpi.Iallgather(flat.view(np.uint8), parts.view(np.uint8)))
        return reduce(list(parts), op)

    def _two_shot(self, flat: np.ndarray[Any, Any], op: str) -> np.ndarray[Any, Any]:
        chunk = -(-flat.size // self._n)
        padded = np.zeros((self._n, chunk), flat.dtype)
        padded.reshape(-1)[: flat.size] = flat
        parts = np.empty_like(padded)
        self._wait(self._mpi.Ialltoall(padded.view(np.uint8), parts.view(np.uint8)))
        reduced = reduce(list(parts), op)
        self._wait(self._mpi.Iallgather(reduced.view(np.uint8), parts.view(np.uint8)))
        return parts.reshape(-1)[: flat.size]

    def _wait(self, request: Any) -> None:
        what = f"the data of call {self._call}"
        exchange.complete(request, self._ranks, self._deadline, what, call=self._call, interrupt=self._interrupt)
