"""The calls of NCCL that make an all-gather, a reduce-scatter or a broadcast.

NCCL's all-gather and reduce-scatter take equal parts, one behind the other. Other parts are a broadcast or a reduction
for each rank, in one group. Rows are packed by the caller: see ``Prepared.packed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..calls.request import Request
from ..dtypes import KINDS, reduced_as
from . import library

Call = tuple[str, tuple[int, ...]]  # the function of the binding, and its arguments but for communicator and stream
_BYTE = library.DTYPES["uint8"]


def calls(request: Request, n: int, rank: int, addresses: Sequence[int], wider: Sequence[Any]) -> Iterator[Call]:
    """The calls for arrays at these addresses: source and target of each.

    :param wider: by array, the dtype in place of its own; else None.
    """
    split = request.split
    assert split is not None
    for index, (one, dtype) in enumerate(zip(request.members, wider, strict=True)):
        source, target = addresses[2 * index : 2 * index + 2]
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
