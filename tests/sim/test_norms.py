"""All-reduce with RMSNorm by the fused kernels and by the unfused pair: random shapes against NumPy, and late ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
SWEEP = "tests/gpu/norm_sweep.py"


@pytest.mark.parametrize(("ranks", "cases"), [(2, 40), (3, 25), (4, 15), (8, 6)])
def test_random_rows(mpirun: Run, ranks: int, cases: int) -> None:
    output = mpirun("tests.simulated", ranks, SWEEP, "--cases", cases, "--largest", 60_000, "--rows", 40).stdout
    assert f"{cases} cases on {ranks} ranks, all right" in output
    assert "fused_one_shot, " in output
    assert "fused_two_shot, " in output


def test_more_rows_than_blocks(mpirun: Run) -> None:
    """Ranks that share a GPU have few blocks, so a block has several rows."""
    environ = {"SIM_DEVICES": "1", "SIM_MULTIPROCESSORS": "12"}
    arguments = "--cases", 24, "--first", 100, "--largest", 60_000, "--rows", 40
    output = mpirun("tests.simulated", 3, SWEEP, *arguments, env=environ).stdout
    assert "24 cases on 3 ranks, all right" in output
    for kernel in ("fused_one_shot", "fused_two_shot"):
        assert f"{kernel}, 1 blocks a row, depth 1 in tiles" in output


def test_where_packets_arrive_in_halves(mpirun: Run) -> None:
    environ = {"SIM_SPLIT_PACKETS": "1", "SIM_LATE": "0.002"}
    arguments = "--cases", 10, "--first", 200, "--largest", 20_000, "--rows", 10
    assert "10 cases on 3 ranks, all right" in mpirun("tests.simulated", 3, SWEEP, *arguments, env=environ).stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_late_rank(mpirun: Run, ranks: int) -> None:
    """The others' waits end, and all that they have is NaN. It gets no wrong values itself."""
    assert "abandoned launches on" in mpirun("tests.simulated", ranks, SWEEP, "--abandoned").stdout
