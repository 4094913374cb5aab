"""The sweep, the scenarios and the examples on this machine's GPUs, with as many ranks as GPUs and with more."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests import machine

Run = Callable[..., subprocess.CompletedProcess[str]]


def worlds() -> list[tuple[int, bool]]:
    """(ranks, whether they share GPUs): time-sliced kernels take milliseconds, so the counts are small there."""
    gpus = machine.cuda()[0]
    return [(n, n > gpus) for n in sorted({2, 3, 4, min(8, max(2, gpus))})]


@pytest.mark.parametrize(("ranks", "shared"), worlds())
def test_sweep(mpirun: Run, ranks: int, shared: bool) -> None:
    cases, largest = (60, 200_000) if shared else (500, 8 << 20)
    result = mpirun("tests/gpu/sweep.py", ranks, "--cases", cases, "--largest", largest, timeout=500)
    assert f"{cases} cases, {4 * cases} calls on {ranks} ranks, all right" in result.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_scenarios(mpirun: Run, ranks: int) -> None:
    from tests.gpu.scenarios import SCENARIOS

    result = mpirun("tests/gpu/scenarios.py", ranks, timeout=300)
    assert result.stdout.count(": right, ") == len(SCENARIOS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_captures_of_others(mpirun: Run, ranks: int) -> None:
    from tests.gpu.captures import SCENARIOS

    result = mpirun("tests/gpu/captures.py", ranks, timeout=300)
    assert result.stdout.count(": right, ") == len(SCENARIOS)


@pytest.mark.parametrize("example", ["allreduce.py", "tensor_parallel.py", "train_digits.py"])
def test_examples(mpirun: Run, example: str) -> None:
    assert "backend ipc" in mpirun(f"mpi_examples/{example}", 2, timeout=300).stdout


def test_memcheck_finds_nothing(mpirun: Run) -> None:
    """compute-sanitizer, where it is installed, over a sweep and small graphs on two ranks of one GPU."""
    result = mpirun("tests/gpu/memcheck.py", 2, timeout=500)
    if "compute-sanitizer is not installed" in result.stdout:
        pytest.skip("compute-sanitizer is not installed")
    assert result.stdout.count("ERROR SUMMARY: 0 errors") == 2
    assert result.stdout.count("a small graph, ") == 4
