"""The control page: memory in which the ranks see each other's calls and faults. The ranks of one host share it.

Ranks that share no memory have a page each, and each rank's part is copied to the other pages over TCP (mirror.py). A
single rank may have a page of its own, too.

Its head, which the GPUs reach too, holds the abort word, which ends every wait of every rank. For each rank it also
holds two words that the rank's kernels write: the peers for which they waited in vain, and a flag once one of them has
ended without data. After the head come the flight recorder and one block a rank: identity, fault, loss, rounds.

Nothing here relies on the order in which another processor's stores become visible. Faults, losses, rounds and
meetings are records (records.py), seen whole or not at all. A reader that finds the abort word raised by a host looks
until it finds that host's record. All other data are single words, each valid by itself: "dead" and "state" report
ends of processes and of driver calls, not stores. has_left_before() reads two words that may arrive in either order,
so it asks again after 1 ms. (In a sleep a thread releases and takes the GIL, whose locks order its own loads.) Between
clear() and the next fault lie a fence and a meeting of all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from .. import clock
from ..originals import RLock, time
from ..texts import text_in
from . import shared_files
from .flight_recorder import FlightRecorder
from .layout import ABORT_OFFSET, head_bytes, missing_offset, page_bytes, rank_layout, ranks_offset
from .records import Slot, ask_twice

ACTIVE, CLOSED = 1, 2
REFUSED, MISMATCH = 1, 2  # kinds of fault
CLOSED_IT = "it closed the communicator"  # a loss for later calls only
# Values of the abort word. Kernels only test it against zero.
TIMED_OUT = 1  # by kernels, and by a host whose wait for a peer reached its deadline
TOLD = 2  # by a host that has written a record of the reason
_RECORD_SECONDS = 1.0  # for a record to arrive whose abort word is there already: it takes microseconds
_END_SECONDS = 5.0  # for a rank's last block, once a peer has read it: networks send again what they have lost


class Page:
    """The mapped control page. One rank calls :meth:`create`, the others :meth:`open`; then all :meth:`join`."""

    def __init__(self, mapping: mmap.mmap, path: str, rank: int, n: int) -> None:
        self._map, self.path, self.rank, self.n = mapping, path, rank, n
        self.nbytes, self.head_bytes = page_bytes(n), head_bytes(n)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words32 = memoryview(self._map).cast("I")
        self._ranks = np.frombuffer(self._map, rank_layout(n), n, ranks_offset(n))
        self._faults, self._losses, self._meetings = (
            [self.slot(rank, name) for rank in range(n)] for name in ("fault", "loss", "meeting")
        )
        self._rounds = [[self.slot(rank, "rounds", parity) for rank in range(n)] for parity in range(2)]
        self._unheard: set[int] = set()  # ranks that have closed, as peers say, and whose last block has not come
        self._written = 0  # faults and losses, by this rank
        self._writing = RLock()  # the program's threads and the watchdog post
        self.era = 0  # changes as this rank begins a resynchronisation, and as it clears its part of the page
        self.aborts = 0  # how often this rank has raised the abort word
        self.version = 0  # of this rank's block
        self.changed: Callable[[], object] | None = None  # called when others are to read this rank's block
        self.calls = FlightRecorder(self._map, self.head_bytes, rank, n)
        self.abort_word = self._words32[ABORT_OFFSET // 4 : ABORT_OFFSET // 4 + 1]

    @classmethod
    def create(cls, rank: int, n: int) -> Page:
        """A new page, in a file that only this user can open and nobody else made."""
        descriptor, path = shared_files.create(page_bytes(n))
        return cls(shared_files.mapped(descriptor), path, rank, n)

    @classmethod
    def open(cls, path: str, rank: int, n: int) -> Page:
        """The page that another rank created."""
        return cls(shared_files.mapped(shared_files.open_existing(path)), path, rank, n)

    @classmethod
    def alone(cls, rank: int, n: int) -> Page:
        """A page that no other process has."""
        return cls(mmap.mmap(-1, page_bytes(n)), "", rank, n)

    def slot(self, rank: int, name: str, index: int = 0) -> Slot:
        """The place of a record in a rank's block: of the field ``name``, or the one at ``index`` in it."""
        fields = rank_layout(self.n).fields
        assert fields is not None
        layout, offset = fields[name][0].base, fields[name][1]
        return Slot(self._map, self._block(rank).start + offset + index * layout.itemsize, layout)

    def join(self, pid: int, namespace: int) -> None:
        """Write this rank's identity."""
        mine = self._ranks[self.rank]
        mine["pid"], mine["namespace"], mine["state"] = pid, namespace, ACTIVE
        self._tell()

    # ---- copies of other ranks' blocks
    def _tell(self) -> None:
        self.version += 1
        if self.changed is not None:
            self.changed()

    def _block(self, rank: int) -> slice:
        nbytes = rank_layout(self.n).itemsize
        at = ranks_offset(self.n) + rank * nbytes
        return slice(at, at + nbytes)

    def read_block(self) -> bytes:
        """A copy of this rank's block."""
        return self._map[self._block(self.rank)]

    def store(self, rank: int, block: bytes, aborts: int, why: int) -> None:
        """Store the abort word, if another rank ``aborts``, and then the copy of its block, unless that is empty.

        In this order, as the block may lead to a meeting that clears the word; readers of the word wait for its record.

        :raises ValueError: if the block has another length.
        """
        place = self._block(rank)
        if len(block) not in (0, place.stop - place.start):
            raise ValueError(f"a block of {len(block)} bytes")
        if aborts:
            self._words32[ABORT_OFFSET // 4] = why or TOLD
        if block:
            self._map[place] = block

    # ---- words shared with the kernels
    def abort(self, why: int = TIMED_OUT) -> None:
        """End every wait of every rank."""
        self.aborts += 1
        self._words32[ABORT_OFFSET // 4] = why
        self._tell()

    @property
    def aborted(self) -> bool:
        return self.abort_word[0] != 0

    @property
    def ended_without_data(self) -> int:
        """Not 0 if a kernel of this rank has ended without data since the last :meth:`clear`.

        Kernels of this package write the epoch of the first such kernel, plus 1. See :meth:`IpcBackend.right`.
        """
        return self._words32[missing_offset(self.rank) // 4 + 1]

    def note_ended_without_data(self) -> None:
        """Write that a call of this rank has ended without data, as kernels do."""
        self._words32[missing_offset(self.rank) // 4 + 1] = 1

    # ---- faults
    def next_era(self) -> None:
        """Begin another era: what other threads of this rank have seen before is not posted any more."""
        with self._writing:
            self.era += 1

    @contextlib.contextmanager
    def in_era(self, era: int) -> Iterator[bool]:
        """Hold off the next era in the block, in which a thread posts what it has seen in ``era``.

        :returns: False if ``era`` is over: the fault would count as one of later calls.
        """
        with self._writing:
            yield self.era == era

    def post_fault(self, kind: int, call: int, text: str, of: int | None = None) -> None:
        """Write the reason for which a call ends on all ranks, then raise the abort word.

        :param of: the rank at fault; None: this one.
        """
        with self._writing:
            self._written += 1
            of = self.rank if of is None else of
            self._faults[self.rank].write(self._written, kind=kind, call=call, rank=of, text=text)
            self.abort(TOLD)

    def fault(self) -> tuple[int, int, int, str] | None:
        """(call, rank, kind, text) of the earliest fault on the page; None if there is none."""
        deadline = None
        while True:
            is_told = self.abort_word[0] != TOLD or self.loss() is not None  # first: loss() may wait for a fault, too
            found = [
                (int(fault["call"]), int(fault["rank"]), int(fault["kind"]), text_in(fault))
                for slot in self._faults
                if (fault := slot.read()) is not None
            ]
            if found or is_told:
                return min(found) if found else None
            deadline = deadline or clock.now() + _RECORD_SECONDS
            if clock.now() > deadline:
                return None
            time.sleep(1e-4)

    def post_timeout(self, ranks: Iterable[int]) -> None:
        """Write that this rank's wait for ``ranks`` has reached its deadline, and end every wait."""
        for rank in ranks:
            self._ranks[self.rank]["late"][rank] = 1
        self.abort()

    def missed(self) -> set[int]:
        """The ranks for which another rank, or its kernels, waited in vain."""
        found = set(np.flatnonzero(self._ranks["late"].any(axis=0)).tolist())
        for rank in range(self.n):
            bits = self._words32[missing_offset(rank) // 4]
            found |= {other for other in range(self.n) if bits >> other & 1}
        return found

    def clear(self) -> None:
        """Remove this rank's fault and the abort word: once all kernels have ended, before any rank goes on."""
        with self._writing:
            self.next_era()
            self._faults[self.rank].clear()
            self._ranks[self.rank]["late"] = 0
            for word in (0, 1):
                self._words32[missing_offset(self.rank) // 4 + word] = 0
            self._words32[ABORT_OFFSET // 4] = 0

    # ---- losses
    def post_lost(self, rank: int, why: str) -> None:
        """Write that ``rank`` has gone for good, unless there is a record, and end every wait of every rank."""
        with self._writing:
            new = self._losses[self.rank].read() is None
            if new:
                self._written += 1
                self._losses[self.rank].write(self._written, rank=rank, text=why)
            if new or not self.aborted:  # the watchdogs of mirrored pages would tell each other without end
                self.abort(TOLD)

    def abort_at_close(self) -> None:
        """Abort every wait, since this rank closes and a call of it still waits. The peers read that it has closed."""
        if not self.has_left(self.rank):
            self.post_lost(self.rank, f"{CLOSED_IT}, and ended its calls that still waited")

    def loss(self, call: int | None = None) -> tuple[int, str] | None:
        """(rank, why) of the rank that has gone first, as far as the records tell.

        A rank's own record comes before its peers'. A rank that had recorded another's loss has left because of it.
        What a rank that has closed wrote before is waited for.

        :param call: leave out ranks that have closed the communicator after this call.
        """
        found = {
            writer: (rank, why)
            for writer, (rank, why) in self._told_losses().items()
            if call is None or why != CLOSED_IT or self.calls.call_of(rank) < call
        }
        if not found:
            return None
        writer = min(found, key=lambda writer: (found[writer][0] != writer, found[writer][0]))
        passed = {writer}
        while (earlier := found[writer][0]) in found and earlier not in passed:
            writer = earlier
            passed.add(writer)
        return found[writer]

    def _told_losses(self) -> dict[int, tuple[int, str]]:
        """The (rank, why) that each rank has recorded, by writer."""
        while True:
            records = {
                writer: record for writer, slot in enumerate(self._losses) if (record := slot.read()) is not None
            }
            told = {writer: (int(one["rank"]), text_in(one)) for writer, one in records.items() if one["rank"] < self.n}
            if not any(self._await_end(rank) for rank, why in told.values() if why == CLOSED_IT):
                return told

    def _await_end(self, rank: int) -> bool:
        """Wait for the last block of a rank that has closed, as a peer says. True if it has come meanwhile.

        To a mirrored page it comes over another connection than the peer's word, and perhaps later. Only the block
        tells the rank's last call, its reason to close, and its own fault or record of an earlier loss.
        """
        if rank == self.rank or rank in self._unheard or self.has_left(rank):
            return False
        deadline, is_over = clock.now() + _END_SECONDS, False
        while not (has_come := self.has_left(rank)) and not is_over:
            is_over = bool(self._ranks[self.rank]["dead"][rank]) or clock.now() > deadline
            time.sleep(1e-4)
        if not has_come:
            self._unheard.add(rank)
        return has_come

    # ---- rounds and meetings, in which every rank writes one record and reads all
    def write_round(self, serial: int, ok: bool, total: int, chunk: bytes) -> None:
        """This rank's part of round ``serial``, from 1: a chunk of a payload of ``total`` bytes."""
        self._rounds[serial % 2][self.rank].write(serial, ok=ok, total=total, payload=chunk)
        self._tell()

    def read_round(self, serial: int) -> list[tuple[bool, int, bytes] | None]:
        """Every rank's part of a round; None for ranks that have not come."""
        return [
            (bool(part["ok"]), int(part["total"]), part["payload"].tobytes())
            if (part := slot.read()) is not None and part["serial"] == serial
            else None
            for slot in self._rounds[serial % 2]
        ]

    def write_meeting(self, serial: int, call: int, last_round: int, offer: bytes = b"", right: int = 0) -> None:
        """Write that this rank has come to meeting ``serial``, with its last call and round, and something to read.

        :param right: its last right call: see :meth:`CallSequence.recover`.
        """
        self._meetings[self.rank].write(
            serial, call=call, round=last_round, right=right, offered=len(offer), offer=offer
        )  # fmt: skip
        self._tell()

    def read_meeting(self, serial: int) -> list[tuple[int, int, bytes, int] | None]:
        """Every rank's (call, round, offer, right); None for those that have not come. One may be a meeting further."""
        return [
            None if found is None or found["serial"] < serial else (
                int(found["call"]), int(found["round"]), found["offer"].tobytes()[: int(found["offered"])],
                int(found["right"]),
            )
            for found in (slot.read() for slot in self._meetings)
        ]  # fmt: skip

    # ---- life
    def identity(self, rank: int) -> tuple[int, int]:
        """(pid, pid namespace) of a rank."""
        entry = self._ranks[rank]
        return int(entry["pid"]), int(entry["namespace"])

    def mark_dead(self, rank: int) -> None:
        """Write that this rank has seen the end of the process of ``rank``."""
        self._ranks[self.rank]["dead"][rank] = 1
        self._tell()

    def has_unmapped(self, rank: int) -> bool:
        """True if ``rank`` cannot reach its peers' memory any more."""
        return self.has_left(rank) or bool(self._ranks["dead"][:, rank].any())

    def leave(self) -> None:
        """Write that this rank has closed the communicator: it has unmapped its peers' memory and makes no call."""
        self._ranks[self.rank]["state"] = CLOSED
        self._tell()

    def has_left(self, rank: int) -> bool:
        return bool(self._ranks[rank]["state"] == CLOSED)

    def has_left_before(self, rank: int, call: int) -> bool:
        """True if a rank has closed the communicator without making this call."""
        return ask_twice(lambda: self.has_left(rank) and self.calls.call_of(rank) < call)
