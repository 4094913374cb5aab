"""Exchanges over the control page: rounds and meetings, the ranks as threads of this process."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ipcreduce.errors import PeerFailedError, PeerLostError
from ipcreduce.page import control_page, records, rounds, shared_files
from ipcreduce.page.control_page import Page
from ipcreduce.page.layout import CHUNK_BYTES
from ipcreduce.page.rounds import Left, Rounds
from tests.shared.bounds import HANG
from tests.unit.pages import in_threads, make_pages

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7]


def patient(missing: list[int]) -> None:
    """Waits for any rank, as long as a test may take."""


class Gone(Exception):
    """A rank gives a wait up."""


def gone(missing: list[int]) -> None:
    raise Gone(f"without {missing}")


def make_rounds(n: int) -> list[Rounds]:
    return [Rounds(page) for page in make_pages(n)]


# ---- rounds
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_payloads_of_one_length(n: int, size: int):
    payloads = [np.random.default_rng(rank).bytes(size) for rank in range(n)]
    ranks = make_rounds(n)
    found = in_threads([lambda rank=rank: ranks[rank].gather(payloads[rank], patient) for rank in range(n)])
    assert found == [payloads] * n


def test_payloads_of_different_lengths():
    """As many rounds as the longest takes, on every rank."""
    payloads = [np.random.default_rng(size).bytes(size) for size in SIZES]
    ranks = make_rounds(len(SIZES))
    found = in_threads([lambda one=one, payload=payload: one.gather(payload, patient) for one, payload in
                        zip(ranks, payloads, strict=True)])  # fmt: skip
    assert found == [payloads] * len(SIZES)
    assert [one.last for one in ranks] == [6] * len(SIZES)


@pytest.mark.parametrize("n", [1, 40, 70])
def test_as_many_ranks_as_there_are(n: int):
    ranks = make_rounds(n)
    found = in_threads([lambda rank=rank: ranks[rank].gather(b"%d" % rank, patient) for rank in range(n)])
    assert found == [[b"%d" % rank for rank in range(n)]] * n


def test_two_buffers_are_enough():
    """A rank that runs ahead never overwrites what a slow one has still to read."""
    n, turns = 4, 300
    ranks = make_rounds(n)

    def run(rank: int) -> list[list[bytes]]:
        delays = random.Random(rank)
        found = []
        for turn in range(turns):
            if delays.random() < 0.3:
                time.sleep(delays.random() * 2e-3)
            found.append(ranks[rank].gather(b"%d of %d" % (turn, rank), patient))
        return found

    expected = [[b"%d of %d" % (turn, rank) for rank in range(n)] for turn in range(turns)]
    assert in_threads([lambda rank=rank: run(rank) for rank in range(n)]) == [expected] * n


def test_who_has_not_come_is_told_between_polls():
    ranks = make_rounds(3)
    seen: list[list[int]] = []

    def check(missing: list[int]) -> None:
        seen.append(missing)
        assert len(seen) < 10
        rank = missing[0]
        ranks[rank]._page.write_round(1, True, 4, b"late")

    assert ranks[0].gather(b"mine", check) == [b"mine", b"late", b"late"]
    assert seen == [[1, 2], [2]]


def test_a_round_that_a_rank_has_left():
    """Those that come later raise, and name the first that left, whoever left because of it."""
    ranks = make_rounds(4)
    with pytest.raises(Gone):
        ranks[2].gather(b"", gone)
    found = in_threads([lambda rank=rank: outcome(lambda: ranks[rank].gather(b"", patient)) for rank in (0, 1, 3)])
    assert [(type(error), error.rank, error.text) for error in found] == [(Left, 2, "Gone: without [0, 1, 3]")] * 3
    assert "rank 2 left an exchange between the ranks (Gone: without [0, 1, 3])" in str(found[0])


def test_a_round_left_because_of_a_fault():
    """Ranks that come later name the rank at fault, even where its fault is not on their page yet."""
    ranks = make_rounds(2)

    def fail(missing: list[int]) -> None:
        ranks[0]._page.post_fault(control_page.REFUSED, 1, "ArgumentError: no", 7)
        raise PeerFailedError("rank 0, call 1: rank 7 raised an error (ArgumentError: no)")

    with pytest.raises(PeerFailedError):
        ranks[0].gather(b"", fail)
    ranks[0]._page.clear()
    found = outcome(lambda: ranks[1].gather(b"", patient))
    assert (type(found), found.rank, found.text) == (Left, 7, "ArgumentError: no")


def test_what_is_left_fits_a_chunk():
    ranks = make_rounds(2)
    with pytest.raises(Gone):
        ranks[0].gather(b"", lambda missing: (_ for _ in ()).throw(Gone("\N{LATIN SMALL LETTER E WITH ACUTE}" * 2000)))
    found = outcome(lambda: ranks[1].gather(b"", patient))
    assert found.rank == 0
    assert found.text.startswith("Gone: \N{LATIN SMALL LETTER E WITH ACUTE}")


def test_a_round_left_with_a_payload():
    """It is in the place of the first, and those that come later have it; the rank that left raises."""
    ranks = make_rounds(3)
    with pytest.raises(Gone):
        ranks[0].gather(b"all is well", gone, lambda error: f"but {error}".encode())
    found = in_threads([lambda rank=rank: ranks[rank].gather(b"all is well", patient) for rank in (1, 2)])
    assert found == [[b"but without [1, 2]", b"all is well", b"all is well"]] * 2


def test_a_round_left_after_chunks_that_all_have_read():
    """The rank that leaves says so in the round in which it is."""
    ranks = make_rounds(2)
    payload = bytes(range(256)) * 12

    def leave(missing: list[int]) -> None:
        if ranks[0].last == 3:
            raise Gone

    def follow(missing: list[int]) -> None:
        if ranks[1].last == 3:
            pytest.fail("rank 0 has left this one by now")

    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(outcome(lambda: ranks[0].gather(payload, leave))))
    thread.start()
    before = ranks[1]._page.write_round

    def write(serial: int, *part: Any) -> None:
        if serial == 3 and thread.is_alive():
            thread.join()
        before(serial, *part)

    ranks[1]._page.write_round = write  # type: ignore[method-assign]
    with pytest.raises(PeerFailedError, match="rank 0 left an exchange"):
        ranks[1].gather(payload, follow)
    assert type(first[0]) is Gone


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except BaseException as error:
        return error


def test_a_long_reason_is_cut_to_a_chunk():
    ranks = make_rounds(2)

    def fail(missing: list[int]) -> None:
        raise ValueError("é" * 5000)

    with pytest.raises(ValueError, match="é"):
        ranks[0].gather(b"", fail)
    with pytest.raises(PeerFailedError, match="ValueError: éé"):
        ranks[1].gather(b"", patient)


def test_an_interrupt_leaves_the_round_too(monkeypatch: pytest.MonkeyPatch):
    ranks = make_rounds(2)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks[0].gather(b"", patient)
    with pytest.raises(PeerFailedError, match="KeyboardInterrupt"):
        ranks[1].gather(b"", patient)


# ---- meetings
@pytest.mark.parametrize("n", [1, 3, 40, 70])
def test_all_get_the_same_numbers(n: int):
    ranks = make_rounds(n)
    for rank, one in enumerate(ranks):
        one.last = 2 * rank
    found = in_threads(
        [lambda rank=rank: ranks[rank].meet(7 + rank, patient, bytes(rank), 3 * rank) for rank in range(n)]
    )
    assert found == [[(7 + rank, 2 * rank, bytes(rank), 3 * rank) for rank in range(n)]] * n


def test_nobody_gets_past_a_meeting_before_all_have_come():
    n, turns = 4, 100
    ranks, came, early = make_rounds(n), [0] * n, []

    def run(rank: int) -> None:
        delays = random.Random(rank)
        for turn in range(1, turns + 1):
            if delays.random() < 0.3:
                time.sleep(delays.random() * 2e-3)
            came[rank] = turn
            ranks[rank].meet(turn // 2, patient)
            early.extend(one for one in came if one < turn)

    in_threads([lambda rank=rank: run(rank) for rank in range(n)])
    assert not early


def test_a_fast_rank_overwrites_its_first_record_by_the_second_meetings():
    """It has read the first one's; a slow rank that has not takes the second one's, of the same numbers."""
    fast, slow = make_rounds(2)
    fast.last, slow.last = 4, 3

    def twice() -> list[Any]:
        return [fast.meet(9, patient), fast.meet(9, patient)]

    second = threading.Event()
    reading = slow._page.read_meeting

    def read(serial: int) -> Any:
        if serial == 1 and not second.is_set():
            assert within(lambda: (fast._page.read_meeting(2))[0] is not None)  # the fast one is at the second
            second.set()
        return reading(serial)

    slow._page.read_meeting = read  # type: ignore[method-assign]
    found = in_threads([twice, lambda: [slow.meet(7, patient), slow.meet(7, patient)]])
    assert found == [[[(9, 4, b"", 0), (7, 3, b"", 0)]] * 2] * 2


def within(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + HANG
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-4)
    return bool(condition())


def test_a_rank_may_close_right_behind_a_meeting():
    """A slow rank has read the records before the last one was written, and then sees that its writer is gone."""
    slow, fast = make_rounds(2)

    def closed(missing: list[int]) -> None:
        assert missing == [1]
        fast._page.write_meeting(1, 5, 0, b"")
        raise PeerLostError("it closed the communicator")

    assert slow.meet(5, closed) == [(5, 0, b"", 0), (5, 0, b"", 0)]


def test_a_meeting_that_is_given_up_leaves_its_record():
    """Unlike a round: the communicator is lost then, which is written elsewhere."""
    ranks = make_rounds(2)
    with pytest.raises(Gone, match=r"without \[1\]"):
        ranks[0].meet(1, gone)
    assert ranks[1].meet(2, gone) == [(1, 0, b"", 0), (2, 0, b"", 0)]


def test_pages_do_not_share_anything():
    one, other = Page.create(0, 1), Page.create(0, 1)
    for page in (one, other):
        shared_files.remove(page.path)
    assert Rounds(one).gather(b"a", gone) == [b"a"]
    assert other.read_round(1) == [None]


def test_a_finaliser_comes_to_a_fence_within_another_one():
    """It runs at any instruction of the same thread, which would wait for itself."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code is records.fence.__code__:
            frame.f_trace_opcodes = True
            if event == "opcode":
                sys.settrace(None)
                records.fence()
                seen += 1
                sys.settrace(trace)
        return trace

    def fenced() -> None:
        sys._getframe().f_trace_opcodes = True  # see tests/interrupts/points.py
        sys.settrace(trace)
        records.fence()
        sys.settrace(None)

    thread = threading.Thread(target=fenced, daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive()
    assert seen > 5
