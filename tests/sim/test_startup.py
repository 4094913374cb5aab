"""Start-up that fails, devices, a driver that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulated.machine import Gpu

Hold = Callable[..., None]
A, B, C = (Gpu(index, index).uuid_text for index in range(3))


def test_fails_to_start(hold: Hold) -> None:
    links = "no_peer_access", "link_loses_data", "link_loses_data_with_a_short_timeout", "slow_compiler"
    hold(3, *links, SIM_NO_NCCL="1")
    hold(3, "too_little_memory", "wrong_options", "odd_options", SIM_NO_NCCL="1")
    hold(3, "one_smaller_gpu", "one_gpu_with_little_shared_memory", "an_older_driver", SIM_NO_NCCL="1")


@pytest.mark.parametrize("visible", ["0,1/", "/".join(["0,1,2", A, ""]), "1/0/2/"])
def test_a_rank_without_a_gpu(hold: Hold, visible: str) -> None:
    hold(visible.count("/") + 1, "no_gpu", visible=visible)


@pytest.mark.parametrize("visible", ["0/1", "/".join([A, B, C])])
def test_peers_whose_gpus_are_not_visible(hold: Hold, visible: str) -> None:
    hold(visible.count("/") + 1, "peers_not_visible", visible=visible, SIM_NO_NCCL="1")


@pytest.mark.parametrize("visible", ["0/1", "0/0", "0,1/1", "0,1/0,1", f"{A},{B}/{B},{A[:10]}", "0,1,2/1,2,0/2,0,1"])
def test_devices(hold: Hold, visible: str) -> None:
    hold(visible.count("/") + 1, "devices", visible=visible)


@pytest.mark.parametrize("visible", ["0,1", "0,1,2"])
def test_packets_over_pcie(hold: Hold, visible: str) -> None:
    hold(visible.count(",") + 1, "packets_over_pcie", visible="/".join([visible] * (visible.count(",") + 1)))


@pytest.mark.parametrize("visible", ["0/1", "/".join([A, B, C])])
def test_packets_over_links_that_no_rank_sees(hold: Hold, visible: str) -> None:
    hold(visible.count("/") + 1, "packets_over_unseen_links", visible=visible)


def test_packets_over_links_that_another_rank_sees(hold: Hold) -> None:
    hold(3, "packets_over_links_that_another_sees", visible="0,1,2/1/2")


@pytest.mark.parametrize("visible", ["0/0", "0/0/1", "0/1/0/0"])
def test_ranks_that_share_gpus(hold: Hold, visible: str) -> None:
    hold(visible.count("/") + 1, "shared_gpus", visible=visible)


def test_a_part_of_the_ranks(hold: Hold) -> None:
    hold(4, "auto_in_a_part")


def test_a_group_that_is_not_mpis(hold: Hold) -> None:
    hold(3, "any_group")


@pytest.mark.parametrize("ranks", [2, 3])
def test_exceptions_and_warnings_of_one_rank(hold: Hold, ranks: int) -> None:
    hold(ranks, "exceptions_at_start_up", "a_rank_leaves_before_the_links_are_tried", "a_warning_that_is_an_error")


def test_no_secret_is_shown(hold: Hold) -> None:
    hold(2, "no_secret_is_shown")


def test_files_and_ports(hold: Hold) -> None:
    hold(2, "no_port_is_opened", "files_are_private")


def test_exclusive_compute_mode(hold: Hold) -> None:
    hold(2, "exclusive_compute_mode")


def test_a_rank_without_compiler(hold: Hold) -> None:
    hold(2, "no_compiler", SIM_NO_NCCL="1")


def test_a_kernel_cache_that_cannot_be_used(hold: Hold) -> None:
    hold(2, "no_cache")


def test_a_driver_that_fails(hold: Hold) -> None:
    hold(2, "driver_faults")
