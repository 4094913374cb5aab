"""Calls with an expression on NumPy arrays: see maps_worker.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("n", [1, 3])
def test_functions_of_the_host(mpirun: Callable, n: int):
    output = mpirun("tests/mpi/maps_worker.py", n).stdout
    assert [f"rank {rank}: right" in output for rank in range(n)] == [True] * n
