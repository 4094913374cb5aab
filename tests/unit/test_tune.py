"""What ``python -m ipcreduce tune`` tries."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.bench import tune
from ipcreduce.ipc import plan, workspace
from ipcreduce.ipc.backend import IpcBackend

KB, MB = 1 << 10, 1 << 20
HALF = workspace.half_bytes(256 * MB)


def candidates(nbytes: int, n: int, resident: int = plan.RESIDENT, before: Any = ()) -> list[plan.Choice]:
    def planned(size: int, forced: str | None = None) -> tuple[plan.LaunchPlan, ...]:
        return plan.make_plan(size, n, HALF, forced, (), resident)

    launches = SimpleNamespace(planned=planned, resident=resident)
    backend = IpcBackend.__new__(IpcBackend)
    backend.launches = launches  # type: ignore[assignment]
    comm: Any = SimpleNamespace(size=n, _graph_session=SimpleNamespace(require_backend=lambda what: backend))
    return list(tune._candidates(nbytes, comm, list(before)))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [4, KB, 96 * KB, 256 * KB, 3 * MB, 16 * MB, 48 * MB])
def test_each_runs_and_each_differs(n: int, nbytes: int):
    found = candidates(nbytes, n)
    shape = partial(plan.plan_launch, offset=0, nbytes=nbytes, n=n)
    steps = [shape(choice.algorithm, choice=plan.checked_table([choice], n)[0]) for choice in found]
    assert len({*steps}) == len(steps) > 1
    planned = plan.make_plan(nbytes, n, HALF)[0].algorithm
    assert planned in {step.algorithm for step in steps}


def test_both_kernels_only_near_the_crossing():
    assert {choice.algorithm for choice in candidates(256 * KB, 4)} == {"one_shot", "two_shot"}
    assert {choice.algorithm for choice in candidates(KB, 4)} == {"one_shot"}
    assert {choice.algorithm for choice in candidates(16 * MB, 4)} == {"two_shot"}


def test_depths_where_there_is_a_loop_and_grids_that_are_resident():
    assert {choice.depth for choice in candidates(48 * MB, 4)} == {1, 2, 4}
    assert {choice.depth for choice in candidates(MB, 4) if choice.block == 512} == {1}
    assert {choice.blocks for choice in candidates(48 * MB, 4, resident=100)} == {50, 100, 200, 400, plan.EPOCH_SLOTS}


def test_the_choice_of_the_size_before_is_among_them():
    before = plan.Choice(32 * MB, "two_shot", 96, 200, 2)
    assert plan.Choice(64 * MB, "two_shot", 96, 200, 2) in candidates(64 * MB, 4, before=[before])
