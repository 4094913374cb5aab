"""Lists of arrays in one call: random ones against NumPy, and tests/sim/scenarios/lists.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Hold = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]
SWEEP = "tests/gpu/sweep.py", "list"


@pytest.mark.parametrize(("ranks", "cases"), [(1, 10), (2, 30), (3, 30), (4, 10)])
def test_random_lists(mpirun: Run, ranks: int, cases: int) -> None:
    """The same lists on all worlds: each kernel is built once."""
    output = mpirun("tests.simulated", ranks, *SWEEP, "--cases", cases, "--largest", 8000).stdout
    assert f"{cases} cases, " in output
    assert f" calls on {ranks} ranks, all right" in output


def test_random_lists_where_packets_arrive_in_halves(mpirun: Run) -> None:
    environ = {"SIM_SPLIT_PACKETS": "1", "SIM_LATE": "0.002"}
    arguments = "--cases", 10, "--largest", 3000, "--members", 200
    assert "10 cases, " in mpirun("tests.simulated", 3, *SWEEP, *arguments, env=environ).stdout


@pytest.mark.parametrize("hosts", [1, 2])
def test_random_lists_over_nccl(mpirun: Run, hosts: int) -> None:
    arguments = "--cases", 40, "--largest", 8000, "--members", 300, "--backend", "nccl", "--hosts", hosts
    assert "40 cases, " in mpirun("tests.simulated", 2, *SWEEP, *arguments).stdout


def test_results(hold: Hold) -> None:
    hold(
        3,
        "forms_of_lists",
        "cached_lists_of_another_shape",
        "cached_lists_of_other_arrays",
        "cached_lists_in_turns",
        "cached_lists_of_several_launches",
        "first_list_of_the_default_communicator",
        "larger_than_the_workspace",
        "lists_of_tensors",
        "synchronous_lists",
    )


def test_graphs_and_streams(hold: Hold) -> None:
    hold(3, "recorded_lists", "checked_and_run_lists", SIM_LATE="0.002")


def test_faults(hold: Hold) -> None:
    hold(3, "refused_members", "interrupted_list")
