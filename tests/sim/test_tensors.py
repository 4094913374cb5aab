"""Arrays of other kinds than CuPy's of numbers: tests/sim/scenarios/tensors.py and written.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors(hold: Callable[..., None], ranks: int) -> None:
    hold(ranks, "on_torchs_stream", "in_a_recording", "values_that_are_still_pending")


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_as_people_write_them(hold: Callable[..., None], ranks: int) -> None:
    hold(ranks, "of_no_dimension", "quick_the_second_time", "recorded")
