"""Arrays that are split among the ranks: their rows, the plan of the launches, and the table that kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ipcreduce.arrays import splits
from ipcreduce.arrays.host_splits import HostSplit, SplitParts
from ipcreduce.calls.addresses import addresses_of
from ipcreduce.calls.request import BROADCAST, GATHER, SCATTER, Collective, Moved, Request, Rows, Split
from ipcreduce.device import arguments
from ipcreduce.host.over_mpi import MpiReducer
from ipcreduce.host.shared import SharedReducer
from ipcreduce.ipc import lists, parts, plan
from ipcreduce.ipc.launches import Launches
from ipcreduce.nccl import splits as nccl_splits
from tests.unit.test_kernel_layout import MAX_ARGUMENT_BYTES, WORD, run_program
from tests.unit.test_plan import launch_bound

PACKET = plan.PACKET_BYTES
Shape = tuple[int, ...]
Place = tuple[int, int, int, int]  # the member, the first byte in its whole array and in the part, and the bytes


def rows_of(rows: int, widths: list[int], gap: int = 0) -> Rows:
    """Parts one behind the other in each row."""
    offsets = tuple(sum(widths[:rank]) for rank in range(len(widths)))
    return Rows(rows, sum(widths) + gap, offsets, tuple(widths))


def places_of(one: parts.Plan, rank: int) -> Iterator[Place]:
    """The packets of a rank's message, as kernels/parts.cuh finds them."""
    ends = [*(piece.first[rank] for piece in one.pieces[1:]), one.packets[rank]]
    for piece, end in zip(one.pieces, ends, strict=True):
        width, per_row = piece.rows.widths[rank], -(-piece.rows.widths[rank] // PACKET)
        for index in range(end - piece.first[rank]):
            row, skipped = index // per_row, index % per_row * PACKET
            whole = piece.whole + row * piece.rows.pitch + piece.rows.offsets[rank] + skipped
            yield piece.member, whole, piece.part + row * width + skipped, min(PACKET, width - skipped)


def due(every: dict[int, Rows], rank: int) -> list[Place]:
    """Each byte of a rank's parts: the member, its place in the whole array and in the part, and 1."""
    return [
        (member, row * rows.pitch + rows.offsets[rank] + at, row * rows.widths[rank] + at, 1)
        for member, rows in every.items()
        for row in range(rows.rows)
        for at in range(rows.widths[rank])
    ]


widths = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 200)), min_size=8, max_size=8)
arrays = st.lists(st.tuples(st.one_of(st.integers(0, 2), st.integers(0, 9)), widths), max_size=8)


@given(st.integers(2, 8), arrays, st.integers(1, 12), st.integers(1, 4))
@example(3, [(2, [0] * 8), (3, [17, 0, 70, *[0] * 5]), (0, [5] * 8), (1, [0, 0, 1, *[0] * 5])], 4, 2)
@example(2, [(1, [17] * 8), (2, [16] * 8)], 12, 4)
@settings(deadline=None, max_examples=60)
def test_every_byte_is_in_one_packet(n: int, given_arrays: list[tuple[int, list[int]]], packets: int, pieces: int):
    """Of each rank's part, in order, with the same launches on every rank and within their limits."""
    every = {3 * index: rows_of(rows, widths[:n], index) for index, (rows, widths) in enumerate(given_arrays)}
    plans = [parts.make_plan(every, rank, packets, pieces) for rank in range(n)]
    for rank, mine in enumerate(plans):
        assert [replace_parts(one) for one in mine] == [replace_parts(one) for one in plans[0]]
        found = [
            (member, whole + at, part + at, 1)
            for one in mine
            for member, whole, part, nbytes in places_of(one, rank)
            for at in range(nbytes)
        ]
        assert found == due(every, rank)
    for one in plans[0]:
        assert 1 <= len(one.pieces) <= pieces
        assert len(one.packets) == n
        assert max(one.packets) <= packets
        assert one.longest == max(one.packets) > 0, "a launch that nobody needs"
        for before, behind in pairwise(one.pieces):
            assert all(a <= b for a, b in zip(before.first, behind.first, strict=True)), "kernels search in them"
        assert one.pieces[0].first == [0] * n


def replace_parts(one: parts.Plan) -> list[parts.Piece]:
    """What all ranks have to plan in the same way."""
    return [replace(piece, part=0) for piece in one.pieces]


def test_launches_are_full(subtests: pytest.Subtests):
    """No launch is begun for what the last one has room for; a row that fits into no launch has launches of its own."""
    long = rows_of(2, [3 * PACKET, 5 * PACKET + 1])
    for every, most, pieces, launches in (
        ({0: rows_of(10, [16, 16])}, 10, 1, [(10, 10)]), ({0: rows_of(10, [16, 16])}, 4, 1, [(4, 4), (4, 4), (2, 2)]),
        ({0: rows_of(3, [16, 32]), 1: rows_of(3, [32, 16])}, 9, 2, [(9, 9)]),
        ({0: rows_of(3, [16, 32]), 1: rows_of(3, [32, 16])}, 9, 1, [(3, 6), (6, 3)]),
        ({0: rows_of(3, [16, 32]), 1: rows_of(3, [32, 16])}, 8, 2, [(7, 8), (2, 1)]),
        ({0: long}, 6, 1, [(3, 6), (3, 6)]), ({0: long}, 4, 1, [(3, 4), (0, 2), (3, 4), (0, 2)]),
        ({0: rows_of(1, [1, 0]), 1: long, 2: rows_of(1, [1, 1])}, 4, 3, [(1, 0), *[(3, 4), (0, 2)] * 2, (1, 1)]),
        ({0: rows_of(7, [0, 0]), 1: rows_of(0, [5, 5])}, 4, 3, []), ({}, 4, 3, []),
    ):  # fmt: skip
        with subtests.test(every=every, most=most):
            plans = parts.make_plan(every, 0, most, pieces)
            assert [tuple(one.packets) for one in plans] == launches


def test_one_launch_for_long_rows_in_32_bits():
    """Widths, rows and packets of the largest arrays."""
    half = 1 << 32
    for one in parts.make_plan({0: rows_of(1, [3 * half, half + 5, 0])}, 1, plan.LAUNCH_PACKETS, 1):
        assert max(one.packets) <= plan.LAUNCH_PACKETS
        assert max(max(piece.rows.widths) for piece in one.pieces) < 1 << 31, "kernels take the rest of a row as an int"
    (one,) = parts.make_plan({0: rows_of(1 << 20, [8, 8])}, 1, plan.LAUNCH_PACKETS, 1)
    assert one.packets == [1 << 20] * 2


# ---- the rows of a call
@given(st.data(), st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_rows_are_those_of_an_array(data: st.DataObject, n: int, shape: list[int], even: bool):
    """Each rank's place in a row, compared with a view of an array of bytes that are their own addresses."""
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    if even:
        sizes, shape[axis] = None, shape[axis] * n
    else:
        sizes = tuple(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
        shape[axis] = sum(sizes)
    itemsize = data.draw(st.sampled_from([1, 2, 6]))
    rows = Split(GATHER, axis, sizes).rows(tuple(shape), itemsize, n)
    places = np.arange(np.prod(shape), dtype=int).reshape(shape)
    lengths = sizes or [shape[axis] // n] * n
    for rank in range(n):
        begin = sum(lengths[:rank])
        part = np.take(places, range(begin, begin + lengths[rank]), axis).ravel()
        first = [one * itemsize + at for one in part for at in range(itemsize)]
        found = [
            row * rows.pitch + rows.offsets[rank] + at for row in range(rows.rows) for at in range(rows.widths[rank])
        ]
        assert found == first


def test_the_part_of_a_broadcast_is_everything():
    rows = Split(BROADCAST, root=2).rows((3, 5), 4, 4)
    assert rows == Rows(1, 60, (0, 0, 0, 60), (0, 0, 60, 0))
    assert Split(BROADCAST).rows((), 8, 2) == Rows(1, 8, (0, 8), (8, 0))


def test_floats_of_8_bits_have_names(monkeypatch: pytest.MonkeyPatch):
    """They are moved as bytes, and no rank takes them for others."""
    of_torch = SimpleNamespace(dtype="torch.float8_e5m2")
    monkeypatch.setattr(splits.torch_runtime, "float8_as_bytes", lambda array: b"" if array is of_torch else array)
    call, reducing = (splits.SplitCall(None, None, (one, *[None] * 5), 0, 1) for one in (GATHER, SCATTER))  # type: ignore[arg-type]
    assert splits.readable(call, of_torch) == (b"", "float8_e5m2")
    other = SimpleNamespace(dtype="torch.float32")
    assert splits.readable(call, other) == (other, "")
    assert splits.readable(reducing, of_torch) == (of_torch, "")


def test_what_the_ranks_compare():
    """Everything but the arrays' memory is in the words, and no two calls have the same ones."""
    member, other = Moved((6, 4), "int8", 1), Moved((4, 6), "int8", 1)
    calls = [
        Request("", (member,), split=Split(GATHER)), Request("", (other,), split=Split(GATHER)),
        Request("", (Moved((6, 4), "bool", 1),), split=Split(GATHER)),
        Request("", (member,), split=Split(GATHER, 1)),
        Request("", (member,), split=Split(GATHER, 0, (3, 3))),
        Request("", (member,), split=Split(GATHER, 0, (6, 0))), Request("", (member,), split=Split(BROADCAST)),
        Request("", (member,), split=Split(BROADCAST, root=1)),
        Request("sum", (member,), split=Split(SCATTER)),
        Request("max", (member,), split=Split(SCATTER)),
        Request("sum", (member,)), Request("", (member,), is_list=True, split=Split(GATHER)),
        Request("", (member,), sms=3, split=Split(GATHER)),
        Request("", (member,), on_host=True, split=Split(GATHER)),
        Request("", (member, member), is_list=True, split=Split(GATHER)),
        Request("", (member, other), is_list=True, split=Split(GATHER)),
        Request("sum", (member, member), is_list=True), Request("max", (member, member), is_list=True),
        Request("sum", (member, other), is_list=True),
    ]  # fmt: skip
    assert len({call.fingerprint for call in calls}) == len({call.fingerprint.text for call in calls}) == len(calls)
    assert calls[8].fingerprint.text == "reduce-scatter by sum of int8 (6, 4), axis 0, no sizes="


def test_the_words_of_an_all_gather():
    """They show the rank's own shape, unless the parts may differ: these words have to be the same on every rank."""

    def words(array: Any, sizes: Any) -> str:
        call = splits.SplitCall(array, None, (GATHER, None, 0, sizes, 0, None), 0, 2)
        return HostSplit(call).request.fingerprint.text

    rows = np.zeros((2, 3), "i8")
    assert words(rows, None) == "all-gather of int64 (2, 3), axis 0, no sizes= on the host"
    assert words([rows], None) == "all-gather of 1 arrays, axis 0, no sizes= on the host: int64 (2, 3)"
    assert words(rows, [2, 3]) == "all-gather of int64 (5, 3), axis 0, sizes=[2, 3] on the host"


def test_an_axis_of_a_list_is_counted_from_0():
    """Unless it is another one for each array."""
    square, cube = np.zeros((2, 2), "f4"), np.zeros((2, 2, 2), "f4")
    for arrays, axis, due in (
        (square, -1, 1), ([square], -2, 0), ([square, square], -1, 1), ([square, square], 1, 1), ([], -1, -1),
        ([square, cube], -1, -1), ([cube, square], 1, 1), ([square, cube], -2, -2),
    ):  # fmt: skip
        call = splits.SplitCall(arrays, None, (GATHER, None, axis, None, 0, None), 1, 2)
        assert HostSplit(call).request.split == Split(GATHER, due), (arrays, axis)


def test_a_collective_that_a_layer_does_not_know_is_no_other_one():
    other = Collective("all-to-all", gathers=False, reduces=False, rooted=False)
    request = Request("", (Moved((4,), "int8", 1),), split=Split(other))
    exchange = SplitParts(other, "", None, [np.zeros(2, "u1")] * 2, [np.zeros(2, "u1")] * 2)
    ranks: Any = SimpleNamespace(rank=0, n=2, size=2, mpi=None, half_bytes=1 << 20)
    launches: Any = SimpleNamespace(_workspace=ranks, _arguments=lambda offset: arguments.empty(0))
    unused: Any = None
    for call in (
        lambda: Launches._of_parts(launches, request), lambda: [*nccl_splits.calls(request, 2, 0, (0, 0), [None])],
        lambda: SharedReducer(ranks).split(exchange, unused, unused),
        lambda: MpiReducer(ranks, 1.0).split(exchange, 1, unused),
    ):  # fmt: skip
        with pytest.raises(KeyError, match="all-to-all"):
            call()


# ---- the shape of a launch
@given(
    st.one_of(st.integers(1, 2000), st.integers(1, plan.LAUNCH_PACKETS)), st.integers(2, 8), st.integers(1, 8),
    st.integers(8, 256), st.none() | st.integers(1, 600),
)  # fmt: skip
@example(1, 2, 1, 132, None)
@example(plan.LAUNCH_PACKETS, 8, 8, 8, 1)
def test_blocks_of_a_launch(packets: int, n: int, sharing: int, multiprocessors: int, sms: int | None):
    """All are resident at once, within the limits, and none is without a packet in its first turn."""
    resident = min(plan.EPOCH_SLOTS, 2 * multiprocessors)
    grid, block = plan.parts_shape(packets, plan.Gpus(n, 0, resident, sharing), sms)
    for kernel in ("gather", "scatter"):
        assert 0 < block <= launch_bound(kernel, 1, n)
        assert grid * block <= resident * launch_bound(kernel, 1, n)
    assert block % 32 == 0, "whole warps, which have their escape packets together"
    assert 1 <= grid <= min(plan.EPOCH_SLOTS, plan.EPOCH_SLOTS if sms is None else sms)
    assert sharing == 1 or 2 * sharing * grid <= max(2 * sharing, resident), "two of each rank"
    assert (grid - 1) * block < packets


def launch_of(words: np.ndarray) -> Any:
    return SimpleNamespace(args=words)


# ---- the table
LAYOUT = """
#include <cstddef>
#include <cstdio>
#include <packets.cuh>
int main() {
  std::printf("%zu %zu %zu %zu\\n", offsetof(Args, table), offsetof(SplitTable, members), sizeof(Member), sizeof(Args));
  std::printf("%zu %zu %zu %zu %zu %zu\\n", offsetof(Member, part), offsetof(Member, whole), offsetof(Member, pitch),
              offsetof(Member, offset), offsetof(Member, width), offsetof(Member, first));
}
"""


def test_words_of_a_table(tmp_path: Path, subtests: pytest.Subtests):
    """As many arrays as fit into the arguments of a kernel, each where ipc/parts.py puts it."""
    assert (parts.most_pieces(lists.SHORT), parts.most_pieces(lists.LONG)) == (parts.SHORT, parts.LONG)
    for members, most in (
        (parts.ONE, 4096),
        *zip((parts.SHORT, parts.LONG), MAX_ARGUMENT_BYTES.values(), strict=True),
    ):
        with subtests.test(members=members):
            sizes, offsets = run_program(tmp_path, LAYOUT, IPCREDUCE_MEMBERS=str(members))
            table, first, one, size = map(int, sizes.split())
            assert (table, first, one) == (
                WORD * arguments.ARG_WORDS, WORD * parts.TABLE_WORDS, WORD * parts.MEMBER_WORDS
            )  # fmt: skip
            names = parts._PART, parts._WHOLE, parts._PITCH, parts._OFFSETS, parts._WIDTHS, parts._FIRST
            assert [*map(int, offsets.split())] == [WORD * name for name in names]
            assert size <= most, "a kernel takes no more"
            assert members == parts.ONE or size + one > most, "there is room for more"


FIND = """
#include <cstdio>
#include <cstdlib>
#include <packets.cuh>
static Args args;
int main(int, char** words) {  // a file with the table, the ranks, this one
  std::FILE* file = std::fopen(words[1], "rb");
  if (!file || std::fread(&args.table, sizeof args.table, 1, file) != 1) return 1;
  for (int rank = 0; rank < std::atoi(words[2]); ++rank)
    for (u32 index = 0; index < args.table.packets[rank]; ++index) {
      const Place whole = place_of<true>(args.table, rank, index), part = place_of<false>(args.table, rank, index);
      std::printf("%llu %llu %d\\n", (unsigned long long)whole.at, (unsigned long long)part.at, whole.left);
    }
}
"""


def test_a_thread_finds_its_place(tmp_path: Path, subtests: pytest.Subtests):
    """The kernels' search, for each packet of each rank, with one array, as many as fit, and between."""
    rng = np.random.default_rng(11)
    for count in (1, 2, 3, parts.SHORT - 1, parts.SHORT, parts.LONG):
        with subtests.test(count=count):
            every = {
                index: rows_of(int(rng.integers(1, 4)), [*map(int, rng.integers(0, 60, 3)), 1], 7)
                for index in range(count)
            }
            rank, (one,) = 1, parts.make_plan(every, 1, 1 << 20, parts.LONG)
            words = np.concatenate([np.zeros(arguments.ARG_WORDS, np.uint64), parts.table(one)])
            sources, targets = ([base + (index << 16) for index in range(count)] for base in (1 << 30, 1 << 40))
            parts.step(one, launch_of(words), gathers=True, length=count).set(
                (addresses_of(sources), addresses_of(targets))
            )
            (tmp_path / "table").write_bytes(words[arguments.ARG_WORDS :].tobytes())
            members = str(parts.places(one))
            found = run_program(tmp_path, FIND, tmp_path / "table", 4, IPCREDUCE_MEMBERS=members)
            begin = 0
            for other in range(4):
                places = [*places_of(one, other)]
                lines = [line.split() for line in found[begin : begin + len(places)]]
                begin += len(places)
                assert [int(line[0]) for line in lines] == [
                    (1 << 40) + (member << 16) + whole for member, whole, _, _ in places
                ]
                assert [min(PACKET, int(line[2])) for line in lines] == [nbytes for *_, nbytes in places]
                if other == rank:
                    assert [int(line[1]) for line in lines] == [
                        (1 << 30) + (member << 16) + part for member, _, part, _ in places
                    ]
            assert begin == len(found)


def test_an_empty_message_has_a_packet():
    (one,) = parts.make_plan({0: rows_of(1, [0, 40])}, 0, 9, 1)
    assert one.packets == [0, 3]
    assert parts.table(one)[: parts.TABLE_WORDS].view(np.uint32)[:2].tolist() == [1, 3]


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(
    ("width", "address", "aligned"), [(32, 1 << 20, True), (24, 1 << 20, False), (32, 1 << 20 | 8, False)]
)
@pytest.mark.parametrize("count", [None, 1, 2, 3])
def test_addresses_of_a_launch(count: int | None, width: int, address: int, aligned: bool, gathers: bool):
    """Each array's, with what earlier launches took of it; and their alignment, by which kernels are chosen."""
    rows = {0: rows_of(4, [width, width]), 1: rows_of(1, [16, 16]), 2: rows_of(0, [0, 0])}
    plans = parts.make_plan({index: rows[index] for index in range(count or 1)}, 1, 3, 2)
    assert len(plans) > 1
    for one in plans:
        words = np.concatenate([np.zeros(arguments.ARG_WORDS, np.uint64), parts.table(one)])
        step: Any = parts.step(one, launch_of(words), gathers=gathers, length=count)
        for turn in (3, 0):  # nothing of a former call stays
            sources, targets = (
                [(turn << 30) + address + (2 * index + side << 24) for index in range(count or 1)] for side in (0, 1)
            )
            step.set((sources[0], targets[0]) if count is None else (addresses_of(sources), addresses_of(targets)))
            members = words[arguments.ARG_WORDS + parts.TABLE_WORDS :].reshape(-1, parts.MEMBER_WORDS)
            for piece, found in zip(one.pieces, members, strict=False):
                part, whole = (int(found[name]) - (turn << 30) - address for name in (0, 1))
                source, target = (part - piece.part, whole - piece.whole)[:: 1 if gathers else -1]
                assert (source, target) == (2 * piece.member << 24, 2 * piece.member + 1 << 24)
            assert (words[arguments.IN] % PACKET == 0) == (aligned or one.pieces[0].member == 1)


def test_arrays_of_a_list_that_are_not_in_a_launch_do_not_choose_its_kernel():
    """As those of another dtype in a reduce-scatter, or without bytes."""
    (one,) = parts.make_plan({1: rows_of(1, [16, 16])}, 0, 9, 2)
    words = np.concatenate([np.zeros(arguments.ARG_WORDS, np.uint64), parts.table(one)])
    step: Any = parts.step(one, launch_of(words), gathers=True, length=3)
    step.set((addresses_of([1, 1 << 20, 3]), addresses_of([0, 1 << 30, 7])))
    assert words[arguments.IN] % PACKET == 0
    assert words[arguments.ARG_WORDS + parts.TABLE_WORDS :].tolist()[:2] == [1 << 20, 1 << 30]


def test_moved_bytes_are_of_the_largest_dtype_that_fits_all():
    for itemsizes, dtype in (([16], "uint64"), ([12, 8], "uint32"), ([6], "uint16"), ([4, 5], "uint8"), ([], "uint8")):
        members = tuple(Moved((2, 3), "x", itemsize) for itemsize in itemsizes)
        ((found, kind, rows),) = parts.together(Request("", members, split=Split(GATHER)), 2)
        assert (found, kind, [*rows]) == (dtype, plan.BYTES, [*range(len(itemsizes))])
