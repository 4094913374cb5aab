"""What importing needs: neither GPU, nor driver, nor MPI, nor CuPy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ipcreduce
from tests.tools import machine


def python(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], env=machine.environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_needs_no_gpu_no_mpi_and_no_framework():
    heavy = [
        "cupy",
        "torch",
        "ipcreduce.torch",
        "ipcreduce.serving",
        "cuda.bindings",
        "cuda.core",
        "mpi4py.MPI",
        "numba",
    ]
    output = python(f"import sys, ipcreduce\nprint([name for name in {heavy} if name in sys.modules])")
    assert output.strip() == "[]"


@pytest.mark.parametrize("missing", ["cupy", "cuda", "mpi4py", "torch"])
def test_importing_works_where_it_is_missing(missing: str):
    python(f"import sys\nsys.modules[{missing!r}] = None\nimport ipcreduce\nprint(ipcreduce.__version__)")


def test_no_mpi_is_said_with_advice():
    """mpi4py's wheel raises RuntimeError where it finds no MPI library; without mpi4py it is an ImportError."""
    program = (
        "import sys, types, ipcreduce\n"
        "class Missing(types.ModuleType):\n"
        "    def __getattr__(self, name): raise {error}('no libmpi.so\\ntried here\\nand there')\n"
        "sys.modules['mpi4py'] = Missing('mpi4py')\n"
        "try: ipcreduce.Communicator()\n"
        "except ipcreduce.UnsupportedError as error: print(error)"
    )
    for error in ("RuntimeError", "ImportError"):
        assert python(program.format(error=error)) == (
            "MPI cannot be loaded (no libmpi.so): pip install 'ipcreduce[mpi]', or install MPICH or Open MPI, or pass "
            "Communicator a torch.distributed process group or another ipcreduce.Group\n"
        )


def test_the_public_names():
    """DESIGN's, as far as this version has them; the rest of the package is not in the way."""
    assert sorted(ipcreduce.__all__) == ipcreduce.__all__, "sorted, as readers look them up"
    assert {"allreduce", "Communicator", "get_communicator", "IpcReduceError"} <= set(ipcreduce.__all__)
    assert all(hasattr(ipcreduce, name) for name in ipcreduce.__all__)
    assert ipcreduce.__version__[0].isdigit()
