"""The flight recorder: each rank's last calls, in memory that all see, for every rank to compare with its own.

A ring of slots, by call number. In a slot the ranks' keys stand side by side, checksums of what they did: that all of
them agree is seen at one look. The texts, for people, lie apart.
"""

from __future__ import annotations

import mmap
import time
from typing import Any

import numpy as np

from .plan import MAX_RANKS
from .signature import KEY_BYTES, TEXT_BYTES, Signature

# Calls in the ring: more than a host can run ahead of its GPU. Those that repeat in cycles of up to 10 find in their
# slots what they would write there, so that the ranks' processors keep sharing these.
RING = 2520
SLOT_BYTES = KEY_BYTES * MAX_RANKS
_KEYS_BYTES = RING * SLOT_BYTES
_RANK = np.dtype([("number", "<u8", (8,)), ("texts", f"S{TEXT_BYTES}", (RING,))])  # number: of its last call, a line


class FlightRecorder:
    """One rank's view of it, on the way of every call. Not thread-safe."""

    def __init__(self, page: mmap.mmap, offset: int, rank: int, n: int) -> None:
        """:param offset: where in the page it begins; it has :func:`nbytes` there."""
        self.page, self.keys_offset = page, offset
        self._rank = rank
        words, ranks = memoryview(page), offset + _KEYS_BYTES
        blocks = [words[at : at + _RANK.itemsize] for at in range(ranks, ranks + n * _RANK.itemsize, _RANK.itemsize)]
        self._keys = words[offset:ranks].cast("I")
        self._numbers = [block[:8].cast("Q") for block in blocks]
        self._texts = [block[_RANK.fields["texts"][1] :] for block in blocks]  # type: ignore[index]
        self.number = self._numbers[rank]
        self._others = [(other, number) for other, number in enumerate(self._numbers) if other != rank]
        self.recorded: list[Signature | None] = [None] * RING  # whose keys and texts are in our slots
        self._places = range(rank, MAX_RANKS if rank == n - 1 else rank + 1)  # the last one stands for the missing

    def enter(self, call: int, what: Signature) -> int | None:
        """Records a call and compares it with that of the same number of every rank that has come.

        Who comes later compares with this one. ``GraphSupport.replayer`` does the same in one function.

        :returns: a rank whose call differs, or None.
        """
        slot = call % RING
        if self.recorded[slot] is not what:  # else it is there from RING calls ago
            self.write(slot, what)
        self.number[0] = call
        at = self.keys_offset + slot * SLOT_BYTES
        return None if self.page[at : at + SLOT_BYTES] == what.keys else self.differing(call)

    def write(self, slot: int, what: Signature) -> None:
        """Puts what a call is into a slot: before its number."""
        self._texts[self._rank][TEXT_BYTES * slot : TEXT_BYTES * (slot + 1)] = what.record
        for place in self._places:
            self._keys[slot * MAX_RANKS + place] = what.crc
        self.recorded[slot] = what

    def differing(self, call: int) -> int | None:
        """A rank whose call of this number, which this rank has entered, differs from ours; None if none has so far."""
        for rank, number in self._others:
            if number[0] >= call and self._differs(rank, call):
                time.sleep(1e-3)  # some processors show another's key after the number that it wrote behind
                if self._differs(rank, call):
                    return rank
        return None

    def _differs(self, rank: int, call: int) -> bool:
        slot = call % RING * MAX_RANKS
        return self._keys[slot + rank] != self._keys[slot + self._rank] and self._holds(rank, call)

    def _holds(self, rank: int, call: int) -> bool:
        """Whether what a rank did in a call is still there: it writes a slot before the number."""
        return call <= self._numbers[rank][0] < call + RING - 1

    def call_of(self, rank: int) -> int:
        """The number of a rank's last call."""
        return self._numbers[rank][0]

    def describe(self, rank: int, call: int) -> str:
        """What a rank did in a call, for people; "" if it has not come so far, or that call is long gone."""
        if not call or not self._holds(rank, call):
            return ""
        slot = TEXT_BYTES * (call % RING)
        return bytes(self._texts[rank][slot : slot + TEXT_BYTES]).rstrip(b"\0").decode(errors="replace")


def nbytes(n: int) -> int:
    """Its size for ``n`` ranks: whole cache lines."""
    size: Any = _KEYS_BYTES + n * _RANK.itemsize
    return int(size)
