"""The flight recorder, with the ranks as several views of one memory in this process."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipcreduce.page import flight_recorder, records
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.page.flight_recorder import RING, FlightRecorder
from tests.shared.bounds import HANG
from tests.shared.fingerprints import of_allreduce

SUM = of_allreduce((10,), "float32", "sum")
ON_HOST = Fingerprint.of(f"{SUM} on the host")
OFFSET = 4096


def recorders(n: int) -> list[FlightRecorder]:
    page = mmap.mmap(-1, OFFSET + flight_recorder.nbytes(n) + 64)
    return [FlightRecorder(page, OFFSET, rank, n) for rank in range(n)]


@pytest.fixture
def ranks() -> list[FlightRecorder]:
    return recorders(3)


def test_equal_calls_pass(ranks: list[FlightRecorder]):
    for call in range(1, 3 * RING):  # round the ring, and on
        for rank in ranks:
            assert rank.enter(call, SUM) is None
    assert [rank.call_of(1) for rank in ranks] == [3 * RING - 1] * 3


@pytest.mark.parametrize(
    "other",
    [
        of_allreduce((10,), "int32", "sum"),
        of_allreduce((10,), "float32", "min"),
        of_allreduce((5, 2), "float32", "sum"),
        ON_HOST,
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [1, 7, RING, RING + 1, 5 * RING - 1, (1 << 32) + 3])
def test_whoever_comes_second_sees_the_difference(ranks: list[FlightRecorder], other: Fingerprint, call: int):
    assert ranks[0].enter(call, SUM) is None
    assert ranks[2].enter(call, other) == 0
    assert ranks[1].enter(call, SUM) == 2
    assert ranks[1].describe(2, call) == str(other)


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_the_odd_rank_is_named_first(odd: int, monkeypatch: pytest.MonkeyPatch):
    """Though the first two to come show only that they differ: the others come within a moment."""
    monkeypatch.setattr(flight_recorder, "_MOMENT_SECONDS", HANG)  # 5 ms can last longer than the library's moment
    ranks = recorders(4)
    other = of_allreduce((11,), "float32", "sum")
    first, *late = [odd, *({0, 1, 2, 3} - {odd})]
    assert ranks[first].enter(7, other) is None
    assert ranks[late[0]].enter(7, SUM) == odd
    timers = [threading.Timer(0.005, ranks[rank].enter, (7, SUM)) for rank in late[1:]]
    for timer in timers:
        timer.start()
    words = f"{other} on rank {odd} and {SUM} on ranks {late[0]}, {late[1]} and {late[2]}"
    assert ranks[late[0]].describe_all(7) == words
    for timer in timers:
        timer.join()


def test_a_rank_that_does_not_come_is_not_waited_for(ranks: list[FlightRecorder]):
    ranks[0].enter(7, SUM)
    ranks[1].enter(7, ON_HOST)
    assert ranks[0].describe_all(7) == f"{SUM} on rank 0 and {ON_HOST} on rank 1"


def test_ranks_may_be_apart(ranks: list[FlightRecorder]):
    """One that runs ahead is compared when the other comes to that call, not before."""
    different = of_allreduce((3,), "int8", "sum")
    for call in range(1, 6):
        assert ranks[0].enter(call, different if call == 4 else SUM) is None
    assert [ranks[1].enter(call, SUM) for call in range(1, 6)] == [None, None, None, 0, None]


def test_a_call_that_the_ring_has_overwritten_is_not_compared(ranks: list[FlightRecorder]):
    other = of_allreduce((3,), "int8", "sum")
    ranks[0].enter(1, SUM)
    ranks[0].enter(1 + RING, other)
    assert ranks[1].enter(1, SUM) is None
    assert ranks[1].describe(0, 1) == ""
    assert ranks[1].describe(0, 1 + RING) == str(other)


def test_a_slot_that_is_being_overwritten_is_not_compared(ranks: list[FlightRecorder]):
    for call in range(1, RING + 1):
        ranks[0].enter(call, SUM)
    ranks[0].write(1, of_allreduce((3,), "int8", "sum"))  # of call RING + 1, whose number is not there yet
    assert ranks[1].enter(1, SUM) is None


@given(st.data())
@settings(deadline=None)
def test_any_difference_from_who_came_before_is_seen(data: st.DataObject):
    n = data.draw(st.integers(2, 8))
    odd = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    ranks, other = recorders(n), of_allreduce((3,), "int8", "sum")
    for rank in data.draw(st.permutations(range(n))):
        assert ranks[rank].enter(1, SUM) is None
    came: list[int] = []
    for rank in data.draw(st.permutations(range(n))):
        differ = [one for one in came if (one in odd) != (rank in odd)]
        assert ranks[rank].enter(2, other if rank in odd else SUM) == min(differ, default=None)
        came.append(rank)


@pytest.mark.parametrize("n", range(1, 9))
def test_that_all_agree_is_seen_at_one_look(n: int, monkeypatch: pytest.MonkeyPatch):
    ranks = recorders(n)
    for rank in ranks:
        rank.enter(1, SUM)
    monkeypatch.setattr(FlightRecorder, "differing", lambda *_: pytest.fail("a second look"))
    for call in (1, 1 + RING):
        assert [rank.enter(call, SUM) for rank in ranks] == [None] * n


@pytest.mark.parametrize("n", [1, 3, 8])
def test_ranks_write_side_by_side_and_nowhere_else(n: int):
    ranks = recorders(n)
    page = np.frombuffer(ranks[0]._keys.obj, np.uint8)
    changed = []
    for rank in ranks:
        before = page.copy()
        rank.enter(RING - 1, SUM)
        changed.append(set(np.flatnonzero(page != before)))
    assert sum(map(len, changed)) == len(set().union(*changed)), "two ranks write the same byte"
    assert all(OFFSET <= byte < OFFSET + flight_recorder.nbytes(n) for one in changed for byte in one)


@pytest.mark.parametrize(
    ("fingerprint", "text"),
    [
        (SUM, "sum of float32 (10,)"),
        (of_allreduce((), "bfloat16", "avg"), "avg of bfloat16 ()"),
        (of_allreduce((2, 3, 4), "uint64", "prod"), "prod of uint64 (2, 3, 4)"),
        (ON_HOST, "sum of float32 (10,) on the host"),
    ],
)
def test_described_alike_here_and_there(ranks: list[FlightRecorder], fingerprint: Fingerprint, text: str):
    assert str(fingerprint) == text
    ranks[0].enter(1, fingerprint)
    assert ranks[1].describe(0, 1) == text


def test_a_long_description_is_cut_but_compared_whole(ranks: list[FlightRecorder]):
    many, other = (of_allreduce((1,) * 50 + (last,), "int8", "sum") for last in (2, 3))
    ranks[0].enter(1, many)
    text = ranks[1].describe(0, 1)
    assert len(text) >= 80
    assert text.endswith("...")
    assert str(many).startswith(text[:-3])
    assert ranks[1].enter(1, other) == 0


def test_nothing_to_describe_yet(ranks: list[FlightRecorder]):
    assert ranks[0].describe(1, 0) == ranks[0].describe(1, 1) == ""
    assert ranks[0].call_of(1) == 0
    ranks[1].enter(1, SUM)
    assert ranks[0].describe(1, 1 + RING) == "", "what is in that slot is an earlier call"


def test_more_calls_than_the_table_has_texts():
    """It begins anew, and what comes again is told again."""
    ahead, behind = recorders(2)
    many = [of_allreduce((count,), "int8", "sum") for count in range(flight_recorder.TEXTS + 10)]
    calls = [*enumerate(many, 1), (1 + RING, many[0]), (2 + RING, many[-1]), (3 + RING, many[500])]
    for call, fingerprint in calls:
        ahead.enter(call, fingerprint)
        assert behind.describe(0, call) == str(fingerprint)


def test_a_text_that_has_gone():
    ahead, behind = recorders(2)
    for count in range(flight_recorder.TEXTS + 2):
        ahead.enter(1 + count, of_allreduce((count,), "int8", "sum"))
    assert [behind.describe(0, call) for call in (1, 2, 3)] == ["another call", "another call", "sum of int8 (2,)"]


def test_a_slot_is_written_before_its_number_and_compared_behind_it(
    ranks: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
):
    """So that of two ranks the later one sees the other's key with the number, and does look."""
    seen = []

    def write(self: FlightRecorder, slot: int, fingerprint: Fingerprint, before: Any = FlightRecorder.write) -> None:
        seen.append(("write", self.number[0]))
        before(self, slot, fingerprint)

    def differing(self: FlightRecorder, call: int) -> None:
        seen.append(("look", self.number[0]))

    monkeypatch.setattr(FlightRecorder, "write", write)
    monkeypatch.setattr(FlightRecorder, "differing", differing)
    ranks[0].enter(5, SUM)
    assert seen == [("write", 0), ("look", 5)]
    ranks[0].enter(5 + RING, SUM)
    assert seen[2:] == [("look", 5 + RING)], "written only where it changes"


def test_a_key_that_comes_late_is_no_difference(ranks: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch):
    """Some processors show another's number before the key that it wrote first."""
    other = of_allreduce((3,), "int8", "sum")
    for rank in ranks[:2]:
        rank.enter(1, other)
    ranks[1].number[0] = 1 + RING
    monkeypatch.setattr(records.time, "sleep", lambda seconds: ranks[1].write((1 + RING) % RING, SUM))
    assert ranks[0].enter(1 + RING, SUM) is None


@pytest.mark.parametrize("part", ["key", "table"])
def test_an_interrupt_leaves_nothing_wrong(part: str, monkeypatch: pytest.MonkeyPatch):
    ahead, behind = recorders(2)
    other = of_allreduce((3,), "int8", "sum")

    class Interrupts(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            raise KeyboardInterrupt

    ahead.enter(1, SUM)
    if part == "key":
        keys, ahead._keys = ahead._keys, Interrupts()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            ahead.enter(1 + RING, other)
        ahead._keys = keys
        keys[2 * ((1 + RING) % RING)] = other.crc
    else:
        monkeypatch.setattr(flight_recorder, "TEXTS", 1)
        ahead.agreed = Published(ahead.agreed)
        with pytest.raises(KeyboardInterrupt):
            ahead.enter(2, other)
        ahead.agreed = dict(ahead.agreed)
        ahead.enter(2, other)
    ahead.enter(1 + 2 * RING, SUM)
    behind.enter(1 + 2 * RING, SUM)
    assert behind.differing(1 + 2 * RING) is None
    assert behind.describe(0, 1 + 2 * RING) == str(SUM)


class Published(dict[int, bytes]):
    """Is interrupted right behind its clearing."""

    def clear(self) -> None:
        super().clear()
        raise KeyboardInterrupt


def test_no_key_stands_beside_the_text_of_another(ranks: list[FlightRecorder]):
    """Not even while the table begins anew and a rank reads it."""
    log = []

    class Entry:
        def __setitem__(self, field: str, value: Any) -> None:
            log.append((field, value))

    ranks[0]._texts = {(0, 0): Entry()}  # type: ignore[assignment]
    ranks[0].enter(1, SUM)
    assert log == [("key", 0), ("text", str(SUM).encode()), ("key", SUM.crc)]


def test_many_calls_are_compared_afterwards(ranks: list[FlightRecorder]):
    """Those that both ranks have made and none has overwritten, whatever numbers a damaged page tells."""
    other = of_allreduce((3,), "int8", "sum")
    for call in range(1, 2 * RING):
        ranks[0].enter(call, SUM)
        ranks[1].enter(call, other if call in (3, RING + 9, RING + 11) else SUM)
    last = 2 * RING - 1
    assert ranks[0].first_differing(1, 1, last) == RING + 9
    assert ranks[0].first_differing(1, RING + 10, last) == RING + 11
    assert ranks[0].first_differing(1, RING + 12, last) is None
    assert ranks[0].first_differing(1, 1, 1 << 47) == RING + 9
    ranks[1].number[0] = (1 << 64) - 1
    assert ranks[0].first_differing(1, 1, (1 << 64) - 1) != RING + 9, "no call of ours has such a number"
