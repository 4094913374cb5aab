"""Threads, their streams and devices, captures, and what runs in between: see tests/sim/scenarios."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Hold = Callable[..., None]
pytestmark = pytest.mark.parametrize("ranks", [2, 3])


def test_order_of_calls(hold: Hold, ranks: int) -> None:
    hold(ranks, "threads_after_a_fault", "per_thread_default_streams", "copied_out_on_a_raw_stream")
    hold(ranks, "called_as_a_recording_ends", "packets_under_way", "launches_that_fail")
    hold(ranks, "what_the_driver_is_asked")
    hold(ranks, "called_during_a_recording", "finaliser_within_a_call")


def test_what_is_given_back(hold: Hold, ranks: int) -> None:
    hold(ranks, "given_back_in_several_threads", "given_back_while_a_step_waits", "unknown_is_no_end", "alone")
    hold(ranks, "memory_is_short", SIM_MEMORY=str(64 << 20), IPCREDUCE_WORKSPACE_MB="1")


def test_another_device(hold: Hold, ranks: int) -> None:
    hold(ranks, "threads_with_another_device", "stream_of_another_device", "recordings_with_another_device")
    hold(ranks, "memory_with_another_device", "default_streams_of_two_devices", "faults_with_another_device")
    hold(ranks, "arrays_of_another_device")


def test_captures(hold: Hold, ranks: int) -> None:
    hold(ranks, "captured_after_a_fault", "fault_within_a_recording", "fault_beside_a_recording")
    hold(ranks, "one_edge_is_enough", "joins_an_open_capture", "joined_within_a_recording")
    hold(ranks, "captured_on_a_blocking_stream", "first_use_while_a_call_runs")
    hold(ranks, "graph_dropped_within_a_capture", "eager_call_behind_a_capture")
