"""Readers of what other ranks have written, each with valid messages, for tests/fuzz/messages.py."""

from __future__ import annotations

import json
import socket
import struct
import time
import types
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ipcreduce.calls import faults, votes
from ipcreduce.calls.request import NormShape
from ipcreduce.errors import IpcReduceError
from ipcreduce.graphs.direct import registration
from ipcreduce.ipc import norm_plan, plan, tuning
from ipcreduce.page import control_page
from ipcreduce.page.control_page import Page
from ipcreduce.page.layout import CHUNK_BYTES, rank_layout, ranks_offset
from ipcreduce.page.mirror import Mirror
from ipcreduce.page.records import Slot
from ipcreduce.page.rounds import Left
from ipcreduce.ranks import exchange
from ipcreduce.texts import text_in
from tests.shared.fingerprints import of_allreduce
from tests.unit.pages import make_pages

N = 3
_SUM = of_allreduce("sum", "float32", (100,))


@dataclass
class Target:
    """A reader of other ranks' messages, some of which are valid."""

    name: str
    valid: list[bytes]
    read: Callable[[bytes], object]
    may_raise: tuple[type[Exception], ...] = (IpcReduceError,)
    share: int = 1  # of the turns


# ---- start-up
def _startup(name: str, record: np.ndarray[Any, Any], use: Callable[[Any], object]) -> Target:
    own = record.tobytes()

    class Two:
        rank, size, call, silence = 0, 2, 0, ""
        theirs = b""

        def gather(self, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> Any:
            padded = self.theirs[: exchange.MESSAGE_BYTES].ljust(exchange.MESSAGE_BYTES, b"\0")
            received.reshape(-1)[:] = np.frombuffer(own + padded, np.uint8)
            return types.SimpleNamespace(Test=lambda: True)

    ranks: Any = Two()

    def read(data: bytes) -> None:
        ranks.theirs = data
        gathered = exchange.allgather(ranks, record, time.monotonic() + 1, name)
        exchange.check(ranks, gathered, name)
        use(gathered[1])

    return Target(name, [own], read)


def _received(record: Any) -> None:
    with suppress(ValueError, IndexError):  # startup.py makes its error of these
        tuning.received(record, 2)


_TABLE = tuning.Tables(
    plan.checked_table(
        [plan.Choice(1 << 16, "one_shot", 128, 128, 1), plan.Choice(1 << 30, "two_shot", 256, 132, 1)], 2
    ),
    norm_plan.checked_table([norm_plan.NormChoice(4096, 8, "one_shot", 4)]),
)
_ROWS = NormShape(rows=8, hidden=4096, dtype="float16", eps=1e-6, weight_bias=0.0, residual=True)


def _tuned_file(directory: Path) -> Target:
    path = directory / "tuned.json"
    with mock.patch.object(tuning, "path_of", return_value=path):
        tuning.save("GPU", 2, _TABLE)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with mock.patch.object(tuning, "path_of", return_value=path):
            table = tuning.load("GPU", 2, lambda text: None)
        if table.messages:  # start-up sends it, and plans by it
            tuning.received(tuning.message(table)[0], 2)
            plan.make_plan(1 << 20, plan.Gpus(2, 8 << 20), table=table.messages)
            norm_plan.make_plan(_ROWS, plan.Gpus(2, 8 << 20), table=table.norms)

    return Target("tuned table in a file", [path.read_bytes(), *_odd_tables(path)], read, may_raise=())


def _odd_tables(path: Path) -> list[bytes]:
    """Tables with values that JSON can have and that are no table's."""
    found = []
    for odd in (None, True, 128.0, 0.5, -1, 1 << 70, "128", "", [], [128], {}, {"block": 1}):
        content = json.loads(path.read_text())
        for part in ("choices", "norms"):
            for name in content[part][0]:
                row = {**content[part][0], name: odd}
                found.append(json.dumps({**content, part: [row]}).encode())
        for name in content:
            found.append(json.dumps({**content, name: odd}).encode())
        found.append(json.dumps(odd).encode())
    return found


# ---- votes and registration
def _vote() -> Target:
    mine = votes.Vote(7, True, 2, 99, "").pack()
    other = votes.Vote(9, False, 2, 99, "ZeroDivisionError: of the program").pack()

    def read(data: bytes) -> None:
        answers = iter([[mine, data]])

        def gather(number: int, payload: bytes, *_: Any) -> list[bytes]:
            return next(answers, [payload, data])

        calls: Any = types.SimpleNamespace(gather=gather, number=7, catch_up=lambda number: None, rank=0)
        votes.agree(calls, 7, [_SUM, _SUM], None)

    return Target("votes", [mine, other], read)


def _left() -> Target:
    valid = Left(2, "KeyboardInterrupt: ").pack().ljust(CHUNK_BYTES, b"\0")
    return Target("rounds that a rank has left", [valid], lambda data: str(Left.unpack(data[:CHUNK_BYTES])))


def _registration() -> Target:
    slab = np.array([(3, 4096, 0, np.void(bytes(64)))], registration._SLAB)
    spans = np.array([(3, 256), (-1, 0)], registration._SPAN)
    first = slab.tobytes()

    def read(data: bytes) -> None:
        answers = [data[: len(first)], data[len(first) :]]
        graphs: Any = types.SimpleNamespace(_gather=lambda number, payload: [payload, answers.pop(0)])
        rows = registration.DirectGraphs._gather_rows(graphs, 1, slab)
        known = [{int(one["number"]): one for one in each} for each in rows]
        both = registration.DirectGraphs._gather_rows(graphs, 1, spans)
        if all(len(one) == len(spans) for one in both):
            registration.check_spans(0, known, both, [1024, 1024])

    return Target("registration of graphs", [first + spans.tobytes()], read)


# ---- the control page
class _Page:
    """The page of ranks that have made some calls, as rank 0 reads it."""

    def __init__(self) -> None:
        self.pages = make_pages(N)
        for call in (1, 2, 3):
            for page in self.pages:
                page.calls.enter(call, _SUM)
        one = self.pages[1]
        one.write_round(1, True, 4, b"data")
        one.write_round(2, False, 4, Left(1, "KeyboardInterrupt: ").pack())
        one.write_meeting(1, 3, 2, b"offer")
        one.post_fault(control_page.REFUSED, 3, "ArgumentError: op must be one of sum")
        self.pages[2].post_lost(1, "its process has ended")
        self.valid = bytes(one._map[:])

    def read(self) -> None:
        """All that rank 0 reads of its peers."""
        page = self.pages[0]
        number = page.calls.call_of(0)
        for ask in (
            lambda: faults.raise_lost(page, number), lambda: faults.raise_lost(page, number, any_call=True),
            lambda: faults.fault_error(page, number, 1.0), lambda: faults.all_come(page, number),
            lambda: faults._positions(page, 1.0), lambda: faults._last_calls(page),
            lambda: page.read_round(1), lambda: page.read_round(2), lambda: page.read_meeting(1),
            page.fault, page.loss, page.missed, lambda: page.calls.differing(number),
            lambda: page.calls.first_differing(1, 1, number), lambda: page.identity(1), lambda: page.has_unmapped(1),
        ):  # fmt: skip
            with suppress(IpcReduceError):
                ask()
        for part in page.read_round(2):
            if part is not None and not part[0]:
                with suppress(IpcReduceError):
                    Left.unpack(part[2])


def _page() -> tuple[Target, Target]:
    """Rank 1's block, and any place of the flight recorder."""
    state = _Page()
    layout = rank_layout(N)
    assert layout.fields is not None
    at = ranks_offset(N) + layout.itemsize
    block = slice(at, at + layout.itemsize)
    recorder = slice(state.pages[0].head_bytes, ranks_offset(N))
    first = state.valid[block]

    def read(data: bytes) -> None:
        page = state.pages[0]
        page._map[block] = data[: len(first)].ljust(len(first), b"\0")
        page.abort_word[0] = data[0] if data else 0
        state.read()
        page._map[:] = state.valid

    def read_recorder(data: bytes) -> None:
        whole = state.valid[recorder]
        place = zlib.crc32(data) % max(1, len(whole) - len(data))
        page = state.pages[0]
        page._map[recorder.start + place : recorder.start + place + len(data)] = data
        state.read()
        page._map[:] = state.valid

    return Target("control page", [first], read, share=2), Target("flight recorder", [bytes(64)], read_recorder)


def _sealed() -> Target:
    """Records whose checksum fits, so that readers believe them."""
    state = _Page()
    page = state.pages[1]
    slots: list[Slot] = [page._faults[1], page._losses[1], page._meetings[1], page._rounds[0][1], page._rounds[1][1]]
    valid = [page._map[slot._place] for slot in slots]

    def read(data: bytes) -> None:
        for slot, one in zip(slots, valid, strict=True):
            if len(data) > 4:
                changed = data[4 : len(one)].ljust(len(one) - 4, b"\0")
                page._map[slot._place] = zlib.crc32(changed).to_bytes(4, "little") + changed
        state.read()
        for slot, one in zip(slots, valid, strict=True):
            page._map[slot._place] = one

    return Target("records with a checksum that fits", valid, read, share=2)


# ---- between hosts
def _mirror() -> Target:
    page = Page.alone(0, 2)
    page.join(1, 3)
    for call in (1, 2):
        page.calls.enter(call, _SUM)
    sender = Page.alone(1, 2)
    sender.join(4, 6)
    sender.calls.enter(1, _SUM)
    sender.abort()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    talking = Mirror(sender, {0: ours})
    talking.send()
    valid = theirs.recv(1 << 20)
    blank = bytes(page._map[:])

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        mirror = Mirror(page, {1: ours})
        theirs.sendall(data)
        mirror.receive()
        theirs.close()
        mirror.receive()
        for ask in (lambda: faults.raise_lost(page, 2), lambda: faults.fault_error(page, 2, 1.0)):
            with suppress(IpcReduceError):
                ask()
        mirror.close(0)
        page._map[:] = blank

    return Target("messages between hosts", [valid, struct.pack("<Q", 0) * 7], read, may_raise=())


def targets(directory: Path) -> list[Target]:
    page, recorder = _page()
    return [
        _startup("identity", exchange.message(exchange.IDENTITY, host=b"host"), text_in),
        _startup("device", exchange.message(exchange.DEVICE, name=b"GPU"), lambda one: bytes(one["name"])),
        _startup("handle", exchange.message(exchange.MEMORY, nbytes=4096), text_in),
        _startup("confirmation", exchange.message(exchange.CONFIRMATION, "an error"), text_in),
        _startup("tuned table", tuning.message(_TABLE), _received),
        _tuned_file(directory), _vote(), _left(), _registration(), page, recorder, _sealed(), _mirror(),
    ]  # fmt: skip
