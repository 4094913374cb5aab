"""Graphs on this machine's GPUs: tests/graphs, and the examples that capture."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("algorithm", [None, "direct"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_scenarios(mpirun: Run, ranks: int, algorithm: str | None) -> None:
    forced = ["--algorithm", algorithm] if algorithm else []
    assert "scenarios, all right" in mpirun("tests.graphs", ranks, *forced, timeout=500).stdout


def test_without_a_gpu(mpirun: Run) -> None:
    output = mpirun("tests.graphs", 2, "host_communicator", env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert "1 scenarios, all right" in output


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (["graph_replay.py"], "1000 runs, 0 wrong"),
        (["train_digits.py", "--graph"], "each step one graph: "),
        (["piecewise.py"], "200 runs in random order, 0 wrong"),
        (["breakable.py", "--steps", "1000"], "full graph"),
        (["decorator_order.py"], "step 4: 16, 16 is due"),
        (["torch_capture.py"], "100 replays of PyTorch's graph, 0 wrong"),
    ],
)
def test_examples(mpirun: Run, example: list[str], words: str) -> None:
    output = mpirun(f"mpi_examples/{example[0]}", 2, *example[1:], timeout=500).stdout
    if "needs PyTorch" in output:
        pytest.skip("PyTorch is not installed")
    assert words in output
    assert "FAIL" not in output
