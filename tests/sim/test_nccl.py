"""The backend nccl over a stand-in for its binding, on 1, 2 and as many pretended hosts as there are ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.test_ends import among_plain_processes

Hold = Callable[..., None]


def test_results(hold: Hold) -> None:
    hold(3, "nccl_is_chosen", "nccl_results", "nccl_threads_and_streams", "nccl_graphs")


def test_faults(hold: Hold) -> None:
    hold(
        3,
        "nccl_refusals",
        "nccl_mismatches",
        "nccl_timeouts",
        "nccl_repeated_call_that_is_late",
        "nccl_mismatches_unseen_at_first",
        "nccl_calls_that_wait_on_the_host",
        "nccl_start_up_that_hangs",
        "interrupted_start_up",
    )


def test_a_pair_without_p2p(hold: Hold) -> None:
    hold(3, "without_p2p", SIM_NO_P2P="0-2")


def test_without_the_binding(hold: Hold) -> None:
    hold(2, "without_the_binding", SIM_NO_NCCL="1")


def test_nccls_own_errors(hold: Hold) -> None:
    hold(2, "nccls_own_errors", SIM_NCCL_ERROR="0:3")


def test_recordings_and_other_work(hold: Hold) -> None:
    hold(
        3,
        "nccl_recordings_across_an_abort",
        "nccl_exception_in_capture",
        "other_work_behind_a_call",
        "nccl_replays_of_others",
    )


def test_ends(hold: Hold) -> None:
    hold(3, "nccl_closes_in_time", "dropped_with_a_call")


@pytest.mark.parametrize("name", ["killed_over_nccl", "killed_joining_anew"])
def test_a_rank_that_is_killed(tmp_path: Path, name: str) -> None:
    outputs = among_plain_processes(name, 3, tmp_path)
    assert outputs == [f"{name}: right on rank 0\n", f"{name}: right on rank 1\n", ""]
