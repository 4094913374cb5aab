"""What mypy says of calls: the types of results, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import machine

PROGRAM = """
from __future__ import annotations
import enum
from typing import Any
import numpy as np
from numpy.typing import NDArray
from mpi4py import MPI
from typing_extensions import assert_type
import ipcreduce

class Tensor:
    def __dlpack__(self, *, stream: int | None = -1, max_version: Any = None) -> object:
        raise NotImplementedError
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

class ReduceOp(enum.Enum):
    SUM = 0

class OnDevice:
    __cuda_array_interface__: dict[str, Any] = {}

def check(
    comm: ipcreduce.Communicator, a: NDArray[np.float64], maybe: NDArray[np.float64] | None, tensor: Tensor,
    table: np.ndarray[tuple[int, int], np.dtype[np.int8]], device: OnDevice, unknown: Any, text: str,
) -> None:
"""
TYPES = {
    "comm.allreduce(1.0)": "float",
    "comm.allreduce(1, 'mean')": "int",
    "comm.allreduce(a, 'product')": "NDArray[np.float64]",
    "comm.allreduce(True, 'any')": "bool",
    "comm.allreduce(a, ReduceOp.SUM)": "NDArray[np.float64]",
    "comm.allreduce(True, 'max')": "bool",
    "comm.allreduce(1j, MPI.SUM)": "complex",
    "comm.allreduce(np.float64(1))": "np.float64",
    "comm.allreduce(np.uint8(1), op='min')": "np.uint8",
    "comm.allreduce(a, op='max')": "NDArray[np.float64]",
    "comm.allreduce(table)": "np.ndarray[tuple[int, int], np.dtype[np.int8]]",
    "comm.allreduce(a, out=maybe)": "NDArray[np.float64]",
    "comm.allreduce(tensor)": "Any",
    "comm.allreduce(device, stream=7)": "Any",
    "comm.allreduce(unknown)": "Any",
    "comm.allreduce(tensor, out=a)": "NDArray[np.float64]",
    "comm.allreduce(a, out=tensor)": "Tensor",
    "comm.allreduce([a, tensor])": "list[Any]",
    "comm.allreduce((a, table), 'max')": "list[Any]",
    "comm.allreduce([a, a], out=(a, a))": "tuple[Any, ...]",
    "ipcreduce.allreduce([device])": "list[Any]",
    "ipcreduce.allreduce(a, comm=comm)": "NDArray[np.float64]",
    "ipcreduce.allreduce(2.5, 'avg')": "float",
    "ipcreduce.allreduce(a, out=device)": "OnDevice",
    "comm.allreduce_rmsnorm(a, a)": "tuple[NDArray[np.float64], NDArray[np.float64]]",
    "comm.allreduce_rmsnorm(a, a, 1e-6, residual=a, out=maybe, residual_out=a)":
        "tuple[NDArray[np.float64], NDArray[np.float64]]",
    "comm.allreduce_rmsnorm(tensor, tensor, weight_bias=1, residual=device, out=tensor)": "tuple[Any, Any]",
    "comm.allreduce_rmsnorm(a, a, quantize=ipcreduce.FP8(per=128), quant_out=tensor)": "tuple[Any, Any, Any]",
    "ipcreduce.allreduce_rmsnorm(a, a)": "tuple[NDArray[np.float64], NDArray[np.float64]]",
    "ipcreduce.allreduce_rmsnorm(tensor, tensor, residual=tensor, comm=comm)": "tuple[Any, Any]",
    "ipcreduce.allreduce_rmsnorm(tensor, tensor, quantize=ipcreduce.FP8(per='token'))": "tuple[Any, Any, Any]",
}  # fmt: skip
REFUSED = [
    "comm.allreduce(a, 'sun')",
    "comm.allreduce(a, op='SUM')",
    "comm.allreduce(a, text)",
    "comm.allreduce(a, 3)",
    "comm.allreduce('ones')",
    "comm.allreduce(None)",
    "comm.allreduce(a, out=[1.0])",
    "comm.allreduce([a], out=a)",
    "comm.allreduce(1.0, out=a)",
    "ipcreduce.allreduce(a, 'sun')",
    "ipcreduce.allreduce(a, comm=MPI.COMM_WORLD)",
    "comm.allreduce_rmsnorm(a)",
    "comm.allreduce_rmsnorm(a, a, text)",
    "comm.allreduce_rmsnorm(1.0, a)",
    "comm.allreduce_rmsnorm(a, a, quantize='token')",
    "comm.allreduce_rmsnorm(a, a, quant_out=a)",
]


def test_types(tmp_path: Path):
    """One run, as it takes seconds."""
    pytest.importorskip("mypy")
    right = [f"assert_type({call}, {kind})" for call, kind in TYPES.items()]
    wrong = ["assert_type(comm.allreduce(1.0), int)", *REFUSED]
    lines = [*PROGRAM.strip().splitlines(), *(f"    {line}" for line in right + wrong)]
    path = tmp_path / "program.py"
    path.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", tmp_path / "cache"]
    run = subprocess.run([*command, path], cwd=tmp_path, env=machine.environment(), stdout=subprocess.PIPE, text=True)
    errors = {int(line): text for line, text in re.findall(r"program\.py:(\d+): error: (.*)", run.stdout)}
    first = len(lines) - len(wrong) + 1
    assert sorted(errors) == list(range(first, len(lines) + 1)), run.stdout
    assert "Expression is of type" in errors.pop(first), "mypy compares types"
    assert all("No overload variant" in text for text in errors.values()), run.stdout
