"""Graphs on the simulated device: tests/graph_scenarios.py, and the example that records."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(("ranks", "algorithm"), [(2, None), (2, "direct"), (4, None), (4, "direct")])
def test_scenarios(mpirun: Run, ranks: int, algorithm: str | None) -> None:
    forced = ["--algorithm", algorithm] if algorithm else []
    assert "scenarios, all right" in mpirun("tests/graph_scenarios.py", ranks, "--sim", *forced, timeout=200).stdout


def test_without_a_gpu(mpirun: Run) -> None:
    output = mpirun("tests/graph_scenarios.py", 2, "--sim", "host_communicator", env={"SIM_DEVICES": "0"}).stdout
    assert "1 scenarios, all right" in output


def test_example(mpirun: Run) -> None:
    output = mpirun("tests.sim", 4, "mpi_examples/graph_replay.py", env={"IPCREDUCE_WORKSPACE_MB": "4"}).stdout
    assert "1000 runs, 0 wrong" in output


@pytest.mark.parametrize("example", ["graph_replay", "torch_capture"])
def test_example_without_a_gpu(mpirun: Run, example: str) -> None:
    output = mpirun("tests.sim", 2, f"mpi_examples/{example}.py", env={"SIM_DEVICES": "0"}).stdout
    assert "nothing to show here" in output
