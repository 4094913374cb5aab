"""Workspaces in virtual memory, and what else there is behind IPC handles."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Hold = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]
BEHIND_HANDLES = {"IPCREDUCE_MEMORY": "ipc"}  # all other tests have virtual memory


def test_start_calls_and_graphs(hold: Hold) -> None:
    hold(3, "in_both_memories", "not_in_virtual_memory", "peers_without_access", SIM_NO_NCCL="1")


def test_what_stays_behind(hold: Hold) -> None:
    """The last scenario leaves what its driver refuses to take back."""
    hold(
        2,
        "a_link_that_loses_data",
        "fifty_communicators",
        "no_descriptor_is_left",
        "virtual_driver_faults",
        SIM_NO_NCCL="1",
    )


def test_exceptions_of_one_rank(hold: Hold) -> None:
    hold(2, "exceptions_at_start_up", **BEHIND_HANDLES)


def test_a_driver_that_fails(hold: Hold) -> None:
    hold(2, "driver_faults", SIM_NO_NCCL="1", **BEHIND_HANDLES)


def test_graphs(mpirun: Run) -> None:
    names = "--modules", "replays", "memory", "quick"
    output = mpirun("tests.graphs", 2, "--sim", "--first", *names, env=BEHIND_HANDLES, timeout=300).stdout
    assert "3 scenarios, all right" in output
