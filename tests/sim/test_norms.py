"""All-reduce with RMSNorm by the fused kernels and by the unfused pair: random shapes against NumPy, and late ranks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim import faults
from tests.simulated import compiler, kernels
from tests.simulated.kernels import Library

Run = Callable[..., subprocess.CompletedProcess[str]]
SWEEP = "tests/gpu/sweep.py", "norm"


@pytest.mark.parametrize(
    ("ranks", "cases", "largest"), [(2, 30, 60_000), (3, 15, 60_000), (4, 8, 60_000), (8, 3, 8_000)]
)
def test_random_rows(mpirun: Run, ranks: int, cases: int, largest: int) -> None:
    output = mpirun("tests.simulated", ranks, *SWEEP, "--cases", cases, "--largest", largest, "--rows", 40).stdout
    assert f" calls on {ranks} ranks, all right" in output
    assert "fused_one_shot, " in output
    assert "fused_two_shot, " in output


def test_more_rows_than_blocks(mpirun: Run) -> None:
    """Ranks that share a GPU have few blocks, so a block has several rows."""
    environ = {"SIM_DEVICES": "1", "SIM_MULTIPROCESSORS": "12"}
    arguments = "--cases", 24, "--first", 100, "--largest", 60_000, "--rows", 40
    output = mpirun("tests.simulated", 3, *SWEEP, *arguments, env=environ).stdout
    assert "24 cases, " in output
    for kernel in ("fused_one_shot", "fused_two_shot"):
        assert f"{kernel}, 1 blocks a row, depth 1 in tiles" in output


def test_where_packets_arrive_in_halves(mpirun: Run) -> None:
    environ = {"SIM_SPLIT_PACKETS": "1", "SIM_LATE": "0.002"}
    arguments = "--cases", 10, "--first", 200, "--largest", 20_000, "--rows", 10
    assert "10 cases, " in mpirun("tests.simulated", 3, *SWEEP, *arguments, env=environ).stdout


@pytest.mark.parametrize("ranks", [3])
def test_a_late_rank(mpirun: Run, ranks: int) -> None:
    """The others' waits end, and all that they have is NaN. It gets no wrong values itself."""
    assert "abandoned launches on" in mpirun("tests.simulated", ranks, *SWEEP, "--abandoned").stdout


# ---- the fused kernels alone, with ranks as threads of one process
LIBRARIES = [
    Library("fused_one_shot", scale=2),
    Library("fused_one_shot", cluster=4, scale=2),
    Library("fused_one_shot", cluster=2, scale=3, depth=2),
    Library("fused_two_shot", scale=2),
    Library("fused_two_shot", cluster=2, scale=1),
]


@pytest.mark.usefixtures("tsan")
@pytest.mark.parametrize("ranks", [3])
def test_order_between_and_within_blocks(ranks: int) -> None:
    assert kernels.run_norms(LIBRARIES, ranks=ranks, operations=30, seed=ranks, tsan=True) == ("nothing", "ok\n")


@pytest.mark.usefixtures("tsan")
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("rmsnorm.cuh", "  else sync_block();", "  else sync_warp();"),
        ("fused_one_shot.cu", "for (u32 turn = 0;; turn ^= 1)", "for (u32 turn = 0;; turn ^= 0)"),
        ("fused_one_shot.cu", "restore_sentinels(rows_at, slots, packet_index(slot, d), alive);", "sync_warp();"),
    ],
    ids=["no barrier before the sums are read", "one table for all rows", "slots are not emptied"],
)  # fmt: skip
def test_faults_are_caught(file: str, old: str, new: str, tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    shutil.copytree(compiler.KERNELS, directory)
    text = (directory / file).read_text()
    assert text.count(old) == 1
    (directory / file).write_text(text.replace(old, new))
    sources = kernels.Sources(directory, compiler.INCLUDE, tmp_path)
    finding, output = kernels.run_norms(LIBRARIES[:1], ranks=2, operations=30, tsan=True, sources=sources)
    assert faults.is_caught(finding), output
