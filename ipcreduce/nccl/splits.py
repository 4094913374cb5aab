"""The calls of NCCL that make an all-gather, a reduce-scatter or a broadcast.

NCCL's all-gather and reduce-scatter take equal parts, one after the other. Other parts are a broadcast or a reduction
for each rank, in one group. Rows are packed by the caller: see ``Prepared.packed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..calls.addresses import pairs_of
from ..calls.request import Request
from ..dtypes import KINDS, reduced_as
from . import library

Call = tuple[str, tuple[int, ...]]  # the function of the binding, and its arguments but for communicator and stream
_BYTE = library.DTYPES["uint8"]


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
    pairs = pairs_of(addresses) if request.is_list else [addresses]
    for (source, target), one, dtype in zip(pairs, request.members, wider, strict=True):
        rows = split.rows(one.shape, one.itemsize, n)
        parts = [rows.rows * width for width in rows.widths]
        if not any(parts):
            continue
        if split.collective == "broadcast":
            yield "broadcast", (source, target, parts[split.root], _BYTE, split.root)
        elif request.op:
            yield from _scattered(one.kind, request.op, source, target, parts, dtype)
        elif len({*parts}) == 1:
            yield "all_gather", (source, target, parts[0], _BYTE)
        else:
            for root, (begin, nbytes) in enumerate(zip(np.cumsum([0, *parts]).tolist(), parts, strict=False)):
                if nbytes:
                    there = target + begin
                    yield "broadcast", (source if root == rank else there, there, nbytes, _BYTE, root)


def _scattered(kind: str, op: str, source: int, target: int, parts: Sequence[int], wider: Any) -> Iterator[Call]:
    reduced = KINDS[reduced_as(kind)]
    dtype = wider or reduced
    counts = [nbytes // reduced.itemsize for nbytes in parts]
    codes = library.DTYPES[reduced_as(kind) if wider is None else wider.name], library.OPS[op]
    if len({*counts}) == 1:
        yield "reduce_scatter", (source, target, counts[0], *codes)
        return
    for root, (begin, count) in enumerate(zip(np.cumsum([0, *counts]).tolist(), counts, strict=False)):
        if count:
            yield "reduce", (source + begin * dtype.itemsize, target, count, *codes, root)
