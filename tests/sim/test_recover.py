"""``recover()`` where calls on GPUs end without data: see tests/sim/scenarios/recovered.py."""

from __future__ import annotations

from collections.abc import Callable

Hold = Callable[..., None]


def test_the_last_right_call(hold: Hold) -> None:
    hold(
        3, "refused_behind_queued_calls", "late_behind_queued_calls", "late_on_the_stream", "recovered_synchronously",
        "recovered_with_graphs_of_others", "recovered_recordings", "recordings_of_some_ranks",
        "registered_on_some_ranks",
    )  # fmt: skip
