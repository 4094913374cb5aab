"""Ranks that close, refuse, are killed or fork, and how the others hear of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import machine
from tests.tools.processes import remove_left

Hold = Callable[..., None]


def test_errors_in_place_and_fork(hold: Hold) -> None:
    hold(3, "synchronous", "forked")


def test_ends(hold: Hold) -> None:
    hold(3, "closed_early", "freed_once_unmapped", "crosswise", "never_closed")


def test_nothing_holds_close(hold: Hold) -> None:
    hold(
        3,
        "closed_beside_a_forked_child",
        "closed_with_their_graph_under_way",
        "closed_on_a_busy_device",
        "closed_beside_a_call",
    )


def test_a_meeting_that_fails(hold: Hold) -> None:
    hold(3, "interrupted_where_others_meet", "busy_where_others_meet")


def test_registration(hold: Hold) -> None:
    hold(3, "registered_graph_in_a_fork", "registration_that_lies")


def test_a_rank_that_refuses_or_closes(hold: Hold) -> None:
    hold(
        3,
        "refused_and_closed",
        "refused_again_alone",
        "closed_where_others_meet",
        "closed_within_a_recording",
        "closed_with_a_call_under_way",
        "closed_ahead_of_a_fault",
    )


def test_what_one_rank_passes(hold: Hold) -> None:
    hold(3, "first_call_refused", "list_among_host_arrays", "misaligned_arrays")


def among_plain_processes(name: str, ranks: int, directory: Path) -> list[str]:
    """What each rank prints. Not under mpirun, which ends them all if one is killed."""
    environ = {**machine.ranks_environment(), "SIM_DEVICES": str(ranks), "SIM_SHARED": str(directory)}
    command = [sys.executable, "-m", "tests.sim.scenarios", "--among", str(directory)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), name],
            cwd=machine.ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        remove_left()


@pytest.mark.parametrize("name", ["killed", "killed_in_a_host_call"])
def test_a_rank_that_is_killed(tmp_path: Path, name: str) -> None:
    outputs = among_plain_processes(name, 3, tmp_path)
    assert outputs == [f"{name}: right on rank 0\n", f"{name}: right on rank 1\n", ""]


@pytest.mark.parametrize("name", ["ended_beside_a_forked_child", "ended_on_a_busy_device"])
def test_programs_end(tmp_path: Path, name: str) -> None:
    """In time: it would be two minutes if they did not."""
    outputs = among_plain_processes(name, 2, tmp_path)
    for rank, output in enumerate(outputs):
        first, *rest = output.splitlines()
        assert first == f"{name}: right on rank {rank}"
        assert ("close() has given up waiting for GPU" in "".join(rest)) == (name == "ended_on_a_busy_device"), output


def test_a_rank_whose_program_ends(tmp_path: Path) -> None:
    outputs = among_plain_processes("refused_and_ended", 3, tmp_path)
    assert outputs == [f"refused_and_ended: right on rank {rank}\n" for rank in range(3)]
