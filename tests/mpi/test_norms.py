"""All-reduce and RMSNorm of NumPy arrays in one call. What the ranks do is in norm_worker.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCENARIOS = "bits", "refused"


@pytest.mark.parametrize(("n", "how"), [(2, "memory"), (3, "memory"), (3, "apart")])
def test_on_the_host(mpirun: Callable, n: int, how: str):
    output = mpirun("tests/mpi/norm_worker.py", n, how, *SCENARIOS, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert all(f"{scenario}: right" in output for scenario in SCENARIOS), output
