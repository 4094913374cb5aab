"""Communicators, graphs and runners on a machine without GPUs. What the ranks do is in objects_worker.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCENARIOS = (
    "reprs", "public_interface", "copies", "closed", "log", "arguments", "nothing_is_recorded", "results_of_breaks",
)  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
def test_objects(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/objects_worker.py", n, *SCENARIOS, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert all(f"{scenario}: right" in output for scenario in SCENARIOS), output
