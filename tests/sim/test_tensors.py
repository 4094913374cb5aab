"""Arrays of other kinds than CuPy's of numbers: tests/sim/scenarios/tensors.py, gradients.py and written.py."""

from __future__ import annotations

from collections.abc import Callable


def test_tensors(hold: Callable[..., None]) -> None:
    hold(
        3, "on_torchs_stream", "in_a_recording", "memory_that_is_not_the_tensors_values", "results_are_tensors",
        "the_short_way", "a_stream_by_its_handle", "torch_in_recordings", "after_a_wait", "by_dlpack", "by_interface",
        "other_memory_under_a_recorded_tensor", "addresses_of_weights", "a_stream_that_goes_before_its_tensors",
        "without_memory", "where_a_result_would_be_lost", "not_to_be_written", "without_memory_apart",
        "words_of_pytorch", "an_error_behind_a_launch",
    )  # fmt: skip


def test_gradients(hold: Callable[..., None]) -> None:
    hold(
        3, "buckets_behind_the_gradients", "buckets_beside_the_backward_pass", "a_bucket_that_is_dropped",
        "long_buckets_run_in_few_blocks", "ways_take_turns", "ways_after_a_failed_pass", "one_call_behind_the_pass",
        "sparse_gradients", "a_backward_pass_that_raises", "buckets_without_a_backward_pass",
        "buckets_of_another_group", "a_group_that_one_rank_has_not_compared",
        "an_interrupt_behind_the_call_of_a_bucket",
    )  # fmt: skip


def test_calls_as_people_write_them(hold: Callable[..., None]) -> None:
    hold(3, "of_no_dimension", "quick_the_second_time", "recorded")
