"""The exchange between ranks, over a stand-in for them that answers when the test says so."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ipcreduce.coordination import exchange
from ipcreduce.errors import PeerTimeoutError, RankMismatchError, UnsupportedError
from ipcreduce.ipc import links, tuning
from tests.shared import clock

STRUCTS = {
    name: value for module in (exchange, links, tuning) for name, value in vars(module).items()
    if isinstance(value, np.dtype)
}  # fmt: skip


class Request:
    """Done at the given poll, counted from 1; never, if that is None."""

    def __init__(self, finish: Callable[[], None], at: int | None) -> None:
        self.polls, self._finish, self._at = 0, finish, at

    def Test(self) -> bool:
        self.polls += 1
        if self.polls == self._at:
            self._finish()
        return self._at is not None and self.polls >= self._at


class World:
    """Rank 1 of three. ``change(rank, record)`` edits what the other ranks send, which else is what this one sends."""

    def __init__(self, change: Callable[[int, Any], None] = lambda rank, record: None, at: int | None = 3) -> None:
        self.change, self.at = change, at
        self.requests: list[Request] = []

    rank, size, silence = 1, 3, "silence"

    def gather(self, sent: np.ndarray, received: np.ndarray) -> Request:
        assert sent.dtype == received.dtype == np.uint8, "pickled or typed data"
        assert received.nbytes == 3 * sent.nbytes

        def finish() -> None:
            received[:] = np.tile(sent, 3)
            kind = sent.view(exchange.CONFIRMATION)["kind"]
            [dtype] = [struct for struct in STRUCTS.values() if struct.metadata["kind"] == kind]
            for rank in (0, 2):
                self.change(rank, received.view(dtype)[rank : rank + 1])

        self.requests.append(Request(finish, self.at))
        return self.requests[-1]

    def allgather(self, record: np.ndarray, seconds: float = 10.0, **options: Any) -> np.ndarray:
        return exchange.allgather(self, record, clock.now() + seconds, "a test", **options)


def test_all_messages_have_one_size_and_their_own_kind():
    assert {"IDENTITY", "DEVICE", "PAGE", "MEMORY", "CONFIRMATION", "CALL", "VERDICT", "TUNING"} == set(STRUCTS)
    assert {struct.itemsize for struct in STRUCTS.values()} == {exchange.MESSAGE_BYTES}
    kinds = [struct.metadata["kind"] for struct in STRUCTS.values()]
    assert len(set(kinds)) == len(kinds)
    for struct in STRUCTS.values():
        for field in ("magic", "version", "kind", "length", "ok", "text"):
            assert struct.fields[field] == exchange.CONFIRMATION.fields[field] or field == "text"
        assert not struct.hasobject


def test_a_message_is_filled_in():
    record = exchange.message(exchange.MEMORY, handle=np.void(bytes(range(64))), nbytes=1 << 40)
    assert record.shape == (1,)
    assert record["magic"] == exchange.MAGIC
    assert record["version"] == exchange.VERSION
    assert record["kind"] == exchange.MEMORY.metadata["kind"]
    assert record["length"] == record.nbytes == exchange.MESSAGE_BYTES
    assert record["ok"] == 1
    assert record["handle"][0].tobytes() == bytes(range(64))
    assert record["nbytes"] == 1 << 40
    assert exchange.text_of(record[0]) == ""


def test_an_error_travels_as_text():
    record = exchange.message(exchange.CONFIRMATION, ValueError("no GPU, said the driver"))
    assert record["ok"] == 0
    assert exchange.text_of(record[0]) == "no GPU, said the driver"


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "x" + "é" * 5000, "\N{SNOWMAN}" * 5000])
def test_a_long_text_is_cut_and_stays_readable(text: str):
    found = exchange.text_of(exchange.message(exchange.CONFIRMATION, text)[0])
    whole = found.rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that was cut in two
    assert text.startswith(whole)
    assert len(whole.encode()) > exchange.TEXT_BYTES - 4


def test_an_error_without_words_is_still_an_error():
    assert exchange.message(exchange.CONFIRMATION, ValueError())["ok"] == 0


@pytest.mark.parametrize("polls", [1, 2, 500])
def test_gathers_every_ranks_record_by_rank(polls: int):
    def number(rank: int, record: Any) -> None:
        record["call"] = 10 * rank

    world = World(number, at=polls)
    gathered = world.allgather(exchange.message(exchange.CALL, call=11))
    assert gathered["call"].tolist() == [0, 11, 20]
    assert gathered.dtype == exchange.CALL
    assert world.requests[0].polls == polls


@pytest.mark.parametrize("field", ["magic", "version", "kind", "length"])
@pytest.mark.parametrize("other", [0, 2])
def test_another_program_or_version_is_named(field: str, other: int):
    def change(rank: int, record: Any) -> None:
        if rank == other:
            record[field] = 77

    with pytest.raises(RankMismatchError) as caught:
        World(change).allgather(exchange.message(exchange.CONFIRMATION), call=5)
    assert re.match("rank 1, call 5: expected ", str(caught.value))
    assert f"{field} 77 from rank {other}" in str(caught.value)
    assert "same version of ipcreduce" in str(caught.value)


def test_the_deadline_ends_a_wait():
    with clock.standing():
        begun = clock.now()
        with pytest.raises(PeerTimeoutError, match=r"rank 1, call 9: expected all 3 ranks at a test") as caught:
            World(at=None).allgather(
                exchange.message(exchange.CALL), seconds=100.0, call=9, interrupt=lambda: clock.advance(9.0)
            )
        assert 100 < clock.now() - begun <= 109
    assert "close" in str(caught.value), "what is left to do"


def test_what_was_given_up_is_kept():
    """The late rank's data may still come, into the buffers that the request holds."""
    world = World(at=None)
    for interrupt in (None, lambda: 1 / 0):
        with pytest.raises((PeerTimeoutError, ZeroDivisionError)):
            world.allgather(exchange.message(exchange.CALL), seconds=0.01, interrupt=interrupt)
        request = weakref.ref(world.requests.pop())
        gc.collect()
        assert request() is not None


def test_start_up_has_no_call_number():
    with pytest.raises(PeerTimeoutError, match="rank 1, start-up: expected"):
        World(at=None).allgather(exchange.message(exchange.CONFIRMATION), seconds=0.0)


def test_a_late_answer_within_the_deadline_is_taken():
    world = World(at=None)
    record = exchange.message(exchange.CALL, call=4)

    def ask() -> None:
        clock.advance(1.0)
        if world.requests[0].polls == 8:
            world.requests[0]._at = world.requests[0].polls + 1

    with clock.standing():
        assert world.allgather(record, interrupt=ask)["call"].tolist() == [4, 4, 4]


def test_the_wait_can_be_interrupted():
    asked = 0

    def interrupt() -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise RuntimeError("a rank has gone")

    with pytest.raises(RuntimeError, match="a rank has gone"):
        World(at=None).allgather(exchange.message(exchange.CALL), interrupt=interrupt)
    assert asked == 5


def test_a_long_wait_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(exchange.time, "sleep", lambda seconds: (slept.append(seconds), clock.advance(seconds)))
    with clock.standing(), pytest.raises(PeerTimeoutError):
        World(at=None).allgather(exchange.message(exchange.CALL), seconds=10.0)
    assert len(slept) < 12_000, "a poll takes a millisecond after some time"
    assert sum(slept) > 9.9


def test_a_step_passes_where_all_confirm_it():
    exchange.confirm(World(), None, clock.now() + 10, "a step")


def test_a_failed_step_names_ranks_and_reasons():
    def change(rank: int, record: Any) -> None:
        record["ok"], record["text"] = rank == 0, b"" if rank == 0 else b"out of memory"

    with pytest.raises(UnsupportedError) as caught:
        exchange.confirm(World(change), ValueError("bad handle"), clock.now() + 10, "mapping")
    assert str(caught.value) == "mapping failed on 2 of 3 ranks: rank 1: bad handle; rank 2: out of memory"


def test_a_step_that_fails_everywhere_stays_short():
    gathered = np.concatenate([exchange.message(exchange.CONFIRMATION, "no GPU") for _ in range(8)])
    with pytest.raises(UnsupportedError) as caught:
        exchange.check(World(), gathered, "start-up")
    assert "failed on 8 of 8 ranks: rank 0: no GPU; rank 1: no GPU; rank 2: no GPU" in str(caught.value)
    assert "rank 3" not in str(caught.value)
