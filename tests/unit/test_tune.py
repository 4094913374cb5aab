"""What ``python -m ipcreduce tune`` tries."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.bench import tune, tune_norms
from ipcreduce.calls.request import NormShape
from ipcreduce.ipc import norm_plan, plan, workspace

KB, MB = 1 << 10, 1 << 20
HALF = workspace.half_bytes(256 * MB)


def candidates(nbytes: int, n: int, resident: int = plan.RESIDENT, before: Any = ()) -> list[plan.Choice]:
    return list(tune._candidates(nbytes, plan.Gpus(n, HALF, resident), list(before)))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [4, KB, 96 * KB, 256 * KB, 3 * MB, 16 * MB, 48 * MB])
def test_each_runs_and_each_differs(n: int, nbytes: int):
    found = candidates(nbytes, n)
    shape = partial(plan.plan_launch, offset=0, nbytes=nbytes, gpus=plan.Gpus(n, HALF))
    steps = [shape(choice.algorithm, choice=plan.checked_table([choice], n)[0]) for choice in found]
    assert len({*steps}) == len(steps) > 1
    planned = plan.make_plan(nbytes, plan.Gpus(n, HALF))[0].algorithm
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


def measured(monkeypatch: pytest.MonkeyPatch, hidden: list[int], before: Any, times: Any) -> norm_plan.NormTable:
    """The table for 2 ranks, if a launch takes ``times(hidden, rows, algorithm, cluster)``."""
    cuda = SimpleNamespace(Stream=lambda non_blocking: nullcontext())
    backend: Any = SimpleNamespace(launches=SimpleNamespace(norm_table=before, gpus=plan.Gpus(2, HALF)))

    def time(backend: Any, message: Any, planned: norm_plan.NormPlan, *_: Any) -> float:
        shape = message.source.shape
        algorithm = planned.kernel.removeprefix("fused_")
        return float(times(shape.hidden, shape.rows, algorithm, planned.cluster))

    def message(rows: int, hidden: int, *_: Any) -> Any:
        shape = NormShape(rows, hidden, "float16", 1e-6, 0.0, residual=True)
        return SimpleNamespace(source=SimpleNamespace(shape=shape))

    monkeypatch.setattr(tune_norms.cupy_runtime, "load", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(tune_norms.norms, "Message", message)
    monkeypatch.setattr(tune_norms, "_time", time)
    comm: Any = SimpleNamespace(synchronize=lambda: None)
    return tune_norms.measure(comm, backend, hidden, 1, None)


def test_rows_get_their_fastest_kernel(monkeypatch: pytest.MonkeyPatch):
    def times(hidden: int, rows: int, algorithm: str, cluster: int) -> float:
        best = ("one_shot", 4) if rows <= 8 else ("one_shot", 1) if rows <= 64 else ("two_shot", 1)
        return 2.0 if (algorithm, cluster) == best else 2.03 if rows <= 16 and cluster == 4 else 3.0

    other, same = norm_plan.NormChoice(2048, 9, "one_shot", 1), norm_plan.NormChoice(4096, 9, "one_shot", 2)
    found = measured(monkeypatch, [4096], (other, same), times)
    assert found == (
        other, norm_plan.NormChoice(4096, 16, "one_shot", 4), norm_plan.NormChoice(4096, 64, "one_shot", 1),
        norm_plan.NormChoice(4096, 512, "two_shot", 1),
    )  # fmt: skip
    assert measured(monkeypatch, [], (other,), times) == (other,)


def test_noise_changes_no_kernel(monkeypatch: pytest.MonkeyPatch):
    def times(hidden: int, rows: int, algorithm: str, cluster: int) -> float:
        wanted = ("one_shot", "two_shot")[rows.bit_length() % 2]
        return 1.0 if (algorithm, cluster) == (wanted, 1) else 1.015

    assert [choice.up_to for choice in measured(monkeypatch, [4096], (), times)] == [512]


def test_new_choices_for_rows_come_first(monkeypatch: pytest.MonkeyPatch):
    """The most hidden sizes whose choices all differ fit in a table, without those that were there."""
    before = norm_plan.checked_table(norm_plan.NormChoice(1024, rows, "one_shot", 1) for rows in range(1, 9))

    def times(hidden: int, rows: int, algorithm: str, cluster: int) -> float:
        wanted = ("one_shot", "two_shot")[rows.bit_length() % 2]
        return 1.0 if (algorithm, cluster) == (wanted, 1) else 2.0

    found = measured(monkeypatch, [2048, 4096, 5120, 8192], before, times)
    assert len(found) == norm_plan.MAX_CHOICES
    assert {choice.hidden for choice in found} == {2048, 4096, 5120, 8192}


def test_hidden_sizes():
    assert tune_norms.hidden_sizes("8192,4096, 4096") == [4096, 8192]
    many = "64,128,192,256,320"
    for text, words in (("100", "100 has no fused kernel"), ("32768", "no fused kernel"), (many, "at most 4")):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            tune_norms.hidden_sizes(text)
