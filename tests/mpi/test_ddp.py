"""The hook for DistributedDataParallel on CPU tensors. What the ranks do is in ddp_worker.py."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

HOST = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("n", "names"), [(1, ()), (2, ()), (4, ("bits", "as_without"))])
def test_hook(mpirun: Callable, n: int, names: tuple[str, ...]):
    output = mpirun("tests/mpi/ddp_worker.py", n, *names, env=HOST).stdout
    assert f"{len(names) or 8} scenarios, all right" in output


@pytest.mark.parametrize("n", [1, 2])
def test_the_example(mpirun: Callable, n: int):
    output = mpirun("mpi_examples/train_ddp.py", n, env=HOST).stdout
    assert output.count(f"{n} ranks, backend host, ") == output.count("have the same weights") == 2, output
    assert output.count("no GPUs here: with GPUs ") == 1, output


def test_the_example_notices_a_wrong_sum(mpirun: Callable, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import numpy, ipcreduce\n"
        "ipcreduce.Communicator.allreduce = lambda self, x, op='sum', *, out=None, sms=None, stream=None: x\n"
    )
    path = os.pathsep.join([str(tmp_path), machine.environment()["PYTHONPATH"]])
    run = mpirun("mpi_examples/train_ddp.py", 2, check=False, env=HOST | {"PYTHONPATH": path})
    assert run.returncode != 0
    assert "Traceback" not in run.stdout
    assert run.stdout.count("the ranks have DIFFERENT weights") == 2, run.stdout


def test_the_benchmark_of_overlap(mpirun: Callable, tmp_path: Path):
    """Small, on the host: each way's gradients are right, and the file has all that the documents read."""
    small = "--layers", 3, "--hidden", 64, "--tokens", 8, "--turns", 2, "--steps", 2
    mpirun("benchmarks/overlap.py", 2, tmp_path / "found.json", *small, env=HOST)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ms_of_step"].keys() == {"alone", "overlapped", "after", "all-reduces"}
    [(full, averaged)] = found["timeline_ms"]["buckets"]  # 25 KB fit into one
    assert 0 <= full <= averaged <= found["timeline_ms"]["end"]
