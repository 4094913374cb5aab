"""The layout of the control page: head, flight recorder, one block a rank; the records and words in them."""

from __future__ import annotations

import functools
import mmap
from typing import Any

import numpy as np

from . import flight_recorder
from .records import record

OFFER_BYTES = 136  # for what a rank offers the others at a meeting
CHUNK_BYTES = 1024  # of a rank's payload in one round
ABORT_OFFSET = 0

FAULT = record(("kind", "<u8"), ("call", "<u8"), ("rank", "<u8"), ("text", "S1024"))
LOSS = record(("rank", "<u8"), ("text", "S128"))
FAREWELL = record(("text", "S256"))  # why a rank has closed the communicator, if there is more to say
ROUND = record(("ok", "<u4"), ("total", "<u4"), ("payload", f"V{CHUNK_BYTES}"))
MEETING = record(
    ("call", "<u8"), ("round", "<u8"), ("right", "<u8"), ("offered", "<u8"), ("offer", f"V{OFFER_BYTES}")
)  # fmt: skip


@functools.cache
def rank_layout(n: int) -> np.dtype[Any]:
    """One rank's block on the page of ``n`` ranks. Bytes "dead" and "late" are by rank."""
    return np.dtype([
        ("pid", "<i8"), ("namespace", "<u8"), ("state", "<u4"),
        ("dead", "u1", (n,)), ("late", "u1", (n,)),
        ("fault", FAULT), ("loss", LOSS), ("farewell", FAREWELL), ("meeting", MEETING),
        ("rounds", ROUND, (2,)),  # by parity of the serial: no rank writes one before all have read the last but one
    ], align=True)  # fmt: skip


def ranks_offset(n: int) -> int:
    """Offset of the ranks' blocks: after head and flight recorder."""
    return head_bytes(n) + flight_recorder.nbytes(n)


def head_bytes(n: int) -> int:
    """Size of the head, which is mapped for the GPU too: whole pages."""
    return _whole_pages(missing_offset(n))


def missing_offset(rank: int) -> int:
    """Offset of the two words of a rank's kernels: bits of the peers missed, and a flag. A cache line for each rank."""
    return 64 * (rank + 1)


def page_bytes(n: int) -> int:
    """Size of the page of ``n`` ranks: whole pages."""
    return _whole_pages(ranks_offset(n) + n * rank_layout(n).itemsize)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
