"""Arrays of other kinds than CuPy's of numbers: tests/sim/scenarios/tensors.py and written.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors(hold: Callable[..., None], ranks: int) -> None:
    hold(
        ranks, "on_torchs_stream", "in_a_recording", "memory_that_is_not_the_tensors_values", "results_are_tensors",
        "the_short_way", "a_stream_by_its_handle", "torch_in_recordings", "after_a_wait", "by_dlpack", "by_interface",
        "other_memory_under_a_recorded_tensor", "addresses_of_weights", "a_stream_that_goes_before_its_tensors",
        "without_memory_apart", "words_of_pytorch",
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_as_people_write_them(hold: Callable[..., None], ranks: int) -> None:
    hold(ranks, "of_no_dimension", "quick_the_second_time", "recorded")
