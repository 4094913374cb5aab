"""The control page, with the ranks as several mappings of one file in this process."""

from __future__ import annotations

import gc
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from ipcreduce.errors import PeerFailedError, PeerTimeoutError, RankMismatchError
from ipcreduce.ipc import control, flight_recorder, watchdog
from ipcreduce.ipc.control import Page
from ipcreduce.ipc.flight_recorder import RING
from ipcreduce.ipc.signature import Signature, Vote, signature
from ipcreduce.numerics import DTYPE_NAMES, OPS

SUM = signature((10,), "float32", "sum")
ON_HOST = Signature.of(f"{SUM} on the host")


def make_pages(n: int) -> list[Page]:
    first = Page.create(0, n)
    pages = [first, *(Page.open(first.path, rank, n) for rank in range(1, n))]
    for page in pages:
        page.join(*watchdog.own_identity())
    first.unlink()
    return pages


@pytest.fixture
def pages() -> list[Page]:
    return make_pages(3)


# ---- the file
def test_only_this_user_opens_the_file_and_it_goes():
    page, other = Page.create(0, 2), Page.create(0, 2)
    path, status = Path(page.path), os.stat(page.path)
    page.unlink()
    other.unlink()
    assert path.parent == Path("/dev/shm")
    assert other.path != page.path
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_size == page.nbytes == control.page_bytes(2)
    assert not path.exists()
    page.unlink()  # again is harmless
    page.abort()  # the mapping stays
    assert page.aborted


def test_nothing_is_left_of_a_page():
    gc.collect()
    descriptors, maps = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("ipcreduce-")
    make_pages(4)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert Path("/proc/self/maps").read_text().count("ipcreduce-") == maps


def test_no_link_is_followed(tmp_path: Path):
    page = Page.create(0, 2)
    (tmp_path / "link").symlink_to(page.path)
    with pytest.raises(OSError, match="symbolic links"):
        Page.open(str(tmp_path / "link"), 1, 2)
    page.unlink()


def test_a_page_that_has_gone_is_an_error():
    with pytest.raises(FileNotFoundError):
        Page.open("/dev/shm/ipcreduce-no-such-page", 1, 2)


@pytest.mark.parametrize("n", range(1, 9))
def test_whole_pages_and_aligned_words(n: int):
    assert control.page_bytes(n) % mmap.PAGESIZE == 0
    recorder = flight_recorder.nbytes(n)
    assert control.page_bytes(n) >= control.HEAD_BYTES + recorder + n * control._RANK.itemsize
    assert not any(size % 8 for size in (recorder, control._RANK.itemsize)), "words are read by aligned accesses"
    lines = [control.HEAD_BYTES, flight_recorder._keys_bytes(n), flight_recorder._RANK.itemsize]
    assert not any(size % 64 for size in lines), "a rank's number has a cache line"
    assert control.HEAD_BYTES % mmap.PAGESIZE == 0, "the GPUs get whole pages"
    lines = [control.ABORT_OFFSET, *(control.missing_offset(rank) for rank in range(n))]
    assert len({offset // 64 for offset in lines}) == n + 1, "a cache line each"
    assert max(lines) + 4 <= control.HEAD_BYTES


def test_ranks_see_each_other(pages: list[Page]):
    pid, started, namespace = watchdog.own_identity()
    assert pid == os.getpid()
    assert started > 0
    assert namespace == os.stat("/proc/self/ns/pid").st_ino
    assert all(page.identity(rank) == (pid, started, namespace) for page in pages for rank in range(3))
    pages[2].leave()
    assert [page.has_left(2) for page in pages] == [True] * 3
    assert [page.has_left(1) for page in pages] == [False] * 3


# ---- signatures
def test_signatures_differ_in_all_that_matters():
    different = [
        signature((10,), "float32", "sum"),
        signature((10,), "int32", "sum"),
        signature((10,), "float32", "max"),
        signature((11,), "float32", "sum"),
        signature((5, 2), "float32", "sum"),
        signature((2, 5), "float32", "sum"),
        signature((10, 1), "float32", "sum"),
        signature((), "float32", "sum"),
        signature((1,), "float32", "sum"),
        signature((0,), "float32", "sum"),
        signature((0, 3), "float32", "sum"),
        signature((1, 2, 3, 4, 5, 6), "float32", "sum"),
        signature((1, 2, 3, 4, 5, 7), "float32", "sum"),
        ON_HOST,
    ]
    assert len({one.crc for one in different}) == len(different)
    assert signature((10,), "float32", "sum") == SUM


def test_every_pair_of_dtype_and_op_differs():
    assert len({signature((8,), dtype, op).crc for dtype in DTYPE_NAMES for op in OPS}) == 60


def test_votes(pages: list[Page]):
    """Nobody is absent once all have cast; two votes do not disturb each other; one can be taken back."""
    for serial in (1, 2, 3):
        for page in pages:
            assert page.absent(serial) == [other.rank for other in pages[page.rank :]]
            page.cast(serial, Vote(7 + serial, True, page.rank, 5, ""))
        if serial > 1:
            assert not pages[0].absent(serial - 1), "gone while a slow rank may still read it"
    assert pages[1].votes(3) == [Vote(10, True, rank, 5, "") for rank in range(len(pages))]
    pages[2].cast(3, Vote(10, False, 2, 5, "ValueError: " + "é" * 1000))
    late = pages[0].votes(3)[2]
    assert (late.ok, late.text[:14], len(late.text.encode()) <= 512) == (False, "ValueError: éé", True)


def test_waiting_in_vain(pages: list[Page]):
    """A rank that did not come to a vote is named on every rank, and every wait ends."""
    for page in pages[:-1]:
        page.calls.enter(3, Signature.of("recording of a graph"))
    pages[0].miss([len(pages) - 1])
    for page in pages:
        assert page.aborted
        assert f"rank {len(pages) - 1} never came" in str(page.explain(3, 5.0))


def test_a_rank_writes_only_its_own_block(pages: list[Page]):
    begin = control._ranks_offset(3)
    blocks = slice(begin, begin + 3 * control._RANK.itemsize)
    before = np.frombuffer(pages[0]._map, np.uint8)[blocks].reshape(3, -1).copy()
    pages[1].calls.enter(RING - 1, SUM)
    assert (np.frombuffer(pages[0]._map, np.uint8)[blocks].reshape(3, -1) == before).all(), "the recorder has its own"
    pages[1].post(control.REFUSED, 1, "x" * 5000)
    pages[1].leave()
    after = np.frombuffer(pages[0]._map, np.uint8)[blocks].reshape(3, -1)
    assert (after != before).any(axis=1).tolist() == [False, True, False]


# ---- faults
def test_a_fault_raises_everybodys_abort_word(pages: list[Page]):
    assert not any(page.aborted for page in pages)
    assert pages[0].fault() is None
    pages[1].post(control.REFUSED, 4, "ArgumentError: op must be sum")
    assert all(page.aborted for page in pages)
    assert pages[2].fault() == (4, 1, control.REFUSED, "ArgumentError: op must be sum")


def test_the_abort_word_is_the_pages_first(pages: list[Page]):
    """Where the kernels look for it."""
    pages[1].abort()
    assert bytes(pages[0]._map[:8]) == b"\1" + bytes(7)


def test_the_earliest_fault_counts(pages: list[Page]):
    pages[2].post(control.MISMATCH, 9, "late")
    pages[1].post(control.REFUSED, 5, "early")
    assert pages[0].fault() == (5, 1, control.REFUSED, "early")


def test_a_refused_call(pages: list[Page]):
    pages[1].post(control.REFUSED, 4, "ArgumentError: op must be sum")
    error = pages[2].explain(6, 30.0)
    assert type(error) is PeerFailedError
    assert str(error) == (
        "rank 2, call 6: expected call 4 on every rank; found that rank 1 refused it (ArgumentError: op must be sum). "
        "The communicator can be used again."
    )


def test_a_mismatch(pages: list[Page]):
    pages[0].post(control.MISMATCH, 7, "sum of int8 (3,) on rank 0 and sum of int8 (4,) on rank 1")
    error = pages[1].explain(7, 30.0)
    assert type(error) is RankMismatchError
    assert str(error) == (
        "rank 1, call 7: expected the same call 7 on every rank; found sum of int8 (3,) on rank 0 and sum of int8 (4,) "
        "on rank 1. Make the ranks' programs agree; the communicator can be used again."
    )


def miss(page: Page, *ranks: int) -> None:
    """What this rank's kernels write when their waits for these ranks pass the deadline."""
    word = np.frombuffer(page._map, np.uint32, 1, control.missing_offset(page.rank))
    word[0] = sum(1 << rank for rank in ranks)


def test_a_timeout_says_who_never_came_and_what_it_did_last(pages: list[Page]):
    for page in pages:
        page.calls.enter(1, SUM)
    for rank in (0, 2):
        pages[rank].calls.enter(2, signature((6,), "int64", "max"))
        miss(pages[rank], 1)
    pages[0].abort()
    error = pages[0].explain(2, 1.5)
    assert type(error) is PeerTimeoutError
    assert str(error) == (
        "rank 0, call 2: expected every rank within 1.5 s; found rank 1 never came: its last call was 1 "
        "(sum of float32 (10,)); ranks [0, 2] are at call 2 (max of int64 (6,)). Look for a rank that waits elsewhere "
        "(a transfer, a lock, another collective, a decorator outside of eager_break), or raise timeout=."
    )


def test_a_rank_that_never_called(pages: list[Page]):
    pages[0].calls.enter(1, SUM)
    miss(pages[0], 1, 2)
    text = str(pages[0].explain(1, 1.0))
    assert "rank 1 never came: its last call was 0; rank 2 never came: its last call was 0; ranks [0] are at" in text


def test_a_chain_of_waits_ends_at_the_rank_that_is_behind(pages: list[Page]):
    """Rank 0 waits for 1, which is at the same call and waits for 2, the one to look for."""
    for rank in (0, 1):
        pages[rank].calls.enter(1, SUM)
        miss(pages[rank], rank + 1)
    text = str(pages[0].explain(1, 1.0))
    assert "rank 2 never came" in text
    assert "rank 1 never came" not in text


def test_every_call_is_named_where_ranks_between_have_not_come():
    ranks, other = make_pages(5), signature((3,), "int8", "sum")
    ranks[0].calls.enter(1, SUM)
    ranks[2].calls.enter(1, other)
    miss(ranks[0], 1)
    text = str(ranks[0].explain(1, 1.0))
    assert "rank 1 never came: its last call was 0; ranks [0] are at call 1 (sum of float32 (10,)); ranks [2]" in text
    assert f"ranks [2] are at call 1 ({other})" in text


def test_the_late_rank_itself_can_explain(pages: list[Page]):
    """It comes after the others gave up: it is at their call by now, so the missing bits alone name it."""
    for page in pages:
        page.calls.enter(1, SUM)
    miss(pages[0], 2)
    assert "rank 2 never came" in str(pages[2].explain(1, 1.0))


def test_clear_takes_back_ones_own(pages: list[Page]):
    for page in pages[:2]:
        miss(page, 2)
        page.post(control.REFUSED, 1, "why")
    pages[0].clear()
    assert pages[2].fault() == (1, 1, control.REFUSED, "why"), "another rank's fault is its own to clear"
    pages[1].clear()
    assert not any(page.aborted for page in pages)
    assert pages[2].fault() is None
    assert not np.frombuffer(pages[2]._map, np.uint8, control.HEAD_BYTES).any()


def test_long_and_foreign_texts(pages: list[Page]):
    pages[1].post(control.REFUSED, 1, "é" * 5000)
    text = pages[0].fault()[3]
    assert text.startswith("é" * 500)
    pages[1].post(control.REFUSED, 1, "short")
    assert pages[0].fault()[3] == "short"


def test_a_lost_rank(pages: list[Page]):
    pages[1].calls.enter(3, SUM)
    assert str(pages[0].lost(4, 1, "its process has ended")) == (
        "rank 0, call 4: expected rank 1 to take part; found that its process has ended, after its call 3. The "
        "communicator can only be closed."
    )
