"""Communicators of groups that are not MPI's, among plain processes that cannot import mpi4py."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

from tests.programs import group_worker

NAMES = [scenario.__name__ for scenario in group_worker.SCENARIOS]


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("name", NAMES)
def test_scenario(tmp_path: Path, name: str, size: int):
    found = group_worker.among_processes("tests.programs.group_worker", name, tmp_path, size=size)
    right = [(0, "right\n")] * size
    if name == "a_rank_is_killed":
        right[-1] = (-signal.SIGKILL, "")
    if name.startswith("rank_0_is_killed"):
        right[0] = (-signal.SIGKILL, "")
    assert found == right


def test_one_process(tmp_path: Path):
    assert group_worker.among_processes("tests.programs.group_worker", "results", tmp_path, size=1) == [(0, "right\n")]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("size", [2, 4])
def test_a_process_group_of_pytorch(tmp_path: Path, size: int):
    found = group_worker.among_processes("tests.programs.torch_worker", tmp_path, size=size)
    assert [status for status, _ in found] == [0] * size, found
    assert all(output.endswith("right\n") for _, output in found), found
