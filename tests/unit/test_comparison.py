"""Calls that differ are found afterwards, on a shared page and on mirrored ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ipcreduce.calls.sequence import CallSequence
from ipcreduce.page import comparison, records
from ipcreduce.page.comparison import Comparison
from ipcreduce.page.control_page import MISMATCH, Page
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.page.flight_recorder import RING
from tests.unit.pages import make_mirrored, make_pages

SUM, MAX = Fingerprint.of("a sum"), Fingerprint.of("a maximum")


class Ranks:
    """Two ranks. ``turn``: one of both watchdogs."""

    def __init__(self, pages: list[Page], mirrors: list[Any]) -> None:
        self.pages, self._mirrors = pages, mirrors
        self._comparisons = [Comparison(page) for page in pages]

    def turn(self, rank: int | None = None) -> None:
        for page in self.pages:
            page.changed = None
        for act in ("send", "receive"):
            for mirror in self._mirrors:
                getattr(mirror, act)()
        for one in self._comparisons if rank is None else self._comparisons[rank : rank + 1]:
            one.look()


def differ_at_first(ranks: Ranks) -> None:
    """The first call of two differs."""
    for page, what in zip(ranks.pages, (SUM, MAX), strict=True):
        page.calls.enter(1, what)
        page.calls.enter(2, SUM)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PATIENCE_SECONDS", -1.0)


@pytest.fixture(params=["a shared page", "mirrored pages"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pages, mirrors = (make_pages(2), []) if request.param == "a shared page" else make_mirrored(2)
    yield Ranks(pages, mirrors)
    for mirror in mirrors:
        mirror.close(0)


@pytest.mark.parametrize("differing", [1, 2, 500])
@pytest.mark.parametrize("finder", [0, 1])
def test_calls_that_differ_are_found(ranks: Ranks, differing: int, finder: int):
    """By either rank, for both."""
    first, second = ranks.pages
    for call in range(1, 601):
        first.calls.write(call % RING, SUM)
        second.calls.write(call % RING, MAX if call == differing else SUM)
    first.calls.number[0] = second.calls.number[0] = 600
    ranks.turn(finder)
    fault = ranks.pages[finder].fault()
    assert fault is not None
    assert fault[0] == differing
    assert fault[2] == MISMATCH
    assert "a sum on rank 0" in fault[3]
    assert "a maximum on rank 1" in fault[3]
    ranks.turn()
    assert first.aborted
    assert second.aborted


def test_a_last_call_is_compared_once_it_stands(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """Until then it may be withdrawn, and another one take its number."""
    first, second = ranks.pages
    first.calls.enter(1, SUM)
    second.calls.enter(1, MAX)
    ranks.turn()
    ranks.turn()
    assert not first.aborted
    second.calls.enter(1, SUM)  # the same number, after the other one was withdrawn
    ranks.turn()
    monkeypatch.setattr(comparison, "_SETTLED_SECONDS", -1.0)
    ranks.turn()
    assert not first.aborted
    second.calls.enter(2, MAX)
    first.calls.enter(2, SUM)
    ranks.turn()
    ranks.turn()
    assert first.aborted


def test_calls_that_a_resynchronisation_left_out_are_not_compared(ranks: Ranks):
    first, second = ranks.pages
    first.calls.enter(1, SUM)
    second.calls.enter(1, SUM)
    second.calls.enter(2, MAX)  # failed, and met by no call of rank 0
    for page in (first, second):
        page.calls.first = 4
        for call in (4, 5):
            page.calls.enter(call, SUM)
    ranks.turn()
    ranks.turn()
    assert not first.aborted


def test_a_key_that_comes_behind_its_number_is_no_difference(monkeypatch: pytest.MonkeyPatch):
    first, second = make_pages(2)
    for page in (first, second):
        page.calls.enter(1, SUM)
        page.calls.enter(2, SUM)
    second.calls.write(1, MAX)  # as if its key of an earlier call were still seen
    slept: list[float] = []

    def arrives(seconds: float) -> None:
        slept.append(seconds)
        second.calls.write(1, SUM)

    monkeypatch.setattr(records.time, "sleep", arrives)
    Comparison(first).look()
    assert slept
    assert not first.aborted


def test_slots_that_are_written_again_during_the_look_are_left_out(monkeypatch: pytest.MonkeyPatch):
    """The ranks go on between the look at their numbers and that at their keys."""
    first, second = make_pages(2)
    for page in (first, second):
        for call in range(1, RING + 1):
            page.calls.enter(call, SUM)
    newest = first.calls._newest

    def goes_on(rank: int) -> int:
        number = newest(rank)
        for call in (RING + 2, RING + 3):
            second.calls.write(call % RING, MAX)
            second.calls.number[0] = call
        return number

    monkeypatch.setattr(first.calls, "_newest", goes_on)
    assert first.calls.first_differing(1, 1, RING) is None


def test_a_mismatch_is_left_to_the_ranks_for_a_while(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """They let their earlier calls end first, for which the watchdog cannot wait."""
    monkeypatch.setattr(comparison, "_PATIENCE_SECONDS", 60.0)
    first, second = ranks.pages
    differ_at_first(ranks)
    ranks.turn()
    ranks.turn()
    assert not first.aborted
    assert not second.aborted
    monkeypatch.setattr(comparison, "_PATIENCE_SECONDS", -1.0)
    ranks.turn(0)
    fault = first.fault()
    assert fault is not None
    assert fault[0] == 1


def test_a_mismatch_that_the_ranks_have_raised_is_forgotten(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "_PATIENCE_SECONDS", 60.0)
    first = ranks.pages[0]
    differ_at_first(ranks)
    ranks.turn()
    for page in ranks.pages:
        page.next_era()
        page.calls.first = 3
        page.clear()
        for call in (3, 4):
            page.calls.enter(call, SUM)
    ranks.turn()
    for page in ranks.pages:
        page.calls.enter(5, SUM if page is first else MAX)
        page.calls.enter(6, SUM)
    ranks.turn()
    monkeypatch.setattr(comparison, "_PATIENCE_SECONDS", -1.0)
    ranks.turn(0)
    fault = first.fault()
    assert fault is not None
    assert fault[0] == 5


@pytest.mark.parametrize("as_it", ["begins", "ends"])
@pytest.mark.parametrize("rank_that_meets", [0, 1])
def test_a_mismatch_is_not_posted_once_the_ranks_meet(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, as_it: str, rank_that_meets: int
):
    """It has been raised: the watchdog of rank 0 was held up between its look and its post."""
    first = ranks.pages[0]
    differ_at_first(ranks)
    describe = first.calls.describe

    def meet(rank: int, call: int) -> str:
        text = describe(rank, call)
        page = ranks.pages[rank_that_meets]
        page.next_era()
        if as_it == "ends":
            page.calls.first = 3
            page.clear()
        return text

    monkeypatch.setattr(first.calls, "describe", meet)
    ranks.turn(0)
    posted = rank_that_meets == 1  # then this rank's resynchronisation is still to come, and will clear it
    assert bool(first.aborted) == posted
    assert (first.fault() is not None) == posted


def test_an_era_ends_before_the_ranks_meet_and_as_the_page_is_cleared():
    """So that what was seen before, or meanwhile, is not posted to what follows."""
    (page,) = make_pages(1)
    eras: list[int] = []

    class Quiet:
        def quiesce(self, deadline: float) -> None:
            eras.append(page.era)  # the one of the calls: NCCL's guard ends them now

        def right(self, number: int) -> int:
            return number

        def offer(self) -> bytes:
            return b""

        def reset(self, offers: object) -> None:
            eras.append(page.era)

    before = page.era
    backends: list[Any] = [Quiet()]
    CallSequence(page, 60, backends)._resynchronise()
    assert len({before, *eras}) == 2
    assert page.era not in (before, *eras)
    with page.in_era(before) as current:
        assert not current
    with page.in_era(page.era) as current:
        assert current
