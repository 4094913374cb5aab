"""The vote that ends a recording, over real pages, with the ranks as threads of this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.calls.sequence import CallSequence
from ipcreduce.calls.votes import Vote, agree, vote
from ipcreduce.device.backend import Validity
from ipcreduce.errors import PeerFailedError, PeerTimeoutError, RankMismatchError
from ipcreduce.graphs.session import GraphSession
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.page.layout import CHUNK_BYTES
from tests.shared import clock
from tests.shared.fingerprints import of_allreduce
from tests.unit.pages import in_threads, make_pages

SUM, OTHER = of_allreduce((10,), "float32", "sum"), of_allreduce((3,), "int8", "sum")


class Backend:
    """Nothing runs on it."""

    def drain(self) -> None: ...

    def quiesce(self, deadline: float) -> None: ...

    def reset(self) -> None: ...

    def is_capturing(self, stream: int) -> bool:
        return False


def make_ranks(n: int, timeout: float = 120.0) -> list[CallSequence]:
    """All in call 1, the recording; each has made as many calls within it as its rank number."""
    ranks = []
    for page in make_pages(n):
        calls = CallSequence(page, timeout, [Backend()])
        calls.number = 1
        calls.enter(Fingerprint.of("recording of a graph"), 0)
        calls.number += page.rank
        ranks.append(calls)
    return ranks


def agreed(
    ranks: list[CallSequence], recorded: list[list[Fingerprint]], errors: list[BaseException | None]
) -> list[Any]:
    return in_threads([
        lambda calls=calls, mine=mine, error=error: agree(calls, 1, mine, error)
        for calls, mine, error in zip(ranks, recorded, errors, strict=True)
    ])  # fmt: skip


def test_calls_before_a_vote_are_still_compared():
    """Between hosts they are compared afterwards, perhaps while the ranks vote."""
    ranks = make_ranks(2)
    for calls in ranks:
        calls.number = 1
    assert agreed(ranks, [[], []], [None, None]) == [None, None]
    assert all(calls.page.calls.first == 1 for calls in ranks)


def test_a_stale_recording_does_not_hide_the_timeout_of_its_vote():
    calls = make_ranks(2)[0]
    session = GraphSession.__new__(GraphSession)
    session.calls, session.backend = calls, SimpleNamespace()  # type: ignore[assignment]
    recording = SimpleNamespace(number=1, validity=Validity(), segments=[])
    recording.validity.end()  # NCCL's communicator was aborted
    with clock.passing(121.0), pytest.raises(PeerTimeoutError, match="rank 1"):
        session.end_recording(recording, None)  # type: ignore[arg-type]


def test_a_vote_travels_as_bytes():
    for one in (Vote(1 << 40, True, 256, 0xFFFFFFFF, ""), Vote(0, False, 0, 0, "ValueError: wrong")):
        assert Vote.unpack(one.pack()) == one
        assert Vote.unpack(one.pack().ljust(CHUNK_BYTES, b"\0")[: len(one.pack())]) == one
    long = Vote.unpack(Vote(7, False, 1, 2, "ValueError: " + "é" * 1000).pack())
    assert (long.ok, long.text[:14], len(long.text.encode()) <= 512) == (False, "ValueError: éé", True)
    assert len(long.pack()) <= CHUNK_BYTES, "of one chunk, so that it can be left in a round"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_agree(n: int):
    ranks = make_ranks(n)
    assert agreed(ranks, [[SUM, OTHER, SUM]] * n, [None] * n) == [None] * n
    assert [calls.number for calls in ranks] == [n] * n, "the highest"


def test_one_has_failed():
    ranks = make_ranks(3)
    found = agreed(ranks, [[SUM], [SUM], []], [None, None, ValueError("of the body")])
    assert [type(error) for error in found] == [PeerFailedError] * 3
    for rank, error in enumerate(found):
        assert str(error).startswith(f"rank {rank}, call 1: the recording failed on rank 2 (ValueError: of the body). ")
    assert [calls.number for calls in ranks] == [3] * 3


@pytest.mark.parametrize(
    ("odd", "number", "theirs"),
    [
        ([SUM, OTHER], 2, str(OTHER)),
        ([OTHER, SUM], 1, str(OTHER)),
        ([SUM], 2, "none (it has 1)"),
        ([], 1, "none (it has 0)"),
        ([SUM] * 1000, 3, str(SUM)),
    ],
)
def test_another_recording(odd: list[Fingerprint], number: int, theirs: str):
    """The first difference is named with what each rank has there. The checksums may take several chunks."""
    found = agreed(make_ranks(3), [[SUM, SUM], odd, [SUM, SUM]], [None] * 3)
    ours = str(SUM) if number < 3 else "none (it has 2)"
    for rank, error in enumerate(found):
        assert type(error) is RankMismatchError
        assert str(error).startswith(f"rank {rank}, call 1: call {number} of the recording is not the same on ")
        assert f": {theirs} on rank 1 and {ours} on ranks 0 and 2. " in str(error)


def test_one_that_gives_up_leaves_its_vote_to_those_that_come_later():
    """They learn why, and none waits for it."""
    ranks = make_ranks(2)
    with clock.passing(121.0), pytest.raises(PeerTimeoutError):
        agree(ranks[0], 1, [SUM], None)
    votes = vote(ranks[1], 1, Vote(2, True, 1, 5, ""))
    assert [one.ok for one in votes] == [False, True]
    assert votes[0].text.startswith("PeerTimeoutError: rank 0, call 1: ")
    assert (votes[0].call, votes[0].count) == (1, 1)
