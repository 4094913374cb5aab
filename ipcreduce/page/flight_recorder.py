"""The flight recorder: each rank's last calls, in memory that all ranks see, so that each can compare its own calls.

A ring of slots, by call number. In a slot the ranks' keys stand side by side, so one comparison shows that all agree.
A key is the checksum of a call's fingerprint. Each rank has a table of the texts behind its keys.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np

from ..originals import monotonic, time
from ..texts import encoded
from .fingerprint import Fingerprint, by_rank
from .records import ask_twice

# Calls in the ring: more than a host can run ahead of its GPU. Those that repeat in cycles of up to 10 find in their
# slots the keys that they would write, so the cache lines stay shared by the ranks' processors.
RING = 2520
_KEY_BYTES = 4
_MOMENT_SECONDS = 0.02  # for ranks on their way to a call: with two ranks nobody sees which of them is the odd one
_MAX_CALLS = 1 << 62
TEXTS, TEXT_BYTES = 1008, 80  # in a rank's table
_TEXT = np.dtype([("key", "<u4"), ("text", f"S{TEXT_BYTES}")])
_RANK = np.dtype([("number", "<u8", (8,)), ("texts", _TEXT, (TEXTS,))])  # number: of its last call, a cache line


class FlightRecorder:
    """One rank's view of the flight recorder, on the path of every call. Not thread-safe."""

    def __init__(self, page: mmap.mmap, offset: int, rank: int, n: int) -> None:
        """:param offset: where in the page it begins; it has :func:`nbytes` there."""
        self._rank, self._n = rank, n
        words, ranks = memoryview(page), offset + _keys_bytes(n)
        self._keys = words[offset:ranks].cast("I")
        self._columns = np.frombuffer(page, "<u4", RING * n, offset).reshape(RING, n)
        self._numbers = [words[at : at + 8].cast("Q") for at in range(ranks, offset + nbytes(n), _RANK.itemsize)]
        self._texts = np.frombuffer(page, _RANK, n, ranks)["texts"]
        # By slot, a view of all ranks' keys; None until our first key is there. Views are compared by whole words.
        self.slots: list[memoryview | None] = [None] * RING
        self.agreed: dict[int, memoryview] = {}  # by the keys in our table: a slot in which all ranks have that key
        self.number = self._numbers[rank]
        self._others = [(other, number) for other, number in enumerate(self._numbers) if other != rank]
        self.recorded: list[Fingerprint | None] = [None] * RING  # the calls whose keys are in this rank's slots
        self.restarts = 0  # of our table of texts
        self.first = 1  # calls from here on are numbered without gaps: a resynchronisation leaves one

    def enter(self, call: int, fingerprint: Fingerprint) -> int | None:
        """Record a call and compare it with the same call of every rank that has come.

        A rank that comes later compares with this one. ``FastPath.make`` does the same within one function.

        :returns: a rank whose call differs, or None.
        """
        slot = call % RING
        if self.recorded[slot] is not fingerprint:  # else it is there from RING calls ago
            self.write(slot, fingerprint)
        self.number[0] = call
        return self.compare(call, fingerprint)

    def compare(self, call: int, fingerprint: Fingerprint) -> int | None:
        """A rank that has come to this call, which this rank has entered, and made another one; None if none has."""
        return None if self.slots[call % RING] == self.agreed[fingerprint.crc] else self.differing(call)

    def write(self, slot: int, fingerprint: Fingerprint) -> None:
        """Write a call's key into a slot: before its number."""
        if fingerprint.crc not in self.agreed:
            self._publish(fingerprint)
        self.recorded[slot] = None  # if we are interrupted here
        self._keys[slot * self._n + self._rank] = fingerprint.crc
        if self.slots[slot] is None:
            self.slots[slot] = self._keys[slot * self._n : (slot + 1) * self._n]
        self.recorded[slot] = fingerprint

    def _publish(self, fingerprint: Fingerprint) -> None:
        if len(self.agreed) == TEXTS:  # the table begins anew: keys that come again are published again
            self.recorded[:] = [None] * RING
            self.restarts += 1
            self.agreed.clear()
        entry = self._texts[self._rank, len(self.agreed)]
        entry["key"] = 0  # while it has another one's text
        entry["text"], entry["key"] = encoded(fingerprint.text, TEXT_BYTES), fingerprint.crc
        keys = fingerprint.crc.to_bytes(_KEY_BYTES, sys.byteorder) * self._n
        self.agreed[fingerprint.crc] = memoryview(keys).cast("I")

    def differing(self, call: int) -> int | None:
        """A rank whose call of this number, which this rank has entered, is another one; None if none has so far."""
        for rank, number in self._others:
            if number[0] >= call and ask_twice(partial(self._differs, rank, call)):  # most have not come
                return rank
        return None

    def _differs(self, rank: int, call: int) -> bool:
        slot = call % RING * self._n
        return self._keys[slot + rank] != self._keys[slot + self._rank] and self._holds(rank, call)

    def _holds(self, rank: int, call: int) -> bool:
        """True if the slot still holds a rank's call of this number: it is written before the number."""
        return call <= self._numbers[rank][0] < call + RING - 1

    # ---- copies of other ranks' parts, where each rank has a page of its own: see mirror.py
    KEY_BYTES, TEXT_BYTES = _KEY_BYTES, int(_TEXT.itemsize)
    most_news = RING * _KEY_BYTES + int(_TEXT.itemsize) * TEXTS  # bytes

    def keys_from(self, first: int, last: int) -> tuple[int, bytes]:
        """(call of the first key, keys) of this rank's calls from ``first``, or the oldest in the ring, to ``last``."""
        first = max(first, last - RING + 2, 1)
        return first, self._columns[np.arange(first, last + 1) % RING, self._rank].tobytes()

    def own_key(self, call: int) -> int:
        """The key in this rank's slot for a call."""
        return int(self._columns[call % RING, self._rank])

    def own_texts(self, begin: int, end: int) -> bytes:
        """Entries ``begin`` to ``end`` - 1 of this rank's table of texts."""
        return self._texts[self._rank, begin:end].tobytes()

    def store(self, rank: int, number: int, first: int, keys: int, text: int, texts: int, body: bytes) -> None:
        """Store another rank's last number, the keys of ``keys`` calls from ``first`` on, and entries of its table.

        :raises ValueError: if they do not fit.
        """
        past = keys * _KEY_BYTES
        fits = keys <= RING and text + texts <= TEXTS and len(body) == past + texts * _TEXT.itemsize
        if not fits or max(first, number) > _MAX_CALLS:
            raise ValueError("keys or texts that do not fit")
        self._texts[rank, text : text + texts] = np.frombuffer(body, _TEXT, texts, past)
        self._columns[(first + np.arange(keys)) % RING, rank] = np.frombuffer(body, "<u4", keys)
        self._numbers[rank][0] = number

    def first_differing(self, rank: int, first: int, last: int) -> int | None:
        """The first call from ``first`` to ``last``, which both have made, in which a rank differs; None if none does.

        Calls that either has overwritten are left out.
        """
        newest = self._newest(rank)
        calls = np.arange(max(first, self.first, newest - RING + 2), min(last, newest) + 1)
        slots = self._columns[calls % RING]
        differing = calls[slots[:, rank] != slots[:, self._rank]]
        differing = differing[differing >= self._newest(rank) - RING + 2]  # the ranks go on meanwhile
        return int(differing[0]) if len(differing) else None

    def difference(self, rank: int, first: int, last: int) -> tuple[int, str] | None:
        """The call of :meth:`first_differing`, and what it is on both ranks, in words; None if none differs."""
        call = ask_twice(partial(self.first_differing, rank, first, last))
        return None if call is None else (call, self.describe_all(call))

    def _newest(self, rank: int) -> int:
        """The highest number of a call of this rank or another one."""
        return min(max(self.number[0], self._numbers[rank][0]), _MAX_CALLS)

    def latest(self, call: int) -> Iterator[tuple[int, Fingerprint]]:
        """This rank's calls and their numbers, from ``call`` backwards, as far as the ring has them."""
        for number in range(call, max(self.first, self.number[0] - RING + 2) - 1, -1):
            fingerprint = self.recorded[number % RING]
            if fingerprint is not None:
                yield number, fingerprint

    # ---- for people
    def call_of(self, rank: int) -> int:
        """The number of a rank's last call."""
        return self._numbers[rank][0]

    def describe(self, rank: int, call: int) -> str:
        """A rank's call of a number, for people; "" if the rank has not come to it, or has overwritten it.

        "another call" if its text has gone: the rank has made over 1,000 different ones since.
        """
        if not call or not self._holds(rank, call):
            return ""
        texts = self._texts[rank]
        found = texts["text"][texts["key"] == self._keys[call % RING * self._n + rank]]
        return bytes(found[0]).decode(errors="replace") if len(found) else "another call"

    def describe_all(self, call: int) -> str:
        """The calls of this number, which differ, of all ranks that have come to it, or come within a moment."""
        until = monotonic() + _MOMENT_SECONDS
        while min(map(self.call_of, range(self._n))) < call and monotonic() < until:
            time.sleep(1e-4)
        keys = self._keys[call % RING * self._n :]
        texts = {rank: text for rank in range(self._n) if (text := self.describe(rank, call))}
        return by_rank({rank: (keys[rank], text) for rank, text in texts.items()})


def _keys_bytes(n: int) -> int:
    """Bytes of all slots: whole cache lines."""
    return -(-RING * _KEY_BYTES * n // 64) * 64


def nbytes(n: int) -> int:
    """The recorder's size in bytes for ``n`` ranks."""
    return _keys_bytes(n) + n * int(_RANK.itemsize)
