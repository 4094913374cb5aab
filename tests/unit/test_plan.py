"""The plan covers every message, fits every workspace, and agrees with the kernels' own constants and formulas."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ipcreduce.dtypes import KIND_NAMES, OPS
from ipcreduce.graphs.direct import launches
from ipcreduce.ipc import bulk, peers, plan, workspace
from tests.tools.machine import ROOT

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
KERNELS = ROOT / "kernels"

worlds = st.integers(2, plan.MAX_RANKS)
# Sizes of every order of magnitude, and those beside a round one, where an off-by-one would be.
sizes = st.integers(1, 64 * MB) | st.builds(
    lambda power, step: max(1, (1 << power) + step), st.integers(0, 28), st.integers(-17, 17)
)
halves = st.integers(1, 512).map(lambda megabytes: workspace.half_bytes(megabytes * MB))
forced = st.sampled_from([None, *plan.ALGORITHMS])


def constant(name: str) -> int:
    """A constant of the kernels, from their source."""
    text = "".join(path.read_text() for path in sorted(KERNELS.glob("*.cu*")))
    [value] = re.findall(rf"constexpr u32 {name} = (\d+)", text)
    return int(value)


def launch_bound(kernel: str, depth: int, n: int) -> int:
    """The most threads a block, from ``KERNEL(name, threads, blocks)``."""
    source = (KERNELS / f"{kernel}.cu").read_text()
    [threads] = re.findall(rf"KERNEL\({kernel}, (.+?), .+\)\(KERNEL_ARGS", source)
    if threads.isdecimal():
        return int(threads)
    [(most, fewer, otherwise)] = re.findall(r"kDepth \* kRanks <= (\d+) \? (\d+) : (\d+)", threads)
    return int(fewer) if depth * n <= int(most) else int(otherwise)


@given(st.integers(1, 2 * GB), worlds)
@settings(deadline=None)
@example(8 * MB, 2)
@example(8 * MB, 8)
def test_a_workspace_for_the_largest_message(nbytes: int, n: int):
    """One launch up to 1 GB; as many as with any workspace beyond. Not much more than the message takes."""
    size = workspace.bytes_for(nbytes)
    assert len(plan.make_plan(nbytes, plan.Gpus(n, workspace.half_bytes(size)))) == -(-nbytes // GB)
    assert size <= 4 * min(nbytes, GB) + MB


@given(sizes, worlds, halves, forced)
@settings(max_examples=1000, deadline=None)
@example(1, 2, workspace.half_bytes(MB), None)
@example(2 * GB, 8, workspace.half_bytes(MB), "two_shot")
@example(2 * GB, 8, workspace.half_bytes(MB), "one_shot")
def test_steps(nbytes: int, n: int, half: int, force: str | None):
    steps = plan.make_plan(nbytes, plan.Gpus(n, half), force)
    end = 0
    for step in steps:
        assert step.offset == end, "a gap, an overlap, or out of order"
        end += step.nbytes
        assert step.nbytes > 0
        assert step.nbytes % 16 == 0 or step is steps[-1]
        check_step(step, n, half)
        assert force in (None, step.algorithm)
    assert end == nbytes


def check_step(step: plan.LaunchPlan, n: int, half: int) -> None:
    """One launch fits the workspace and the limits of the kernel, and its threads cover its packets."""
    if step.algorithm == "direct":  # data one way, as in two_shot, and then a packet a block
        staged = plan.staging_bytes("two_shot", step.nbytes, n) // 2 + (n - 1) * plan.row_bytes(plan.EPOCH_SLOTS)
    else:
        staged = plan.staging_bytes(step.algorithm, step.nbytes, n)
    assert staged + plan.CODES_BYTES <= half
    assert 1 <= step.grid <= plan.EPOCH_SLOTS
    assert step.block % 32 == 0
    assert 32 <= step.block <= launch_bound(step.algorithm, step.depth, n)
    assert step.depth in ((1,) if step.algorithm == "one_shot" else (1, 2, 4))
    packets = -(-step.nbytes // 16)
    if step.algorithm == "one_shot":  # a thread a packet
        work = packets
        assert step.grid * step.block >= work
    else:  # a thread a column; where there are more columns, the kernel goes on to the next tile
        work = -(-packets // n)
    assert (step.grid - 1) * step.block < work, "a block with nothing to do"


@given(sizes, st.integers(3, 8), halves, st.integers(8, 256), worlds)
@settings(max_examples=300, deadline=None)
@example(1, 3, workspace.half_bytes(MB), 132, 1)
@example(2 * GB, 8, workspace.half_bytes(MB), 132, 1)
@example(2 * GB, 3, workspace.half_bytes(64 * GB), 132, 1)
@example(64 * MB, 8, workspace.half_bytes(256 * MB), 8, 8)
def test_broadcasts_in_two_hops(nbytes: int, n: int, half: int, multiprocessors: int, sharing: int):
    """Every byte once, in even launches that fit the slots, and whose blocks every rank's GPU holds at once."""
    resident, most = min(plan.EPOCH_SLOTS, 2 * multiprocessors), launch_bound("spread", 1, n)
    gpus = plan.Gpus(n, half, resident, min(sharing, n))
    steps = plan.spread_plan(nbytes, gpus, "two_shot")
    assert [step.offset for step in steps] == [*range(0, nbytes, steps[0].nbytes)]
    assert sum(step.nbytes for step in steps) == nbytes
    assert steps[0].nbytes % 16 == 0 or len(steps) == 1
    assert steps[0].nbytes - nbytes / len(steps) < 16 * KB
    for step in steps:
        columns = -(-step.nbytes // 16 // (n - 1))
        assert (n - 1) * plan.row_bytes(columns) + plan.CODES_BYTES <= half
        assert step.nbytes <= GB
        assert (step.algorithm, step.depth) == ("spread", 1)
        assert 32 <= step.block <= most
        assert step.block % 32 == 0
        assert 1 <= step.grid <= gpus.most_blocks
        assert (step.grid - 1) * step.block < columns, "a block with nothing to do"
        assert step.grid * step.block <= resident * most
    assert "KERNEL(spread, 256, 2)" in (KERNELS / "spread.cu").read_text()


def test_which_broadcasts_go_in_two_hops():
    half, least = workspace.half_bytes(256 * MB), plan.SPREAD_BYTES
    for forced, n, nbytes, spreads in (
        (None, 3, least, True), (None, 8, GB, True), (None, 3, least - 1, False), (None, 2, GB, False),
        ("two_shot", 3, 1, True), ("two_shot", 3, 0, False), ("two_shot", 2, GB, False), ("two_shot", 1, GB, False),
        ("one_shot", 3, GB, False), (plan.BULK, 3, GB, False), (None, 3, 0, False),
    ):  # fmt: skip
        assert bool(plan.spread_plan(nbytes, plan.Gpus(n, half), forced)) == spreads, (forced, n, nbytes)
    assert [step.nbytes for step in plan.spread_plan(120 * MB, plan.Gpus(4, half))] == [120 * MB]
    assert [step.nbytes for step in plan.spread_plan(128 * MB, plan.Gpus(4, half))] == [64 * MB] * 2


@pytest.mark.parametrize("algorithm", plan.ALGORITHMS)
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("gigabytes", [8, 64])
def test_one_launch_is_within_the_kernels_32_bits(algorithm: str, n: int, gigabytes: int):
    """Counts of bytes and packets are u32 in the kernels, ``a + b - 1`` of divide_up() included."""
    half = workspace.half_bytes(gigabytes * GB)
    for step in plan.make_plan(17 * GB, plan.Gpus(n, half), algorithm):
        assert step.nbytes + 15 < 1 << 32
        check_step(step, n, half)


@pytest.mark.parametrize("algorithm", plan.ALGORITHMS)
@pytest.mark.parametrize("n", range(2, 9))
def test_the_smallest_workspace_makes_progress(algorithm: str, n: int):
    steps = plan.make_plan(64 * MB, plan.Gpus(n, workspace.half_bytes(MB)), algorithm)
    assert len(steps) <= 64 * MB // (16 * KB)


@given(sizes, worlds, halves, forced)
def test_launches_are_even(nbytes: int, n: int, half: int, force: str | None):
    """96 MB do not quite fit the default workspace: two launches of 48, not of 82 and 14."""
    steps = plan.make_plan(nbytes, plan.Gpus(n, half), force)
    assert all(step.nbytes == steps[0].nbytes for step in steps[:-1])
    assert steps[0].nbytes - nbytes / len(steps) < 16 * KB
    gpus = plan.Gpus(4, workspace.half_bytes(256 * MB))
    assert [step.nbytes for step in plan.make_plan(96 * MB, gpus)] == [48 * MB] * 2


def test_a_half_without_room_for_a_warp_is_refused():
    with pytest.raises(ValueError, match="too small for 8 ranks"):
        plan.make_plan(MB, plan.Gpus(8, plan.CODES_BYTES + 8 * KB))


@pytest.mark.parametrize("n", range(1, 9))
def test_nothing_to_send_is_no_launch(n: int):
    half = workspace.half_bytes(MB)
    assert plan.make_plan(0, plan.Gpus(n, half)) == ()
    if n == 1:
        assert plan.make_plan(100 * MB, plan.Gpus(n, half), "two_shot") == ()


@pytest.mark.parametrize("n", range(2, 9))
def test_one_shot_for_small_two_shot_for_large(n: int):
    half = workspace.half_bytes(256 * MB)
    algorithms = [{step.algorithm for step in plan.make_plan(1 << power, plan.Gpus(n, half))} for power in range(31)]
    assert all(len(used) == 1 for used in algorithms)
    order = [used.pop() for used in algorithms]
    assert order == sorted(order), "one_shot after two_shot"
    last = order.index("two_shot") - 1
    largest = {2: 8 * MB, 3: 128 * KB, 4: 128 * KB}.get(n)  # measured; the powers of two next to the crossings
    assert 64 * KB <= 1 << last <= 128 * KB if largest is None else 1 << last == largest


@given(sizes, worlds, st.integers(1, 256), st.booleans())
def test_looped_grids_are_resident_at_once(nbytes: int, n: int, multiprocessors: int, direct: bool):
    """Two blocks of the largest size a multiprocessor, which KERNEL(..., 2) keeps the registers for."""
    resident, half = min(plan.EPOCH_SLOTS, 2 * multiprocessors), workspace.half_bytes(256 * MB)
    gpus = plan.Gpus(n, half, resident)
    for step in plan.make_plan(nbytes, gpus, "two_shot"):
        found = launches.direct(step, gpus) if direct else step
        check_step(found, n, half)
        most = launch_bound(found.algorithm, found.depth, n)
        assert direct or plan.most_threads(found.algorithm, found.depth, n) == most
        assert found.grid * found.block <= resident * most
        assert re.search(rf"KERNEL\({found.algorithm}, .+, 2\)", (KERNELS / f"{found.algorithm}.cu").read_text())


@functools.cache
def resident_threads(kernel: str, depth: int, n: int) -> int:
    """Threads for which a multiprocessor has the registers, from ``KERNEL(name, threads, blocks)``."""
    source = (KERNELS / f"{kernel}.cu").read_text()
    [blocks] = re.findall(rf"KERNEL\({kernel}, .+, (.+)\)\(KERNEL_ARGS", source)
    if not blocks.isdecimal():
        [(two, other)] = re.findall(r"^kRanks == 2 .*\? (\d) : (\d)$", blocks)
        blocks = two if n == 2 else other
    return launch_bound(kernel, depth, n) * int(blocks)


@given(sizes, worlds, worlds, st.integers(8, 256), halves, forced, st.booleans())
@settings(max_examples=300, deadline=None)
@example(8 * MB, 2, 2, 132, workspace.half_bytes(256 * MB), None, False)
@example(8 * MB, 2, 2, 132, workspace.half_bytes(256 * MB), "one_shot", False)
@example(64 * MB, 8, 8, 8, workspace.half_bytes(256 * MB), None, True)
def test_grids_of_ranks_on_one_gpu_are_resident_at_once(
    nbytes: int, n: int, sharing: int, multiprocessors: int, half: int, force: str | None, tuned: bool
):
    """Two of each rank, since the next one may wait there already; a block takes half a multiprocessor at most."""
    gpus = plan.Gpus(n, half, min(plan.EPOCH_SLOTS, 2 * multiprocessors), sharing)
    table = (plan.Choice(MB, "one_shot", 1024, 512, 1), plan.Choice(GB, "two_shot", 64, 512, 2)) if tuned else ()
    steps = plan.make_plan(nbytes, gpus, force, table)
    assert sum(step.nbytes for step in steps) == nbytes
    assert [step.offset for step in steps] == [sum(other.nbytes for other in steps[:i]) for i in range(len(steps))]
    kernels = plan.kernels(n, force, table)
    if force == "two_shot":
        steps += tuple(launches.direct(step, gpus) for step in steps)
        kernels |= {("direct", launches.depth(n))}
    for step in {replace(step, offset=0) for step in steps}:
        check_step(step, n, half)
        assert 2 * sharing * step.grid <= 2 * multiprocessors, "more blocks than two a multiprocessor"
        assert 2 * step.block <= resident_threads(step.algorithm, step.depth, n)
        assert 2 * step.block <= 1536  # what the multiprocessors of the smaller GPUs hold
    assert {(step.algorithm, step.depth) for step in steps} <= kernels


@pytest.mark.parametrize(
    ("n", "sharing", "nbytes", "shape"),
    [
        (2, 2, 4 * KB, ("one_shot", 2, 128)), (2, 2, 64 * KB, ("one_shot", 32, 128)), (2, 2, MB, ("two_shot", 64, 512)),
        (2, 2, 528 * KB, ("one_shot", 66, 512)), (2, 2, 16 * MB, ("two_shot", 66, 512)),
        (4, 2, 192 * KB, ("one_shot", 64, 192)), (4, 4, 16 * MB, ("two_shot", 17, 256)),
        (8, 8, 64 * KB, ("one_shot", 16, 256)),
    ],
)  # fmt: skip
def test_shapes_on_a_shared_gpu(n: int, sharing: int, nbytes: int, shape: tuple[str, int, int]):
    steps = plan.make_plan(nbytes, plan.Gpus(n, workspace.half_bytes(256 * MB), sharing=sharing))
    assert [(step.algorithm, step.grid, step.block) for step in steps] == [shape]


@given(sizes, worlds)
def test_direct_does_what_the_staged_launch_did(nbytes: int, n: int):
    half = workspace.half_bytes(256 * MB)
    for staged in plan.make_plan(nbytes, plan.Gpus(n, half), "two_shot"):
        step = launches.direct(staged, plan.Gpus(n, half))
        assert (step.algorithm, step.offset, step.nbytes) == ("direct", staged.offset, staged.nbytes)
        check_step(step, n, half)


def test_crossings_are_exact():
    half = workspace.half_bytes(256 * MB)
    for n, crossing in {2: 8 * MB, 4: 192 * KB, 8: 64 * KB}.items():
        assert plan.make_plan(crossing, plan.Gpus(n, half))[0].algorithm == "one_shot"
        assert plan.make_plan(crossing + 1, plan.Gpus(n, half))[0].algorithm == "two_shot"


def test_a_small_workspace_turns_to_two_shots():
    """8 MB at n=2 are one shot in a large workspace; where that would take several launches, two shots stage less."""
    [step] = plan.make_plan(8 * MB, plan.Gpus(2, workspace.half_bytes(256 * MB)))
    assert step.algorithm == "one_shot"
    small = plan.make_plan(8 * MB, plan.Gpus(2, workspace.half_bytes(8 * MB)))
    assert {step.algorithm for step in small} == {"two_shot"}


@pytest.mark.parametrize(
    ("n", "nbytes", "shape"),
    [
        (4, 512, ("one_shot", 1, 32)), (4, KB, ("one_shot", 2, 32)), (2, 1536, ("one_shot", 2, 64)),
        (2, 4 * KB, ("one_shot", 2, 128)), (4, 8 * KB, ("one_shot", 8, 64)), (2, 16 * KB, ("one_shot", 8, 128)),
        (4, 64 * KB, ("one_shot", 128, 32)), (4, 192 * KB, ("one_shot", 128, 96)), (4, 256 * KB, ("two_shot", 128, 32)),
        (4, MB, ("two_shot", 256, 64)), (4, 2 * MB, ("two_shot", 512, 64)), (4, 3 * MB, ("two_shot", 384, 128)),
        (4, 4 * MB, ("two_shot", 132, 256)), (4, 64 * MB, ("two_shot", 132, 256)), (2, 64 * KB, ("one_shot", 32, 128)),
        (2, 256 * KB, ("one_shot", 64, 256)), (2, MB, ("one_shot", 64, 1024)), (2, 2 * MB, ("one_shot", 512, 256)),
        (2, 8 * MB, ("one_shot", 512, 1024)), (2, 16 * MB, ("two_shot", 264, 512)),
    ],
)  # fmt: skip
def test_shapes_that_were_quickest(n: int, nbytes: int, shape: tuple[str, int, int]):
    """Over H200: see prototypes-h200-x*.json. Those of 16 KB to 1 MB over two ranks are quickest beside products."""
    [step] = plan.make_plan(nbytes, plan.Gpus(n, workspace.half_bytes(256 * MB)))
    assert (step.algorithm, step.grid, step.block) == shape


def test_short_eager_calls_only_are_graphs():
    half = workspace.half_bytes(256 * MB)
    for n in (2, 4):
        assert [len(plan.make_plan(nbytes, plan.Gpus(n, half))) for nbytes in (1, MB, MB + 1)] == [1, 1, 1]
    assert [plan.is_short(nbytes) for nbytes in (1, MB, MB + 1)] == [True, True, False]


@given(sizes, worlds, halves, forced)
@settings(deadline=None)
def test_pure(nbytes: int, n: int, half: int, force: str | None):
    """The same arguments give the same plan, whatever was planned before and whatever the environment says."""
    first = plan.make_plan(nbytes, plan.Gpus(n, half), force)
    plan.make_plan.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPCREDUCE_WORKSPACE_MB", "CUDA_VISIBLE_DEVICES", "IPCREDUCE_SYNC", "OMP_NUM_THREADS"):
            patch.setenv(name, "1")
        plan.make_plan(7, plan.Gpus(2, half))
        assert plan.make_plan(nbytes, plan.Gpus(n, half), force) == first


def test_reads_nothing_but_its_arguments():
    """No import through which a plan could come to know one rank's machine."""
    imported = set(re.findall(r"^(?:from|import) (\S+)", Path(plan.__file__).read_text(), re.M))
    assert imported == {"__future__", "collections.abc", "dataclasses", "functools", "itertools", "typing", "..dtypes"}


choices = st.builds(
    plan.Choice,
    up_to=st.integers(1, 64 * MB),
    algorithm=st.sampled_from(["one_shot", "two_shot"]),
    block=st.integers(1, 8).map(lambda warps: 32 * warps),
    blocks=st.integers(1, plan.EPOCH_SLOTS),
    depth=st.just(1),
)
choices |= st.builds(replace, choices, algorithm=st.just("two_shot"), depth=st.sampled_from([2, 4]))
tables = st.lists(choices, max_size=6, unique_by=lambda choice: choice.up_to).map(
    lambda found: plan.checked_table(sorted(found, key=lambda choice: choice.up_to), 8)
)


@given(sizes, worlds, halves, tables)
@settings(max_examples=300)
def test_any_table_gives_launches_that_run(nbytes: int, n: int, half: int, table: plan.Table):
    steps = plan.make_plan(nbytes, plan.Gpus(n, half), None, table)
    assert sum(step.nbytes for step in steps) == nbytes
    assert [step.offset for step in steps] == [sum(other.nbytes for other in steps[:i]) for i in range(len(steps))]
    for step in steps:
        packets = -(-step.nbytes // plan.PACKET_BYTES)
        assert 1 <= step.grid <= plan.EPOCH_SLOTS
        assert step.block <= launch_bound(step.algorithm, step.depth, n)
        assert step.block % 32 == 0
        assert step.algorithm == "two_shot" or step.grid * step.block >= packets  # a thread a packet
        assert plan.staging_bytes(step.algorithm, step.nbytes, n) + plan.CODES_BYTES <= half
    gpus = plan.Gpus(n, half)
    assert plan.make_plan(nbytes, gpus, "two_shot", table) == plan.make_plan(nbytes, gpus, "two_shot")


def test_a_table_decides():
    half = workspace.half_bytes(256 * MB)
    small, large = plan.Choice(1000, "two_shot", 64, 3, 1), plan.Choice(5000, "one_shot", 96, 512, 1)
    table = plan.checked_table([small, large], 2)
    gpus = plan.Gpus(2, half)
    assert plan.make_plan(1000, gpus, None, table) == (plan.LaunchPlan("two_shot", 0, 1000, 1, 64, 1),)
    assert plan.make_plan(1001, gpus, None, table) == (plan.LaunchPlan("one_shot", 0, 1001, 1, 96, 1),)
    assert plan.make_plan(16 * 960, gpus, None, table) == (plan.LaunchPlan("one_shot", 0, 16 * 960, 10, 96, 1),)
    assert plan.make_plan(2 * 16 * 640, gpus, None, table[:1])[0].grid == 3  # at most, in a loop


@pytest.mark.parametrize(
    "wrong",
    [
        plan.Choice(1000, "direct", 64, 3, 1),
        plan.Choice(1000, "one_shot", 0, 3, 1),
        plan.Choice(1000, "one_shot", 1056, 3, 1),
        plan.Choice(1000, "two_shot", 544, 3, 1),
        plan.Choice(1000, "two_shot", 33, 3, 1),
        plan.Choice(1000, "two_shot", 64, 513, 1),
        plan.Choice(1000, "two_shot", 64, 0, 1),
        plan.Choice(1000, "two_shot", 64, 3, 3),
        plan.Choice(1000, "two_shot", 64, 3, 0),
        plan.Choice(1000, "one_shot", 64, 3, 2),
        plan.Choice(1000, "two_shot", 512, 3, 4),
    ],
)
def test_a_choice_that_no_kernel_runs_by_is_refused(wrong: plan.Choice):
    with pytest.raises(ValueError, match="no kernel runs by"):
        plan.checked_table([wrong], 2)


def test_tables_are_in_order_and_short():
    choice = plan.Choice(1000, "two_shot", 64, 3, 1)
    with pytest.raises(ValueError, match="or do not ascend"):
        plan.checked_table([choice, choice], 2)
    many = [plan.Choice(size, "two_shot", 64, 3, 1) for size in range(1, plan.MAX_CHOICES + 2)]
    assert plan.checked_table(many[:-1], 2)
    with pytest.raises(ValueError, match="are more than 24"):
        plan.checked_table(many, 2)


def test_codes_are_apart():
    assert {"uint8", "bool", "float32", "complex64", "float64", "complex128"} <= set(KIND_NAMES)
    whole = [(kind, op) for kind in KIND_NAMES for op in OPS]
    parts = [(kind, f"reduce-scatter {op}") for kind, op in whole]
    moved = "all-gather", "broadcast", "spread"
    offsets = [plan.code_offset(*of) for of in (*whole, *parts, *((plan.BYTES, op) for op in moved))]
    assert len(set(offsets)) == 2 * len(KIND_NAMES) * len(OPS) + len(moved)
    assert all(offset % 128 == 0 for offset in offsets)
    assert min(offsets) == 0
    assert max(offsets) + 128 == plan.CODES_BYTES


def test_the_kernels_constants():
    assert constant("kEpochSlots") == plan.EPOCH_SLOTS
    assert constant("kPacketBytes") == plan.PACKET_BYTES
    epochs_and_words_of_check_wait = 8 * plan.EPOCH_SLOTS + 12
    room = workspace.EPOCHS_BYTES
    assert epochs_and_words_of_check_wait <= room
    assert room % 128 == 0


@given(st.integers(1, 64 * 1024))
def test_halves_fit_the_workspace(megabytes: int):
    half = workspace.half_bytes(megabytes * MB)
    assert half % 128 == 0
    assert 0 <= megabytes * MB - (workspace.EPOCHS_BYTES + 2 * half) < 2 * 128


@pytest.fixture(scope="module")
def rows_of_the_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """Bytes of a row of so many packets, as packets.cuh itself has it, compiled for the CPU."""
    stand_in = ROOT / "tests" / "simulated" / "include"
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("rows")
    packets = [*range(2100), *(k * 32 * 8 + d for k in (64, 1000, 65536) for d in (-33, -32, -1, 0, 1, 31, 32, 33))]
    (folder / "rows.cpp").write_text(
        "#include <cstdio>\n#include <packets.cuh>\nint main() {\n"
        '  for (unsigned p; scanf("%u", &p) == 1;)\n'
        '    printf("%llu %llu\\n", row_bytes(p), escape_at(0, p, p ? p - 1 : 0));\n'
        "}\n"
    )
    macros = ["-DIPCREDUCE_DTYPE=int32", "-DIPCREDUCE_OP=sum", "-DIPCREDUCE_WHOLE_PACKETS=1"]
    runtime = folder / "runtime.cpp"  # row_bytes() calls nothing of it, but other functions of the header do
    runtime.write_text(
        "#include <cstdlib>\n#include <runtime.h>\n__thread const SimThread* sim_thread; __thread int kRank, kRanks;\n"
        "bool sim_split_packets; void sim_sync_block() { abort(); } void sim_sync_warp() { abort(); }\n"
        "uint32_t sim_vote(bool) { abort(); } void sim_relax() { abort(); } void sim_touch() { abort(); }\n"
        "void sim_await_predecessor() { abort(); } uint64_t sim_timer() { abort(); }\n"
        "void sim_misaligned() { abort(); }\n"
    )
    command = ["g++", "-std=c++17", *macros, f"-I{stand_in}", f"-I{KERNELS}", "rows.cpp", "runtime.cpp", "-o", "rows"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    output = subprocess.run(
        [folder / "rows"], input=" ".join(map(str, packets)), capture_output=True, text=True, check=True
    ).stdout
    lines = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert all(last_escape + 16 <= row for (row, last_escape), p in zip(lines, packets, strict=True) if p)
    return {count: row for count, (row, _) in zip(packets, lines, strict=True)}


def test_row_bytes_is_the_kernels(rows_of_the_kernels: dict[int, int]):
    assert {packets: plan.row_bytes(packets) for packets in rows_of_the_kernels} == rows_of_the_kernels


@given(st.integers(0, 1 << 28))
def test_rows_hold_their_packets_and_escapes(packets: int):
    row = plan.row_bytes(packets)
    warps = -(-packets // 32)
    assert row % 128 == 0
    assert row >= 16 * (32 * warps + warps)
    assert row < 16 * (33 * warps + 8)


@given(sizes, worlds, halves, forced, st.booleans())
@settings(deadline=None)
def test_kernels_are_all_that_a_plan_may_launch(nbytes: int, n: int, half: int, force: str | None, tuned: bool):
    table = (plan.Choice(4 * KB, "one_shot", 64, 128, 1), plan.Choice(GB, "two_shot", 128, 256, 2)) if tuned else ()
    steps = plan.make_plan(nbytes, plan.Gpus(n, half), force, table)
    used = {(step.algorithm, step.depth) for step in steps}
    assert used <= plan.kernels(n, force, table)


# ---- calls with few blocks
limits = st.integers(1, 300)


@given(sizes, worlds, limits, st.sampled_from([None, "two_shot"]), st.integers(1, 4))
@settings(deadline=None)
def test_no_grid_is_larger_than_its_limit(nbytes: int, n: int, sms: int, force: str | None, sharing: int):
    """A limit that the usual plan keeps changes nothing."""
    half, area = workspace.half_bytes(16 * MB), plan.area_bytes(16 * MB)
    usual = plan.make_plan(nbytes, plan.Gpus(n, half, sharing=sharing), force)
    for room in (0, area):
        steps = plan.make_plan(nbytes, plan.Gpus(n, half, sharing=sharing, area=room), force, sms=sms)
        assert all(step.grid <= sms for step in steps)
        assert sum(step.nbytes for step in steps) == nbytes
        if all(step.grid <= sms for step in usual):
            assert steps == usual
        elif room and force is None and nbytes >= plan.BULK_BYTES:
            assert {step.algorithm for step in steps} == {plan.BULK}


@pytest.mark.parametrize(
    ("n", "packets", "shape"),
    [
        (2, 512, (8, 64)), (2, 4 * KB, (32, 128)), (2, 16 * KB, (64, 256)), (2, 65 * KB, (130, 512)),
        (4, 4 * KB, (128, 32)), (4, 16 * KB, (128, 128)),
    ],
)  # fmt: skip
def test_shapes_of_splits(n: int, packets: int, shape: tuple[int, int]):
    assert plan.parts_shape(packets, plan.Gpus(n, 0), None) == shape


@pytest.mark.parametrize(
    ("n", "sms", "nbytes", "shape"),
    [(2, 8, 256 * KB, (8, 512)), (2, 1, 64 * KB, (1, 512)), (4, 16, 256 * KB, (16, 256)), (8, 4, 512 * KB, (4, 256))],
)
def test_few_blocks_are_large(n: int, sms: int, nbytes: int, shape: tuple[int, int]):
    [step] = plan.make_plan(nbytes, plan.Gpus(n, workspace.half_bytes(256 * MB)), sms=sms)
    assert (step.algorithm, step.grid, step.block) == ("two_shot", *shape)


@given(sizes, worlds, limits, st.integers(1, 4), st.sampled_from([MB, 3 * MB, 128 * MB]))
@settings(deadline=None)
def test_parts_of_a_message_fit_the_area(nbytes: int, n: int, sms: int, sharing: int, nbytes_of_workspace: int):
    half, area = workspace.half_bytes(nbytes_of_workspace), plan.area_bytes(nbytes_of_workspace)
    gpus = plan.Gpus(n, half, sharing=sharing, area=area)
    steps = plan.make_plan(nbytes, gpus, plan.BULK, sms=sms)
    end = 0
    for step in steps:
        assert step.offset == end
        assert 0 < step.nbytes <= area
        assert step.nbytes % 16 == 0 or step is steps[-1]
        assert 1 <= step.grid <= min(sms, gpus.most_blocks)
        assert step.block <= launch_bound(plan.BULK, step.depth, n)
        end += step.nbytes
    assert end == nbytes
    flags = 2 * (n - 1) * plan.row_bytes(plan.EPOCH_SLOTS)
    assert flags + plan.CODES_BYTES <= half, "two rows of flags for each peer"


@given(worlds, limits, st.integers(1, 4), st.integers(0, 300).map(lambda units: 128 * 1024 * units), st.booleans())
def test_rounds_of_tiles_fit_the_area(n: int, sms: int, sharing: int, area: int, reduces: bool):
    """With at least as many tiles in a round as tiles.cuh needs, and with one block if that is all that fits."""
    if n == 1:
        return
    gpus = plan.Gpus(n, 0, sharing=sharing, area=area)
    found = plan.tiles(gpus, sms, reduces=reduces)
    tile, messages = (32 * KB // n // 128 * 128, n - 1) if reduces else (32 * KB // (n - 1) // 128 * 128, 1)
    if found is None:
        assert area // messages < 4 * 3 * tile
        return
    assert 1 <= found.grid <= min(sms, gpus.most_resident)
    assert found.round_tiles >= 3
    assert 4 * found.round_tiles * found.grid * tile * messages <= area


def test_the_numbers_of_tiles_are_those_of_the_kernels():
    text = (ROOT / "kernels" / "tiles.cuh").read_text()
    assert "kStages = 6, kRounds = 4," in text
    assert "kLeastTiles = kStages / 2" in text
    assert (plan._ROUNDS, plan._LEAST_TILES) == (4, 3)
    assert f"kStageBytes = {plan._STAGE_BYTES >> 10} << 10" in (ROOT / "kernels" / "sync.cuh").read_text()


def test_gpus_without_bulk_copies_have_no_area():
    options = SimpleNamespace(workspace=128 * MB, algorithm=None)
    for capability, kilobytes, area in (((8, 9), 227, 0), ((9, 0), 227, 32 * MB), ((12, 0), 99, 0)):
        devices = np.array(
            [((9, 0), 227 * KB), (capability, kilobytes * KB)], [("capability", "<u4", 2), ("shared_bytes", "<u4")]
        )
        assert peers._lowest(devices, options) == (min(capability, (9, 0)), area)
        assert peers._lowest(devices[:1], options) == ((9, 0), 0)
    assert plan.area_bytes(64 * GB) == 256 * MB, "kernels count the bytes of a launch in 32 bits"


@given(st.integers(1, 64 * MB), worlds)
def test_the_chunks_of_all_ranks_are_the_message(nbytes: int, n: int):
    end = 0
    for rank in range(n):
        first, packets = bulk.own_chunk(nbytes, n, rank)
        assert first == end
        end += packets
    assert end == -(-nbytes // 16)
