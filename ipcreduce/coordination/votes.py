"""The vote that ends a recording: every rank goes on with it, or every rank raises."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import PeerFailedError, RankMismatchError, report
from . import exchange
from .calls import Faults
from .fingerprint import Signature, Vote

_CHUNK = 64  # checksums a message, when the first call that differs is looked for


def agree(
    faults: Faults, mpi: Any, number: int, calls: Sequence[Signature], error: BaseException | None, call: int,
    deadline: float,
) -> tuple[int, Exception | None]:  # fmt: skip
    """Compares what the ranks have recorded. Collective.

    :param number: of the call that the recording is.
    :param calls: this rank's all-reduces, in order.
    :param error: what went wrong here, if anything did.
    :param call: this rank's last call number by now.
    :returns: the highest call number of all ranks, with which all have to go on; and the error that this rank has to
        raise if another one has failed or recorded something else: :class:`PeerFailedError` or
        :class:`RankMismatchError`.
    :raises IpcReduceError: if a rank does not come: see :meth:`Faults.vote`.
    """
    rank = mpi.Get_rank()
    everything = zlib.crc32(np.array([c.crc for c in calls], "<u4").tobytes())
    text = "" if error is None else f"{type(error).__name__}: {error}"
    votes = faults.vote(number, Vote(call, error is None, len(calls), everything, text))
    highest = max(vote.call for vote in votes)
    for other, vote in enumerate(votes):
        if not vote.ok:
            return highest, PeerFailedError(report(
                rank, number, expected="every rank to end its recording",
                found=f"that rank {other} failed in it ({vote.text})",
                advice="The graph has failed; the communicator can be used again.",
            ))  # fmt: skip
    if len({(vote.count, vote.crc) for vote in votes}) == 1:
        return highest, None
    most = max(vote.count for vote in votes)
    with exchange.losing():
        index, texts = _first_difference(mpi, calls, most, number, deadline)
    return highest, RankMismatchError(report(
        rank, number, expected=f"the same all-reduces in every rank's recording; number {index + 1} differs",
        found="; ".join(f"rank {other}: {text}" for other, text in enumerate(texts)),
        advice="Make the ranks' functions agree; the graph has failed, the communicator can be used again.",
    ))  # fmt: skip


def _first_difference(
    mpi: Any, calls: Sequence[Signature], most: int, call: int, deadline: float
) -> tuple[int, list[str]]:
    """The index of the first all-reduce that is not the same on every rank, and each rank's."""
    checksums = np.zeros(-(-max(most, 1) // _CHUNK) * _CHUNK, np.uint32)
    checksums[: len(calls)] = [c.crc for c in calls]
    index = 0
    for begin in range(0, len(checksums), _CHUNK):
        record = exchange.message(exchange.CHECKSUMS, crcs=checksums[begin : begin + _CHUNK])
        everyone = exchange.allgather(mpi, record, deadline, "comparing recordings", call=call)["crcs"]
        different = (everyone != everyone[0]).any(axis=0)
        if different.any():
            index = begin + int(different.argmax())
            break
    record = exchange.message(exchange.CALL, call=call)
    record["text"] = (calls[index].text if index < len(calls) else f"none, it has {len(calls)}").encode()
    everyone = exchange.allgather(mpi, record, deadline, "comparing recordings", call=call)
    return index, [exchange.text_of(other) for other in everyone]
