"""MPI not initialised, finalised, without threads; ranks that end without closing. See lifecycle_worker.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

WORKER = "tests/mpi/lifecycle_worker.py"


@pytest.mark.parametrize(
    "scenario",
    [
        "not_initialised",
        "finalised_before_close",
        "never_closed",
        "exit_closes",
        "used_until_the_end",
        "without_threads",
        "synchronously",
        "no_room",
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_lifecycle(mpirun: Callable, scenario: str, n: int):
    """Right on every rank; and nothing is said at exit."""
    output = mpirun(WORKER, n, scenario, env={"CUDA_VISIBLE_DEVICES": "", "IPCREDUCE_SYNC": "1"}).stdout
    assert sorted(output.split("\n")) == sorted([f"{scenario}: right"] * n + [""]), output


@pytest.mark.parametrize("order", ["before", "after"])
def test_under_libraries_that_replace_clock_and_threads(mpirun: Callable, order: str):
    output = mpirun("tests/mpi/replaced_worker.py", 2, order, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert output == "right\n" * 2
