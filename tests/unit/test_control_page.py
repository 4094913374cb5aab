"""The control page, with the ranks as several mappings of one file in this process."""

from __future__ import annotations

import gc
import mmap
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipcreduce.calls import faults
from ipcreduce.calls.sequence import CallSequence
from ipcreduce.dtypes import DTYPE_NAMES, OPS
from ipcreduce.errors import PeerFailedError, PeerLostError, PeerTimeoutError, RankMismatchError
from ipcreduce.page import control_page, flight_recorder, layout, shared_files, watchdog
from ipcreduce.page.control_page import Page
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.page.flight_recorder import RING
from tests.shared.bounds import LONG, late
from tests.shared.fingerprints import of_allreduce
from tests.unit.pages import make_pages

SUM = of_allreduce((10,), "float32", "sum")
ON_HOST = Fingerprint.of(f"{SUM} on the host")


@pytest.fixture
def pages() -> list[Page]:
    return make_pages(3)


# ---- the file
def test_only_this_user_opens_the_file_and_it_goes():
    page, other = Page.create(0, 2), Page.create(0, 2)
    path, status = Path(page.path), os.stat(page.path)
    shared_files.remove(page.path)
    shared_files.remove(other.path)
    assert path.parent == Path("/dev/shm")
    assert other.path != page.path
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_size == page.nbytes == layout.page_bytes(2)
    assert not path.exists()
    shared_files.remove(page.path)  # again is harmless
    page.abort()  # the mapping stays
    assert page.aborted


def test_nothing_is_left_of_a_page():
    gc.collect()
    descriptors, maps = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("ipcreduce-")
    make_pages(4)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert Path("/proc/self/maps").read_text().count("ipcreduce-") <= maps


def test_no_link_is_followed(tmp_path: Path):
    page = Page.create(0, 2)
    (tmp_path / "link").symlink_to(page.path)
    with pytest.raises(OSError, match="symbolic links"):
        Page.open(str(tmp_path / "link"), 1, 2)
    shared_files.remove(page.path)


def test_a_page_that_has_gone_is_an_error():
    with pytest.raises(FileNotFoundError):
        Page.open("/dev/shm/ipcreduce-no-such-page", 1, 2)


@pytest.mark.parametrize("n", [*range(1, 9), 40, 63, 64, 70, 100])
def test_whole_pages_and_aligned_words(n: int):
    assert layout.page_bytes(n) % mmap.PAGESIZE == 0
    head, recorder, block = layout.head_bytes(n), flight_recorder.nbytes(n), layout.rank_layout(n).itemsize
    assert layout.page_bytes(n) >= head + recorder + n * block
    assert not any(size % 8 for size in (recorder, block)), "words are read by aligned accesses"
    lines = [head, flight_recorder._keys_bytes(n), flight_recorder._RANK.itemsize]
    assert not any(size % 64 for size in lines), "a rank's number has a cache line"
    assert head % mmap.PAGESIZE == 0, "the GPUs get whole pages"
    lines = [layout.ABORT_OFFSET, *(layout.missing_offset(rank) for rank in range(n))]
    assert len({offset // 64 for offset in lines}) == n + 1, "a cache line each"
    assert max(lines) + 8 <= head, "two words each"


def test_ranks_see_each_other(pages: list[Page]):
    pid, namespace = watchdog.own_identity()
    assert pid == os.getpid()
    assert namespace == os.stat("/proc/self/ns/pid").st_ino
    assert all(page.identity(rank) == (pid, namespace) for page in pages for rank in range(3))
    pages[2].leave()
    assert [page.has_left(2) for page in pages] == [True] * 3
    assert [page.has_left(1) for page in pages] == [False] * 3


# ---- fingerprints
def test_fingerprints_differ_in_all_that_matters():
    different = [
        of_allreduce((10,), "float32", "sum"),
        of_allreduce((10,), "int32", "sum"),
        of_allreduce((10,), "float32", "max"),
        of_allreduce((11,), "float32", "sum"),
        of_allreduce((5, 2), "float32", "sum"),
        of_allreduce((2, 5), "float32", "sum"),
        of_allreduce((10, 1), "float32", "sum"),
        of_allreduce((), "float32", "sum"),
        of_allreduce((1,), "float32", "sum"),
        of_allreduce((0,), "float32", "sum"),
        of_allreduce((0, 3), "float32", "sum"),
        of_allreduce((1, 2, 3, 4, 5, 6), "float32", "sum"),
        of_allreduce((1, 2, 3, 4, 5, 7), "float32", "sum"),
        ON_HOST,
    ]
    assert len({one.crc for one in different}) == len(different)
    assert of_allreduce((10,), "float32", "sum") == SUM


def test_every_pair_of_dtype_and_op_differs():
    assert len({of_allreduce((8,), dtype, op).crc for dtype in DTYPE_NAMES for op in OPS}) == 60


def test_rounds(pages: list[Page]):
    """Nobody is absent once all have written; two rounds do not disturb each other; a part can be replaced."""
    for serial in (1, 2, 3):
        for page in pages:
            assert [part is None for part in page.read_round(serial)] == [other.rank >= page.rank for other in pages]
            page.write_round(serial, True, 7 + serial, bytes([page.rank]))
        if serial > 1:
            assert None not in pages[0].read_round(serial - 1), "gone while a slow rank may still read it"
    parts = pages[1].read_round(3)
    assert parts == [(True, 10, bytes([rank]).ljust(layout.CHUNK_BYTES, b"\0")) for rank in range(len(pages))]
    pages[2].write_round(3, False, 5, b"x" * layout.CHUNK_BYTES)
    assert pages[0].read_round(3)[2] == (False, 5, b"x" * layout.CHUNK_BYTES)


def test_a_meeting_is_read_from_the_next_ones_record_too(pages: list[Page]):
    """A peer that has read it may be at the next one, to which it brings the same numbers."""
    assert pages[0].read_meeting(1) == [None] * 3
    pages[0].write_meeting(1, 7, 3, b"an offer\0", 6)
    pages[1].write_meeting(2, 9, 4)
    assert [page.read_meeting(1) for page in pages] == [[(7, 3, b"an offer\0", 6), (9, 4, b"", 0), None]] * 3
    assert pages[2].read_meeting(2) == [None, (9, 4, b"", 0), None]


@pytest.mark.parametrize("n", [1, 40, 70])
def test_ranks_beyond_the_bits_of_a_word(n: int):
    """Deaths and missed ranks are by rank number, with no limit of 32 or 63."""
    ranks, last = make_pages(n), n - 1
    ranks[0].mark_dead(last)
    assert [ranks[-1].has_unmapped(rank) for rank in range(n)] == [rank == last for rank in range(n)]
    ranks[0].post_timeout([last])
    assert ranks[last].missed() == {last}
    ranks[last].post_timeout(range(n))
    assert ranks[0].missed() == set(range(n))
    for page in ranks:
        page.clear()
    assert ranks[0].missed() == set()
    assert not ranks[0].aborted


def test_waiting_in_vain(pages: list[Page]):
    """A rank that did not come to a vote is named on every rank, and every wait ends."""
    for page in pages[:-1]:
        page.calls.enter(3, Fingerprint.of("recording of a graph"))
    pages[0].post_timeout([len(pages) - 1])
    for page in pages:
        assert page.aborted
        assert f"rank {len(pages) - 1} did not call within" in str(faults.fault_error(page, 3, 5.0))


def test_a_rank_writes_only_its_own_block(pages: list[Page]):
    begin = layout.ranks_offset(3)
    blocks = slice(begin, begin + 3 * layout.rank_layout(3).itemsize)
    before = np.frombuffer(pages[0]._map, np.uint8)[blocks].reshape(3, -1).copy()
    pages[1].calls.enter(RING - 1, SUM)
    assert (np.frombuffer(pages[0]._map, np.uint8)[blocks].reshape(3, -1) == before).all(), "the recorder has its own"
    pages[1].post_fault(control_page.REFUSED, 1, "x" * 5000)
    pages[1].leave()
    after = np.frombuffer(pages[0]._map, np.uint8)[blocks].reshape(3, -1)
    assert (after != before).any(axis=1).tolist() == [False, True, False]


# ---- faults
def test_a_fault_raises_everybodys_abort_word(pages: list[Page]):
    assert not any(page.aborted for page in pages)
    assert pages[0].fault() is None
    pages[1].post_fault(control_page.REFUSED, 4, "ArgumentError: op must be sum")
    assert all(page.aborted for page in pages)
    assert pages[2].fault() == (4, 1, control_page.REFUSED, "ArgumentError: op must be sum")


def test_the_abort_word_is_the_pages_first(pages: list[Page]):
    """Where the kernels look for it."""
    pages[1].abort()
    assert bytes(pages[0]._map[:8]) == b"\1" + bytes(7)


def test_the_earliest_fault_counts(pages: list[Page]):
    pages[2].post_fault(control_page.MISMATCH, 9, "late")
    pages[1].post_fault(control_page.REFUSED, 5, "early")
    assert pages[0].fault() == (5, 1, control_page.REFUSED, "early")


def test_a_refused_call(pages: list[Page]):
    pages[1].post_fault(control_page.REFUSED, 4, "ArgumentError: op must be sum")
    error = faults.fault_error(pages[2], 6, 30.0)
    assert type(error) is PeerFailedError
    assert str(error) == (
        "rank 2, call 6: in call 4, rank 1 raised an error (ArgumentError: op must be sum). "
        "The communicator can be used again."
    )


@pytest.mark.parametrize(
    ("kind", "why"),
    [(control_page.REFUSED, "why"), (control_page.REFUSED, "recover()"), (control_page.MISMATCH, "why")],
)
def test_a_fault_of_a_communicator_that_is_lost(pages: list[Page], kind: int, why: str):
    """Nobody says that it can be used again."""
    pages[1].post_fault(kind, 4, why)
    calls = CallSequence(pages[0], 30.0, [])
    lost = calls.lose("it left", faults.fault_error(pages[0], 4, 30.0))
    told = faults.fault_error(pages[2], 4, 30.0)
    with pytest.raises(PeerLostError, match="rank 0 is gone: it left") as gone:
        faults.raise_lost(pages[2], 4)
    for error in (lost, told, gone.value):
        assert str(error).endswith("The communicator can only be closed.")
        assert "used again" not in str(error)
    assert "Call recover()" not in str(told)


def test_a_mismatch(pages: list[Page]):
    pages[0].post_fault(control_page.MISMATCH, 7, "sum of int8 (3,) on rank 0 and sum of int8 (4,) on rank 1")
    error = faults.fault_error(pages[1], 7, 30.0)
    assert type(error) is RankMismatchError
    assert str(error) == (
        "rank 1, call 7: call 7 is not the same on every rank: sum of int8 (3,) on rank 0 and sum of int8 (4,) on "
        "rank 1. Let the ranks make the same calls. The communicator can be used again."
    )


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("all-gather of int64 (3, 3), axis 0, no sizes=", True),
        ("all-gather of 1 arrays, axis 0, no sizes= on the host: int64 (3, 3)", True),
        ("reduce-scatter by sum of int64 (4, 3), axis 0, no sizes=", False),
        ("sum of int8 (3,)", False),
    ],
)
def test_a_mismatch_of_parts_names_sizes(pages: list[Page], other: str, named: bool):
    own = "all-gather of int64 (2, 3), axis 0, no sizes="
    pages[0].post_fault(control_page.MISMATCH, 7, f"{other} on rank 0 and {own} on ranks 1 and 2")
    text = str(faults.fault_error(pages[1], 7, 30.0))
    assert ("same calls or, if the parts differ in length, pass sizes=, the same on every rank. The" in text) == named
    assert ("same calls. The" in text) != named


def miss(page: Page, *ranks: int) -> None:
    """What this rank's kernels write when their waits for these ranks pass the deadline."""
    word = np.frombuffer(page._map, np.uint32, 1, layout.missing_offset(page.rank))
    word[0] = sum(1 << rank for rank in ranks)


def test_a_difference_that_nobody_has_found_comes_before_a_refused_call():
    """Between hosts no call is compared as it is entered; a refusal behind it must not hide it."""
    pages = make_pages(2)
    for page, what in zip(pages, ("a sum", "a maximum"), strict=True):
        page.calls.write(3, Fingerprint.of("a sum"))
        page.calls.write(4, Fingerprint.of(what))
        page.calls.number[0] = 4
    pages[1].post_fault(control_page.REFUSED, 5, "why")
    error = faults.fault_error(pages[0], 5, 30.0)
    assert type(error) is RankMismatchError
    assert "call 4 is not the same on every rank" in str(error)
    assert "a sum on rank 0 and a maximum on rank 1" in str(error)
    pages[0].calls.write(4, Fingerprint.of("a maximum"))
    assert type(faults.fault_error(pages[0], 5, 30.0)) is PeerFailedError
    pages[0].calls.write(4, Fingerprint.of("a sum"))
    pages[0].calls.first = 5  # the ranks have met since
    assert type(faults.fault_error(pages[0], 5, 30.0)) is PeerFailedError


def test_a_difference_with_a_third_rank_comes_before_a_refusal_and_a_timeout(pages: list[Page]):
    for page, what in zip(pages, ("a maximum", "a sum", "a sum"), strict=True):
        page.calls.enter(1, Fingerprint.of(what))
    for page in pages[:2]:
        page.calls.enter(2, SUM)
    pages[2].post_fault(control_page.REFUSED, 2, "why")
    for page in pages[:2]:
        error = faults.fault_error(page, 2, 30.0)
        assert type(error) is RankMismatchError
        assert "a maximum" in str(error)
    for page in pages:
        page.clear()
    miss(pages[1], 2)
    pages[1].abort()
    assert type(faults.fault_error(pages[1], 2, 1.0)) is RankMismatchError


def test_the_rank_that_is_missed_is_named_and_not_those_that_wait(pages: list[Page]):
    """It has left a call that the others had not all come to."""
    pages[0].calls.enter(2, SUM)
    for page in pages[1:]:
        page.calls.enter(1, SUM)
        miss(page, 0)
    text = str(faults.fault_error(pages[1], 1, 1.0))
    assert "rank 0 did not call within" in text
    assert "rank 1 did not call within" not in text


def test_a_loss_is_told_once(pages: list[Page]):
    """Watchdogs of mirrored pages, which write it at every turn, would wake each other without end."""
    told: list[int] = []
    pages[0].changed = lambda: told.append(1)
    for _ in range(3):
        pages[0].post_lost(1, "its process has ended")
    assert len(told) == 1
    pages[0].clear()
    pages[0].post_lost(1, "its process has ended")
    assert pages[0].aborted, "the abort word stays up"


def test_a_timeout_says_who_never_came_and_what_it_did_last(pages: list[Page]):
    for page in pages:
        page.calls.enter(1, SUM)
    for rank in (0, 2):
        pages[rank].calls.enter(2, of_allreduce((6,), "int64", "max"))
        miss(pages[rank], 1)
    pages[0].abort()
    error = faults.fault_error(pages[0], 2, 1.5)
    assert type(error) is PeerTimeoutError
    assert str(error) == (
        "rank 0, call 2: rank 1 did not call within 1.5 s (its last call was 1: sum of float32 (10,)). Ranks 0, 2 are "
        "in call 2 (max of int64 (6,)). Check whether a rank waits elsewhere (in a transfer, a lock or another "
        "collective; in graphs, in a decorator outside of eager_break), or raise timeout=."
    )


def test_a_rank_that_never_called(pages: list[Page]):
    pages[0].calls.enter(1, SUM)
    miss(pages[0], 1, 2)
    text = str(faults.fault_error(pages[0], 1, 1.0))
    late = "did not call within 1 s (it has made no call yet)"
    assert f"rank 1 {late}, and rank 2 {late}. Rank 0 is in call 1 (" in text


def test_a_chain_of_waits_ends_at_the_rank_that_is_behind(pages: list[Page]):
    """Rank 0 waits for 1, which is at the same call and waits for 2, the one to look for."""
    for rank in (0, 1):
        pages[rank].calls.enter(1, SUM)
        miss(pages[rank], rank + 1)
    text = str(faults.fault_error(pages[0], 1, 1.0))
    assert "rank 2 did not call within" in text
    assert "rank 1 did not call within" not in text


def test_every_call_is_named_where_ranks_between_have_not_come():
    ranks, other = make_pages(5), of_allreduce((3,), "int8", "sum")
    ranks[0].calls.enter(1, SUM)
    ranks[2].calls.enter(1, other)
    miss(ranks[0], 1)
    text = str(faults.fault_error(ranks[0], 1, 1.0))
    assert (
        "rank 1 did not call within 1 s (it has made no call yet). Rank 0 is in call 1 (sum of float32 (10,)). Rank 2"
        in text
    )
    assert f"Rank 2 is in call 1 ({other}). " in text


def test_the_late_rank_itself_can_explain(pages: list[Page]):
    """It comes after the others gave up: it is at their call by now, so the missing bits alone name it."""
    for page in pages:
        page.calls.enter(1, SUM)
    miss(pages[0], 2)
    assert "rank 2 did not call within" in str(faults.fault_error(pages[2], 1, 1.0))


def test_clear_takes_back_ones_own(pages: list[Page]):
    for page in pages[:2]:
        miss(page, 2)
        page.post_timeout([0])
        page.post_fault(control_page.REFUSED, 1, "why")
    pages[0].clear()
    assert pages[2].fault() == (1, 1, control_page.REFUSED, "why"), "another rank's fault is its own to clear"
    pages[1].clear()
    assert not any(page.aborted for page in pages)
    assert pages[2].fault() is None
    assert not pages[2].missed(), "they would be named beside those of the next fault"
    assert not np.frombuffer(pages[2]._map, np.uint8, layout.head_bytes(3)).any()


def test_long_and_foreign_texts(pages: list[Page]):
    pages[1].post_fault(control_page.REFUSED, 1, "é" * 5000)
    text = pages[0].fault()[3]
    assert text.startswith("é" * 500)
    pages[1].post_fault(control_page.REFUSED, 1, "short")
    assert pages[0].fault()[3] == "short"


def test_a_lost_rank(pages: list[Page]):
    pages[1].calls.enter(3, SUM)
    faults.raise_lost(pages[0], 4)
    pages[2].post_lost(1, "its process has ended")
    with pytest.raises(PeerLostError) as caught:
        faults.raise_lost(pages[0], 4)
    assert str(caught.value) == (
        "rank 0, call 4: rank 1 is gone: its process has ended, after its call 3. The communicator can only be closed."
    )


def test_a_rank_that_closed_is_lost_to_the_calls_that_it_did_not_make(pages: list[Page]):
    pages[1].calls.enter(3, SUM)
    pages[1].leave()
    faults.raise_lost(pages[0], 3)
    with pytest.raises(PeerLostError, match="it closed the communicator, after its call 3"):
        faults.raise_lost(pages[0], 4)
    with pytest.raises(PeerLostError, match="it closed the communicator, after its call 3"):
        faults.raise_lost(pages[0], 3, any_call=True)


def test_all_have_come_unless_a_fault_keeps_one_from_it(pages: list[Page]):
    for page in pages[:2]:
        page.calls.enter(3, SUM)
    assert not faults.all_come(pages[0], 3)
    pages[2].calls.enter(4, SUM)
    assert faults.all_come(pages[0], 3)
    pages[2].post_fault(control_page.REFUSED, 4, "why")
    assert faults.all_come(pages[0], 3), "a later call's"
    assert not faults.all_come(pages[0], 4)


def test_the_first_loss_counts_and_what_a_rank_says_of_itself_comes_first(pages: list[Page]):
    pages[0].post_lost(2, "its process has ended")
    pages[1].leave()
    pages[0].post_lost(1, "it closed the communicator")
    assert [page.loss() for page in pages] == [(2, "its process has ended")] * 3
    pages[2].post_lost(2, "it was interrupted")
    assert [page.loss() for page in pages] == [(2, "it was interrupted")] * 3


def test_a_rank_that_left_because_of_a_loss_is_not_taken_for_the_first(pages: list[Page]):
    """Rank 2 closes. Rank 0 hears of it and closes. Rank 1 looks only then, and meets rank 0's end first."""
    pages[2].leave()
    pages[0].calls.enter(1, SUM)
    with pytest.raises(PeerLostError, match="rank 2 is gone"):
        faults.raise_lost(pages[0], 1)
    pages[0].leave()
    pages[1].post_lost(0, "it closed the communicator")  # as rank 1's watchdog may
    with pytest.raises(PeerLostError, match="rank 2 is gone"):
        faults.raise_lost(pages[1], 1)
    pages[2].post_lost(0, "it closed the communicator")
    assert pages[1].loss() is not None, "two ranks that name each other"


def test_a_rank_that_closed_after_a_call_has_taken_part_in_it(pages: list[Page]):
    """Rank 0 closes after call 1. Rank 1 goes on to call 2, and posts the loss, while rank 2 is still within call 1."""
    for page in pages:
        page.calls.enter(1, SUM)
    pages[0].leave()
    pages[1].calls.enter(2, SUM)
    with pytest.raises(PeerLostError, match="rank 0 is gone: it closed the communicator, after"):
        faults.raise_lost(pages[1], 2)
    faults.raise_lost(pages[2], 1)
    with pytest.raises(PeerLostError, match="rank 0 is gone"):
        faults.raise_lost(pages[2], 1, any_call=True)
    pages[0].post_lost(0, "it left call 1 halfway")
    with pytest.raises(PeerLostError, match="halfway"):
        faults.raise_lost(pages[2], 1)


# ---- what another rank may see of a record, where a processor shows stores in any order
Change = tuple[np.ndarray, Callable[[Page], Any]]  # the page before, and what a reader makes of it


def bytes_of(page: Page) -> np.ndarray:
    return np.frombuffer(page._map, np.uint8)


def fault_twice(page: Page) -> Change:
    page.post_fault(control_page.REFUSED, 4, "ArgumentError: op must be sum")
    before = bytes_of(page).copy()
    page.post_fault(control_page.MISMATCH, 7, "sum of int8 (3,) on rank 0 and sum of int8 (4,) on rank 1")
    return before, lambda reader: reader.fault()


def fault_of_none(page: Page) -> Change:
    page.post_lost(2, "its process has ended")  # or fault() looks again for what the abort word stands for
    before = bytes_of(page).copy()
    page.post_fault(control_page.MISMATCH, 7, "sum of int8 (3,) on rank 0 and sum of int8 (4,) on rank 1")
    return before, lambda reader: reader.fault()


def fault_cleared(page: Page) -> Change:
    page.post_fault(control_page.MISMATCH, 7, "sum of int8 (3,) on rank 0 and sum of int8 (4,) on rank 1")
    before = bytes_of(page).copy()
    page.clear()
    return before, lambda reader: reader.fault()


def loss_of_none(page: Page) -> Change:
    before = bytes_of(page).copy()
    page.post_lost(page.rank, "it was interrupted (KeyboardInterrupt)")
    return before, lambda reader: reader.loss()


def round_left(page: Page) -> Change:
    page.write_round(3, True, 17, b"every byte of it")
    before = bytes_of(page).copy()
    page.write_round(3, False, 30, b"ValueError: wrong")
    return before, lambda reader: reader.read_round(3)[1]


def round_two_later(page: Page) -> Change:
    page.write_round(1, True, 17, b"of before, and so on and on" * 9)
    before = bytes_of(page).copy()
    page.write_round(3, False, 257, b"ValueError: wrong" * 60)
    return before, lambda reader: reader.read_round(3)[1]


def meeting_after_meeting(page: Page) -> Change:
    page.write_meeting(1, 0x0102030405, 0x060708)
    before = bytes_of(page).copy()
    page.write_meeting(2, 0x1112131415, 0x161718)
    return before, lambda reader: reader.read_meeting(1)[1]


@pytest.mark.parametrize(
    "change",
    [fault_twice, fault_of_none, fault_cleared, loss_of_none, round_left, round_two_later, meeting_after_meeting],
)
def test_a_record_is_there_whole_or_not_at_all(
    pages: list[Page], change: Callable[[Page], Change], monkeypatch: pytest.MonkeyPatch
):
    """Whichever of its bytes have come: the first ones, the last ones, or any words of it."""
    monkeypatch.setattr(control_page, "_RECORD_SECONDS", -1.0)
    before, read = change(pages[1])
    after = bytes_of(pages[1]).copy()
    changed = np.flatnonzero(before != after)
    reader, seen = pages[0], bytes_of(pages[0])
    allowed = []
    for state in (before, after):
        seen[:] = state
        allowed.append(read(reader))
    assert allowed[0] != allowed[1]
    few = np.random.default_rng(16)
    orders = [changed, changed[::-1], *(few.permutation(changed) for _ in range(5))]
    for order in orders:
        seen[:] = before
        for at in order[:-1]:
            seen[at] = after[at]
            assert read(reader) in (*allowed, None)
        seen[order[-1]] = after[order[-1]]
        assert read(reader) == allowed[1]
    for _ in range(300):  # any 8 bytes, in any order
        seen[:] = before
        for word in few.permutation(np.unique(changed // 8))[: few.integers(1, 9)]:
            seen[8 * word : 8 * word + 8] = after[8 * word : 8 * word + 8]
        assert read(reader) in (*allowed, None)


@pytest.mark.parametrize("post", ["fault", "loss"])
def test_an_abort_word_that_comes_before_its_record_is_no_timeout(
    pages: list[Page], post: str, monkeypatch: pytest.MonkeyPatch
):
    """The reader looks again until the record has come."""
    monkeypatch.setattr(control_page, "_RECORD_SECONDS", LONG)
    after = make_pages(3)[1]
    if post == "fault":
        after.post_fault(control_page.REFUSED, 4, "ArgumentError: op must be sum")
    else:
        after.post_lost(1, "it was interrupted")
    pages[1].abort(control_page.TOLD)

    def come() -> None:
        late(0.1)
        bytes_of(pages[1])[layout.ranks_offset(3) :] = bytes_of(after)[layout.ranks_offset(3) :]

    thread = threading.Thread(target=come)
    thread.start()
    fault = pages[0].fault()
    thread.join()
    assert fault == ((4, 1, control_page.REFUSED, "ArgumentError: op must be sum") if post == "fault" else None)
    assert pages[0].loss() == (None if post == "fault" else (1, "it was interrupted"))


def test_a_timeout_is_one_at_once(pages: list[Page], monkeypatch: pytest.MonkeyPatch):
    """The kernels' abort, and that of a vote, have no record to wait for."""
    monkeypatch.setattr(control_page.time, "sleep", lambda seconds: pytest.fail("it waits"))
    pages[0].calls.enter(1, SUM)
    pages[0].abort()
    assert type(faults.fault_error(pages[2], 1, 1.0)) is PeerTimeoutError
    pages[0].clear()
    pages[0].post_timeout([2])
    assert type(faults.fault_error(pages[1], 1, 1.0)) is PeerTimeoutError


def test_a_rank_that_closed_after_a_call_is_not_taken_for_one_that_did_not_make_it(
    pages: list[Page], monkeypatch: pytest.MonkeyPatch
):
    """Its state may be seen before the number of its last call: who reads looks again after a pause."""
    pages[1].leave()
    monkeypatch.setattr(control_page.time, "sleep", lambda seconds: pages[1].calls.enter(1, SUM))
    assert not pages[0].has_left_before(1, 1)
    assert pages[0].has_left_before(1, 2)
    assert not pages[0].has_left_before(2, 1)
