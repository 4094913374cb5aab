"""The calls of NCCL that make an all-gather, a reduce-scatter or a broadcast.

NCCL's all-gather and reduce-scatter take equal parts, one after the other. Other parts are a broadcast or a reduction
for each rank, in one group. Rows are packed by the caller: see ``Prepared.packed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from ..calls.addresses import pairs_of
from ..calls.request import BROADCAST, GATHER, SCATTER, Request
from ..dtypes import KINDS, reduced_as
from . import library

Call = tuple[str, tuple[int, ...]]  # the function of the binding, and its arguments but for communicator and stream
_BYTES: tuple[int, ...] = (library.DTYPES["uint8"],)
# The function for equal parts, and the one for a part that a rank sends or gets
_NAMES = {GATHER: ("all_gather", "broadcast"), SCATTER: ("reduce_scatter", "reduce"), BROADCAST: ("", "broadcast")}


def packs(request: Request, n: int) -> bool:
    """True if some array has several rows with a part of each rank, for which NCCL has no call."""
    split = request.split
    return split is not None and any(split.rows(one.shape, 1, n).rows > 1 for one in request.members)


def calls(request: Request, n: int, rank: int, addresses: Any, wider: Sequence[Any]) -> Iterator[Call]:
    """The calls for arrays at these addresses: see calls/addresses.py.

    :param wider: by array, the dtype in place of its own; else None.
    """
    split = request.split
    assert split is not None
    for_equal, for_each = _NAMES[split.collective]
    pairs = pairs_of(addresses) if request.is_list else [addresses]
    for (source, target), one, dtype in zip(pairs, request.members, wider, strict=True):
        rows = split.rows(one.shape, one.itemsize, n)
        counts, itemsize, codes = [rows.rows * width for width in rows.widths], 1, _BYTES
        if request.op:
            reduced = KINDS[reduced_as(one.kind)]
            counts, itemsize = [nbytes // reduced.itemsize for nbytes in counts], (dtype or reduced).itemsize
            codes = library.DTYPES[(dtype or reduced).name], library.OPS[request.op]
        if for_equal and len({*counts}) == 1:
            if counts[0]:
                yield for_equal, (source, target, counts[0], *codes)
            continue
        for root, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            if count:
                begin = (end - count) * itemsize
                read, written = (source, target + begin) if split.collective.gathers else (source + begin, target)
                if split.collective.gathers and root != rank:
                    read = written
                yield for_each, (read, written, count, *codes, root)
