"""Start-up that fails, devices, a driver that fails, ends, faults: see library_worker.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import machine
from tests.sim.machine import Gpu

Run = Callable[..., subprocess.CompletedProcess[str]]
WORKER = "tests/sim/library_worker.py"
A, B, C = (Gpu(index, index).uuid_text for index in range(3))


def hold(mpirun: Run, ranks: int, *names: str, visible: str | None = None, **environ: str) -> None:
    """The scenarios hold, one after the other in the same processes."""
    options = [] if visible is None else [f"--visible={visible}"]
    output = mpirun(WORKER, ranks, *options, *names, env=environ, timeout=60).stdout
    assert [name for name in names if f"{name}: right" in output] == list(names), output


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fails_to_start(mpirun: Run, ranks: int) -> None:
    hold(mpirun, ranks, "no_peer_access", "link_loses_data", "link_loses_data_with_a_short_timeout")
    hold(mpirun, ranks, "too_little_memory", "wrong_options", "odd_options")


@pytest.mark.parametrize("visible", ["0,1/", "/".join(["0,1,2", A, ""]), "1/0/2/"])
def test_a_rank_without_a_gpu(mpirun: Run, visible: str) -> None:
    hold(mpirun, visible.count("/") + 1, "no_gpu", visible=visible)


@pytest.mark.parametrize("visible", ["0/1", "/".join([A, B, C])])
def test_peers_whose_gpus_are_not_visible(mpirun: Run, visible: str) -> None:
    hold(mpirun, visible.count("/") + 1, "peers_not_visible", visible=visible)


@pytest.mark.parametrize("visible", ["0/1", "0/0", "0,1/1", "0,1/0,1", f"{A},{B}/{B},{A[:10]}", "0,1,2/1,2,0/2,0,1"])
def test_devices(mpirun: Run, visible: str) -> None:
    hold(mpirun, visible.count("/") + 1, "devices", visible=visible)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ends_and_faults(mpirun: Run, ranks: int) -> None:
    hold(mpirun, ranks, "synchronous", "forked", "threads_after_a_fault", "captured_after_a_fault")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ends(mpirun: Run, ranks: int) -> None:
    hold(mpirun, ranks, "closed_early", "crosswise", *(["never_closed"] if ranks == 3 else []))


def test_a_driver_that_fails(mpirun: Run) -> None:
    hold(mpirun, 2, "driver_faults")


def among_plain_processes(name: str, ranks: int, directory: Path) -> list[str]:
    """What each rank prints. Not under mpirun, which ends them all if one is killed."""
    environ = {**machine.environment(), "SIM_DEVICES": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, "--among", str(directory), str(rank), str(ranks), name],
            cwd=machine.ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=30)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["killed", "killed_in_a_host_call"])
def test_a_rank_that_is_killed(tmp_path: Path, name: str) -> None:
    outputs = among_plain_processes(name, 3, tmp_path)
    assert outputs == [f"{name}: right on rank 0\n", f"{name}: right on rank 1\n", ""]
