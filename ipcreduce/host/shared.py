"""The collectives on NumPy arrays through a shared segment, with the bits of the kernels.

Small messages are one-shot: every rank writes its data, hands it over, and reduces everybody's. Larger ones are
two-shot, chunk by chunk: each rank reduces its share of the chunk, and all copy the results. These are the algorithms
of the kernels (kernels/one_shot.cu, two_shot.cu), with a handover in place of packets. All-gather, broadcast and
reduce-scatter hand each chunk over once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..calls.backend import Backend
from ..calls.request import BROADCAST, GATHER, SCATTER
from ..dtypes import reduce
from .segment import Segment

if TYPE_CHECKING:
    from ..arrays.host_splits import SplitParts

Check = Callable[[list[int]], None]
Array = np.ndarray[Any, Any]
_BYTE = np.dtype(np.uint8)


class SharedReducer(Backend):
    """The collectives through one segment. Every call is collective and blocks until it is done.

    Nothing of it runs between calls.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment, self._rank, self._n = segment, segment.rank, segment.n
        self._part = 0  # of the places for small messages, of the last one
        self._parts: dict[Any, list[list[Array]]] = {}  # these, by part and rank, as arrays of a dtype

    def describe(self) -> str:
        """The size of the segment, in words."""
        return f"through {self._segment.nbytes / (1 << 20):.1f} MB of shared memory"

    def allreduce(self, array: Array, op: str, out: Array, check: Check, agreed: Callable[[], None]) -> None:
        """Reduce every rank's ``array`` into ``out``: contiguous, of the same shape and dtype.

        After an error the values in ``out`` are undefined.

        :param check: called while this rank waits, with the ranks that have not come; raises to give up.
        :param agreed: called once every rank has come to this call; raises if their calls differ.
        """
        source, target = array.reshape(-1), out.reshape(-1)
        if self._n == 1:
            reduce([source], op, target)
            return
        if source.nbytes <= self._segment.small_bytes:
            self._one_shot(source, op, target, check, agreed)
            return
        if array is not out and np.may_share_memory(source, target):  # shifted: results would overwrite later data
            source = source.copy()
        length = self._segment.area_bytes // source.itemsize
        for begin in range(0, source.size, length):
            self._two_shot(source[begin : begin + length], op, target[begin : begin + length], check, agreed)
            agreed = _nothing

    def _one_shot(self, source: Array, op: str, target: Array, check: Check, agreed: Callable[[], None]) -> None:
        """Reduce all data on each rank."""
        size = source.size
        views = [place[:size] for place in self._small_places(source.dtype)]
        views[self._rank][:] = source
        self._segment.hand_over(check)
        agreed()
        reduce(views, op, target)

    def _small_places(self, dtype: np.dtype[Any]) -> list[Array]:
        """Each rank's place for a small message.

        Two places in turns are enough: a peer hands over once more only after it has read the last ones.
        """
        parts = self._parts.get(dtype)
        if parts is None:
            parts = self._parts[dtype] = [[one.view(dtype) for one in part] for part in self._segment.small]
        self._part = 1 - self._part
        return parts[self._part]

    def _two_shot(self, source: Array, op: str, target: Array, check: Check, agreed: Callable[[], None]) -> None:
        """Let each rank reduce its share. Its area has its data for the others, and another place the reduced share.

        One area is enough: after the second handover, all ranks have read the data. One place for results is enough:
        after the first handover of the next chunk, all ranks have read the results.
        """
        rank, n, size = self._rank, self._n, source.size
        length = -(-size // n)
        areas = [area[: source.nbytes].view(source.dtype) for area in self._segment.areas]
        shares = [slice(min(j * length, size), min((j + 1) * length, size)) for j in range(n)]
        results = [
            result[: (share.stop - share.start) * source.itemsize].view(source.dtype)
            for result, share in zip(self._segment.results, shares, strict=True)
        ]
        own, mine = areas[rank], shares[rank]
        own[: mine.start], own[mine.stop :] = source[: mine.start], source[mine.stop :]
        self._segment.hand_over(check)
        agreed()
        reduce([area[mine] if j != rank else source[mine] for j, area in enumerate(areas)], op, results[rank])
        self._segment.hand_over(check)
        for result, share in zip(results, shares, strict=True):
            target[share] = result

    # ---- arrays that are split
    def split(self, one: SplitParts, check: Check, agreed: Callable[[], None]) -> None:
        """Exchange the parts of an array. See :meth:`allreduce`."""
        if self._n == 1:
            split_alone(one)
        else:
            self._WAYS[one.collective](self, one, check, agreed)

    def _gather(self, one: SplitParts, check: Check, agreed: Callable[[], None]) -> None:
        rank, (source,), targets = self._rank, one.sources, one.targets
        for begin, length, places in self._turns(max(map(len, targets)), 1, check):
            part = source[begin : begin + length]
            places[rank][: part.size] = part
            self._segment.hand_over(check)
            agreed()
            agreed = _nothing
            if one.root == rank:
                continue  # its array, which may be read-only, is the source
            for peer, (target, place) in enumerate(zip(targets, places, strict=True)):
                if peer != rank:
                    part = target[begin : begin + length]
                    part[:] = place[: part.size]
        if one.root is None and not np.may_share_memory(source, targets[rank]):  # else it is the source
            targets[rank][:] = source

    def _scatter(self, one: SplitParts, check: Check, agreed: Callable[[], None]) -> None:
        """Reduce this rank's part. The target may be its own source: of that a chunk is read before it is written."""
        rank, n, sources, (target,) = self._rank, self._n, one.sources, one.targets
        ends = [*accumulate(map(len, sources))]
        if ends[-1] * target.itemsize <= self._segment.small_bytes:
            typed = self._small_places(target.dtype)
            np.concatenate(sources, out=typed[rank][: ends[-1]])
            self._segment.hand_over(check)
            agreed()
            reduce([place[ends[rank] - target.size : ends[rank]] for place in typed], one.op, target)
            return
        unit = n * target.itemsize
        for begin, length, places in self._turns(max(map(len, sources)) * unit, unit, check):
            first, count = begin // unit, length // unit
            typed = [place[: count * unit].view(target.dtype).reshape(n, count) for place in places]
            for source, place in zip(sources, typed[rank], strict=True):
                part = source[first : first + count]
                place[: part.size] = part
            self._segment.hand_over(check)
            agreed()
            agreed = _nothing
            part = target[first : first + count]
            reduce([place[rank, : part.size] for place in typed], one.op, part)

    _WAYS: ClassVar = {GATHER: _gather, SCATTER: _scatter, BROADCAST: _gather}

    def _turns(self, nbytes: int, unit: int, check: Check) -> Iterator[tuple[int, int, list[Array]]]:
        """The chunks of a message: where it begins, its most bytes, and each rank's place for it.

        There are two places in turns, as in :meth:`_small_places`. After the last chunk of an area is a handover: the
        next call may write to all of the area.

        :param unit: chunks are multiples of so many bytes.
        """
        segment = self._segment
        if nbytes <= segment.small_bytes:
            yield 0, nbytes, self._small_places(_BYTE)
            return
        half = segment.area_bytes // 2 // 64 * 64
        length = half // unit * unit
        for turn, begin in enumerate(range(0, nbytes, length)):
            yield begin, length, [area[turn % 2 * half :][:half] for area in segment.areas]
        segment.hand_over(check)

    # ---- as the backend of a call sequence
    def reset(self, offers: Sequence[bytes]) -> None:
        """Forget the handovers of calls that failed, once every rank is quiet."""
        self._segment.drain()
        self._part = 0


def _nothing() -> None:
    pass


def split_alone(one: SplitParts) -> None:
    """Exchange the parts of an array where there is only one rank, as :meth:`SharedReducer.split` does for several."""
    ((source,), (target,)) = one.sources, one.targets
    if one.op:
        reduce([source], one.op, target)
    elif target is not source:
        target[:] = source
