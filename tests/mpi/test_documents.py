"""The first program of the documents runs as it is on a machine without GPUs, and CuPy."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shared import documents
from tests.tools import machine


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_program(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, page: str, n: int
) -> None:
    program = tmp_path / "app.py"
    program.write_text(documents.first_program(machine.ROOT / page) + "\nprint(comm.backend, comm.xp.__name__)\n")
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy')\n")
    lines = mpirun(program, n, env={"CUDA_VISIBLE_DEVICES": ""}).stdout.splitlines()
    total = n * (n - 1) // 2
    largest = "" if page == "README.md" else f" {n - 1}.0"
    expected = [f"{rank} {total}.0{largest}" for rank in range(n)] + ["host numpy"] * n
    assert sorted(lines) == sorted(expected)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("n", [1, 2])
def test_programs_of_pytorch(mpirun: Callable[..., subprocess.CompletedProcess[str]], n: int) -> None:
    """Both give the same loss, on tensors of the CPU."""
    page = machine.ROOT / "docs/from_torch_distributed.md"
    output = mpirun("tests.mpi.documents", n, page, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    programs = [piece for piece in documents.pieces(page) if piece.fragment == "needs PyTorch"]
    assert len(programs) == 2
    assert all(f"line {piece.line}: right\n" in output for piece in programs), output
