"""``recover()``: random programs on host arrays, by ranks that are threads, go on at one turn after any exception.

The number that it returns is compared with what the ranks have seen of their calls.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ipcreduce.arrays.lists import ListCall
from ipcreduce.arrays.maps import Map, MapCall
from ipcreduce.arrays.plain import PlainCall
from ipcreduce.calls import call_lock
from ipcreduce.calls.right_calls import RightCalls
from ipcreduce.calls.sequence import CallSequence
from ipcreduce.errors import (
    ArgumentError,
    GraphStateError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    Reach,
    UnsupportedError,
)
from ipcreduce.graphs.session import GraphSession
from ipcreduce.host.reducer import HostReducer
from ipcreduce.host.segment import Segment
from ipcreduce.host.shared import SharedReducer
from ipcreduce.page import shared_files
from ipcreduce.page.control_page import Page
from tests.shared import clock
from tests.shared.bounds import HANG, LONG
from tests.unit.pages import in_threads, make_pages

TURNS = 5
Fault = tuple[int, int, str]  # turn, step, and what happens there, the first time


class Program(Exception):
    """An exception of the program's own."""


@dataclass
class Met:
    """One recover(): what it returned, the numbers before and behind, and this rank's right calls since the last."""

    returned: int
    before: int
    right: list[int]


@dataclass
class Rank:
    page: Page
    segment: Segment
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.number, shared = self.page.rank, SharedReducer(self.segment)
        self.calls = CallSequence(self.page, LONG, [shared])
        self.host = HostReducer(self.calls, None, shared, "")
        self.session = GraphSession(self.calls, None, "no GPU", False, False)
        self.results: dict[int, list[Any]] = {}
        self.met: list[Met] = []
        self.before, self.right = 0, list[int]()

    # ---- calls
    def made(self, body: Callable[..., Any], *given: Any) -> Any:
        result, number = call_lock.make(self.calls, lambda: (body(*given), self.calls.number))
        self.right.append(number)
        return result

    def recover(self) -> int:
        returned = self.session.recover()
        self.met.append(Met(returned, self.before, self.right))
        self.before, self.right = self.calls.number, []
        return returned

    def step(self, kind: str, value: int, fault: str) -> Any:
        """One call, and what goes wrong at it. The result is the sum of all ranks' values."""
        if fault == "before":
            raise Program
        if fault == "interrupt":
            raise KeyboardInterrupt
        op = {"refused": "median", "differs": "max"}.get(fault, "sum")
        if kind == "map":
            given: tuple[Any, ...] = self.host.call, MapCall(np.full(3, value), op, None, self.map(fault))
        elif kind == "list":
            arrays = [np.full(2, value), np.full(3, value, np.float32), np.empty(0)]
            given = self.host.call, ListCall(arrays, op, None)
        else:
            count = {"number": 0, "array": 50, "long": 30_000}[kind]
            given = self.host.call, PlainCall(value if kind == "number" else np.full(count, value), op, None)
        result = self.made(*given)
        if fault in ("behind", "nested"):
            raise Program
        first = result[0] if kind == "list" else result
        return int(np.min(first)) if int(np.min(first)) == int(np.max(first)) else result

    def map(self, fault: str) -> Map:
        def function(value: Any) -> Any:
            if fault == "function":
                raise Program
            for _ in range(2 * (fault == "nested")):  # the peers are told of one behind this call, of the other later
                with pytest.raises(UnsupportedError, match="within call"):
                    call_lock.make(self.calls, self.host.call, PlainCall(1, "sum", None))
            return value

        return Map("v", host=function)

    # ---- the loop of docs/errors.md
    def run(self, program: Sequence[Sequence[str]]) -> None:
        turn, began = 0, list[int]()
        while turn < len(program):
            try:
                began[turn:] = [self.calls.number]
                self.results[turn] = [
                    self.step(kind, self.value(turn, step), self.fault(turn, step))
                    for step, kind in enumerate(program[turn])
                ]
                turn += 1
            except BaseException:
                right = self.recover()
                mine = max(one for one, calls in enumerate(began) if calls <= right)
                turn = self.made(self.host.call, PlainCall(mine, "min", None))

    def fault(self, turn: int, step: int) -> str:
        for one in self.faults:
            if one[:2] == (turn, step):
                self.faults.remove(one)
                return one[2]
        return ""

    def value(self, turn: int, step: int) -> int:
        """Sums of values of different turns, or of steps, are no sum of one turn's."""
        return (self.number + 1) * (1000 + 37 * turn + 5 * step) + turn


def make_ranks(n: int) -> list[Rank]:
    first = Segment.create(0, n)
    segments = [first, *(Segment.open(first.path, rank, n) for rank in range(1, n))]
    shared_files.remove(first.path)
    return [Rank(page, segment) for page, segment in zip(make_pages(n), segments, strict=True)]


def last_right(met: Sequence[Met]) -> int:
    """The last call such that it and all since the last meeting were right on every rank."""
    number = met[0].before
    while all(number + 1 in one.right for one in met):
        number += 1
    return number


def check(ranks: Sequence[Rank], program: Sequence[Sequence[str]]) -> None:
    for turn, steps in enumerate(program):
        for step in range(len(steps)):
            due = sum(rank.value(turn, step) for rank in ranks)
            assert [rank.results[turn][step] for rank in ranks] == [due] * len(ranks), (turn, step)
    for met in zip(*(rank.met for rank in ranks), strict=True):
        assert {one.before for one in met} == {met[0].before}
        assert [one.returned for one in met] == [last_right(met)] * len(met)
    assert len({rank.calls.number for rank in ranks}) == 1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_random_programs(n: int, subtests: pytest.Subtests):
    """The last turn has one call, without which a rank might end while another one has to repeat a turn."""
    kinds: set[str] = set()
    for seed in range(30):
        draw = random.Random(seed * 10 + n)
        program = [
            [draw.choice(["number", "array", "long", "list", "map", "map"]) for _ in range(draw.randint(1, 3))]
            for _ in range(TURNS)
        ] + [["number"]]
        ranks = make_ranks(n)
        for _ in range(draw.randint(1, 4)):
            turn = draw.randrange(TURNS)
            step = draw.randrange(len(program[turn]))
            faults = ["before", "behind", "refused", "interrupt"] + ["differs"] * (n > 1)
            what = draw.choice(faults + ["function", "function", "nested"] * (program[turn][step] == "map"))
            kinds.add(what)
            for rank in ranks if draw.random() < 0.2 and what != "differs" else [draw.choice(ranks)]:
                rank.faults.append((turn, step, what))
        with subtests.test(seed=seed):
            in_threads([lambda rank=rank, steps=program: rank.run(steps) for rank in ranks])
            check(ranks, program)
    assert len(kinds) == 6 + (n > 1)


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except BaseException as error:
        return error


def failing(rank: Rank) -> None:
    with pytest.raises(ArgumentError):
        rank.step("array", 1, "refused")


def test_the_next_call_does_the_same():
    """One rank calls recover(), and the other one makes its next call, which is the first one's next, too."""
    first, second = make_ranks(2)
    in_threads([lambda rank=rank: rank.step("array", 1, "") for rank in (first, second)])
    failing(second)
    with pytest.raises(PeerFailedError):
        first.step("array", 1, "")
    found = in_threads(
        [lambda: (first.recover(), first.calls.number, first.step("array", 2, "")), lambda: second.step("array", 2, "")]
    )
    assert found == [(1, 2, 4), 4]
    assert (first.calls.number, second.calls.number) == (3, 3)


def test_without_an_error():
    ranks = make_ranks(3)
    for turn in range(3):
        assert in_threads([rank.recover for rank in ranks]) == [turn] * 3
        assert in_threads([lambda rank=rank: rank.step("array", 1, "") for rank in ranks]) == [3] * 3


def test_it_tells_the_ranks_that_wait_and_says_why():
    first, second = make_ranks(2)

    def waits() -> tuple[str, int]:
        with pytest.raises(PeerFailedError) as caught:
            first.step("array", 1, "")
        return str(caught.value), first.recover()

    def recovers() -> int:
        try:
            raise ValueError("bad batch")
        except ValueError:
            return second.recover()

    (text, one), other = in_threads([waits, recovers])
    assert "rank 1 called recover() after ValueError: bad batch. Call recover() on this rank, too. The" in text
    assert (one, other) == (0, 0)


def test_a_fault_that_it_meets_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture):
    first, second = make_ranks(2)
    failing(second)
    caplog.clear()
    assert in_threads([first.recover, second.recover]) == [0, 0]
    assert ["there is no op 'median'" in record.getMessage() for record in caplog.records] == [True]
    assert in_threads([lambda rank=rank: rank.step("array", 1, "") for rank in (first, second)]) == [2, 2]


def test_a_fault_of_a_later_call_does_not_keep_the_peers_from_waiting():
    """Rank 2 waits for rank 0 in call 1. Rank 1 is further, by calls that wait for nobody, and has refused call 3."""
    ranks = make_ranks(3)
    waiting = threading.Event()
    for _ in range(2):
        call_lock.make(ranks[1].calls, lambda: None)
    failing(ranks[1])
    watched = ranks[2].segment.hand_over

    def hand_over(check: Callable[[list[int]], None]) -> None:
        def noting(missing: list[int]) -> None:
            waiting.set()
            check(missing)

        watched(noting)

    ranks[2].segment.hand_over = hand_over  # type: ignore[method-assign]

    def waits() -> int:
        with pytest.raises(PeerFailedError, match=r"in call 1, rank 0 called recover\(\)\. Call recover\(\) on this"):
            ranks[2].step("array", 1, "")
        return ranks[2].recover()

    def recovers() -> int:
        assert waiting.wait(LONG)
        return ranks[0].recover()

    assert in_threads([recovers, ranks[1].recover, waits]) == [0] * 3


def test_an_error_that_every_rank_makes_alike():
    """It is not right while it is the last. Programs that go on with other calls have dealt with it."""

    def alike() -> None:
        raise GraphStateError("not now", reach=Reach.ALL)

    ranks = make_ranks(2)
    for expected in (0, 3):
        for rank in ranks:
            with pytest.raises(GraphStateError):
                call_lock.make(rank.calls, alike)
        if expected:
            in_threads([lambda rank=rank: rank.step("array", 1, "") for rank in ranks])
        assert in_threads([rank.recover for rank in ranks]) == [expected] * 2


def test_ranks_that_recover_at_the_same_moment():
    """Neither has told the other of it as it looks for the last right call."""

    def alike() -> None:
        raise GraphStateError("not now", reach=Reach.ALL)

    ranks = make_ranks(2)
    both = threading.Barrier(2)
    for rank in ranks:
        with pytest.raises(GraphStateError):
            call_lock.make(rank.calls, alike)

        def post(*given: Any, post: Any = rank.page.post_fault) -> None:
            both.wait(HANG)
            post(*given)

        rank.page.post_fault = post  # type: ignore[method-assign]
    assert in_threads([rank.recover for rank in ranks]) == [0, 0]


def test_where_nothing_can_be_saved():
    first, second = make_ranks(2)
    with (
        clock.passing(LONG + 1, when=lambda: first.page.read_meeting(1)[0] is not None),
        pytest.raises(PeerLostError, match="waited in vain for rank 1 to make a call after its call"),
    ):
        first.recover()
    for rank in (first, second):
        with pytest.raises(PeerLostError):
            rank.recover()
        with pytest.raises(PeerLostError):
            rank.step("array", 1, "")


def test_behind_close():
    rank = make_ranks(1)[0]
    rank.calls.close(ArgumentError("the communicator is closed"))
    with pytest.raises(ArgumentError, match="is closed"):
        rank.recover()


def test_within_a_call_or_a_recording():
    rank = make_ranks(1)[0]
    found = call_lock.make(rank.calls, lambda: outcome(rank.session.recover))
    assert isinstance(found, UnsupportedError)
    assert "recover() was called within call 1 of" in str(found)

    class Recording:
        in_this_thread, error = True, None

    rank.calls.recording = Recording()
    with pytest.raises(GraphStateError, match=r"recover\(\) was called within a recording"):
        rank.recover()


def test_an_interrupt_before_the_meeting():
    """The others are told nevertheless; the next recover() meets them."""
    first, second = make_ranks(2)
    in_threads([lambda rank=rank: rank.step("array", 1, "") for rank in (first, second)])

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    first.calls._resynchronise = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.recover()
    del first.calls._resynchronise
    with pytest.raises(PeerFailedError, match="recover"):
        second.step("array", 1, "")
    assert in_threads([first.recover, second.recover]) == [1, 1]


def test_what_a_backend_knows_counts():
    """The ranks' calls on GPUs have ended without data, each from another one on."""

    class Backend:
        def __init__(self, ended: int) -> None:
            self.ended = ended

        def right(self, number: int) -> int:
            return min(number, self.ended)

    known = RightCalls()
    known.spoil(9, 9, fault=True)
    known.spoil(10, 10, fault=True)
    backends: Any = [Backend(20), Backend(20)]
    assert known.here(12, backends) == 8
    backends[1].ended = 5
    assert known.here(12, backends) == 5
    known.meet(13, [5, 7])
    assert known.last == 5
    assert known.here(14, backends) == 12, "what was before the meeting is settled"


def test_a_rank_that_is_late_and_one_that_differs():
    first, second = make_ranks(2)
    in_threads([lambda rank=rank: rank.step("array", 1, "") for rank in (first, second)])
    with clock.passing(LONG + 1, when=lambda: first.page.calls.number[0] == 2), pytest.raises(PeerTimeoutError):
        first.step("array", 1, "")
    assert in_threads([first.recover, second.recover]) == [1, 1]
    assert first.calls.number == second.calls.number
    found = in_threads([lambda: outcome(lambda: first.step("array", 1, "differs")),
                        lambda: outcome(lambda: second.step("array", 1, ""))])  # fmt: skip
    assert {type(one) for one in found} == {RankMismatchError}
    before = first.calls.number - 1
    assert in_threads([first.recover, second.recover]) == [before] * 2
