"""Memory that is given back for a while."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import checkpoint
from tests.sim.test_ends import among_plain_processes
from tests.tools import machine

Hold = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_graphs_and_calls(hold: Hold) -> None:
    names = "replays_after_resume", "idempotent", "resumed_within_resume", "not_suspended", "graphs_of_others"
    hold(3, *names, SIM_NO_NCCL="1")


def test_ranks_that_differ(hold: Hold) -> None:
    hold(2, "ranks_that_differ", "late_for_resume", "no_memory_to_resume", SIM_NO_NCCL="1")


def test_descriptors(hold: Hold) -> None:
    names = "no_descriptors_to_resume", "mailboxes_that_strangers_fill", "interrupted_while_resuming"
    hold(2, *names, SIM_NO_NCCL="1")


def test_what_is_held(hold: Hold) -> None:
    """The last scenario leaves what its driver refuses to take back."""
    hold(2, "a_hundred_cycles", "suspended_driver_faults", SIM_NO_NCCL="1")


def test_pools(hold: Hold) -> None:
    names = "collected_while_another_is_registered", "collected_in_resume"
    hold(2, "pools_given_back", "direct_graphs", "many_direct_outputs", "nothing_is_shared", *names, SIM_NO_NCCL="1")


def test_over_nccl(hold: Hold) -> None:
    hold(2, "suspended_over_nccl")


def test_the_benchmark_over_nccl(mpirun: Run) -> None:
    few = "--cycles", 2, "--largest", 8192
    output = mpirun("tests.simulated", 2, "-m", "benchmarks.suspend_nccl", *few).stdout
    assert "'the bits of before': ['graph', 'captured by CuPy', 'eager']" in output


@pytest.mark.parametrize("name", ["killed_while_suspended", "killed_in_resume"])
def test_a_rank_that_is_killed(tmp_path: Path, name: str) -> None:
    outputs = among_plain_processes(name, 3, tmp_path)
    assert outputs == [f"{name}: right on rank 0\n", f"{name}: right on rank 1\n", ""]


@pytest.mark.parametrize("trial", ["suspended", "suspended with pools"])
def test_ranks_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch, trial: str) -> None:
    """The ranks of benchmarks/checkpoint.py rest, and go on with the same bits. No checkpoint is taken."""
    monkeypatch.setattr(checkpoint, "PROGRAM", [sys.executable, "-m", "tests.simulated", "-m", "benchmarks.checkpoint"])
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checkpoint, "MPIRUN", machine.mpirun(sys.executable))
    monkeypatch.setattr(checkpoint, "checkpoint", lambda pids: {"processes": len({*pids})})
    assert checkpoint.take(2, trial) == {"processes": 2, "right": True}
