"""Exchanges among all ranks over the control page: rounds of bytes, and the meetings after a fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from ..errors import PeerFailedError, PeerLostError, RankMismatchError
from ..originals import time
from ..texts import decoded, described, encoded
from .control_page import Page
from .layout import CHUNK_BYTES
from .records import fence

_SPINS = 20  # polls without a sleep, for ranks that come together
_POLL_SECONDS = 1e-4  # the sleep between later ones

Check = Callable[[list[int]], None]
Abandon = Callable[[BaseException], bytes]
_Record = TypeVar("_Record")


class Left(PeerFailedError):
    """The error that rank ``rank`` has given up a round, for the reason ``text``."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} left an exchange between the ranks ({text})")
        self.rank, self.text = rank, text

    @classmethod
    def because(cls, error: BaseException, page: Page) -> Left:
        """The error that this rank leaves a round for ``error``. It names another rank if that one is the cause."""
        if isinstance(error, cls):
            return error
        fault = page.fault() if isinstance(error, PeerFailedError) else None
        return cls(page.rank, described(error)) if fault is None else cls(fault[1], fault[3])

    def pack(self) -> bytes:
        """The payload of a chunk that tells the others of this error. Its text is cut to the room."""
        return encoded(f"{self.rank} {self.text}", CHUNK_BYTES)

    @classmethod
    def unpack(cls, chunk: bytes) -> Left:
        """The error that a peer has packed into ``chunk``. :raises RankMismatchError: if there is none."""
        rank, _, text = decoded(chunk).partition(" ")
        if not re.fullmatch("[0-9]{1,9}", rank):
            raise RankMismatchError(
                f"a rank sent {rank[:20]!r} where the number of a rank was due. Run the same version of ipcreduce on "
                "every rank."
            )
        return cls(int(rank), text)


def _all(read: Callable[[int], list[_Record | None]], serial: int, check: Check) -> list[_Record]:
    """Every rank's record of this number, once all are there."""
    polls = 0
    while None in (found := read(serial)):
        time.sleep(0 if polls < _SPINS else _POLL_SECONDS)
        polls += 1
        check([rank for rank, one in enumerate(found) if one is None])
    return [one for one in found if one is not None]


class Rounds:
    """Numbered rounds, in each of which every rank writes one chunk and reads all; and meetings after a fault.

    Two buffers are enough: a rank writes round s + 2 after it has read all of round s + 1, which each peer wrote after
    it had read all of round s. After a round that some ranks left, the numbers may differ until a meeting.

    Meetings have numbers of their own. They never differ: every rank comes to each, or the communicator is lost.
    """

    def __init__(self, page: Page) -> None:
        self.last = 0  # number of the last round
        self._page, self._meeting = page, 0

    def gather(self, payload: bytes, check: Check, abandon: Abandon | None = None) -> list[bytes]:
        """Every rank's payload, by rank; they may differ in length. Collective.

        :param check: called between polls with the ranks that have not come; raises to give the round up.
        :param abandon: makes a payload of one chunk from the exception that ends this rank's wait, for ranks that come
            later. Without it they raise.
        :raises Left: if a rank has given up, and has left no payload.
        """
        parts: list[bytes] = [b""] * self._page.n
        lengths = [1] * self._page.n
        begin = 0
        while begin < max(lengths):
            found = self._round(len(payload), payload[begin : begin + CHUNK_BYTES], check, abandon)
            lengths = [total for total, _ in found]
            parts = [part + chunk for part, (_, chunk) in zip(parts, found, strict=True)]
            begin += CHUNK_BYTES
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _round(self, total: int, chunk: bytes, check: Check, abandon: Abandon | None) -> list[tuple[int, bytes]]:
        page = self._page
        self.last += 1
        page.write_round(self.last, True, total, chunk)
        try:
            parts = _all(page.read_round, self.last, check)
            for part in parts:
                if not part[0]:
                    raise Left.unpack(part[2])
        except BaseException as error:  # a rank that comes later must not count on this one
            left = Left.because(error, page).pack() if abandon is None else abandon(error)
            page.write_round(self.last, abandon is not None, len(left), left[:CHUNK_BYTES])
            raise
        return [part[1:] for part in parts]

    def meet(
        self, call: int, check: Check, offer: bytes = b"", right: int = 0
    ) -> list[tuple[int, int, bytes, int]]:  # fmt: skip
        """Every rank's (call, last round, offer, right), once all have come to this meeting.

        Meetings come in pairs to which a rank brings the same numbers. So it does no harm if a peer that has read this
        meeting's records overwrites its own by the second one's. No peer gets further before this rank does.

        :param check: see :meth:`gather`.
        """
        page = self._page
        self._meeting += 1
        page.write_meeting(self._meeting, call, self.last, offer, right)

        def still_missing(missing: list[int]) -> None:
            try:
                check(missing)
            except PeerLostError:
                if None in page.read_meeting(self._meeting):
                    raise  # else the rank has come and, once all had, has closed: its program was at its end

        found = _all(page.read_meeting, self._meeting, still_missing)
        fence()  # loads of what the peers wrote before they came follow the loads of their records
        return found
