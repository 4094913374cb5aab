"""The control page: a file in shared memory through which the ranks of one host see each other without MPI.

Its first 4 KB, which the GPUs can reach too, hold the abort word that ends every wait of every rank, and for each
rank the words in which its kernels say whom they waited for in vain, and that one has ended without data. Then come the
flight recorder, and a block a rank: who it is, what it has refused, how it votes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable

import numpy as np

from ..errors import PeerFailedError, PeerLostError, PeerTimeoutError, RankMismatchError, report
from . import flight_recorder
from .flight_recorder import FlightRecorder
from .signature import Vote

HEAD_BYTES = 4096
REGISTRATIONS = 1024  # registered graphs that may be waiting for a rank to drop them
ACTIVE, CLOSED = 1, 2
REFUSED, MISMATCH = 1, 2  # kinds of fault

ABORT_OFFSET = 0

_VOTE = np.dtype([
    ("serial", "<u8"), ("call", "<u8"), ("ok", "<u4"), ("count", "<u4"), ("crc", "<u4"), ("text", "S512"),
], align=True)  # fmt: skip
_RANK = np.dtype([
    ("pid", "<i8"), ("started", "<u8"), ("namespace", "<u8"), ("state", "<u4"), ("fault", "<u4"), ("fault_call", "<u8"),
    ("text", "S1024"), ("lost", "<u4"), ("dead", "<u4"), ("why", "S80"),
    ("unmapped", "<u8", (REGISTRATIONS,)),
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

    def unlink(self) -> None:
        """Removes the file's name; the mappings stay. Only after all ranks have opened it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def join(self, pid: int, started: int, namespace: int) -> None:
        """Fills in who this rank is."""
        mine = self._ranks[self.rank]
        mine["pid"], mine["started"], mine["namespace"], mine["state"] = pid, started, namespace, ACTIVE

    # ---- words that the kernels share
    def abort(self) -> None:
        """Ends every wait of every rank."""
        self._words32[ABORT_OFFSET // 4] = 1

    @property
    def aborted(self) -> bool:
        return self.abort_word[0] != 0

    @property
    def ended_without_data(self) -> bool:
        """Whether a kernel of this rank has, since the last :meth:`clear`: what later ones wrote is not to be used."""
        return self._words32[missing_offset(self.rank) // 4 + 1] != 0

    # ---- faults
    def post(self, kind: int, call: int, text: str) -> None:
        """Writes down why this rank ends a call for all, then raises the abort word."""
        mine = self._ranks[self.rank]
        mine["text"], mine["fault_call"], mine["fault"] = text.encode()[:1024], call, kind
        self.abort()

    def fault(self) -> tuple[int, int, int, str] | None:
        """(call, rank, kind, text) of the earliest fault that a rank has written down, if any."""
        found = [
            (int(r["fault_call"]), rank, int(r["fault"]), bytes(r["text"]).decode(errors="replace"))
            for rank, r in enumerate(self._ranks)
            if r["fault"]
        ]
        return min(found) if found else None

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
        """This rank has seen that ``rank`` has gone: for good, every wait of every rank ends."""
        mine = self._ranks[self.rank]
        mine["why"], mine["lost"] = why.encode(), rank + 1
        self.abort()

    def loss(self) -> tuple[int, str] | None:
        """(rank, why) of a rank that has gone, whoever saw it first."""
        for entry in self._ranks:
            if entry["lost"]:
                return int(entry["lost"]) - 1, bytes(entry["why"]).decode()
        return None

    def bury(self, rank: int) -> None:
        """This rank has seen that the process of ``rank`` has ended."""
        self._ranks[self.rank]["dead"] |= 1 << rank

    def has_unmapped(self, rank: int) -> bool:
        """Whether ``rank`` cannot reach its peers' memory any more."""
        return self.has_left(rank) or any(entry["dead"] >> rank & 1 for entry in self._ranks)

    def clear(self) -> None:
        """Takes back this rank's fault and the abort word: after every kernel has ended, before anyone goes on."""
        mine = self._ranks[self.rank]
        mine["fault"], mine["text"] = 0, b""
        for word in (0, 1):
            self._words32[missing_offset(self.rank) // 4 + word] = 0
        self._words32[ABORT_OFFSET // 4] = 0

    # ---- votes, which leave nothing pending behind a rank that does not come
    def cast(self, serial: int, vote: Vote) -> None:
        """This rank's vote number ``serial``, from 1."""
        mine = self._ranks[self.rank]["votes"][serial % 2]
        for field, value in vars(vote).items():
            mine[field] = value.encode()[:512] if field == "text" else value
        mine["serial"] = serial  # last: now it counts

    def absent(self, serial: int) -> list[int]:
        """The ranks that have not cast this vote."""
        return [rank for rank, votes in enumerate(self._ranks["votes"]) if votes[serial % 2]["serial"] != serial]

    def votes(self, serial: int) -> list[Vote]:
        """Every rank's vote, once nobody is absent."""
        return [
            Vote(int(v["call"]), bool(v["ok"]), int(v["count"]), int(v["crc"]), v["text"].decode(errors="replace"))
            for v in self._ranks["votes"][:, serial % 2]
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
