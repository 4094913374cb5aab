"""The collectives on NumPy arrays over MPI, for ranks that share no memory, with the bits of the kernels.

The ranks compare each call on the control page before, as MPI does not compare what it carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import clock
from ..calls.request import BROADCAST, GATHER, SCATTER
from ..dtypes import reduce
from ..ranks import exchange
from ..ranks.mpi import Begun, MpiRanks
from .shared import split_alone

if TYPE_CHECKING:
    from ..arrays.host_splits import SplitParts

_ONE_SHOT_BYTES = 64 << 10  # up to here every rank receives and reduces all data; above, each reduces a chunk
_SEGMENT_BYTES = 64 << 20  # bounds the temporary memory, and MPI's 32-bit counts

Array = np.ndarray[Any, Any]
Wait = Callable[[Any], None]


class MpiReducer:
    """The collectives over an MPI communicator that nobody else uses. Calls are collective, and return when done."""

    def __init__(self, ranks: MpiRanks, timeout: float) -> None:
        self._ranks, self._mpi, self._timeout = ranks, ranks.mpi, timeout

    def allreduce(self, array: Array, op: str, call: int, interrupt: Callable[[], None]) -> Array:
        """The reduction of every rank's ``array``: a new C-contiguous array of its shape and dtype.

        After an exception the ranks can exchange nothing more: the messages of this call would be taken for the next's.

        :param interrupt: called while this rank waits; raises to give up.
        :raises PeerTimeoutError: if the data of a rank do not come.
        """
        wait = self._waiting(call, interrupt)
        flat = np.ascontiguousarray(array).reshape(-1)
        result = flat.copy()
        if self._ranks.size > 1:
            step = _SEGMENT_BYTES // flat.itemsize
            for begin in range(0, flat.size, step):
                part = flat[begin : begin + step]
                reduce = self._one_shot if part.nbytes <= _ONE_SHOT_BYTES else self._two_shot
                result[begin : begin + step] = reduce(part, op, wait)
        return result.reshape(array.shape)

    def split(self, one: SplitParts, call: int, interrupt: Callable[[], None]) -> None:
        """Exchange the parts of an array. See :meth:`allreduce`."""
        wait, n = self._waiting(call, interrupt), self._ranks.size
        if n == 1:
            split_alone(one)
            return
        way = self._WAYS[one.collective]
        step = _SEGMENT_BYTES // n // one.targets[0].itemsize
        for begin in range(0, max(map(len, (*one.sources, *one.targets))), step):
            sources, targets = ([part[begin : begin + step] for part in parts] for parts in (one.sources, one.targets))
            way(self, one, sources, targets, wait)

    def _broadcast(self, one: SplitParts, _: list[Array], targets: list[Array], wait: Wait) -> None:
        assert one.root is not None
        target = targets[one.root]
        received = target if self._ranks.rank == one.root else np.empty_like(target)  # if this is given up, MPI may
        wait(Begun(self._mpi, "Ibcast", received, one.root))  # write there later, when the target is used anew
        if received is not target:
            target[:] = received

    def _gather(self, _: SplitParts, sources: list[Array], targets: list[Array], wait: Wait) -> None:
        counts = [target.size for target in targets]
        received = np.empty(sum(counts), np.uint8)
        wait(Begun(self._mpi, "Iallgatherv", sources[0], [received, _places(counts)]))
        for target, part in zip(targets, np.split(received, np.cumsum(counts)[:-1]), strict=True):
            target[:] = part

    def _scatter(self, one: SplitParts, sources: list[Array], targets: list[Array], wait: Wait) -> None:
        n, (target,) = self._ranks.size, targets
        received = np.empty((n, target.size), target.dtype)
        counts, own = [source.nbytes for source in sources], [target.nbytes] * n
        sent = np.concatenate(sources).view(np.uint8)
        room = received.reshape(-1).view(np.uint8)
        wait(Begun(self._mpi, "Ialltoallv", [sent, _places(counts)], [room, _places(own)]))
        reduce([*received], one.op, target)

    _WAYS: ClassVar = {GATHER: _gather, SCATTER: _scatter, BROADCAST: _broadcast}

    def _waiting(self, call: int, interrupt: Callable[[], None]) -> Wait:
        return partial(
            exchange.complete, ranks=self._ranks, deadline=clock.now() + self._timeout,
            what=f"the data of call {call}", call=call, interrupt=interrupt,
        )  # fmt: skip

    def _one_shot(self, flat: Array, op: str, wait: Wait) -> Array:
        parts = np.empty((self._ranks.size, flat.size), flat.dtype)
        wait(Begun(self._mpi, "Iallgather", flat.view(np.uint8), parts.view(np.uint8)))
        return reduce(list(parts), op)

    def _two_shot(self, flat: Array, op: str, wait: Wait) -> Array:
        n = self._ranks.size
        padded = np.zeros((n, -(-flat.size // n)), flat.dtype)
        padded.reshape(-1)[: flat.size] = flat
        parts = np.empty_like(padded)
        wait(Begun(self._mpi, "Ialltoall", padded.view(np.uint8), parts.view(np.uint8)))
        reduced = reduce(list(parts), op)
        wait(Begun(self._mpi, "Iallgather", reduced.view(np.uint8), parts.view(np.uint8)))
        return parts.reshape(-1)[: flat.size]


def _places(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Counts and places of parts that lie one after the other, as MPI takes them."""
    return [*counts], [*accumulate(counts, initial=0)][:-1]
