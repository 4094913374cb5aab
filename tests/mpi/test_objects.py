"""Communicators, graphs and runners on a machine without GPUs. What the ranks do is in objects_worker.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("n", [1, 2])
def test_objects(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/objects_worker.py", n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert "8 scenarios, all right" in output
