"""The life of a call: each edge of the state table in CallSequence's docstring, over a real page and a fake backend."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from ipcreduce.calls import call_lock, faults, sequence
from ipcreduce.calls.sequence import CallSequence
from ipcreduce.cuda import cupy_runtime
from ipcreduce.device.fast_path import FastPath
from ipcreduce.device.last_call import ON_STREAM
from ipcreduce.device.launch_cache import LaunchCache
from ipcreduce.device.prepared import BoundLaunch, Prepared
from ipcreduce.errors import (
    ArgumentError,
    CaptureError,
    CudaError,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    Reach,
    UnsupportedError,
)
from ipcreduce.page import control_page, layout
from ipcreduce.page.control_page import Page
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.texts import described
from tests.shared import bounds, clock
from tests.shared.bounds import HANG
from tests.shared.fingerprints import of_allreduce
from tests.unit.pages import in_threads, make_mirrored, make_pages

SUM, OTHER = of_allreduce((10,), "float32", "sum"), of_allreduce((3,), "int8", "sum")
ROOT = Path(__file__).parents[2]
CAPTURING = 77  # a stream
WALKED: set[tuple[str, str]] = set()


def walks(*edges: str) -> Callable[[Any], Any]:
    """The test below walks these edges of the state table, each as "from -> to"."""
    for edge in edges:
        begin, end = edge.split(" -> ")
        WALKED.add((begin, end))
    return lambda test: test


class Backend:
    """Notes what is asked of it, and does what the test puts in."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.act: dict[str, Callable[[], None]] = {}
        self.ended = 1 << 60  # the last call that has ended with its data

    def _do(self, name: str) -> None:
        self.log.append(name)
        self.act.get(name, lambda: None)()

    def drain(self) -> None:
        self._do("drain")

    def quiesce(self, deadline: float) -> None:
        self._do("quiesce")

    def offer(self) -> bytes:
        return b""

    def right(self, number: int) -> int:
        return min(number, self.ended)

    def reset(self, offers: Sequence[bytes]) -> None:
        self._do("reset")

    def is_capturing(self, stream: int) -> bool:
        return stream == CAPTURING


def fail(error: BaseException) -> None:
    raise error


class Rank:
    def __init__(self, page: Page, timeout: float) -> None:
        self.page, self.backend = page, Backend()
        self.calls = CallSequence(page, timeout, [self.backend])

    def call(self, fingerprint: Fingerprint = SUM, stream: int = 0) -> int:
        """One call that is launched; its number."""
        call_lock.make(self.calls, self.calls.enter, fingerprint, stream)
        return self.calls.number

    def refuse(self, error: BaseException | None = None) -> BaseException:
        """One call that this rank refuses; the exception that comes out."""
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            call_lock.make(self.calls, fail, error or ArgumentError("no such op"))
        return caught.value

    def host(self, payload: bytes = b"") -> list[bytes]:
        """One call with an exchange."""

        def body() -> list[bytes]:
            self.calls.enter(SUM, 0)
            return self.calls.gather(self.calls.number, payload)

        return call_lock.make(self.calls, body)

    def kernel_waits_in_vain(self, *peers: int) -> None:
        """What a kernel of this rank writes at its deadline."""
        words = np.frombuffer(self.page._map, np.uint32, 2, layout.missing_offset(self.page.rank))
        words[:] = sum(1 << peer for peer in peers), 1
        self.page.abort()


TIMEOUT = 120.0  # seconds, beyond HANG


def make_ranks(n: int, timeout: float = TIMEOUT) -> list[Rank]:
    return [Rank(page, timeout) for page in make_pages(n)]


@pytest.fixture(params=["2", "3", "3, a page each"])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    if request.param in ("2", "3"):
        yield make_ranks(int(request.param))
    else:
        pages, mirrors = make_mirrored(3)
        yield [Rank(page, TIMEOUT) for page in pages]
        for mirror in mirrors:
            mirror.close(0)


@pytest.fixture(params=[2, 3])
def sharing(request: pytest.FixtureRequest) -> list[Rank]:
    """Ranks of one page: they see a difference before a call starts."""
    return make_ranks(request.param)


@pytest.fixture
def three() -> list[Rank]:
    return make_ranks(3)


def together(ranks: list[Rank], act: Callable[[Rank], Any] = Rank.call) -> list[Any]:
    return in_threads([lambda rank=rank: act(rank) for rank in ranks])


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except BaseException as error:
        return error


def raised_by(
    rank: Rank, kind: type[BaseException], text: str | None = None, act: Callable[[Rank], Any] = Rank.call
) -> Any:
    with pytest.raises(kind, match=text) as caught:
        act(rank)
    return caught.value


def all_raise(ranks: list[Rank], kind: type[BaseException]) -> None:
    """The next call of each raises this, once."""
    for rank in ranks:
        raised_by(rank, kind)
    assert all(rank.calls.raised for rank in ranks)


def go_on(ranks: list[Rank]) -> list[int]:
    """The next call of each works; the page is clear, and no rank has anything to settle."""
    numbers = together(ranks)
    assert not ranks[0].page.aborted
    assert ranks[0].page.fault() is None
    assert not any(rank.calls.raised for rank in ranks)
    return numbers


# ---- the table
def edges_of_the_table() -> set[tuple[str, str]]:
    """Those of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, rows = text.split("| state | kept in | next |\n|---|---|---|\n")
    cells = [row.strip("|").split("|") for row in rows.split("\n\n")[0].splitlines()]
    return {
        (state.strip(), end.strip(" `"))
        for state, _, ends in cells
        for end in ends.split(",")
        if "its number is used again" not in end
    }


def test_every_edge_of_the_table_is_walked():
    edges = edges_of_the_table()
    assert {("entered", "refused"), ("entered", "posted"), ("raised", "lost"), ("lost", "close()")} <= edges
    assert len(edges) >= 11
    assert edges == WALKED


# ---- entered
@walks("entered -> done")
def test_a_call_is_numbered_recorded_and_done(sharing: list[Rank]):
    for number in (1, 2, 3):
        for rank in sharing:
            assert rank.call() == number
            assert [other.page.calls.call_of(rank.page.rank) for other in sharing] == [number] * len(sharing)
    assert not sharing[0].page.aborted
    assert all(rank.backend.log == [] for rank in sharing), "the backend has nothing to do with it"


def fast_path_of(rank: Rank) -> FastPath:
    """A fast path on stream 7, over no GPU."""
    order: Any = SimpleNamespace(quick=lambda stream, looked: ON_STREAM if stream == 7 else None)
    return FastPath(rank.calls, 0, 1, order, rank.page, LaunchCache(0, order, Prepared.bind))


@walks("entered -> done")
def test_the_fast_path_and_the_usual_one(sharing: list[Rank], monkeypatch: pytest.MonkeyPatch):
    calls, made = sharing[0].calls, []
    current = SimpleNamespace(ptr=7)
    monkeypatch.setattr(cupy_runtime, "get_current_stream", lambda: current)
    fast = fast_path_of(sharing[0])

    def launch(argument: int, stream: int) -> None:
        made.append((calls.number, argument, stream))

    bound = BoundLaunch(Fingerprint.of("a replay"), launch, 9)

    def usual(*given: Any) -> str:
        made.append((calls.number, *given))
        return "usual result"

    assert fast.make(bound, usual) is True
    assert sharing[1].page.calls.describe(0, 1) == "a replay"
    current.ptr = 8  # a launch there needs an event
    assert fast.make(bound, usual) == "usual result"
    assert fast.make(None, usual, "an array", "sum", None, 8) == "usual result"
    nobody = (None,) * 4
    assert made == [(1, 9, 7), (2, *nobody), (3, "an array", "sum", None, 8)]
    current.ptr, bound.launch = 7, lambda argument, stream: 1 // 0
    with pytest.raises(ZeroDivisionError):
        fast.make(bound, usual)
    assert sharing[1].page.fault()[0] == 4
    assert in_threads([lambda: calls.lock.acquire(timeout=HANG)]) == [True], "the lock is free"


@walks("entered -> posted")
def test_the_fast_path_sees_another_call(sharing: list[Rank], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cupy_runtime, "get_current_stream", lambda: SimpleNamespace(ptr=7))
    sharing[1].page.calls.enter(1, Fingerprint.of("another replay"))
    launched: list[Any] = []
    bound = BoundLaunch(Fingerprint.of("a replay"), lambda *given: launched.append(given), 9)
    with pytest.raises(RankMismatchError, match="a replay on rank 0 and another replay on rank 1"):
        fast_path_of(sharing[0]).make(bound, lambda *_: sharing[0].calls.enter(bound.fingerprint, 0))
    assert not launched


def nested_in(rank: Rank, how: str, attempts: Sequence[Callable[[], Any]], error: BaseException | None = None) -> Any:
    """The outcomes of attempts that this thread makes in the middle of a call, and the outcome of that call."""
    found: list[Any] = []

    def body(*_: Any) -> int:
        rank.calls.enter(SUM, 0)
        before = rank.page.aborts
        found.extend(outcome(attempt) for attempt in attempts)
        assert rank.page.aborts == before, "it would end waits of the call around it"
        if error is not None:
            raise error
        return rank.calls.number

    made = outcome(
        lambda: call_lock.make(rank.calls, body) if how == "usual" else fast_path_of(rank).make(None, body, 0, 0)
    )
    return found, made


@walks("entered -> refused")
@pytest.mark.parametrize("how", ["usual", "fast"])
def test_a_nested_call_is_refused_and_the_one_around_it_is_made(ranks: list[Rank], how: str):
    """By a signal handler, say: it would take what the peers have sent for the call around it."""
    first, *others = ranks

    def fast() -> Any:
        return fast_path_of(first).make(None, lambda *_: first.calls.enter(SUM, 0), 0, 0)

    (nested,), made = nested_in(first, how, [first.call if how == "usual" else fast])
    assert isinstance(nested, UnsupportedError), nested
    assert re.match(
        "rank 0, call 2: this call was made within call 1 of the same .*: by the host function of a Map, ", str(nested)
    )
    assert made == 1
    assert together(others) == [1] * len(others), "the call around it is made on every rank"
    for rank in others:
        raised_by(rank, PeerFailedError, "rank 0 raised an error .UnsupportedError: rank 0, call 2: this call was made")
    assert go_on(ranks) == [3] * len(ranks)


def test_nested_calls_of_every_rank(ranks: list[Rank]):
    """The same signal comes to all: each has refused its call, and no rank is told of another one's."""
    for rank in ranks:
        (nested,), made = nested_in(rank, "usual", [rank.call])
        assert (type(nested), made) == (UnsupportedError, 1)
    assert go_on(ranks) == [3] * len(ranks)


def test_several_nested_calls_are_told_one_by_one(ranks: list[Rank]):
    """Also what refuses a call before it begins: a replay of a closed graph, say."""
    first, *others = ranks
    error = GraphStateError("closed")
    found, made = nested_in(first, "usual", [first.call, lambda: first.calls.fail(error, begun=False)])
    assert [type(one) for one in found] == [UnsupportedError, type(None)]
    assert made == 1
    together(others)
    for rank in others:
        raised_by(rank, PeerFailedError, "raised an error .UnsupportedError")
    told_and_made(ranks, "raised an error (GraphStateError: rank 0, call 3: closed)", call=4)


def test_a_fault_that_cannot_be_posted_is_not_raised(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    """Else this rank's next calls would take it for settled, and go on without data that the peers do not send."""
    first = ranks[0]

    def broken(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(first.page, "post_fault", broken)
        assert type(first.refuse()) is MemoryError
    assert not first.calls.raised
    assert not first.page.aborted


def told_and_made(ranks: list[Rank], words: str, call: int) -> None:
    """Rank 0 makes one exchange, which is ``call``. The others are told of a call before that first."""

    def go(rank: Rank) -> None:
        if rank is not ranks[0]:
            told = outcome(rank.host)
            assert isinstance(told, PeerFailedError), told
            assert words in str(told)
        assert rank.host() == [b""] * len(ranks)
        assert rank.calls.number == call

    together(ranks, go)


def test_a_nested_call_in_one_that_fails_is_told_behind_the_meeting(ranks: list[Rank]):
    first, *others = ranks
    (nested,), made = nested_in(first, "usual", [first.call], ArgumentError("no such op"))
    assert (type(nested), type(made)) == (UnsupportedError, ArgumentError)
    for rank in others:
        raised_by(rank, PeerFailedError, "raised an error .ArgumentError: rank 0, call 1: no such op")
    told_and_made(ranks, "raised an error (UnsupportedError: rank 0, call 2: this call was made", call=3)


@pytest.mark.parametrize("how", ["usual", "fast"])
@pytest.mark.parametrize("then", [Rank.host, lambda rank: rank.calls.recover()])
def test_a_failure_that_could_not_be_told_is_told_later(
    ranks: list[Rank], how: str, then: Callable[[Rank], Any], monkeypatch: pytest.MonkeyPatch
):
    """As another Ctrl-C came, or the stack had no room left. The others may wait in that call."""
    with monkeypatch.context() as patch:
        patch.setattr(ranks[0].calls, "fail", lambda error: fail(RecursionError()))
        _, made = nested_in(ranks[0], how, [], KeyboardInterrupt())
    assert type(made) is RecursionError

    def go(rank: Rank) -> None:
        if rank is not ranks[0]:
            raised_by(rank, PeerFailedError, r"in call 1, rank 0 raised an error \(KeyboardInterrupt\)", Rank.host)
        then(rank)

    together(ranks, go)


@pytest.mark.parametrize("then", [Rank.host, lambda rank: rank.calls.recover()])
def test_a_loss_that_could_not_be_told_is_told_later(
    ranks: list[Rank], then: Callable[[Rank], Any], monkeypatch: pytest.MonkeyPatch
):
    """The stack had no room for it. From then on this rank counts other calls than the others."""

    def no_room(*_: object) -> None:
        raise RecursionError

    first = ranks[0]
    assert type(first.refuse()) is ArgumentError

    def go(rank: Rank) -> None:
        if rank is not first:
            rank.calls.recover()
            raised_by(rank, PeerLostError, r"it left the resynchronisation after a fault \(RecursionError\)", Rank.host)
            return
        with monkeypatch.context() as patch:
            patch.setattr(first.calls._right, "meet", no_room)
            patch.setattr(first.page, "post_lost", no_room)
            assert type(outcome(first.calls.recover)) is RecursionError
        raised_by(first, PeerLostError, r"this rank cannot go on with the others \(RecursionError\)", then)

    together(ranks, go)


def test_a_call_in_an_exchange_of_the_same_thread_is_refused(ranks: list[Rank]):
    """In the vote at the end of a recording, say, for which this thread has no call under way."""

    def exchange() -> None:
        assert type(outcome(ranks[0].call)) is UnsupportedError
        assert ranks[0].calls.number == 0

    call_lock.alone(ranks[0].calls, exchange)
    for rank in ranks[1:]:
        raised_by(rank, PeerFailedError, "raised an error .UnsupportedError")
    assert go_on(ranks) == [2] * len(ranks)


def test_another_communicators_call_within_one_is_made():
    """They share nothing: a lock, a number, a page of its own each."""
    first, second = make_ranks(1)[0], make_ranks(1)[0]
    assert nested_in(first, "usual", [second.call, second.call]) == ([1, 2], 1)
    assert (first.calls.nested, second.calls.nested) == ([], [])


def test_a_call_of_another_thread_waits_for_its_turn(ranks: list[Rank]):
    """It is no nested one."""
    rank, inside, go = ranks[0], threading.Event(), threading.Event()

    def body() -> int:
        rank.calls.enter(SUM, 0)
        inside.set()
        assert go.wait(60)
        return rank.calls.number

    def other() -> int:
        assert inside.wait(60)
        threading.Timer(0.05, go.set).start()
        return rank.call()

    assert in_threads([lambda: call_lock.make(rank.calls, body), other]) == [1, 2]


@walks("entered -> withdrawn")
def test_a_call_that_is_recorded_has_no_number(ranks: list[Rank]):
    def record() -> None:
        assert ranks[0].calls.number == 1
        ranks[0].calls.withdraw()

    call_lock.make(ranks[0].calls, record)
    assert together(ranks) == [1] * len(ranks)


@walks("entered -> withdrawn")
@pytest.mark.parametrize("catch", ["usual", "fast"])
def test_a_capture_error_within_takes_no_number(ranks: list[Rank], catch: str):
    """The abort word would spoil the work that is captured."""
    error = CaptureError("not here", reach=Reach.CAPTURED)

    def fail(*_: Any) -> None:
        raise error

    assert (
        ranks[0].refuse(error) if catch == "usual" else outcome(lambda: fast_path_of(ranks[0]).make(None, fail, 0, 0))
    ) is error
    assert str(error) == "rank 0, call 1: not here"
    assert not ranks[0].page.aborted
    assert together(ranks) == [1] * len(ranks)


@walks("entered -> withdrawn")
def test_a_wrong_state_in_a_recordings_body_takes_no_number(ranks: list[Rank]):
    """On every rank alike, so that no peer waits."""
    body = ranks[0].calls.recording = SimpleNamespace(error=None, is_own=True)
    ranks[0].refuse(GraphStateError("not in a body"))
    assert body.error is None
    assert (ranks[0].calls.number, ranks[0].page.aborted) == (0, False)
    ranks[1].refuse(GraphStateError("not in a body"))
    assert (ranks[1].calls.number, ranks[1].page.aborted) == (1, True), "outside of one it is refused"


@walks("entered -> refused", "refused -> raised")
def test_a_rank_refuses(ranks: list[Rank]):
    """The peers know, once the calls before have ended; the program has got the error, and no second one."""
    together(ranks)
    word: list[bool] = []
    ranks[1].backend.act["drain"] = lambda: word.append(ranks[1].page.aborted)
    error = ranks[1].refuse()
    assert str(error) == "rank 1, call 2: no such op"
    assert word == [False], "the abort word would end earlier calls too"
    assert ranks[0].page.fault() == (2, 1, control_page.REFUSED, "ArgumentError: rank 1, call 2: no such op")
    assert ranks[1].calls.raised
    all_raise([rank for rank in ranks if rank is not ranks[1]], PeerFailedError)
    assert go_on(ranks) == [3] * len(ranks)


def test_a_call_that_a_fault_has_ended_raises_that_fault(ranks: list[Rank]):
    """NCCL's calls fail on the ranks that wait, when a rank refuses the same call."""
    together(ranks)
    ranks[1].refuse()
    ended = CudaError("ncclAllReduce", -1, "the NCCL communicator has been aborted")
    ended.reach = Reach.ENDED
    error = ranks[0].refuse(ended)
    assert type(error) is PeerFailedError
    assert "rank 1 raised an error (ArgumentError" in str(error)
    all_raise(ranks[2:], PeerFailedError)
    assert go_on(ranks) == [3] * len(ranks)


@pytest.mark.parametrize("error", [ValueError("of the caller"), KeyboardInterrupt()])
def test_what_is_not_ours_passes_unchanged(ranks: list[Rank], error: BaseException):
    before = error.args
    assert ranks[0].refuse(error) is error
    assert error.args == before
    assert type(error).__name__ in ranks[1].page.fault()[3]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("raised", [False, True])
def test_an_interrupt_is_not_replaced_by_an_earlier_fault(sharing: list[Rank], error: BaseException, raised: bool):
    """Nor does it wait for the others to meet; the next call raises that fault, or meets them."""
    sharing[0].call()
    sharing[1].refuse()
    if raised:
        raised_by(sharing[0], PeerFailedError)
    with bounds.no_hang():
        assert sharing[0].refuse(error) is error
    if not raised:
        raised_by(sharing[0], PeerFailedError)
    for rank in sharing[2:]:
        raised_by(rank, PeerFailedError)
    assert len({*together(sharing)}) == 1, "and all go on with one number"


@pytest.mark.parametrize("kind", [PeerFailedError, PeerTimeoutError, RankMismatchError, PeerLostError])
def test_an_error_of_another_communicator_is_told(ranks: list[Rank], kind: type[IpcReduceError]):
    """One that a break raises, say: on this communicator only this rank knows of it."""
    together(ranks)
    error = kind("rank 3, call 7: of another one")
    ranks[0].calls.fail(error, begun=False, foreign=True)
    assert str(error) == "rank 3, call 7: of another one", "it passes unchanged"
    for rank in ranks[1:]:
        raised_by(rank, PeerFailedError, rf"rank 0 raised an error \({kind.__name__}: rank 3, call 7: of another")
    assert len({*together(ranks)}) == 1, "the communicator works again"


@pytest.mark.parametrize("kind", [PeerFailedError, PeerTimeoutError, RankMismatchError, PeerLostError])
def test_an_error_of_another_communicator_within_a_call_is_told(ranks: list[Rank], kind: type[IpcReduceError]):
    """One that the host function of a Map raises, say, or a signal's handler; also of one that is lost by then."""
    together(ranks)
    other = make_ranks(2)[0]
    error = other.refuse(kind("rank 3, call 7: of another one"))
    for one in [error, *([raised_by(other, kind)] if kind is PeerLostError else [])]:
        assert ranks[0].refuse(one) is one
        assert str(one) == "rank 3, call 7: of another one", "it passes unchanged"
        for rank in ranks[1:]:
            raised_by(rank, PeerFailedError, rf"rank 0 raised an error \({kind.__name__}: rank 3, call 7: of another")
        assert len({*together(ranks)}) == 1, "the communicator works again"


def test_an_interrupt_at_the_end_of_a_call_leaves_the_lock_free(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    calls = ranks[0].calls

    def interrupted(*_: Any) -> None:  # a signal is handled as a function of Python's begins
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "fail", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call_lock.make(calls, fail, ArgumentError("no such op"))
    assert in_threads([lambda: calls.lock.acquire(timeout=HANG)]) == [True]
    assert not calls.within


def test_an_interrupt_while_earlier_calls_are_waited_for_is_told(ranks: list[Rank]):
    def interrupted() -> None:
        raise KeyboardInterrupt

    together(ranks)
    ranks[0].backend.act["drain"] = interrupted
    assert type(ranks[0].refuse()) is KeyboardInterrupt
    del ranks[0].backend.act["drain"]
    for rank in ranks[1:]:
        raised_by(rank, PeerFailedError, "ArgumentError: rank 0, call 2: no such op")
    assert len({*together(ranks)}) == 1


def test_the_call_in_which_the_ranks_meet_is_compared(ranks: list[Rank]):
    together(ranks)
    ranks[0].refuse()
    for rank in ranks[1:]:
        raised_by(rank, PeerFailedError)
    number = together(ranks)[0]
    ranks[1].page.calls.write(number, Fingerprint.of("another call"))
    ranks[1].page.write_round(1, True, 0, b"")  # tells it to pages of their own
    assert ranks[0].page.calls.first_differing(1, 1, number) == number


def test_rank_and_call_are_added_once(ranks: list[Rank]):
    error = ArgumentError("x")
    for _ in range(2):
        make_ranks(2)[0].refuse(error)
        assert str(error) == "rank 0, call 1: x"


def test_a_drain_that_fails_does_not_hide_the_fault(ranks: list[Rank]):
    def fail() -> None:
        raise PeerTimeoutError("of an earlier call")

    ranks[0].backend.act["drain"] = fail
    assert type(ranks[0].refuse()) is ArgumentError
    assert ranks[1].page.fault()[:3] == (1, 0, control_page.REFUSED)


def test_what_a_recordings_body_refuses_is_noted_in_it(ranks: list[Rank]):
    """Even if the program catches it; the first one counts. Another thread's call is none of the body's."""
    body = ranks[0].calls.recording = SimpleNamespace(error=None, is_own=True)
    first = ranks[0].refuse(ArgumentError("first"))
    assert body.error is first
    for rank in ranks[1:]:
        raised_by(rank, PeerFailedError)
    peers = [threading.Thread(target=rank.call) for rank in ranks[1:]]  # they meet this rank's refusal
    for thread in peers:
        thread.start()
    ranks[0].refuse(ArgumentError("second"))
    for thread in peers:
        thread.join(60)
    assert body.error is first
    other = make_ranks(2)[0]
    other.calls.recording = SimpleNamespace(error=None, is_own=False)
    other.refuse()
    assert other.calls.recording.error is None


def test_refuse_cancels_a_call_that_does_not_begin(ranks: list[Rank]):
    error = ArgumentError("wrong")
    ranks[0].calls.fail(error, begun=False)
    assert ranks[1].page.fault()[:3] == (1, 0, control_page.REFUSED)
    assert str(error) == "rank 0, call 1: wrong"
    ranks[0].calls.fail(ValueError(), begun=False, foreign=True)
    assert ranks[0].calls.number == 1, "the peers know of a fault, and may wait for a vote"
    all_raise(ranks[1:], PeerFailedError)
    assert go_on(ranks) == [2] * len(ranks)
    ranks[0].calls.fail(ValueError(), begun=False, foreign=True)
    assert ranks[1].page.fault()[:3] == (3, 0, control_page.REFUSED)


# ---- posted
@walks("entered -> posted", "posted -> raised")
def test_a_mismatch(sharing: list[Rank]):
    together(sharing)
    sharing[0].call(SUM)
    error = raised_by(sharing[1], RankMismatchError, act=lambda rank: rank.call(OTHER))
    assert str(error).startswith("rank 1, call 2: call 2 is not the same on every rank: ")
    assert f"{SUM} on rank 0 and {OTHER} on rank 1" in str(error)
    assert sharing[1].backend.log == ["drain"]
    assert sharing[1].calls.raised
    all_raise([rank for rank in sharing if rank is not sharing[1]], RankMismatchError)
    assert go_on(sharing) == [4] * len(sharing)


@walks("entered -> posted", "posted -> raised")
def test_a_peers_refusal_is_raised_once(ranks: list[Rank]):
    ranks[0].refuse()
    error = raised_by(ranks[1], PeerFailedError, "rank 1, call 1: in call 1, rank 0 raised an error .*no such op")
    assert type(error) is PeerFailedError
    assert ranks[1].calls.raised
    assert ranks[1].calls.number == 1, "a refused attempt is a call"


@walks("entered -> posted", "posted -> raised")
def test_a_rank_that_does_not_come_to_an_exchange():
    ranks = make_ranks(3)
    with clock.passing(TIMEOUT + 1, when=lambda: [rank.page.calls.number[0] for rank in ranks[:2]] == [1, 1]):
        errors = together(ranks[:2], lambda rank: outcome(rank.host))
    assert [type(error) for error in errors] == [PeerTimeoutError] * 2
    assert all("rank 2 did not call within 120 s (it has made no call yet)" in str(error) for error in errors)
    assert all(rank.calls.raised for rank in ranks[:2])
    assert "rank 2 did not call within" in str(raised_by(ranks[2], PeerTimeoutError))
    assert together(ranks) == [2] * 3
    assert together(ranks, lambda rank: rank.host(b"%d" % rank.page.rank)) == [[b"0", b"1", b"2"]] * 3


def test_a_deadline_in_real_time():
    """The others move the clock."""
    rank = make_ranks(2, timeout=0.3)[0]
    begun = time.monotonic()
    with bounds.no_hang():
        raised_by(rank, PeerTimeoutError, "rank 1 did not call within", lambda rank: rank.host())
    assert time.monotonic() - begun >= 0.3


@walks("entered -> posted", "posted -> raised")
def test_a_refusal_ends_an_exchange(ranks: list[Rank]):
    waiting = threading.Event()
    before = ranks[1].page.read_round

    def read(serial: int) -> Any:
        waiting.set()
        return before(serial)

    ranks[1].page.read_round = read  # type: ignore[method-assign]

    def refuse() -> BaseException:
        assert waiting.wait(60)
        return ranks[0].refuse()

    found = in_threads([refuse, *(lambda rank=rank: outcome(rank.host) for rank in ranks[1:])])
    assert [type(one) for one in found] == [ArgumentError] + [PeerFailedError] * (len(ranks) - 1)
    assert all(rank.calls.raised for rank in ranks)
    assert go_on(ranks) == [2] * len(ranks)
    assert together(ranks, Rank.host) == [[b""] * len(ranks)] * len(ranks), "the rounds are aligned"


@walks("posted -> raised")
@pytest.mark.parametrize("how", ["interrupted", "late"])
def test_an_exchange_that_a_rank_has_left_is_told_once(how: str):
    """The others find its record of the round before its fault on the page, or none there."""
    ranks = make_ranks(2)
    ranks[1].calls.number += 1  # it has entered the call, and comes to the round late
    ranks[1].calls.enter(SUM, 0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    ranks[0].calls.number += 1
    ranks[0].calls.enter(SUM, 0)
    if how == "late":
        with clock.passing(TIMEOUT + 1):
            left = raised_by(ranks[0], PeerTimeoutError, act=lambda rank: rank.calls.gather(1, b""))
    else:
        ranks[0].page.read_round = lambda serial: interrupt()  # type: ignore[method-assign]
        left = raised_by(ranks[0], KeyboardInterrupt, act=lambda rank: rank.calls.gather(1, b""))
        del ranks[0].page.read_round
    found = raised_by(ranks[1], (PeerFailedError, PeerTimeoutError), act=lambda rank: rank.calls.gather(1, b""))  # type: ignore[arg-type]
    ranks[1].calls.fail(found)
    ranks[0].calls.fail(left)
    assert str(found).startswith("rank 1, call 1: ")
    assert type(found) is (PeerTimeoutError if how == "late" else PeerFailedError)
    assert all(rank.calls.raised for rank in ranks)
    assert go_on(ranks) == [2, 2], "no rank raises it a second time"


@walks("posted -> raised")
def test_a_rank_that_leaves_an_exchange_is_named_by_all(ranks: list[Rank]):
    """Though its record of the round arrives before its fault, and others leave because of it."""
    for rank in ranks:
        rank.calls.number += 1
        rank.calls.enter(SUM, 0)
    last = ranks[-1]

    def interrupt(serial: int) -> NoReturn:
        raise SystemExit(0)

    last.page.read_round = interrupt  # type: ignore[method-assign]
    left = raised_by(last, SystemExit, act=lambda rank: rank.calls.gather(1, b""))
    del last.page.read_round
    found = in_threads([lambda rank=rank: outcome(lambda: rank.calls.gather(1, b"")) for rank in ranks[:-1]])
    for rank, error in zip(ranks, found, strict=False):
        assert type(error) is PeerFailedError
        assert f"rank {last.page.rank} raised an error (SystemExit: 0). " in str(error)
        rank.calls.fail(error)
    last.calls.fail(left)
    assert go_on(ranks) == [2] * len(ranks)


@walks("done -> posted", "posted -> raised")
@pytest.mark.parametrize("where", ["call", "synchronize"])
def test_a_wait_in_a_call_that_is_done_ends(ranks: list[Rank], where: str):
    """The next call raises it, or the end of this one's work does. Kernels that ended so raise each time."""
    for rank in ranks[:-1]:
        rank.call()
    ranks[0].kernel_waits_in_vain(len(ranks) - 1)
    act = Rank.call if where == "call" else lambda rank: rank.calls.check_faults()
    error = raised_by(ranks[0], PeerTimeoutError, f"rank {len(ranks) - 1} did not call within", act)
    number = 2 if where == "call" else 1
    assert str(error).startswith(f"rank 0, call {number}: ")
    assert ranks[0].calls.raised
    for _ in range(2):
        raised_by(
            ranks[0],
            PeerTimeoutError,
            "Graphs captured by other libraries work",
            lambda rank: rank.calls.raise_ended(),
        )
        raised_by(ranks[0], PeerTimeoutError, "work again", lambda rank: rank.calls.check_faults())
    all_raise(ranks[1:], PeerTimeoutError)
    assert go_on(ranks) == [3 if where == "call" or len(ranks) == 3 else 2] * len(ranks)
    ranks[0].calls.check_faults()


def test_the_earliest_fault_takes_precedence():
    ranks = make_ranks(3)
    for number in range(1, 5):
        ranks[0].calls.number = number
    ranks[0].refuse(ArgumentError("of call 5"))
    ranks[1].calls.number = 2
    ranks[1].calls.enter(SUM, 0)
    ranks[1].refuse(ArgumentError("of call 3"))
    ranks[2].calls.number = 7
    raised_by(ranks[2], PeerFailedError, "in call 3, rank 1 raised an error")


def test_a_refusal_behind_a_fault_that_is_not_raised_gives_way_to_it(ranks: list[Rank]):
    """The program has to hear of the first one first."""
    ranks[0].refuse(ArgumentError("the first"))
    ranks[1].calls.number = 3
    error = ranks[1].refuse(ArgumentError("the second"))
    assert type(error) is PeerFailedError
    assert "the first" in str(error)
    assert ranks[1].page.fault()[0] == 1
    assert ranks[1].calls.raised


def test_a_refusal_behind_a_fault_that_is_raised_comes_after_the_meeting(ranks: list[Rank]):
    ranks[0].refuse(ArgumentError("the first"))
    all_raise(ranks[1:], PeerFailedError)

    def second(rank: Rank) -> Any:
        return rank.refuse(ArgumentError("the second")) if rank is ranks[0] else outcome(rank.call)

    found = together(ranks, second)
    assert type(found[0]) is ArgumentError
    assert [rank.backend.log.count("reset") for rank in ranks] == [1] * len(ranks)
    assert ranks[1].page.fault()[:2] == (2, 0)
    for rank, one in zip(ranks[1:], found[1:], strict=True):
        if one == 2:  # it was there before the refusal
            one = raised_by(rank, PeerFailedError)
        assert "the second" in str(one)
    assert len(set(go_on(ranks))) == 1


def test_a_fault_of_a_later_call_does_not_disturb_an_earlier_one(ranks: list[Rank]):
    """Rank 0 is ahead, and refuses its second call."""
    ahead, behind = ranks[0], ranks[1:]
    ahead.call()
    ahead.refuse()
    assert [rank.call() for rank in behind] == [1] * len(behind)
    all_raise(behind, PeerFailedError)
    assert go_on(ranks) == [3] * len(ranks)


def test_a_fault_of_a_later_call_does_not_end_an_exchange():
    """Its ranks have all come, or will. Nobody is behind the exchange before the last one is in it."""
    ranks = make_ranks(2)
    seen: list[bool] = []
    before = ranks[1].page.read_round

    def read(serial: int) -> Any:
        seen.append(ranks[1].page.aborted)
        if len(seen) == 1:
            ranks[0].page.post_fault(control_page.REFUSED, 2, "of call 2")
            return before(serial)
        if len(seen) == 4:
            ranks[0].page.write_round(1, True, 1, b"0")
        return before(serial)

    ranks[1].page.read_round = read  # type: ignore[method-assign]
    assert ranks[1].host(b"1") == [b"0", b"1"]
    assert seen[1:] == [True] * 3
    raised_by(ranks[1], PeerFailedError, "in call 2, rank 0 raised")


# ---- raised
@walks("raised -> resynchronised", "resynchronised -> entered")
def test_all_start_anew_with_the_highest_numbers(ranks: list[Rank]):
    for _ in range(4):
        ranks[0].call()
    ranks[1].refuse()
    for rank in ranks:
        rank.calls._rounds.last = 10 - rank.page.rank
        if rank is not ranks[1]:
            raised_by(rank, PeerFailedError)
    assert [rank.calls.number for rank in ranks] == [5, 1, 1][: len(ranks)]
    assert go_on(ranks) == [6] * len(ranks)
    assert {rank.calls._rounds.last for rank in ranks} == {10}
    assert [rank.backend.log[-2:] for rank in ranks] == [["quiesce", "reset"]] * len(ranks)
    assert [rank.backend.log.count("reset") for rank in ranks] == [1] * len(ranks)
    assert together(ranks, Rank.host) == [[b""] * len(ranks)] * len(ranks)
    assert [rank.calls.number for rank in ranks] == [7] * len(ranks)


def failed_call(ranks: list[Rank]) -> None:
    ranks[0].refuse()
    all_raise(ranks[1:], PeerFailedError)


@walks("raised -> resynchronised")
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_nobody_resets_before_all_are_quiet_nor_goes_on_before_all_have_reset(slow: int):
    ranks = make_ranks(3)
    failed_call(ranks)
    quiet, reset, seen = [False] * 3, [False] * 3, []

    def hold(meeting: int) -> None:
        """Gives the others time to pass this meeting without the slow one, if they do."""
        deadline = time.monotonic() + 0.5  # no verdict: for a longer one they come in any case
        others = [one for one in range(3) if one != slow]
        while time.monotonic() < deadline and not all(ranks[0].page.read_meeting(meeting)[one] for one in others):
            time.sleep(1e-3)
        time.sleep(0.02)

    for number, rank in enumerate(ranks):

        def quiesce(number: int = number) -> None:
            if number == slow:
                hold(1)
            quiet[number] = True

        def start(number: int = number) -> None:
            seen.append(("reset", all(quiet)))
            if number == slow:
                hold(2)
            reset[number] = True

        rank.backend.act.update(quiesce=quiesce, reset=start)

    def call(rank: Rank) -> None:
        rank.call()
        seen.append(("on", all(reset)))

    together(ranks, call)
    assert sorted(seen) == [("on", True)] * 3 + [("reset", True)] * 3


@walks("raised -> resynchronised")
def test_the_page_is_clear_for_all_before_any_goes_on(monkeypatch: pytest.MonkeyPatch):
    """A fence stands between the clearing and the second meeting, or a peer's next fault may be cleared."""
    ranks = make_ranks(2)
    failed_call(ranks)
    log: list[str] = []
    here = threading.local()

    def noting(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            if getattr(here, "noting", False):
                log.append(f"{name} {given[0]}" if given else name)
            return act(*given)

        return noted

    page = ranks[0].page
    monkeypatch.setattr(page, "clear", noting("clear", page.clear))
    monkeypatch.setattr(page, "write_meeting", noting("meeting", page.write_meeting))
    monkeypatch.setattr(sequence, "fence", noting("fence", sequence.fence))
    for name in ("quiesce", "reset"):
        ranks[0].backend.act[name] = noting(name, lambda: None)

    def call(rank: Rank) -> None:
        here.noting = rank is ranks[0]
        rank.call()

    together(ranks, call)
    assert log == ["quiesce", "meeting 1", "reset", "clear", "fence", "meeting 2"]


def test_a_capture_does_not_resynchronise(ranks: list[Rank]):
    """On every rank alike, with no number; the next call that is not captured does."""
    failed_call(ranks)
    for rank in ranks:
        error = raised_by(rank, CaptureError, "the ranks have not met since", lambda one: one.call(stream=CAPTURING))
        assert error.reach is Reach.CAPTURED
        assert rank.calls.number == 1
        assert rank.backend.log.count("quiesce") == 0
    assert go_on(ranks) == [2] * len(ranks)


def test_several_faults_one_after_the_other(ranks: list[Rank]):
    for turn in range(10):
        ranks[turn % len(ranks)].refuse()
        all_raise([rank for rank in ranks if not rank.calls.raised], PeerFailedError)
        assert go_on(ranks) == [2 * turn + 2] * len(ranks)
    assert [rank.backend.log.count("reset") for rank in ranks] == [10] * len(ranks)


# ---- lost
def is_lost(rank: Rank) -> None:
    """Every later call raises, and takes no number."""
    number = rank.calls.number
    for act in (
        Rank.call,
        Rank.host,
        lambda one: fast_path_of(one).make(None, print),
        lambda one: one.calls.check_usable(),
    ):
        assert type(raised_by(rank, PeerLostError, act=act)) is PeerLostError
    rank.calls.fail(ArgumentError("nothing to refuse any more"), begun=False)
    assert rank.calls.number == number


@walks("raised -> lost", "lost -> close()")
def test_a_rank_that_does_not_come_to_the_clean_up(three: list[Rank]):
    failed_call(three)
    with clock.passing(TIMEOUT + 1, when=lambda: all(three[2].page.read_meeting(1)[:2])):
        errors = together(three[:2], lambda rank: outcome(rank.call))
    assert [type(error) for error in errors] == [PeerLostError] * 2
    assert all("waited in vain for rank 2 to make a call after its call 0" in str(error) for error in errors)
    assert "waited in vain for rank 2" in str(raised_by(three[2], PeerLostError)), "it comes too late"
    for rank in three:
        is_lost(rank)
        assert rank.backend.log.count("reset") == 0
        rank.calls.close(ArgumentError("closed"))
        raised_by(rank, ArgumentError, "closed")


@walks("raised -> lost")
@pytest.mark.parametrize("step", ["quiesce", "reset"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), PeerTimeoutError("the kernels run on")], ids=["interrupt", "ours"]
)
def test_a_rank_that_leaves_the_clean_up(ranks: list[Rank], step: str, error: BaseException):
    """What is not ours passes unchanged; the communicator is lost on all ranks."""
    failed_call(ranks)

    def fail() -> None:
        raise error

    ranks[0].backend.act[step] = fail
    found = together(ranks, lambda rank: outcome(rank.call))
    if isinstance(error, IpcReduceError):
        assert type(found[0]) is PeerLostError
        assert found[0].__cause__ is error
    else:
        assert found[0] is error
    text = f"rank 0 is gone: it left the resynchronisation after a fault ({described(error)})"
    assert all(type(one) is PeerLostError and text in str(one) for one in found[1:])
    for rank in ranks:
        is_lost(rank)


@walks("raised -> lost")
def test_an_interrupt_in_the_meeting(ranks: list[Rank]):
    failed_call(ranks)

    def interrupt(serial: int) -> Any:
        raise KeyboardInterrupt

    ranks[0].page.read_meeting = interrupt  # type: ignore[method-assign]
    found = together(ranks, lambda rank: outcome(rank.call))
    assert [type(one) for one in found] == [KeyboardInterrupt] + [PeerLostError] * (len(ranks) - 1)
    for rank in ranks:
        is_lost(rank)


@walks("raised -> lost")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_that_closed_instead(three: list[Rank], ahead: bool):
    """Whatever calls it has made: it does not come to the meeting."""
    failed_call(three)
    if ahead:
        three[2].page.calls.enter(9, SUM)
    three[2].page.leave()
    found = together(three[:2], lambda rank: outcome(rank.call))
    assert [type(one) for one in found] == [PeerLostError] * 2
    assert all("rank 2 is gone: it closed the communicator" in str(one) for one in found)
    for rank in three[:2]:
        is_lost(rank)


@walks("raised -> lost")
def test_a_rank_that_has_died(ranks: list[Rank]):
    """The watchdog posts it."""
    failed_call(ranks)
    ranks[0].page.post_lost(len(ranks) - 1, "its process has ended")
    found = together(ranks[:-1], lambda rank: outcome(rank.call))
    assert all(type(one) is PeerLostError and "its process has ended" in str(one) for one in found)


def test_a_loss_without_a_fault(ranks: list[Rank]):
    ranks[0].page.post_lost(1, "its process has ended")
    raised_by(
        ranks[0],
        PeerLostError,
        "rank 1 is gone: its process has ended",
        lambda rank: rank.calls.check_faults(),
    )
    is_lost(ranks[0])


def test_a_rank_that_closes_after_its_last_call_is_missed_in_later_calls_only(three: list[Rank]):
    """Also where another rank, in a later call, has ended every wait because of it."""
    together(three)
    faults.say_why(three[2].page, "its program ended")
    three[2].page.leave()
    raised_by(three[0], PeerLostError, "rank 2 is gone: its program ended, after its call 1", Rank.host)
    three[1].calls.check_faults()
    raised_by(three[1], PeerLostError, "rank 2 is gone: its program ended, after its call 1", Rank.host)


def test_a_loss_ends_an_exchange(ranks: list[Rank]):
    before = ranks[0].page.read_round

    def read(serial: int) -> Any:
        ranks[0].page.post_lost(1, "its process has ended")
        return before(serial)

    ranks[0].page.read_round = read  # type: ignore[method-assign]
    raised_by(ranks[0], PeerLostError, "its process has ended", Rank.host)
    is_lost(ranks[0])


def test_the_fault_is_raised_before_a_loss_that_came_of_it(ranks: list[Rank]):
    ranks[1].refuse()
    ranks[1].page.post_lost(1, "its process has ended")
    raised_by(ranks[0], PeerFailedError, "no such op")
    raised_by(ranks[0], PeerLostError, "its process has ended")


def test_lose(ranks: list[Rank]):
    cause = ValueError("why")
    lost = ranks[0].calls.lose("it gave up", cause)
    assert "this rank cannot go on with the others (ValueError: why). The communicator can only be" in str(lost)
    is_lost(ranks[0])
    raised_by(ranks[1], PeerLostError, r"rank 0 is gone: it gave up \(ValueError: why\)")


def test_the_end(ranks: list[Rank]):
    ranks[0].calls.close(ArgumentError("the communicator is closed"))
    raised_by(ranks[0], ArgumentError, "is closed")
    assert ranks[0].calls.number == 0
    ranks[0].calls.check_faults()


def test_in_a_forked_child(ranks: list[Rank]):
    """The lock may be held by a thread that is not there."""
    calls = ranks[0].calls
    in_threads([calls.lock.acquire])
    calls.forked(ArgumentError("forked"))
    raised_by(ranks[0], ArgumentError, "forked")


def test_a_loss_that_is_told_while_a_rank_looks_at_the_page(three: list[Rank], monkeypatch: pytest.MonkeyPatch):
    """It came behind the look at the records of losses: the rank finds it in its next look, and no timeout."""
    waiting, other, dead = three
    look = faults.raise_lost

    def meanwhile(page: Page, number: int) -> None:
        look(page, number)
        other.page.post_lost(dead.page.rank, "its process has ended")

    waiting.call()
    with monkeypatch.context() as patched:
        patched.setattr(faults, "raise_lost", meanwhile)
        waiting.calls.check_wait(1, sequence.clock.now() + HANG, [2])
    with pytest.raises(PeerLostError, match="rank 2 is gone: its process has ended"):
        waiting.calls.check_wait(1, sequence.clock.now() + HANG, [2])
