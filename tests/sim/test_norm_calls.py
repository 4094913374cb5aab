"""All-reduce and RMSNorm in one call: see tests/sim/scenarios/norms.py. Random calls are in test_norms.py."""

from __future__ import annotations

from collections.abc import Callable

Hold = Callable[..., None]


def test_results(hold: Hold) -> None:
    hold(3, "forms_of_norms", "in_place_norms", "laid_out_norms", "norms_without_rows")


def test_results_of_two_ranks(hold: Hold) -> None:
    hold(2, "forms_of_norms", "in_place_norms", "norms_without_rows", SIM_SPLIT_PACKETS="1", SIM_LATE="0.002")


def test_results_of_one_rank(hold: Hold) -> None:
    hold(1, "forms_of_norms", "in_place_norms", "laid_out_norms", "norms_without_rows", "norms_of_tensors")


def test_cached_calls(hold: Hold) -> None:
    hold(2, "cached_norms", "cached_norms_of_another_shape", "copied_descriptions")


def test_cached_calls_with_new_results(hold: Hold) -> None:
    hold(2, "new_results_of_norms", "cached_kinds_of_norms", "new_results_on_streams", "new_tensors_of_norms")


def test_graphs_and_streams(hold: Hold) -> None:
    hold(
        3, "recorded_norms", "laid_out_norms_in_graphs", "checked_and_run_norms", "norms_of_tensors",
        SIM_LATE="0.002",
    )  # fmt: skip


def test_faults(hold: Hold) -> None:
    hold(3, "refused_norms", "late_for_a_norm", "interrupted_norm", "interrupted_look_ups")
