"""The class for the servers, called by stand-ins on CPU tensors: serving_worker.py and tests/gpu/serving.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@needs_torch
@pytest.mark.parametrize("n", [1, 2])
def test_a_stand_in(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/serving_worker.py", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert output.count("right\n") == n, output


@needs_torch
@pytest.mark.parametrize("n", [2, 3])
def test_stand_in_groups(mpirun: Callable, n: int):
    output = mpirun("tests.gpu.serving", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert output.count("right\n") == n, output
