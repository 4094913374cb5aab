"""The vote that ends a recording: all ranks go on with it, or all raise."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import PeerFailedError, RankMismatchError, report
from ..page.fingerprint import Fingerprint, by_rank
from ..page.records import filled, rows
from ..texts import decoded, described, encoded, text_in
from .faults import USE_AGAIN
from .sequence import CallSequence

_TEXT_BYTES = 512
_VOTE = np.dtype([("call", "<u8"), ("ok", "<u4"), ("count", "<u4"), ("crc", "<u4"), ("text", f"S{_TEXT_BYTES}")])
_CHECKSUM = np.dtype("<u4")


@dataclass(frozen=True)
class Vote:
    """The end of a recording on one rank."""

    call: int  # the rank's last call number
    ok: bool
    count: int  # of all-reduces in the recording
    crc: int  # checksum over their fingerprints
    text: str  # the error, if not ok

    def pack(self) -> bytes:
        """The vote as bytes for a round. Its text is cut to the room."""
        return filled(_VOTE, **vars(self)).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Vote:
        """The vote in ``data``. :raises RankMismatchError: if there is none."""
        row = rows(data.ljust(1, b"\0"), _VOTE, "votes")[0]
        return cls(int(row["call"]), bool(row["ok"]), int(row["count"]), int(row["crc"]), text_in(row))


def vote(calls: CallSequence, number: int, mine: Vote) -> list[Vote]:
    """Every rank's vote on the end of call ``number``, which this rank has entered. Collective.

    :raises IpcReduceError: see :meth:`CallSequence.gather`.
    """

    def failed(error: BaseException) -> bytes:
        return replace(mine, ok=False, text=described(error)).pack()

    return [Vote.unpack(data) for data in calls.gather(number, mine.pack(), failed)]


def agree(
    calls: CallSequence, number: int, recorded: Sequence[Fingerprint], error: BaseException | None
) -> Exception | None:
    """Compare the ranks' recordings. Collective. Afterwards the call number is the highest of all ranks.

    :param number: of the call that the recording is.
    :param recorded: this rank's all-reduces, in order.
    :param error: this rank's error, if there was one.
    :returns: the error that this rank has to raise because of another one: :class:`PeerFailedError` if that has failed,
        :class:`RankMismatchError` if it has recorded something else.
    :raises IpcReduceError: if a rank does not come: see :meth:`CallSequence.gather`.
    """
    everything = zlib.crc32(_checksums(recorded).tobytes())
    text = "" if error is None else described(error)
    votes = vote(calls, number, Vote(calls.number, error is None, len(recorded), everything, text))
    if len({one.call for one in votes}) > 1:  # else there is no gap, and earlier calls are still to be compared
        calls.catch_up(max(one.call for one in votes))
    for other, one in enumerate(votes):
        if not one.ok:
            return PeerFailedError(report(
                calls.rank, number, f"the recording failed on rank {other} ({one.text})", f"Record again. {USE_AGAIN}",
            ))  # fmt: skip
    if len({(one.count, one.crc) for one in votes}) == 1:
        return None
    index, found = _first_difference(calls, number, recorded)
    return RankMismatchError(report(
        calls.rank, number,
        f"call {index + 1} of the recording is not the same on every rank: {by_rank(found)}",
        f"Let the ranks' functions make the same calls, and record again. {USE_AGAIN}",
    ))  # fmt: skip


def _checksums(recorded: Sequence[Fingerprint]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array([one.crc for one in recorded], _CHECKSUM)


def _first_difference(
    calls: CallSequence, number: int, recorded: Sequence[Fingerprint]
) -> tuple[int, dict[int, tuple[int, str]]]:
    """The index of the first all-reduce that is not the same on every rank, and its checksum and text by rank."""
    everyone = [
        rows(data, _CHECKSUM, "checksums of a recording")
        for data in calls.gather(number, _checksums(recorded).tobytes())
    ]
    shortest = min(len(one) for one in everyone)
    different = (np.array([one[:shortest] for one in everyone]) != everyone[0][:shortest]).any(axis=0)
    index = int(different.argmax()) if different.any() else shortest
    text = recorded[index].text if index < len(recorded) else f"none (it has {len(recorded)})"
    keys = [int(one[index]) if index < len(one) else -1 for one in everyone]
    texts = [decoded(data) for data in calls.gather(number, encoded(text))]
    return index, dict(enumerate(zip(keys, texts, strict=True)))
