"""Calls with an expression: random ones against NumPy, and tests/sim/scenarios/maps.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Hold = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]
SWEEP = "tests/gpu/sweep.py", "map"


@pytest.mark.parametrize(("ranks", "cases"), [(1, 10), (2, 20), (3, 30)])
def test_random_expressions(mpirun: Run, ranks: int, cases: int) -> None:
    """The same calls on all worlds: each kernel is built once."""
    output = mpirun("tests.simulated", ranks, *SWEEP, "--cases", cases, "--largest", 6000, "--expressions", 7).stdout
    assert f"{cases} cases, {6 * cases} calls on {ranks} ranks, all right" in output


def test_random_expressions_in_several_launches(mpirun: Run) -> None:
    """Rows that begin within a launch, and operands that go on from one launch to the next."""
    arguments = "--cases", 6, "--largest", 3_000_000, "--expressions", 3, "--seed", 3
    assert "6 cases, 36 calls" in mpirun("tests.simulated", 2, *SWEEP, *arguments).stdout


def test_random_expressions_over_nccl(mpirun: Run) -> None:
    arguments = "--cases", 30, "--largest", 6000, "--expressions", 7, "--backend", "nccl"
    assert "30 cases, 60 calls" in mpirun("tests.simulated", 2, *SWEEP, *arguments).stdout


def test_results(hold: Hold) -> None:
    hold(2, "forms_of_expressions", "rounded_once", "compiled_once", "host_expressions")


def test_graphs_and_streams(hold: Hold) -> None:
    hold(2, "recorded_expressions", SIM_LATE="0.002")


def test_cached_calls(hold: Hold) -> None:
    hold(2, "cached_expressions", "cached_expressions_around")


def test_faults(hold: Hold) -> None:
    hold(
        2,
        "expressions_that_do_not_compile",
        "expressions_that_differ",
        "late_for_an_expression",
        "refused_expressions",
    )
