"""Every kind of call on every backend in every way: tests/matrix, with each of its cells as a subtest."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.matrix import table

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("backend", table.BACKENDS)
def test_cells(mpirun: Run, subtests: pytest.Subtests, backend: str) -> None:
    device = ["--sim"] if backend not in table.HOST else []
    environ = {"SIM_LATE": "0.002"} if device else {"CUDA_VISIBLE_DEVICES": ""}
    done = mpirun("tests.matrix", 1 if backend == "one rank" else 2, backend, *device, env=environ, check=False)
    for cell, outcome, right in table.outcomes(backend, done.stdout):
        with subtests.test(cell=cell):
            assert right, f"{outcome}\n{done.stdout}"
    assert done.returncode == 0, done.stdout


def test_broadcasts_in_two_hops(mpirun: Run, subtests: pytest.Subtests) -> None:
    """Over three ranks. Those over two go in one."""
    ways = (
        "cached call",
        "recorded and replayed",
        "late rank",
        "refused on one rank",
        "ranks that differ",
        "rank closes",
    )
    options = "--kind", "broadcast", "--algorithm", "two_shot", "--way", *ways
    done = mpirun("tests.matrix", 3, "ipc", "--sim", *options, env={"SIM_LATE": "0.002"}, check=False)
    for way in ways:
        with subtests.test(way=way):
            assert f"ipc | broadcast | {way}: right" in done.stdout
    assert done.returncode == 0, done.stdout
