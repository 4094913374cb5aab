"""Groups of any kind as the exchange takes them; those of several processes are in tests/mpi/test_without_mpi.py."""

from __future__ import annotations

import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

import ipcreduce
from ipcreduce.errors import ArgumentError, PeerLostError, PeerTimeoutError, UnsupportedError
from ipcreduce.ranks import exchange, groups
from tests.shared import bounds, clock

SAMPLE = exchange.struct(99, ("call", "<u8"))


class Echo:
    """Rank 1 of 3. The others send what it sends, changed by ``change(rank, data)``."""

    rank, size = 1, 3

    def __init__(self, change: Callable[[int, bytes], Any] = lambda rank, data: data) -> None:
        self.sent: list[bytes] = []
        self.change = change

    def allgather(self, data: bytes) -> list[bytes]:
        self.sent.append(data)
        return [data if rank == 1 else self.change(rank, data) for rank in range(3)]


def gather(group: Any, seconds: float = 60.0, **fields: Any) -> Any:
    record = exchange.message(SAMPLE, **fields)
    return exchange.allgather(groups.of(group), record, clock.now() + seconds, "a test")


def test_every_ranks_bytes_arrive_by_rank():
    def number(rank: int, data: bytes) -> bytes:
        record = exchange.message(SAMPLE, call=rank * 10)
        return record.tobytes()

    group = Echo(number)
    assert gather(group, call=11)["call"].tolist() == [0, 11, 20]
    assert [type(data) for data in group.sent] == [bytes]
    assert len(group.sent[0]) == exchange.MESSAGE_BYTES


def test_it_is_called_in_another_thread_one_call_at_a_time():
    threads = []
    group = Echo(lambda rank, data: threads.append(threading.current_thread()) or data)
    gather(group)
    gather(group)
    assert threading.main_thread() not in threads
    assert all(thread.daemon for thread in threads)


def test_without_a_further_thread_it_is_called_in_this_one(monkeypatch: pytest.MonkeyPatch):
    """But not where it would wait for a call that has not ended."""
    threads, over = [], threading.Event()
    group = Echo(lambda rank, data: (threads.append(threading.current_thread()), data)[1])
    waiting = Echo(lambda rank, data: (over.wait(bounds.HANG), data)[1])
    with clock.own(), clock.passing(100.0), pytest.raises(PeerTimeoutError):
        gather(waiting, call=1)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert gather(group, call=3)["call"].tolist() == [3] * 3
        with pytest.raises(UnsupportedError, match="can start no further thread"):
            gather(waiting, call=2)
    assert set(threads) == {threading.main_thread()}
    over.set()
    gather(waiting, call=1)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (object(), "AttributeError"),
        (types.SimpleNamespace(rank=0, size=1), "AttributeError"),
        (types.SimpleNamespace(rank=0, size=1, allgather=3), "allgather is no method"),
        (types.SimpleNamespace(rank=0.0, size=1, allgather=len), "TypeError"),
        (types.SimpleNamespace(rank=lambda: 0, size=lambda: 1, allgather=len), "TypeError"),
        (types.SimpleNamespace(rank=None, size=1, allgather=len), "TypeError"),
    ],
)
def test_what_is_no_group_is_refused(group: Any, words: str):
    with pytest.raises(
        ArgumentError, match=r"Pass an mpi4py intracommunicator, .* process group, or an object"
    ) as caught:
        ipcreduce.Communicator(group)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "error"), [("rank", SystemExit(3)), ("__class__", ReferenceError("gone"))])
def test_a_group_whose_attributes_raise_is_refused(name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch):
    """Also where MPI is loaded, whose classes are asked first."""

    class Raising(Echo):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise error
            return super().__getattribute__(asked)

    monkeypatch.setattr(groups.mpi, "loaded", lambda: types.SimpleNamespace(Comm=threading.Thread))
    with pytest.raises(ArgumentError, match=rf"which is no group \({type(error).__name__}: "):
        groups.of(Raising())


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, -1), (5, 3), (0, 1 << 70), (9, 10**9)])
def test_a_rank_outside_of_its_group_is_refused(rank: int, size: int):
    with pytest.raises(ArgumentError, match=f"this process has rank {rank} in a group of {size}, and ranks go from 0"):
        ipcreduce.Communicator(types.SimpleNamespace(rank=rank, size=size, allgather=list))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, "NoneType"),
        (b"x" * 3, "bytes"),
        ([], "0 items"),
        ([b""] * 4, "4 items"),
        ([b"", b"", b""], "0 bytes of rank 0"),
        ([bytes(2048), bytes(2047), bytes(2048)], "2047 bytes of rank 1"),
        ([bytes(2048), bytes(2048), bytearray(2048)], "bytearray of rank 2"),
        ([bytes(2048), None, bytes(2048)], "NoneType of rank 1"),
    ],
)
def test_an_answer_of_another_form_is_refused(answer: Any, found: str):
    group = types.SimpleNamespace(rank=1, size=3, allgather=lambda data: answer)
    words = f"allgather has returned {found}, though each of 3 ranks gave 2048 bytes. Return a list of 3 bytes objects"
    with pytest.raises(ArgumentError, match=re.escape(words)):
        gather(group)
    with pytest.raises(ArgumentError, match=re.escape(words)):
        ipcreduce.Communicator(group)


class Bytes(bytes):
    """Those of a library."""

    def __len__(self) -> int:
        raise OSError("no length")


class Lazy(list[bytes]):
    """Fetches what it has been asked for."""

    def __iter__(self) -> Any:
        raise OSError("not fetched")


def test_bytes_and_lists_of_a_library_are_taken_by_what_they_hold():
    assert gather(Echo(lambda rank, data: Bytes(data)), call=5)["call"].tolist() == [5] * 3
    with pytest.raises(PeerLostError, match="the group's allgather raised OSError: not fetched"):
        gather(types.SimpleNamespace(rank=1, size=3, allgather=lambda data: Lazy([data] * 3)))


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), SystemExit(3), KeyError("x")])
def test_a_group_that_raises_is_lost(error: BaseException):
    def raises(data: bytes) -> list[bytes]:
        raise error

    with pytest.raises(
        PeerLostError, match=f"rank 1, start-up: the group's allgather raised {type(error).__name__}: "
    ) as caught:
        ipcreduce.Communicator(types.SimpleNamespace(rank=1, size=3, allgather=raises))
    assert caught.value.__cause__ is error


class Gate(Echo):
    """Answers once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.under_way = self.most = 0

    def allgather(self, data: bytes) -> list[bytes]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.opened.wait(60)
        self.under_way -= 1
        return super().allgather(data)


def test_a_group_that_does_not_answer_is_named():
    group = Gate()
    answer = "not all 3 ranks came to start-up: the group's allgather has not answered"
    with clock.passing(121.0), pytest.raises(PeerTimeoutError, match=answer):
        ipcreduce.Communicator(group)
    group.opened.set()


@pytest.mark.parametrize("opened", ["before", "after"])
def test_the_answer_to_a_call_that_was_given_up_is_taken(opened: str):
    """The other ranks take part in it when they come, whether this one has asked again by then or not."""
    group = Gate()
    ranks = groups.of(group)
    with pytest.raises(PeerTimeoutError):
        ranks.join(0.05)
    if opened == "before":
        group.opened.set()
    else:
        threading.Timer(0.05, group.opened.set).start()
    with pytest.raises(
        ArgumentError, match=r"has put the bytes of rank 1 of .* at place 0"
    ):  # they say what this one says
        groups.of(group).join(60)
    assert len(group.sent) == 1


def test_another_call_waits_for_the_end_of_one_that_was_given_up():
    group = Gate()
    for call in (1, 2):
        with pytest.raises(PeerTimeoutError):
            gather(group, seconds=0.05, call=call)
    group.opened.set()
    assert gather(group, call=3)["call"].tolist() == [3, 3, 3]
    assert len(group.sent) == 3
    assert group.most == 1, "two calls at a time"


def test_nothing_is_kept_of_calls_that_were_answered():
    before = dict(groups._open)
    gather(Echo())
    with pytest.raises(ArgumentError):
        gather(types.SimpleNamespace(rank=0, size=1, allgather=list))
    assert groups._open == before


def test_the_number_on_a_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    hosts = [b"a", b"b", b"a", b"a", b"b"]
    numbers = [groups.GroupRanks(None, len, rank, 5).local_rank(hosts) for rank in range(5)]
    assert numbers == [0, 0, 1, 2, 1]
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert groups.GroupRanks(None, len, 0, 5).local_rank(hosts) == 7
    for text in ("", "²", "1" * 5000):
        monkeypatch.setenv("LOCAL_RANK", text)
        assert groups.GroupRanks(None, len, 2, 5).local_rank(hosts) == 1


class One:
    rank, size = 0, 1

    def allgather(self, data: bytes) -> list[bytes]:
        return [data]


def test_a_group_needs_no_pytorch(monkeypatch: pytest.MonkeyPatch):
    """Nor that it has torch.distributed, which some builds lack."""
    for module in (None, types.ModuleType("torch.distributed")):
        monkeypatch.setitem(sys.modules, "torch.distributed", module)
        with ipcreduce.Communicator(One()) as comm:
            assert comm.allreduce(3) == 3
