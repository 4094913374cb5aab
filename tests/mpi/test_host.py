"""The host backend: NumPy arrays on 1 to 4 ranks. What the ranks do is in host_worker.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

WORKER = "tests/mpi/host_worker.py"
HOST = {"CUDA_VISIBLE_DEVICES": ""}  # on machines with GPUs too


@pytest.mark.parametrize(("n", "how"), [(1, "memory"), (3, "memory"), (2, "page"), (2, "apart")])
def test_results(mpirun: Callable, n: int, how: str):
    """Without shared memory, messages go over MPI whether the ranks are on one host or apart."""
    scenarios = [
        "as_people_write",
        "a_float_sum_starts_at_rank_0",
        "a_float_state_of_one_rank",
        "lists",
        "splits",
        "known_splits",
    ]
    if how != "page":
        scenarios += ["every_kind", "subclasses", "random_calls"]
    output = mpirun(WORKER, n, how, *scenarios, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in scenarios), output


@pytest.mark.parametrize(("n", "how"), [(1, "memory"), (3, "memory"), (2, "page"), (3, "apart")])
def test_wrong_calls(mpirun: Callable, n: int, how: str):
    of_splits = ["wrong_splits"] if how == "memory" else []  # arguments are the same by any way
    output = mpirun(WORKER, n, how, "wrong_calls", *of_splits, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in ("wrong_calls", *of_splits)), output
    assert int(re.search(r"(\d+) wrong calls", output)[1]) >= 40


WAITS = {
    "memory": ["late_at_start_up", "late", "refused_while_another_is_late", "a_call_after_another_rank_has_closed"],
    "page": ["failed_behind_the_data", "left_before_the_data", "a_call_after_another_rank_has_closed"],
    "apart": [
        "late_at_start_up",
        "failed_behind_the_data",
        "left_before_the_data",
        "memory_outlives_a_wait",
        "a_call_after_another_rank_has_closed",
    ],
}


@pytest.mark.parametrize("how", WAITS)
def test_waits_end(mpirun: Callable, how: str):
    scenarios = [*WAITS[how], "recovered", "interrupted", "out_of_memory"]
    output = mpirun(WORKER, 3, how, *scenarios, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in scenarios), output


@pytest.mark.parametrize(("n", "how"), [(1, "memory"), (4, "memory"), (3, "apart")])
def test_communicators(mpirun: Callable, n: int, how: str):
    """All in one run, so that nothing that one of them leaves disturbs the next."""
    scenarios = ["sub_communicators", "side_by_side", "threads", "closing", "default", "runners", "forked"]
    output = mpirun(WORKER, n, how, *scenarios, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in scenarios), output


def test_ranks_that_do_not_reach_each_other(mpirun: Callable):
    output = mpirun(WORKER, 3, "apart", "without_tcp", env=HOST).stdout
    assert "without_tcp: right" in output, output


def test_arguments_that_differ(mpirun: Callable):
    scenarios = ["arguments_differ", "errors_before_the_first_exchange", "other_builds", "lists_that_differ"]
    output = mpirun(WORKER, 3, "memory", *scenarios, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in scenarios), output
    assert "lists_that_differ: right" in mpirun(WORKER, 4, "apart", "lists_that_differ", env=HOST).stdout


def test_resources(mpirun: Callable):
    scenarios = ["every_rank_is_watched", "nothing_is_used_up", "too_many", "a_graph_keeps_its_communicator"]
    output = mpirun(WORKER, 2, "memory", *scenarios, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in scenarios), output


FAULTS = [
    "exceptions_at_start_up",
    "warnings_at_start_up",
    "no_descriptors",
    "closed_by_the_program",
    "texts_of_any_kind",
]
SEEN = ["a_block_that_raises", "nested"]  # on the control page


@pytest.mark.parametrize(
    ("n", "how", "scenarios"),
    [
        (2, "memory", ["names_of_hosts"]),
        (3, "memory", [*FAULTS, *SEEN]),
        (2, "page", [*FAULTS, *SEEN]),
        (2, "apart", [*FAULTS, *SEEN]),
    ],
)
def test_faults_of_one_rank(mpirun: Callable, n: int, how: str, scenarios: list[str]):
    """The others hear of each at once, and the next communicator or call works."""
    output = mpirun(WORKER, n, how, *scenarios, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in scenarios), output
