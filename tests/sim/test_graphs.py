"""Graphs on the simulated device: tests/graphs, and the example that records."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


# What registration can change.
DIRECT = ("replays", "memory", "pieces", "breaks", "errors", "quick")


@pytest.mark.parametrize(("ranks", "forced"), [(3, []), (2, ["--algorithm", "direct", "--modules", *DIRECT])])
def test_scenarios(mpirun: Run, ranks: int, forced: list[str]) -> None:
    output = mpirun("tests.graphs", ranks, "--sim", *forced, timeout=300).stdout
    count, right = re.search(r"(\d+) scenarios, all right", output)[1], len(re.findall(r"^\w+: right", output, re.M))
    assert int(count) == right >= (75 if forced else 86), output


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (2, 2)])
def test_over_nccl(mpirun: Run, ranks: int, hosts: int) -> None:
    environ = {"IPCREDUCE_BACKEND": "nccl"}
    output = mpirun("tests.graphs", ranks, "--sim", "--hosts", hosts, env=environ, timeout=300).stdout
    count, right = re.search(r"(\d+) scenarios, all right", output)[1], len(re.findall(r"^\w+: right", output, re.M))
    assert int(count) == right >= (76 if hosts == 1 else 20), output


def test_without_a_gpu(mpirun: Run) -> None:
    output = mpirun("tests.graphs", 2, "--sim", "host_communicator", env={"SIM_DEVICES": "0"}).stdout
    assert "1 scenarios, all right" in output


def test_example(mpirun: Run) -> None:
    output = mpirun("tests.simulated", 2, "mpi_examples/graph_replay.py", env={"IPCREDUCE_WORKSPACE_MB": "4"}).stdout
    assert "2 ranks, backend ipc. graph: staged, 1 segments" in output
    assert "1000 runs, 0 wrong" in output


def test_example_without_pytorch(mpirun: Run) -> None:
    output = mpirun("tests.simulated", 2, "mpi_examples/torch_capture.py", env={"SIM_DEVICES": "0"}).stdout
    assert "this example needs PyTorch: pip install torch" in output
