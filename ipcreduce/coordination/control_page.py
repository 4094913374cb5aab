"""The control page: a file in shared memory through which the ranks of one host see each other without MPI.

Its first 4 KB, which the GPUs can reach too, hold the abort word that ends every wait of every rank, and for each
rank the words in which its kernels say whom they waited for in vain, and that one has ended without data. Then come the
flight recorder, and a block a rank: who it is, what it has refused, whom it has lost, how it votes.

Nothing here relies on the order in which another processor shows a rank's stores. Faults, losses and votes are records,
there only once all of their bytes are (records.py); where the abort word says that a host has written one, readers look
until it is. All else is single words, each right by itself: what they stand for (unmapped, dead) are ends of driver
calls and of processes, not stores. Only whether a rank has closed *without* making a call takes two words, its state
and the number of its last call. So that is looked at again after a pause, by when the number, written first, has come;
in a sleep a thread gives the GIL away and takes it again, locks that order its own loads. What a clear() takes back has
come everywhere before anyone writes anew: between them lies an exchange over MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import PeerFailedError, PeerLostError, PeerTimeoutError, RankMismatchError, report
from . import flight_recorder
from .fingerprint import Vote
from .flight_recorder import FlightRecorder
from .records import Slot, record, text_of

HEAD_BYTES = 4096
REGISTRATIONS = 1024  # registered graphs that may be waiting for a rank to drop them
ACTIVE, CLOSED = 1, 2
REFUSED, MISMATCH = 1, 2  # kinds of fault

ABORT_OFFSET = 0
# What is written into the abort word. The kernels only ask whether it is zero.
TIMED_OUT = 1  # by kernels, and by a host that has waited as they do
TOLD = 2  # by a host that has written down why
_RECORD_SECONDS = 1.0  # for what a host has written before the abort word: it takes microseconds

_FAULT = record(("kind", "<u8"), ("call", "<u8"), ("text", "S1024"))
_LOSS = record(("rank", "<u8"), ("text", "S128"))
_VOTE = record(("call", "<u8"), ("ok", "<u4"), ("count", "<u4"), ("crc", "<u8"), ("text", "S512"))
_RANK = np.dtype([
    ("pid", "<i8"), ("started", "<u8"), ("namespace", "<u8"), ("state", "<u4"), ("dead", "<u4"),
    ("unmapped", "<u8", (REGISTRATIONS,)),
    ("fault", _FAULT), ("loss", _LOSS),
    ("votes", _VOTE, (2,)),  # by parity of the serial: nobody casts one before all have read the last but one
], align=True)  # fmt: skip


class Page:
    """The mapped control page. One rank calls :meth:`create`, the others :meth:`open`; then all :meth:`join`."""

    def __init__(self, descriptor: int, path: str, rank: int, n: int) -> None:
        self.path, self.rank, self.n = path, rank, n
        self.nbytes = page_bytes(n)
        try:
            self._map = mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words32 = memoryview(self._map).cast("I")
        self._ranks = np.frombuffer(self._map, _RANK, n, _ranks_offset(n))
        self._faults = [self._slot(rank, "fault", _FAULT) for rank in range(n)]
        self._losses = [self._slot(rank, "loss", _LOSS) for rank in range(n)]
        self._votes = [
            [self._slot(rank, "votes", _VOTE, parity * _VOTE.itemsize) for rank in range(n)] for parity in range(2)
        ]
        self._written = 0  # faults and losses, by this rank
        self.calls = FlightRecorder(self._map, HEAD_BYTES, rank, n)
        self.abort_word = self._words32[ABORT_OFFSET // 4 : ABORT_OFFSET // 4 + 1]

    @classmethod
    def create(cls, rank: int, n: int) -> Page:
        """A new page, in a file that only this user can open and nobody else made."""
        descriptor, path = tempfile.mkstemp(prefix="ipcreduce-", dir="/dev/shm")
        try:
            os.posix_fallocate(descriptor, 0, page_bytes(n))  # no room: an error now, and not a signal later
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return cls(descriptor, path, rank, n)

    @classmethod
    def open(cls, path: str, rank: int, n: int) -> Page:
        """The page that another rank created."""
        return cls(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path, rank, n)

    def _slot(self, rank: int, name: str, layout: np.dtype[Any], further: int = 0) -> Slot:
        assert _RANK.fields is not None
        at = _ranks_offset(self.n) + rank * _RANK.itemsize + _RANK.fields[name][1]
        return Slot(self._map, at + further, layout)

    def unlink(self) -> None:
        """Removes the file's name; the mappings stay. Only after all ranks have opened it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def join(self, pid: int, started: int, namespace: int) -> None:
        """Fills in who this rank is."""
        mine = self._ranks[self.rank]
        mine["pid"], mine["started"], mine["namespace"], mine["state"] = pid, started, namespace, ACTIVE

    # ---- words that the kernels share
    def abort(self, why: int = TIMED_OUT) -> None:
        """Ends every wait of every rank."""
        self._words32[ABORT_OFFSET // 4] = why

    @property
    def aborted(self) -> bool:
        return self.abort_word[0] != 0

    @property
    def ended_without_data(self) -> bool:
        """Whether a kernel of this rank has, since the last :meth:`clear`: what later ones wrote is not to be used."""
        return self._words32[missing_offset(self.rank) // 4 + 1] != 0

    # ---- faults
    def post(self, kind: int, call: int, text: str) -> None:
        """Writes down why this rank ends a call for all, and raises the abort word."""
        self._written += 1
        self._faults[self.rank].write(self._written, kind=kind, call=call, text=text)
        self.abort(TOLD)

    def fault(self) -> tuple[int, int, int, str] | None:
        """(call, rank, kind, text) of the earliest fault that a rank has written down, if any."""
        deadline = None
        while True:
            found = [
                (int(fault["call"]), rank, int(fault["kind"]), text_of(fault))
                for rank, slot in enumerate(self._faults)
                if (fault := slot.read()) is not None
            ]
            if found or self.abort_word[0] != TOLD or self.loss() is not None:
                return min(found) if found else None
            deadline = deadline or time.monotonic() + _RECORD_SECONDS
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-4)

    def explain(self, call: int, timeout: float) -> PeerFailedError | RankMismatchError | PeerTimeoutError:
        """The error that the abort word stands for, as this rank in its call ``call`` has to raise it."""
        fault = self.fault()
        if fault is not None:
            where, rank, kind, text = fault
            if kind == MISMATCH:
                return RankMismatchError(report(
                    self.rank, call, expected=f"the same call {where} on every rank", found=text,
                    advice="Make the ranks' programs agree; the communicator can be used again.",
                ))  # fmt: skip
            return PeerFailedError(report(
                self.rank, call, expected=f"call {where} on every rank", found=f"that rank {rank} refused it ({text})",
                advice="The communicator can be used again.",
            ))  # fmt: skip
        return PeerTimeoutError(report(
            self.rank, call, expected=f"every rank within {timeout:g} s", found=self._who_is_where(),
            advice="Look for a rank that waits elsewhere (a transfer, a lock, another collective, a decorator outside"
            " of eager_break), or raise timeout=.",
        ))  # fmt: skip

    def _who_is_where(self) -> str:
        missing = set()
        for rank in range(self.n):
            bits = self._words32[missing_offset(rank) // 4]
            missing |= {other for other in range(self.n) if bits >> other & 1}
        describe = self.calls.describe
        calls = [self.calls.call_of(rank) for rank in range(self.n)]
        behind = {rank for rank in range(self.n) if calls[rank] < max(calls)}
        parts = []
        for rank in sorted(missing & behind or behind or missing):
            last = describe(rank, calls[rank])
            parts.append(f"rank {rank} never came: its last call was {calls[rank]}" + (f" ({last})" if last else ""))
        others: dict[str, list[int]] = {}
        for rank in range(self.n):
            if calls[rank] == max(calls):
                others.setdefault(describe(rank, max(calls)), []).append(rank)
        parts += [f"ranks {ranks} are at call {max(calls)} ({what})" for what, ranks in others.items()]
        return "; ".join(parts)

    def lose(self, rank: int, why: str) -> None:
        """This rank has seen that ``rank``, maybe itself, has gone: for good, every wait of every rank ends.

        The first time counts; again, the abort word is raised again.
        """
        if self._losses[self.rank].read() is None:
            self._written += 1
            self._losses[self.rank].write(self._written, rank=rank, text=why)
        self.abort(TOLD)

    def loss(self) -> tuple[int, str] | None:
        """(rank, why) of a rank that has gone, whoever saw it first; what a rank says of itself comes before that."""
        found = [
            (int(loss["rank"]) != writer, int(loss["rank"]), text_of(loss))
            for writer, slot in enumerate(self._losses)
            if (loss := slot.read()) is not None
        ]
        return min(found)[1:] if found else None

    def bury(self, rank: int) -> None:
        """This rank has seen that the process of ``rank`` has ended."""
        self._ranks[self.rank]["dead"] |= 1 << rank

    def has_unmapped(self, rank: int) -> bool:
        """Whether ``rank`` cannot reach its peers' memory any more."""
        return self.has_left(rank) or any(entry["dead"] >> rank & 1 for entry in self._ranks)

    def clear(self) -> None:
        """Takes back this rank's fault and the abort word: after every kernel has ended, before anyone goes on."""
        self._faults[self.rank].clear()
        for word in (0, 1):
            self._words32[missing_offset(self.rank) // 4 + word] = 0
        self._words32[ABORT_OFFSET // 4] = 0

    # ---- votes, which leave nothing pending behind a rank that does not come
    def cast(self, serial: int, vote: Vote) -> None:
        """This rank's vote number ``serial``, from 1."""
        self._votes[serial % 2][self.rank].write(serial, **vars(vote))

    def votes(self, serial: int) -> list[Vote | None]:
        """Every rank's vote of this number; None for those that have not cast it."""
        return [
            Vote(int(v["call"]), bool(v["ok"]), int(v["count"]), int(v["crc"]), text_of(v))
            if (v := slot.read()) is not None and v["serial"] == serial
            else None
            for slot in self._votes[serial % 2]
        ]

    def miss(self, ranks: Iterable[int]) -> None:
        """This rank has waited for ``ranks`` in vain: ends every wait."""
        for rank in ranks:
            self._words32[missing_offset(self.rank) // 4] |= 1 << rank
        self.abort()

    # ---- life
    def identity(self, rank: int) -> tuple[int, int, int]:
        """(pid, start time, pid namespace) of a rank."""
        entry = self._ranks[rank]
        return int(entry["pid"]), int(entry["started"]), int(entry["namespace"])

    def mark_unmapped(self, serial: int) -> None:
        """This rank has nothing of the peers mapped any more for the graph with this serial number."""
        self._ranks[self.rank]["unmapped"][serial % REGISTRATIONS] = serial + 1

    def all_unmapped(self, serial: int) -> bool:
        """Whether every rank has marked it."""
        return bool((self._ranks["unmapped"][:, serial % REGISTRATIONS] == serial + 1).all())

    def leave(self) -> None:
        """Says that this rank has unmapped its peers' memory and makes no further call."""
        self._ranks[self.rank]["state"] = CLOSED

    def has_left(self, rank: int) -> bool:
        return bool(self._ranks[rank]["state"] == CLOSED)

    def has_left_before(self, rank: int, call: int) -> bool:
        """Whether a rank has closed the communicator and not made this call."""

        def seen() -> bool:
            return self.has_left(rank) and self.calls.call_of(rank) < call

        if seen():
            time.sleep(1e-3)  # some processors show the state before the number that was written first
            return seen()
        return False

    def lost(self, call: int, rank: int, why: str) -> PeerLostError:
        """The error for a rank that has gone."""
        last = self.calls.call_of(rank)
        return PeerLostError(report(
            self.rank, call, expected=f"rank {rank} to take part", found=f"that {why}, after its call {last}",
            advice="The communicator can only be closed.",
        ))  # fmt: skip


def _ranks_offset(n: int) -> int:
    """Where in the page the ranks' blocks begin: behind the flight recorder."""
    return HEAD_BYTES + flight_recorder.nbytes(n)


def missing_offset(rank: int) -> int:
    """Where in the page a rank's kernels say whom they waited for in vain: two words, in a cache line of the rank's."""
    return 64 * (rank + 1)


def page_bytes(n: int) -> int:
    """Size of the page of ``n`` ranks: whole pages."""
    size = _ranks_offset(n) + n * _RANK.itemsize
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
