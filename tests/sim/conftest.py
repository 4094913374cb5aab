"""Scenarios: see tests/sim/scenarios; and ThreadSanitizer."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def hold(mpirun: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., None]:
    """hold(n, *names, visible=None, **environ): the scenarios hold on n ranks, one after the other in their processes.

    visible is CUDA_VISIBLE_DEVICES, rank by rank, with / between.
    """

    def scenarios_hold(ranks: int, *names: str, visible: str | None = None, **environ: str) -> None:
        options = [] if visible is None else [f"--visible={visible}"]
        output = mpirun("tests.sim.scenarios", ranks, *options, *names, env=environ).stdout
        assert [name for name in names if f"{name}: right" in output] == list(names), output

    return scenarios_hold


@pytest.fixture(scope="session")
def tsan() -> None:
    from tests.simulated import kernels

    try:
        kernels.tsan_launcher()
    except RuntimeError as error:
        pytest.skip(str(error))
