"""The examples of pieces and breaks, which check their own results, on the simulated device and without one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
SMALL = {"IPCREDUCE_WORKSPACE_MB": "4"}
NO_GPU = {"SIM_DEVICES": "0"}


@pytest.mark.parametrize("ranks", [3])
def test_piecewise(mpirun: Run, ranks: int) -> None:
    output = mpirun("tests.simulated", ranks, "mpi_examples/piecewise.py", env=SMALL).stdout
    assert f"{ranks} ranks, backend ipc: 16 graphs (staged), pool of 2097152 bytes" in output
    depths = [int(count) for count in re.findall(r"\d in (\d+) runs", output)]
    assert len(depths) >= 3, "the host's decisions are all alike"
    assert sum(depths) == 200
    assert "200 runs in random order, 0 wrong" in output


@pytest.mark.parametrize(("ranks", "gpus"), [(3, 1), (4, 4)])
def test_breakable(mpirun: Run, ranks: int, gpus: int) -> None:
    env = {**SMALL, "SIM_DEVICES": str(gpus)}
    output = mpirun("tests.simulated", ranks, "mpi_examples/breakable.py", "--steps", 26, env=env).stdout
    assert f"{ranks} ranks, backend ipc: 26 steps" in output
    assert errors(output).keys() == {"eager", "broken", "full graph"}
    assert all(0 < error < 1e-5 for error in errors(output).values()), output
    assert re.findall("segments: (.*?);", output) == ["3, 3, 3", "1, 1, 1"]  # two layers' breaks, and none
    held = re.findall(r"pool and arrays: (.*), at the end (.*) bytes", output)
    assert [before for before, _ in held] == [after for _, after in held]


@pytest.mark.parametrize("ranks", [1, 4])
def test_breakable_without_a_gpu(mpirun: Run, ranks: int) -> None:
    output = mpirun("tests.simulated", ranks, "mpi_examples/breakable.py", "--steps", 26, env=NO_GPU).stdout
    assert "no GPUs here: with GPUs the runner records a graph" in output
    assert f"{ranks} ranks, backend host: 26 steps" in output
    assert errors(output).keys() == {"eager", "broken", "full graph"}
    assert all(0 < error < 1e-5 for error in errors(output).values()), output
    assert "segments" not in output


def errors(output: str) -> dict[str, float]:
    """Those that breakable.py prints, by kind of run."""
    found = re.findall(r"^(\w+(?: \w+)?) +[\d.]+ ms per token, largest error (\S+), at most 1e-05$", output, re.M)
    return {kind: float(error) for kind, error in found}


@pytest.mark.parametrize("ranks", [3])
def test_decorator_order(mpirun: Run, ranks: int) -> None:
    output = mpirun("tests.simulated", ranks, "mpi_examples/decorator_order.py", env=SMALL).stdout
    wrong, right = output.split("the break outermost:")
    square = ranks**2
    assert f"step 1: {square}, {square} is due\nstep 2: {square}, {2 * square} is due\nPeerTimeoutError: " in wrong
    assert "rank 0 did not call within" in wrong
    assert "a decorator outside of eager_break" in wrong
    assert re.findall(r"step (\d): (\d+), (\d+) is due", right) == [
        (str(step), str(step * square), str(step * square)) for step in range(1, 5)
    ]


def test_allreduce(mpirun: Run) -> None:
    output = mpirun("tests.simulated", 2, "mpi_examples/allreduce.py", env=SMALL).stdout
    assert "rank 1 of 2, backend ipc: brought 2.0, got 3.0" in output
    assert "no GPUs here" not in output


@pytest.mark.parametrize("example", ["allreduce", "piecewise", "decorator_order", "graph_replay"])
def test_cupy_without_a_gpu(mpirun: Run, example: str) -> None:
    """The examples choose NumPy where CuPy is installed and there is no GPU."""
    output = mpirun("tests.simulated", 2, f"mpi_examples/{example}.py", env=NO_GPU).stdout
    assert output.count("no GPUs here: ") == 1
