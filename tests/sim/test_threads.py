"""Threads, their streams and devices, captures, and what runs in between: see tests/sim/scenarios."""

from __future__ import annotations

from collections.abc import Callable

Hold = Callable[..., None]


def test_order_of_calls(hold: Hold) -> None:
    hold(
        3,
        "threads_after_a_fault",
        "called_within_synchronize",
        "overtakes_nothing",
        "copies_overtake_nothing",
        "per_thread_default_streams",
        "copied_out_on_a_raw_stream",
        "called_as_a_recording_ends",
        "packets_under_way",
        "launches_that_fail",
        "what_the_driver_is_asked",
        "called_during_a_recording",
        "finaliser_within_a_call",
        "closed_within_its_registration",
    )


def test_what_is_given_back(hold: Hold) -> None:
    hold(3, "given_back_in_several_threads", "given_back_while_a_step_waits", "unknown_is_no_end", "alone")
    hold(3, "memory_is_short", SIM_MEMORY=str(64 << 20), IPCREDUCE_WORKSPACE_MB="1")


def test_another_device(hold: Hold) -> None:
    hold(
        3,
        "threads_with_another_device",
        "stream_of_another_device",
        "recordings_with_another_device",
        "memory_with_another_device",
        "pool_of_another_device",
        "default_streams_of_two_devices",
        "faults_with_another_device",
        "arrays_of_another_device",
    )


def test_captures(hold: Hold) -> None:
    hold(
        3,
        "captured_after_a_fault",
        "fault_within_a_recording",
        "fault_beside_a_recording",
        "one_edge_is_enough",
        "behind_a_kernel_that_starts_early",
        "joins_an_open_capture",
        "joined_within_a_recording",
        "captured_on_a_blocking_stream",
        "order_of_a_graph_of_others",
        "first_use_while_a_call_runs",
        "graph_dropped_within_a_capture",
        "eager_call_behind_a_capture",
    )
