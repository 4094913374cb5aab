"""The plan of a fused all-reduce with RMSNorm covers every row, fits every workspace, and agrees with the kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ipcreduce.calls.request import NormShape
from ipcreduce.ipc import norm_plan, plan, workspace
from tests.tools.machine import ROOT

MB = 1 << 20
ANY = 1 << 50  # bytes of a half that has room for everything

worlds = st.integers(2, plan.MAX_RANKS)
hiddens = st.integers(1, 256).map(lambda groups: 64 * groups)
counts = st.integers(1, 700) | st.integers(0, 16).map(lambda power: 1 << power)
halves = st.just(ANY) | st.integers(1, 256).map(lambda megabytes: workspace.half_bytes(megabytes * MB))
forced = st.sampled_from([None, *plan.ALGORITHMS])
sharings = st.sampled_from([1, 1, 2, 4])


def shape_of(rows: int, hidden: int, dtype: str = "bfloat16") -> NormShape:
    return NormShape(rows=rows, hidden=hidden, dtype=dtype, eps=1e-6, weight_bias=0.0, residual=True)


def launch_bound(kernel: str, n: int, pairs: bool) -> int:
    """The most threads a block, from the kernel's source.

    :param pairs: two blocks have a row, and their threads one unit each.
    """
    source = (ROOT / "kernels" / f"{kernel}.cu").read_text()
    [words] = re.findall(rf"KERNEL\({kernel}, (.+?), [^,]+\)\s*\(KERNEL_ARGS", source)
    if kernel == "fused_one_shot":
        assert "#define PAIRS_OF_BLOCKS (kRanks == 2 && kCluster == 2 && kDepth == 1)" in source
        [of_pairs] = re.findall(r"PAIRS_OF_BLOCKS \? (\d+) : kRanks", words)
        if pairs and n == 2:
            return int(of_pairs)
    limits = [(int(most), int(threads)) for most, threads in re.findall(r"kRanks <= (\d+) \? (\d+)", words)]
    return next((threads for most, threads in limits if n <= most), int(words.split()[-1]))


def check(found: norm_plan.NormPlan, shape: NormShape, gpus: plan.Gpus) -> None:
    """One launch fits the workspace and the limits of its kernel, and its threads cover the rows."""
    n, two_shot = gpus.n, found.kernel == "fused_two_shot"
    assert found.grid % found.cluster == 0
    assert 0 < found.grid <= min(plan.EPOCH_SLOTS, gpus.most_blocks)
    assert found.block % 32 == 0
    pairs = found.cluster == 2 and found.depth == 1
    half_a_block = gpus.sharing > 1 and not two_shot and not (pairs and n == 2)
    assert 0 < found.block <= launch_bound(found.kernel, n, pairs) // (2 if half_a_block else 1)
    parts = found.cluster * found.depth * (n if two_shot else 1)
    units = shape.hidden // 8
    width = 16 * -(-units // (16 * parts))  # as in the kernels
    assert width <= found.block < width + 32
    assert found.depth in (1, 2)
    tiles = -(-shape.rows * found.cluster // found.grid)
    assert found.tiles(shape.rows) == tiles
    assert tiles == 1 or found.cluster == 1, "a cluster has one row"
    if two_shot:
        assert found.grid <= gpus.resident, "its blocks wait for two hops"
    rows = (n - 1) * (2 if two_shot else 1) * plan.row_bytes(found.block * found.grid * found.depth * tiles)
    assert found.staging == rows
    assert plan.code_offset(shape.dtype, "norm") + found.staging <= gpus.half_bytes


@given(counts, hiddens, worlds, halves, forced, sharings, st.booleans(), st.sampled_from([16, 216, 264]))
@settings(max_examples=600, deadline=None)
@example(512, 4096, 2, ANY, None, 1, True, 264)
@example(200, 8320, 2, ANY, None, 1, True, 264)
@example(1, 16_384, 8, ANY, "one_shot", 4, False, 264)
def test_launches(rows: int, hidden: int, n: int, half: int, force: Any, sharing: int, clusters: bool, resident: int):
    shape, gpus = shape_of(rows, hidden), plan.Gpus(n, half, resident, sharing, clusters=clusters)
    found = norm_plan.make_plan(shape, gpus, force)
    if found is None:
        return
    check(found, shape, gpus)
    assert clusters or found.cluster == 1
    assert force is None or found.kernel == plan.ALGORITHMS[force].fused
    kernel = found.kernel, found.cluster, found.depth
    if half == ANY:
        assert kernel in norm_plan.variants(shape, gpus, force)


@given(st.integers(1, 512), st.integers(8, 64).map(lambda groups: 128 * groups), worlds)
@settings(deadline=None)
def test_usual_rows_have_a_kernel(rows: int, hidden: int, n: int):
    """Hidden sizes of 1,024 to 8,192, in the usual workspace, as long as they fit."""
    half = workspace.half_bytes(128 * MB)
    found = norm_plan.make_plan(shape_of(rows, hidden), plan.Gpus(n, half))
    assert found is not None or 2 * 3 * rows * hidden * n > half


@pytest.mark.parametrize(
    ("rows", "hidden", "n", "kernel", "cluster", "grid", "block", "depth"),
    [
        (1, 2048, 2, "one_shot", 1, 1, 256, 1),
        (1, 3072, 2, "one_shot", 4, 4, 96, 1),
        (64, 4096, 2, "one_shot", 4, 256, 128, 1),
        (65, 4096, 2, "one_shot", 1, 65, 512, 1),
        (512, 4096, 2, "one_shot", 1, 512, 512, 1),
        (64, 8192, 2, "one_shot", 8, 512, 128, 1),
        (65, 8192, 2, "one_shot", 4, 260, 256, 1),
        (128, 8192, 2, "one_shot", 4, 512, 256, 1),
        (129, 8192, 2, "one_shot", 2, 258, 512, 1),
        (256, 8192, 2, "one_shot", 2, 512, 512, 1),
        (257, 8192, 2, "two_shot", 1, 257, 512, 1),
        (256, 8256, 2, "one_shot", 2, 512, 288, 2),
        (128, 16_384, 2, "two_shot", 2, 256, 512, 1),
        (64, 16_384, 2, "one_shot", 8, 512, 256, 1),
        (64, 5120, 2, "one_shot", 4, 256, 160, 1),
        (65, 5120, 2, "one_shot", 2, 130, 320, 1),
        (256, 5120, 2, "one_shot", 2, 512, 320, 1),
        (257, 5120, 2, "one_shot", 1, 257, 320, 2),
        (1, 4096, 4, "one_shot", 4, 4, 128, 1),
        (16, 5120, 4, "one_shot", 4, 64, 160, 1),
        (16, 2048, 4, "one_shot", 1, 16, 256, 1),
        (16, 3072, 4, "one_shot", 4, 64, 96, 1),
        (32, 4096, 4, "two_shot", 1, 32, 128, 1),
        (32, 8192, 4, "two_shot", 8, 256, 32, 1),
        (64, 8192, 4, "two_shot", 4, 256, 64, 1),
        (128, 8192, 4, "two_shot", 2, 256, 128, 1),
        (512, 8192, 4, "two_shot", 1, 264, 256, 1),
        (16, 4096, 8, "two_shot", 1, 16, 64, 1),
        (4, 8192, 8, "one_shot", 8, 32, 128, 1),
        (600, 8192, 2, "two_shot", 1, 264, 512, 1),
        (8, 16_384, 2, "one_shot", 8, 64, 256, 1),
    ],
)
def test_the_rule(rows: int, hidden: int, n: int, kernel: str, cluster: int, grid: int, block: int, depth: int):
    """Several blocks for few rows, else one; one shot up to the sizes of the plain all-reduce, or to 2 MB."""
    found = norm_plan.make_plan(shape_of(rows, hidden), plan.Gpus(n, ANY))
    assert found is not None
    assert found.kernel == plan.ALGORITHMS[kernel].fused
    assert (found.cluster, found.grid, found.block, found.depth) == (cluster, grid, block, depth)


def test_measured_choices():
    """The first one with room for the rows, the last one for more; only for its hidden size, and where it can run."""
    table = norm_plan.checked_table(
        norm_plan.NormChoice(*one)
        for one in ((4096, 2, "two_shot", 1), (4096, 16, "one_shot", 4), (8192, 8, "one_shot", 1))
    )

    def found(
        rows: int, hidden: int = 4096, half: int = ANY, forced: str | None = None, clusters: bool = True
    ) -> tuple[str, int]:
        shape, gpus = shape_of(rows, hidden), plan.Gpus(2, half, clusters=clusters)
        planned = norm_plan.make_plan(shape, gpus, forced, table)
        assert planned is not None
        check(planned, shape, gpus)
        of_row = norm_plan.variants(shape, gpus, forced, table)
        assert (planned.kernel, planned.cluster, planned.depth) in of_row
        return planned.kernel, planned.cluster

    assert [found(rows) for rows in (1, 2)] == [("fused_two_shot", 1)] * 2
    assert [found(rows) for rows in (3, 16, 17, 60)] == [("fused_one_shot", 4)] * 4
    assert found(2000) == ("fused_two_shot", 1), "clusters have no tiles"
    assert found(2, forced="one_shot") == ("fused_one_shot", 4)
    assert found(16, clusters=False) == ("fused_two_shot", 1), "the last one without clusters"
    assert found(4, 8192) == ("fused_one_shot", 1)
    assert found(4, 6144) == ("fused_one_shot", 8)
    tight = norm_plan._CODES_END + 60_000
    assert found(2, 8192, tight) == ("fused_one_shot", 1)
    assert found(8, 8192, 4 * tight)[0] == "fused_one_shot"


@given(counts, hiddens, worlds, halves, sharings, st.booleans(), st.sampled_from([16, 264]))
@settings(max_examples=300, deadline=None)
def test_what_a_table_can_choose(
    rows: int, hidden: int, n: int, half: int, sharing: int, clusters: bool, resident: int
):  # fmt: skip
    shape, gpus = shape_of(rows, hidden), plan.Gpus(n, half, resident, sharing, clusters=clusters)
    for choice, planned in norm_plan.every_plan(shape, gpus):
        check(planned, shape, gpus)
        table = norm_plan.checked_table([choice])
        assert norm_plan.make_plan(shape, gpus, None, table) == planned
        kernel = planned.kernel, planned.cluster, planned.depth
        assert kernel in norm_plan.variants(shape, gpus, None, table)


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "n", "half"),
    [
        (1, 4096, "float32", 2, ANY),
        (1, 4128, "bfloat16", 2, ANY),
        (1, 16_448, "bfloat16", 2, ANY),
        (0, 4096, "bfloat16", 2, ANY),
        (1, 4096, "bfloat16", 1, ANY),
        (4096, 8192, "bfloat16", 2, 1 << 20),
    ],
    ids=["float32", "no whole groups", "too long", "no rows", "one rank", "no room"],
)
def test_the_pair_has_the_rest(rows: int, hidden: int, dtype: str, n: int, half: int):
    assert norm_plan.make_plan(shape_of(rows, hidden, dtype), plan.Gpus(n, half)) is None


def test_slots_are_no_plain_kernels():
    """A fused kernel's slots begin where no plain kernel's do, and those of its dtypes differ."""
    offsets = [plan.code_offset(dtype, "norm") for dtype in plan.FUSED_DTYPES]
    assert len({*offsets}) == len(offsets)
    assert all(plan.CODES_BYTES <= offset < norm_plan._CODES_END for offset in offsets)
    assert all(offset % plan.CODE_BYTES == 0 for offset in offsets)


def test_what_the_kernels_have_room_for():
    text = (ROOT / "kernels" / "rmsnorm.cuh").read_text()
    groups = int(re.findall(r"constexpr u32 kMostGroups = (\d+);", text)[0])
    assert groups * norm_plan.GROUP == norm_plan.MAX_HIDDEN
    assert re.findall(r"kScaleUnits = (\d+);", text) == [str(norm_plan._SHARE)]
