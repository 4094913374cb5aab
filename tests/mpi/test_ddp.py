"""The hook for DistributedDataParallel on CPU tensors. What the ranks do is in ddp_worker.py."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

SCENARIOS = ("bits", "unsynchronised", "unused", "static", "as_without", "failures", "left", "groups")
HOST = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("n", "names"), [(1, SCENARIOS), (2, SCENARIOS), (4, ("bits", "as_without"))])
def test_hook(mpirun: Callable, n: int, names: tuple[str, ...]):
    output = mpirun("tests/mpi/ddp_worker.py", n, *names, env=HOST).stdout
    assert all(f"{scenario}: right" in output for scenario in names), output


@pytest.mark.parametrize("n", [1, 2])
def test_the_example(mpirun: Callable, n: int):
    output = mpirun("mpi_examples/train_ddp.py", n, env=HOST).stdout
    assert output.count(f"{n} ranks, backend mpi, ") == output.count("have the same weights") == 2, output
    assert output.count("no GPUs here: with GPUs ") == 1, output


def test_the_example_notices_a_wrong_sum(mpirun: Callable, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import numpy, ipcreduce\n"
        "ipcreduce.Communicator.allreduce = lambda self, x, op='sum', *, out=None, stream=None: x\n"
    )
    path = os.pathsep.join([str(tmp_path), machine.environment()["PYTHONPATH"]])
    run = mpirun("mpi_examples/train_ddp.py", 2, check=False, env=HOST | {"PYTHONPATH": path})
    assert run.returncode != 0
    assert "Traceback" not in run.stdout
    assert run.stdout.count("the ranks have DIFFERENT weights") == 2, run.stdout
