"""All-reduce of NumPy arrays over MPI, for ranks that share no memory, with the bits of the kernels.

The ranks compare each call on the control page before, as MPI does not compare what it carries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import clock
from ..dtypes import reduce
from ..ranks import exchange
from ..ranks.mpi import MpiRanks

_ONE_SHOT_BYTES = 64 << 10  # up to here every rank gets and folds everything; above, a chunk each
_SEGMENT_BYTES = 64 << 20  # bounds the temporary memory, and MPI's 32-bit counts

Array = np.ndarray[Any, Any]
Wait = Callable[[Any], None]


class MpiReducer:
    """All-reduce over an MPI communicator that nobody else uses. Calls are collective, and return when done."""

    def __init__(self, ranks: MpiRanks, timeout: float) -> None:
        self._ranks, self._mpi, self._timeout = ranks, ranks.mpi, timeout

    def allreduce(self, array: Array, op: str, call: int, interrupt: Callable[[], None]) -> Array:
        """The reduction of every rank's ``array``: a new C-contiguous array of its shape and dtype.

        After an exception the ranks can exchange nothing more: the messages of this call would be taken for the next's.

        :param interrupt: called while this rank waits; raises to give up.
        :raises PeerTimeoutError: if the data of a rank do not come.
        """
        wait = partial(
            exchange.complete, ranks=self._ranks, deadline=clock.now() + self._timeout,
            what=f"the data of call {call}", call=call, interrupt=interrupt,
        )  # fmt: skip
        flat = np.ascontiguousarray(array).reshape(-1)
        result = flat.copy()
        if self._ranks.size > 1:
            step = _SEGMENT_BYTES // flat.itemsize
            for begin in range(0, flat.size, step):
                part = flat[begin : begin + step]
                reduce = self._one_shot if part.nbytes <= _ONE_SHOT_BYTES else self._two_shot
                result[begin : begin + step] = reduce(part, op, wait)
        return result.reshape(array.shape)

    def _one_shot(self, flat: Array, op: str, wait: Wait) -> Array:
        parts = np.empty((self._ranks.size, flat.size), flat.dtype)
        wait(self._mpi.Iallgather(flat.view(np.uint8), parts.view(np.uint8)))
        return reduce(list(parts), op)

    def _two_shot(self, flat: Array, op: str, wait: Wait) -> Array:
        n = self._ranks.size
        padded = np.zeros((n, -(-flat.size // n)), flat.dtype)
        padded.reshape(-1)[: flat.size] = flat
        parts = np.empty_like(padded)
        wait(self._mpi.Ialltoall(padded.view(np.uint8), parts.view(np.uint8)))
        reduced = reduce(list(parts), op)
        wait(self._mpi.Iallgather(reduced.view(np.uint8), parts.view(np.uint8)))
        return parts.reshape(-1)[: flat.size]
