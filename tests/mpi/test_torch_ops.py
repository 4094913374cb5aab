"""The operators of PyTorch on CPU tensors. What the ranks do is in torch_ops_worker.py and in torch_norms_worker.py."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

SCENARIOS = (
    "results", "gradients", "in_place", "in_place_gradients", "forward_mode", "transforms", "traced", "without_memory",
    "names", "checks_of_pytorch", "compiled", "compiled_training", "exported",
)  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
def test_operators(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/torch_ops_worker.py", n, *SCENARIOS, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert all(f"{scenario}: right" in output for scenario in SCENARIOS), output


NORMS = (
    "results", "quantised", "differentiated", "changed", "wrong", "checks_of_pytorch", "compiled", "traced",
)  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
def test_norms(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/torch_norms_worker.py", n, *NORMS, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert all(f"{check}: right" in output for check in NORMS), output


SPLITS = "results", "gradients", "transforms", "compiled", "checks_of_pytorch", "fsdp_refuses"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_splits(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/torch_splits_worker.py", n, *SPLITS, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert all(f"{scenario}: right" in output for scenario in SPLITS), output


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
