"""All-gathers, reduce-scatters and broadcasts: random ones against NumPy, and tests/sim/scenarios/splits.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(("ranks", "environ"), [(2, {}), (3, {"SIM_SPLIT_PACKETS": "1", "SIM_LATE": "0.002"})])
def test_random_calls(mpirun: Run, ranks: int, environ: dict[str, str]) -> None:
    arguments = "tests/gpu/sweep.py", "split", "--cases", 25, "--largest", 6000
    output = mpirun("tests.simulated", ranks, *arguments, env=environ).stdout
    assert "25 cases, " in output
    assert f" calls on {ranks} ranks, all right" in output


def test_scenarios(hold: Callable[..., None]) -> None:
    names = "rules_of_splits", "recorded_splits", "launches_of_splits", "slots_of_long_messages", "known_splits"
    hold(3, *names, "broadcasts_in_two_hops", SIM_LATE="0.002")
