"""Calls on PyTorch's tensors, by a stand-in for it: see tests/sim/scenarios/tensors.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors(hold: Callable[..., None], ranks: int) -> None:
    hold(ranks, "on_torchs_stream", "in_a_recording", "values_that_are_still_pending")
