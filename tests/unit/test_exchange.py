"""The exchange between ranks, over a stand-in for them that answers when the test says so."""

from __future__ import annotations

import errno
import importlib
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce.calls.page_channel import PageChannel
from ipcreduce.errors import (
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    Reach,
    UnsupportedError,
)
from ipcreduce.ranks import exchange
from ipcreduce.ranks.exchange import Kind
from ipcreduce.texts import text_in
from tests.shared import clock
from tests.tools.machine import ROOT

MODULES = [
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted((ROOT / "ipcreduce").rglob("*.py")) if re.search(r"\bstruct\(", path.read_text())
]  # fmt: skip
STRUCTS = [
    value for module in MODULES for value in vars(module).values()
    if isinstance(value, np.dtype) and "kind" in (value.metadata or ())
]  # fmt: skip
SAMPLE = exchange.struct(99, ("call", "<u8"))


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

    rank, size, call, silence, left = 1, 3, 0, "silence", False

    def gather(self, sent: np.ndarray, received: np.ndarray) -> Request:
        assert sent.dtype == received.dtype == np.uint8, "pickled or typed data"
        assert received.nbytes == 3 * sent.nbytes

        def finish() -> None:
            received[:] = np.tile(sent, 3)
            kind = sent.view(exchange.CONFIRMATION)["kind"]
            [dtype] = [struct for struct in (*STRUCTS, SAMPLE) if struct.metadata["kind"] == kind]
            for rank in (0, 2):
                self.change(rank, received.view(dtype)[rank : rank + 1])

        self.requests.append(Request(finish, self.at))
        return self.requests[-1]

    def allgather(self, record: np.ndarray, seconds: float = 10.0) -> np.ndarray:
        return exchange.allgather(self, record, clock.now() + seconds, "a test")

    def complete(self, seconds: float = 10.0, **options: Any) -> np.ndarray:
        """What the ranks have sent in an exchange that :func:`exchange.complete` has waited for."""
        record, gathered = exchange.message(SAMPLE, call=4), np.zeros(3, SAMPLE)
        request = self.gather(record.view(np.uint8), gathered.view(np.uint8))
        exchange.complete(request, self, clock.now() + seconds, "a test", **options)
        return gathered


def test_all_messages_have_one_size_and_their_own_kind():
    """In whatever module they are made."""
    assert sorted(struct.metadata["kind"] for struct in STRUCTS) == sorted(Kind)
    assert {struct.itemsize for struct in STRUCTS} == {exchange.MESSAGE_BYTES}
    for struct in STRUCTS:
        for field in ("magic", "version", "kind", "length", "ok", "left", "text"):
            assert struct.fields[field] == exchange.CONFIRMATION.fields[field], "read before the kind is known"
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
    assert text_in(record[0]) == ""


STAYS, LACKS, LEAVES = 0, 1, 2


@pytest.mark.parametrize(
    ("error", "text", "left"),
    [
        ("no GPU, said the driver", "no GPU, said the driver", STAYS),
        (UnsupportedError("no GPU"), "no GPU", STAYS),
        (FileNotFoundError(errno.ENOENT, "gone"), "[Errno 2] gone", STAYS),
        (OSError(errno.EMFILE, "too many"), "[Errno 24] too many: this process may have ", LACKS),
        (MemoryError(), "MemoryError", LEAVES),
        (ValueError("a \udcff"), "ValueError: a \\udcff", LEAVES),
        (KeyboardInterrupt(), "KeyboardInterrupt", LEAVES),
    ],
)
def test_an_error_travels_as_text(error: Any, text: str, left: int):
    """With what the rank does next: errors of ours and of the system lead to another way, as far as that helps."""
    record = exchange.message(exchange.CONFIRMATION, error)[0]
    assert (record["ok"], record["left"]) == (0, left)
    assert text_in(record).startswith(text)


def test_a_text_for_a_field_is_cut_between_characters():
    """Its room is counted in bytes, and NumPy takes ASCII only."""
    assert bytes(exchange.message(exchange.PAGE, path="é" * 40)[0]["path"]).decode() == "é" * 30 + "..."
    assert bytes(exchange.message(exchange.PAGE, path="\udcff")[0]["path"]) == b"\\udcff"


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "x" + "é" * 5000, "\N{SNOWMAN}" * 5000])
def test_a_long_text_is_cut_and_stays_readable(text: str):
    found = text_in(exchange.message(exchange.CONFIRMATION, text)[0])
    assert text.startswith(found.removesuffix("..."))
    assert found.endswith("...")
    assert len(found.encode()) > exchange.TEXT_BYTES - 4


def test_an_error_without_words_is_still_an_error():
    assert exchange.message(exchange.CONFIRMATION, ValueError())["ok"] == 0


@pytest.mark.parametrize("polls", [1, 2, 500])
def test_gathers_every_ranks_record_by_rank(polls: int):
    def number(rank: int, record: Any) -> None:
        record["call"] = 10 * rank

    world = World(number, at=polls)
    gathered = world.allgather(exchange.message(SAMPLE, call=11))
    assert gathered["call"].tolist() == [0, 11, 20]
    assert gathered.dtype == SAMPLE
    assert world.requests[0].polls == polls


@pytest.mark.parametrize("field", ["magic", "version", "kind", "length"])
@pytest.mark.parametrize("other", [0, 2])
def test_another_program_or_version_is_named(field: str, other: int):
    def change(rank: int, record: Any) -> None:
        if rank == other:
            record[field] = 77

    with pytest.raises(RankMismatchError) as caught:
        World(change).allgather(exchange.message(exchange.CONFIRMATION))
    assert re.match(f"rank 1, start-up: rank {other} has {field} 77 at a test, and this rank", str(caught.value))
    assert "same version of ipcreduce" in str(caught.value)


def test_the_deadline_ends_a_wait():
    with clock.standing():
        begun = clock.now()
        with pytest.raises(PeerTimeoutError, match=r"rank 1, call 9: not all 3 ranks came to a test") as caught:
            World(at=None).complete(seconds=100.0, call=9, interrupt=lambda: clock.advance(9.0))
        assert 100 < clock.now() - begun <= 109
    assert "close" in str(caught.value), "what is left to do"


def test_start_up_has_no_call_number():
    with pytest.raises(PeerTimeoutError, match="rank 1, start-up: not all 3 ranks came to "):
        World(at=None).allgather(exchange.message(exchange.CONFIRMATION), seconds=0.0)


def test_a_late_answer_within_the_deadline_is_taken():
    world = World(at=None)

    def ask() -> None:
        clock.advance(1.0)
        if world.requests[0].polls == 8:
            world.requests[0]._at = world.requests[0].polls + 1

    with clock.standing():
        assert world.complete(interrupt=ask)["call"].tolist() == [4, 4, 4]


def test_the_wait_can_be_interrupted():
    asked = 0

    def interrupt() -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise RuntimeError("a rank has gone")

    with pytest.raises(RuntimeError, match="a rank has gone"):
        World(at=None).complete(interrupt=interrupt)
    assert asked == 5


def test_a_long_wait_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(exchange.time, "sleep", lambda seconds: (slept.append(seconds), clock.advance(seconds)))
    with clock.standing(), pytest.raises(PeerTimeoutError):
        World(at=None).complete(seconds=10.0)
    assert len(slept) < 12_000, "a poll takes a millisecond after some time"
    assert sum(slept) > 9.9


def test_a_step_passes_where_all_confirm_it():
    exchange.confirm(World(), None, clock.now() + 10, "a step")


def test_a_failed_step_names_ranks_and_reasons():
    def change(rank: int, record: Any) -> None:
        record["ok"], record["text"] = rank == 0, b"" if rank == 0 else b"out of memory"

    with pytest.raises(UnsupportedError) as caught:
        exchange.confirm(World(change), UnsupportedError("bad handle"), clock.now() + 10, "mapping")
    assert str(caught.value) == "mapping failed on 2 of 3 ranks: rank 1: bad handle; rank 2: out of memory"


@pytest.mark.parametrize("waits", [False, True])
def test_ctrl_c_ends_only_a_step_that_waits(waits: bool):
    """There is a vote in both cases: see test_a_step_tells_of_any_exception."""
    world, ended = World(), []

    def act() -> None:
        with exchange.step(world, clock.now() + 10, "a step", waits=waits):
            signal.raise_signal(signal.SIGINT)
            ended.append("the step")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert ended == ([] if waits else ["the step"])
    assert len(world.requests) == 1


def test_a_step_that_fails_everywhere_stays_short():
    gathered = np.concatenate([exchange.message(exchange.CONFIRMATION, "no GPU") for _ in range(8)])
    with pytest.raises(UnsupportedError) as caught:
        exchange.check(World(), gathered, "start-up")
    assert "failed on 8 of 8 ranks: rank 0: no GPU; rank 1: no GPU; rank 2: no GPU" in str(caught.value)
    assert "rank 3" not in str(caught.value)


# ---- ranks that leave start-up
def leaves(record: Any, error: BaseException) -> None:
    """Makes a record that of a rank which leaves, in place of whatever it was."""
    left = exchange.message(exchange.PAGE, error)["left"]
    record[:] = exchange.message(exchange.LEAVING, error, left=left).view(record.dtype)


def test_a_rank_that_raises_in_an_exchange_of_a_call_is_named():
    """No start-up is meant there."""
    world = World(lambda rank, record: leaves(record, MemoryError("none left")) if rank == 2 else None)
    world.call = 7
    with pytest.raises(PeerFailedError, match=r"^rank 2 raised an error \(MemoryError: none left\)$") as caught:
        world.allgather(exchange.message(exchange.CONFIRMATION))
    assert caught.value.reach is Reach.OWN, "no fault stands behind it, so each rank tells of it"


def test_what_a_rank_lacks_in_a_call_is_an_error_as_any_other():
    """No further way is tried then."""
    lacking = exchange.message(exchange.CONFIRMATION, OSError(errno.EMFILE, "none left"))
    world = World(lambda rank, record: record.__setitem__(..., lacking[0]) if rank == 2 else None)
    world.call = 7
    with pytest.raises(exchange.Agreed, match=r"^sending failed on 1 of 3 ranks: rank 2: .*none left: this process"):
        exchange.confirm(world, None, clock.now() + 10, "sending")
    assert not world.left


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError("none left"), PeerFailedError), (OSError(errno.EMFILE, "none left"), UnsupportedError)],
)
@pytest.mark.parametrize("dtype", [exchange.CONFIRMATION, exchange.MEMORY, exchange.PAGE])
def test_a_rank_that_leaves_is_named_at_the_next_exchange(dtype: Any, error: BaseException, kind: type[Exception]):
    """Whichever that is, and though the other one of the two sends something else."""

    def change(rank: int, record: Any) -> None:
        if rank == 2:
            leaves(record, error)

    world = World(change)
    with pytest.raises(kind, match="rank 1, start-up: rank 2 has left start-up") as found:
        world.allgather(exchange.message(dtype))
    assert "none left" in str(found.value)
    assert world.left
    assert type(found.value) is kind, "which leads to no other way"


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), KeyboardInterrupt(), UnicodeDecodeError("a", b"", 0, 1, "b")]
)
def test_a_step_tells_of_any_exception(error: BaseException):
    """Which passes unchanged on its own rank."""
    sent: list[Any] = []

    def change(rank: int, record: Any) -> None:
        sent.append(record.copy())

    world = World(change)
    with pytest.raises(type(error)) as found, exchange.step(world, clock.now() + 10, "a step"):
        raise error
    assert found.value is error
    assert [one["left"].tolist() for one in sent] == [[LEAVES]] * 2
    assert world.left
    exchange.tell(world, error, clock.now() + 10)
    assert len(world.requests) == 1, "all know"


def test_a_step_without_descriptors_leads_to_no_other_way():
    world = World()
    with pytest.raises(UnsupportedError, match="too many: this process may have") as found:  # noqa: SIM117
        with exchange.step(world, clock.now() + 10, "a step"):
            raise OSError(errno.EMFILE, "too many")
    assert type(found.value) is UnsupportedError
    assert isinstance(found.value.__cause__, OSError)


def test_a_step_that_fails_by_our_errors_leads_to_another_way():
    world = World()
    with pytest.raises(exchange.Agreed, match="a step failed on 3 of 3 ranks: rank 0: no P2P"):  # noqa: SIM117
        with exchange.step(world, clock.now() + 10, "a step"):
            raise UnsupportedError("no P2P")
    assert not world.left


@pytest.mark.parametrize(
    ("error", "left"), [(MemoryError(), LEAVES), (UnsupportedError("no"), LACKS), (OSError(), LACKS)]
)
def test_what_is_met_outside_of_a_step_is_told_in_place_of_the_next_exchange(error: Exception, left: int):
    """The others are at something else, and that is no mismatch."""
    sent: list[Any] = []

    def change(rank: int, record: Any) -> None:
        sent.append(record.copy())
        record[:] = exchange.message(exchange.PAGE).view(record.dtype)

    world = World(change)
    exchange.tell(world, error, clock.now() + 10)
    assert [one["left"].tolist() for one in sent] == [[left]] * 2
    assert world.left


@pytest.mark.parametrize("error", [exchange.Agreed(""), PeerTimeoutError(""), PeerLostError(""), RankMismatchError("")])
def test_what_every_rank_meets_is_not_told(error: Exception):
    world = World()
    exchange.tell(world, error, clock.now() + 10)
    assert (world.requests, world.left) == ([], False)


def test_an_interrupt_waits_for_nobody_long(monkeypatch: pytest.MonkeyPatch):
    """The others may be in a compiler. An error of the program's is told until the deadline."""
    monkeypatch.setattr(exchange, "_LAST_WORDS_SECONDS", 0.05)
    world = World(at=None)
    exchange.tell(world, KeyboardInterrupt(), clock.now() + 3600)
    assert not world.left
    assert exchange.last_words(MemoryError(), 7.0) == exchange.last_words(None, 7.0) == 7.0


def test_no_interrupt_is_lost_within_an_exchange_over_the_page():
    """NumPy's C code drops what is raised in npy_ctypes_check(), a Ctrl-C too. So nothing here may call it."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    page: Any = SimpleNamespace(rank=0, n=2)
    sent, received = np.arange(40, dtype=np.uint8), np.zeros(80, np.uint8)
    ranks = PageChannel(page, 1, lambda data: [data, bytes(len(data))])
    sys.setprofile(note)
    try:
        ranks.gather(sent, received)
    finally:
        sys.setprofile(None)
    assert received.tolist() == [*range(40), *[0] * 40]
    assert "gather" in entered
    assert "npy_ctypes_check" not in entered
