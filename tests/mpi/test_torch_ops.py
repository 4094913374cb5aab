"""The operators of PyTorch on CPU tensors. What the ranks do is in the workers of torch_*.py."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@pytest.mark.parametrize(
    ("worker", "n", "count"),
    [
        *(("torch_ops_worker", n, 13) for n in (1, 2)),
        *(("torch_norms_worker", n, 8) for n in (1, 2)),
        *(("torch_splits_worker", n, 6) for n in (1, 2, 3)),
    ],
)
def test_operators(mpirun: Callable, worker: str, n: int, count: int):
    output = mpirun(f"tests/mpi/{worker}.py", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert f"{count} scenarios, all right" in output


@pytest.mark.parametrize("n", [1, 2])
def test_the_example_of_fsdp(mpirun: Callable, n: int):
    output = mpirun("mpi_examples/train_fsdp.py", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert f"on {n} ranks, as of one" in output, output


@pytest.mark.parametrize("n", [1, 2])
def test_the_example(mpirun: Callable, n: int):
    output = mpirun("mpi_examples/torch_ops.py", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert output.count(f"of {n}, backend host: eager and compiled within") == n, output
    assert output.count("no GPUs here: with GPUs ") == 1, output


def test_the_example_notices_a_wrong_sum(mpirun: Callable, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import numpy, ipcreduce\n"
        "ipcreduce.Communicator.allreduce = lambda self, x, op='sum', *, out=None, stream=None: x.clone()\n"
    )
    path = os.pathsep.join([str(tmp_path), machine.environment()["PYTHONPATH"]])
    run = mpirun("mpi_examples/torch_ops.py", 2, check=False, env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path})
    assert run.returncode != 0
    assert "Traceback" not in run.stdout
    assert "of the unsplit MLP" in run.stdout
