"""The workers for GPUs (tests/gpu) on the simulated device: sweep, scenarios, wrong calls."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable

import pytest

from tests.shared.cases import KINDS
from tests.tools import sanitizers

Run = Callable[..., subprocess.CompletedProcess[str]]


def on_sim(mpirun: Run, worker: str, ranks: int, *arguments: object, **options: object) -> str:
    return mpirun("tests.simulated", ranks, f"tests/gpu/{worker}.py", *arguments, **options).stdout


@pytest.mark.parametrize(("ranks", "cases"), [(2, 40), (3, 40), (4, 40), (8, 12)])
def test_sweep(mpirun: Run, ranks: int, cases: int) -> None:
    output = on_sim(mpirun, "sweep", ranks, "plain", "--cases", cases, "--largest", 6000, "--seed", ranks)
    assert f"{cases} cases, {6 * cases} calls on {ranks} ranks, all right" in output


def test_sweep_of_all_kinds(mpirun: Run) -> None:
    """Mixed on the same communicators, so that calls of different kinds follow one another."""
    output = on_sim(mpirun, "sweep", 3, "--cases", 40, "--largest", 6000, "--expressions", 7, "--rows", 40)
    assert " calls on 3 ranks, all right" in output
    assert all(re.search(rf" {kind}( |$)", output, re.M) for kind in KINDS), output


def test_sweep_where_packets_arrive_in_halves(mpirun: Run) -> None:
    output = on_sim(mpirun, "sweep", 3, "plain", "--cases", 15, "--largest", 3000, env={"SIM_SPLIT_PACKETS": "1"})
    assert "15 cases, 90 calls on 3 ranks, all right" in output


def test_on_systems_that_fortify_programs(mpirun: Run) -> None:
    """With glibc's checks, as on Ubuntu, a jump from one stack to another one would end the process."""
    environ = {"CXX": f"{os.environ.get('CXX', 'g++')} -D_FORTIFY_SOURCE=2"}
    output = on_sim(mpirun, "sweep", 2, "plain", "--cases", 2, "--largest", 600, env=environ)
    assert "2 cases, 12 calls on 2 ranks, all right" in output


def test_no_access_behind_an_array(mpirun: Run) -> None:
    """What memcheck is for on a GPU: here there is nothing mapped behind the arrays."""
    for ranks in (2, 3):
        kernels = [name for name in sanitizers.KERNELS if sanitizers.ranks_of(name) == ranks]
        output = on_sim(mpirun, "sanitized", ranks, *kernels)
        assert re.findall(r"^(\w+): \d+ cases, all right$", output, re.M) == kernels, output


def test_messages_larger_than_the_workspace(mpirun: Run) -> None:
    output = on_sim(mpirun, "sweep", 3, "plain", "--cases", 3, "--largest", 300_000, "--smallest", 200_000)
    assert "3 cases, 18 calls on 3 ranks, all right" in output


def test_epochs_that_wrap(mpirun: Run) -> None:
    output = on_sim(mpirun, "wrap", 2, "--calls", 60, "--replays", 10, "--samples", 5)
    assert output.count(": 600 through the wrap, 5 samples right, ") == 3


@pytest.mark.parametrize(("worker", "ranks"), [("scenarios", 2), ("captures", 2)])
def test_scenarios(mpirun: Run, worker: str, ranks: int) -> None:
    """Work begins late at random: what nothing orders, in the library or in a scenario, comes in a wrong order."""
    assert "scenarios, all right" in on_sim(mpirun, worker, ranks, env={"SIM_LATE": "0.005"})


def test_wrong_calls(mpirun: Run) -> None:
    assert "each refused as it should be" in on_sim(mpirun, "bad_calls", 3)
