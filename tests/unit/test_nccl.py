"""The parts of the backend nccl that need neither NCCL nor a GPU: errors, aborts beside calls, the guard."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ipcreduce import errors
from ipcreduce.device import background, stream_order
from ipcreduce.device.backend import Validity
from ipcreduce.device.last_call import NOTHING, ON_STREAM, Last
from ipcreduce.device.stream_order import StreamOrder
from ipcreduce.nccl import comm as comm_module
from ipcreduce.nccl import guard as guard_module
from ipcreduce.nccl import library
from ipcreduce.nccl.backend import NcclBackend
from ipcreduce.nccl.comm import NcclCommunicator
from ipcreduce.nccl.guard import Guard
from ipcreduce.page.control_page import REFUSED, Page
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.types import Stream
from tests.shared import bounds, clock
from tests.shared.bounds import HANG


class Failed(Exception):
    status = 5


class Binding(ModuleType):
    """nccl.bindings.nccl, of which nothing works but what a test puts in."""

    NCCLError = Failed
    aborted: list[Any]

    def get_version(self) -> int:
        return 22809

    def comm_abort(self, comm: Any) -> None:
        self.aborted.append(comm)

    def comm_get_async_error(self, comm: Any) -> int:
        return 6 if comm == "failed" else 0

    def Result(self, code: int) -> Any:
        return SimpleNamespace(name="RemoteError")

    def all_reduce(self, *arguments: Any) -> None:
        if arguments[5] is None:
            raise TypeError("Cannot convert None")
        arguments[5](arguments)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    made = Binding("nccl.bindings.nccl")
    made.aborted = []
    package = ModuleType("nccl.bindings")
    package.nccl = made  # type: ignore[attr-defined]
    for name, module in (("nccl", package), ("nccl.bindings", package), ("nccl.bindings.nccl", made)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(comm_module, "using_relaxed", lambda context: nullcontext())
    background.start()
    library.load.cache_clear()
    yield made
    library.load.cache_clear()


def test_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    library.load.cache_clear()
    with pytest.raises(errors.UnsupportedError, match=r"pip install '\.\[nccl-cuda13\]'"):
        library.load()


def test_a_library_that_is_missing(binding: Binding, monkeypatch: pytest.MonkeyPatch):
    def missing(self: Binding) -> int:
        raise RuntimeError("Failure finding libnccl.so.2")

    monkeypatch.setattr(Binding, "get_version", missing)
    with pytest.raises(errors.UnsupportedError, match=r"libnccl.so.2.*pip install nvidia-nccl-cu13"):
        library.version()


def test_errors_of_the_binding(binding: Binding):
    comm = NcclCommunicator(0)
    with pytest.raises(
        errors.CudaError, match="ncclAllReduce failed: the NCCL communicator has been aborted"
    ) as caught:
        comm.all_reduce((1, 2, 3, 7, 0), 9)
    assert caught.value.reach is errors.Reach.ENDED

    def refuse(_: Any) -> None:
        raise Failed("invalid usage")

    comm.use(refuse)
    with pytest.raises(errors.CudaError, match=r"ncclAllReduce failed: invalid usage \(5\)"):
        comm.all_reduce((1, 2, 3, 7, 0), 9)
    comm.use("failed")
    assert comm.problem() == "NCCL: RemoteError (6)"
    comm.use("good")
    assert comm.problem() is None


def test_an_abort_waits_for_a_call_that_is_being_enqueued(binding: Binding):
    comm, within, leave = NcclCommunicator(0), threading.Event(), threading.Event()

    def slow(_: Any) -> None:
        within.set()
        leave.wait(HANG)

    comm.use(slow)
    caller = threading.Thread(target=comm.all_reduce, args=[(1, 2, 3, 7, 0), 9])
    caller.start()
    assert within.wait(HANG)
    comm.abort()
    assert not comm.is_open
    assert not comm.when_freed(int, 0.05)
    assert not comm.is_freed(0.05)
    assert not binding.aborted, "freed under a call"
    leave.set()
    assert comm.when_freed(int, 10)
    caller.join(HANG)
    assert binding.aborted == [slow]
    assert comm.is_freed(0.0)
    comm.abort()
    assert comm.when_freed(int, 10)
    assert binding.aborted == [slow], "twice"


@pytest.mark.parametrize("held", [False, True])
def test_the_next_communicator_is_made_when_the_last_one_is_freed(held: bool):
    """Freeing waits for the device, and keeps others from the driver. One that a graph holds is not waited for."""
    did: list[str] = []
    backend = NcclBackend.__new__(NcclBackend)
    backend.nccl = SimpleNamespace(  # type: ignore[assignment]
        abort=lambda: did.append("abort"), is_freed=lambda seconds: did.append("freed") or True
    )
    backend._guard = SimpleNamespace(reset=lambda: None)  # type: ignore[assignment]
    backend.validity = Validity()
    backend.order = SimpleNamespace(shared=held)  # type: ignore[assignment]
    backend._timeout = 60.0
    backend.join = lambda identity, deadline: did.append("join")  # type: ignore[method-assign]
    backend.reset([b"\1" + bytes(128)])
    assert did == (["abort", "join"] if held else ["abort", "freed", "join"])
    backend.reset([b"\0" + bytes(128)])
    assert len(did) == 3 - held, "nobody has aborted"


def test_an_abort_does_not_wait_for_graphs(binding: Binding, monkeypatch: pytest.MonkeyPatch):
    """NCCL frees a communicator only when no graph holds a call of it any more."""
    gone = threading.Event()
    monkeypatch.setattr(Binding, "comm_abort", lambda self, comm: comm == "next" or gone.wait(HANG))
    comm = NcclCommunicator(0)
    comm.use("with a graph")
    comm.abort()
    assert not comm.when_freed(int, 0.05)
    comm.use("next")
    comm.abort()
    freed = threading.Event()
    assert not comm.when_freed(freed.set, 0.05)
    assert not freed.is_set()
    gone.set()
    assert freed.wait(HANG)


# ---- the guard
class Order:
    over = True
    launched = 0

    def is_over(self) -> bool:
        return self.over

    def mark(self, event: Any, between: Any) -> bool:
        return True


@pytest.fixture
def guarded(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A guard over a page of two ranks, and events that have come if ``ended``."""
    made = SimpleNamespace(ended=False)
    streams = SimpleNamespace(create_event=lambda: 1, create_stream=lambda: 2, is_over=lambda event: made.ended)
    monkeypatch.setattr(guard_module, "streams", streams)
    monkeypatch.setattr(guard_module, "using_relaxed", lambda context: threading.Lock())
    made.page, made.order, made.nccl = Page.alone(0, 2), Order(), NcclCommunicator(0)
    made.nccl.use("comm")
    made.guard = Guard(0, made.page, made.order, made.nccl, 100.0)  # type: ignore[arg-type]
    return made


def launch(guarded: Any, number: int) -> None:
    """A call of rank 0."""
    guarded.page.calls.enter(number, Fingerprint.of("a sum"))
    guarded.order.launched = number


def test_nothing_is_aborted_where_no_call_waits(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard_module, "_GRACE_SECONDS", 0.0)
    guarded.page.post_fault(REFUSED, 1, "why")
    for _ in range(3):
        guarded.guard.look()
    assert guarded.nccl.is_open
    assert not guarded.page.ended_without_data
    guarded.order.over = False
    for _ in range(3):
        guarded.guard.look()
        clock.advance(0.001)
    assert not guarded.nccl.is_open
    assert guarded.page.ended_without_data


def test_a_call_that_ends_within_the_grace_is_left_alone(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard_module, "_GRACE_SECONDS", 60.0)
    guarded.page.post_fault(REFUSED, 1, "why")
    guarded.order.over = False
    guarded.guard.look()
    guarded.guard.look()
    assert guarded.nccl.is_open


def test_a_call_that_does_not_end_names_who_is_behind(guarded: Any):
    launch(guarded, 1)
    guarded.guard.look()
    clock.advance(101.0)
    guarded.guard.look()
    assert guarded.page.aborted
    assert guarded.page.missed() == {1}


def test_a_call_that_ends_is_none_that_is_late(guarded: Any):
    launch(guarded, 1)
    guarded.guard.look()
    guarded.ended = True
    clock.advance(101.0)
    for _ in range(3):
        guarded.guard.look()
    assert not guarded.page.aborted


def test_a_call_that_is_launched_late_is_watched(guarded: Any):
    """Its number is on the page before NCCL has put it on the stream."""
    guarded.page.calls.enter(1, Fingerprint.of("a sum"))
    guarded.ended = True  # what the stream has had before
    for _ in range(3):
        guarded.guard.look()
    guarded.ended = False
    guarded.order.launched = 1
    guarded.guard.look()
    clock.advance(101.0)
    guarded.guard.look()
    assert guarded.page.aborted
    assert guarded.page.missed() == {1}


def test_a_call_that_waits_in_nccl_is_late_too(guarded: Any):
    """On the host, since its links are made in the first call."""
    within, over = threading.Event(), threading.Event()
    guarded.nccl.use(lambda _: (within.set(), over.wait(HANG)))
    guarded.page.calls.enter(1, Fingerprint.of("a sum"))
    caller = threading.Thread(target=guarded.nccl.all_reduce, args=[(1, 2, 3, 7, 0), 9])
    caller.start()
    assert within.wait(HANG)
    guarded.guard.look()
    assert not guarded.page.aborted
    clock.advance(101.0)
    guarded.guard.look()
    assert guarded.page.missed() == {1}
    for _ in range(2):  # no stream has anything: the call in NCCL is ended nevertheless
        guarded.guard.look()
        clock.advance(101.0)
    assert not guarded.nccl.is_open
    over.set()
    caller.join(HANG)


def test_many_calls_that_are_quick_are_none_that_waits(guarded: Any):
    """The guard may find one after the other of them in NCCL, with the same argument."""
    argument = (1, 2, 3, 7, 0)
    for number in range(1, 5):
        guarded.page.calls.enter(number, Fingerprint.of("a sum"))
        guarded.nccl.enqueuing = argument
        guarded.guard.look()
        clock.advance(60.0)
    assert not guarded.page.aborted


def test_a_turn_in_which_a_call_fails_begins_anew(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    launch(guarded, 1)
    guarded.guard.look()

    def fail(event: Any) -> bool:
        raise errors.CudaError("cuEventQuery", 1, "once")

    with monkeypatch.context() as patch:
        patch.setattr(guard_module.streams, "is_over", fail)
        guarded.guard.look()
    guarded.guard.look()
    clock.advance(101.0)
    guarded.guard.look()
    assert guarded.page.aborted


def test_the_order_is_not_marked_within_a_launch(monkeypatch: pytest.MonkeyPatch):
    """The event of a call that is being launched is still that of the call before."""

    class Launching(StreamOrder):
        _open, last = True, Last(ON_STREAM, Stream(7))

        def __init__(self) -> None:
            pass

    monkeypatch.setattr(stream_order, "streams", SimpleNamespace(capture_id=lambda stream: 0))
    assert not Launching().mark(1, 2)  # type: ignore[arg-type]


def test_the_order_is_asked_while_calls_go_on(monkeypatch: pytest.MonkeyPatch):
    """By the guard, without the lock: the stream that it has looked up is the one that it asks for."""
    asked: list[Any] = []

    class Moving(StreamOrder):
        turns = iter([Last(ON_STREAM, Stream(7)), Last(NOTHING), Last(NOTHING)])
        _open, _replayed = False, None
        last = property(lambda self: next(self.turns))  # type: ignore[assignment]

        def __init__(self) -> None:
            self._context = 0

    streams = SimpleNamespace(capture_id=lambda stream: 0, is_idle=lambda stream: asked.append(stream) or True)
    monkeypatch.setattr(stream_order, "streams", streams)
    monkeypatch.setattr(stream_order, "using_relaxed", lambda context: threading.Lock())
    assert Moving().is_over()
    assert asked == [7]


def test_a_turn_that_fails_is_not_the_last(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    turns: list[int] = []

    def look() -> None:
        turns.append(1)
        raise RuntimeError("once")

    monkeypatch.setattr(guard_module, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(guarded.guard, "look", look)
    monkeypatch.setattr(logging.Handler, "handle", lambda handler, record: 1 / 0)  # as a full disk does
    guarded.guard.start()
    bounds.until(lambda: len(turns) >= 3, "the next turn")
    guarded.guard._stopped.put(None)
    guarded.guard._thread.join(HANG)
    assert len(turns) >= 3


def test_each_fault_has_its_own_time_of_grace(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    """Also if the ranks meet, and the next fault comes, between two turns."""
    monkeypatch.setattr(guarded.order, "is_over", lambda: False)
    guarded.page.post_fault(REFUSED, 1, "why")
    guarded.guard.look()
    clock.advance(1.5 * guard_module._GRACE_SECONDS)
    guarded.guard.reset()
    guarded.guard.look()
    assert guarded.nccl.is_open


def test_what_was_seen_before_the_ranks_met_is_not_acted_on(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    """The guard was held up between its look and its act: neither a fault, nor an abort, nor a timeout."""
    page = guarded.page

    def meets_and(value: Any) -> Any:
        def look(*_: Any) -> Any:
            page.clear()
            return value

        return look

    with monkeypatch.context() as patch:
        patch.setattr(guard_module, "_NOTICE_SECONDS", 0.0)
        patch.setattr(guarded.nccl, "problem", meets_and("NCCL: an error"))
        guarded.guard.look()
    with monkeypatch.context() as patch:
        patch.setattr(guard_module, "_GRACE_SECONDS", 0.0)
        patch.setattr(guarded.order, "is_over", lambda: False)
        page.post_fault(REFUSED, 1, "why")
        guarded.guard.look()
        clock.advance(0.001)
        patch.setattr(guarded.order, "is_over", meets_and(False))
        guarded.guard.look()
    assert not page.aborted
    launch(guarded, 2)
    guarded.guard.look()
    clock.advance(101.0)
    with monkeypatch.context() as patch:
        patch.setattr(guard_module.streams, "is_over", meets_and(False))
        guarded.guard.look()
    assert not page.aborted
    assert not page.ended_without_data
    assert guarded.nccl.is_open


def test_nccls_own_errors_are_told(guarded: Any, monkeypatch: pytest.MonkeyPatch):
    guarded.nccl.use("failed")
    guarded.guard.look()
    assert guarded.page.fault() is None, "the watchdog may notice the end of a rank, and name it"
    monkeypatch.setattr(guard_module, "_NOTICE_SECONDS", 0.0)
    guarded.guard.look()
    fault = guarded.page.fault()
    assert fault is not None
    assert (fault[1], fault[2], fault[3]) == (0, REFUSED, "NCCL: RemoteError (6)")
    assert not guarded.nccl.is_open
    assert guarded.page.ended_without_data
