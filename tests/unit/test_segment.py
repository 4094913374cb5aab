"""The shared segment and the reducer over it, by ranks that are threads of this process, and its semaphores."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipcreduce.errors import PeerTimeoutError, UnsupportedError
from ipcreduce.host import segment as segment_module
from ipcreduce.host import semaphores
from ipcreduce.host.segment import Segment, areas, segment_bytes, small_bytes
from ipcreduce.host.shared import SharedReducer
from ipcreduce.page import shared_files
from ipcreduce.page.layout import page_bytes
from tests.shared.bounds import HANG
from tests.unit.pages import in_threads


def make_segments(n: int) -> list[Segment]:
    first = Segment.create(0, n)
    others = [Segment.open(first.path, rank, n) for rank in range(1, n)]
    shared_files.remove(first.path)
    return [first, *others]


def never(missing: list[int]) -> None:
    assert missing, "asked for nobody"


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 64, 128, 500])
def test_sizes(n: int):
    small = small_bytes(n)
    assert small % 64 == 0
    assert small >= 1024
    most, *less = areas(n)
    assert (64 << 10) <= most <= (1 << 20)
    assert n > 128 or n * most <= 8 << 20
    assert less
    assert less[-1] == 16 << 10
    for area in (most, *less):
        assert area % 64 == 0
        assert segment_bytes(n, area) >= n * (2 * small + area + area // n + 16)  # the last share may have more
    assert len({segment_bytes(n, area) for area in areas(n)}) == len(areas(n)), "the size tells the area"


@pytest.mark.parametrize(("n", "room"), [(2, 1 << 40), (2, 30 << 20), (4, 64 << 20), (4, 1 << 20), (3, 20 << 20)])
def test_less_is_taken_where_less_is_left(n: int, room: int, monkeypatch: pytest.MonkeyPatch):
    """And every rank knows how much, and results are right, whatever the length of a chunk."""
    monkeypatch.setattr(shared_files, "free_bytes", lambda: room)
    segments = make_segments(n)
    least = segment_bytes(n, 16 << 10)
    assert all(one.nbytes == segments[0].nbytes for one in segments)
    assert segments[0].nbytes <= max(room // 16, least)
    assert 2.2 * segments[0].nbytes > min(room // 16, segment_bytes(n, 1 << 20)), "needlessly small"
    inputs = [np.random.default_rng(rank).integers(-9, 9, 300_001).astype(np.float32) for rank in range(n)]

    def rank(segment: Segment) -> None:
        out = np.empty_like(inputs[0])
        for count in (5, 9000, 300_001):
            SharedReducer(segment).allreduce(inputs[segment.rank][:count], "sum", out[:count], never, lambda: None)
            assert (out[:count] == np.sum(inputs, 0)[:count]).all()

    in_threads([lambda segment=segment: rank(segment) for segment in segments])


@pytest.mark.parametrize(("n", "most"), [(2, 50), (4, 41), (8, 31), (16, 22)])
def test_how_many_find_room_in_a_container_of_docker(n: int, most: int):
    """SECURITY.md has these figures."""
    room, made = 64 << 20, 0
    while (nbytes := page_bytes(n) + segment_bytes(n, segment_module._area_bytes(n, room - page_bytes(n)))) <= room:
        room, made = room - nbytes, made + 1
    assert made == most


@pytest.mark.parametrize("n", [2, 3, 5])
def test_chunks_of_changing_length_and_dtype(n: int, monkeypatch: pytest.MonkeyPatch):
    """Slow readers find the results of their own chunk: not parts of the next, whose shares lie elsewhere."""
    segments = make_segments(n)
    for one in segments:
        one.small_bytes, one.area_bytes = 64, 960
    numbers = random.Random(n)
    calls = [(numbers.choice([np.float32, np.float64, np.int8]), numbers.randrange(1, 2000)) for _ in range(40)]

    def rank(segment: Segment) -> None:
        reducer, pauses = SharedReducer(segment), random.Random(segment.rank)
        hand_over = segment.hand_over

        def slowly(check: Callable[[list[int]], None]) -> None:
            hand_over(check)
            if pauses.random() < 0.2:
                time.sleep(0.002)

        segment.hand_over = slowly  # type: ignore[method-assign]
        for number, (dtype, count) in enumerate(calls):
            array = (np.arange(count) % 7 + segment.rank + number).astype(dtype)
            out = np.empty_like(array)
            reducer.allreduce(array, "max", out, never, lambda: None)
            assert (out == (np.arange(count) % 7 + n - 1 + number).astype(dtype)).all(), (number, dtype, count)

    in_threads([lambda segment=segment: rank(segment) for segment in segments])


def test_small_messages_in_a_row():
    """A slow reader finds the data of its own message, though a peer has the next one's in place by then."""
    segments, next_one = make_segments(2), threading.Event()
    hand_over = segments[0].hand_over
    handovers: list[int] = []

    def telling(check: Callable[[list[int]], None]) -> None:
        handovers.append(1)
        if len(handovers) == 2:
            next_one.set()
        hand_over(check)

    segments[0].hand_over = telling  # type: ignore[method-assign]

    def rank(segment: Segment) -> None:
        reducer, out = SharedReducer(segment), np.empty(5)
        for turn in (1, 2):
            reads_late = segment.rank == 1 and turn == 1
            array = np.full(5, 10.0 * turn + segment.rank)
            reducer.allreduce(array, "sum", out, never, lambda late=reads_late: next_one.wait(HANG) if late else None)  # type: ignore[misc]
            assert out.tolist() == [20.0 * turn + 1] * 5, (segment.rank, turn)

    in_threads([lambda segment=segment: rank(segment) for segment in segments])


def test_a_waiting_rank_lets_others_run(monkeypatch: pytest.MonkeyPatch):
    """A peer may need its processor, also if there are as many processors as ranks."""
    waiting, peer = make_segments(2)
    comes = iter([lambda: peer.hand_over(never)])
    monkeypatch.setattr(segment_module.os, "sched_yield", lambda: next(comes, lambda: None)())
    waiting.hand_over(lambda missing: pytest.fail(f"{missing} did not come"))


def test_the_missing_are_named_and_a_reset_forgets_what_they_gave(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segment_module, "_TICK_SECONDS", 0.01)
    segments = make_segments(4)

    def late(missing: list[int]) -> None:
        raise PeerTimeoutError(str(missing))

    segments[2]._post(segments[2]._outgoing[0])  # rank 2 has given to rank 0 alone
    with pytest.raises(PeerTimeoutError, match=r"^\[1, 3\]$"):
        segments[0].hand_over(late)
    with pytest.raises(PeerTimeoutError, match=r"^\[2, 3\]$"):  # from rank 0 there was one
        segments[1].hand_over(late)
    reducers = [SharedReducer(segment) for segment in segments]
    for _ in range(2):
        for reducer in reducers:
            reducer.quiesce(0.0)
            reducer.reset([])
        with pytest.raises(PeerTimeoutError, match=r"^\[0, 1, 3\]$"):
            segments[2].hand_over(late)
    for reducer in reducers:
        reducer.reset([])

    def call(reducer: SharedReducer, value: float) -> None:
        out = np.empty(3)
        reducer.allreduce(np.full(3, value), "sum", out, never, lambda: None)
        assert out.tolist() == [6.0] * 3

    in_threads([lambda reducer=reducer, rank=rank: call(reducer, float(rank)) for rank, reducer in enumerate(reducers)])


def test_data_that_overlap_their_results():
    segments = make_segments(2)
    expected = np.arange(300_000.0)

    def rank(segment: Segment) -> None:
        memory = np.concatenate([np.arange(300_000.0) / 2, np.zeros(5)])
        SharedReducer(segment).allreduce(memory[:300_000], "sum", memory[5:], never, lambda: None)
        assert (memory[5:] == expected).all()

    in_threads([lambda segment=segment: rank(segment) for segment in segments])


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_files, "_DIRECTORY", str(tmp_path))  # other tests have files in /dev/shm

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: /dev/shm needs 3\.3 MB more .*--shm-size"):
        Segment.create(0, 2)
    assert not [*tmp_path.iterdir()]


def test_semaphores():
    segment = Segment.create(0, 2)
    shared_files.remove(segment.path)
    found, address = semaphores.library(), segment._semaphores[1]
    assert found.try_wait(address) != 0
    started = time.monotonic()
    assert not semaphores.wait(address, 0.05)
    assert time.monotonic() - started >= 0.04
    found.post(address)
    assert semaphores.wait(address, HANG)
    threading.Timer(0.05, lambda: found.post(address)).start()
    assert semaphores.wait(address, 10), "a wait keeps other threads from running"


def test_a_semaphore_where_the_stack_has_no_room():
    """It was an ArgumentError of ctypes, as that converted the address by calls of its own."""
    segment = Segment.create(0, 2)
    address, kinds = segment._semaphores[1], set()

    def go(deeper: int) -> None:
        if deeper:
            go(deeper - 1)
        segment._post(address)
        segment._try_wait(address)

    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
        try:
            go(depth)
        except Exception as error:
            kinds.add(type(error))
    assert kinds == {RecursionError}
    shared_files.remove(segment.path)


def test_without_semaphores(monkeypatch: pytest.MonkeyPatch):
    """The ranks fall back to MPI, as for any UnsupportedError at that step."""

    class Nothing:
        def __init__(self, _: object) -> None: ...

    monkeypatch.setattr(semaphores, "library", functools.cache(semaphores._Library))
    monkeypatch.setattr(semaphores.ctypes, "PyDLL", Nothing)
    with pytest.raises(UnsupportedError, match="has no semaphores"):
        Segment.create(0, 2)
