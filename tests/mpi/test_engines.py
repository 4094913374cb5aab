"""The class for the serving engines, called by a stand-in engine on CPU tensors: engines_worker.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("n", [1, 2])
def test_a_stand_in_engine(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/engines_worker.py", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert output.count("right\n") == n, output
