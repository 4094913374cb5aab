"""What importing needs: neither GPU, nor driver, nor MPI, nor CuPy."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import ipcreduce
from ipcreduce.ranks import launchers
from tests.tools import machine


def python(program: str, **variables: str | None) -> str:
    """What a program prints. Variables that are None are not set for it."""
    env = {name: value for name, value in (machine.environment() | variables).items() if value is not None}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
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


def test_the_package_for_pytorch_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    """If the program has imported PyTorch: else this would."""
    found = types.ModuleType("ipcreduce.torch")
    monkeypatch.setitem(sys.modules, "ipcreduce.torch", found)
    monkeypatch.delattr(ipcreduce, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(AttributeError, match=r"PyTorch, which is not imported. Write: import ipcreduce\.torch"):
        _ = ipcreduce.torch
    assert not hasattr(ipcreduce, "touch")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert ipcreduce.torch is found


# ---- without MPI: mpi4py's wheel raises RuntimeError where it finds no MPI library
NO_LAUNCHER = dict.fromkeys([
    "WORLD_SIZE", *launchers._OTHERS, *(name for _, *names in launchers._LAUNCHERS for name in names)
])  # fmt: skip
UNMADE = """
import sys, types
class Missing(types.ModuleType):
    def __getattr__(self, name): raise {error}('no libmpi.so\\ntried here\\nand there')
sys.modules['mpi4py'] = Missing('mpi4py')
"""
WITHOUT_MPI = {
    "no mpi4py": ("import sys\nsys.modules['mpi4py'] = None\n", {}),
    "no module": (UNMADE.format(error="ImportError"), {}),
    "no library": (UNMADE.format(error="RuntimeError"), {}),
    "no library, by mpi4py's own search": ("", {"MPI4PY_LIBMPI": "/no/libmpi.so"}),
}
ALONE = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout)
import ipcreduce
import numpy as np
x = np.arange(5.0)
for made in (ipcreduce.allreduce(x), ipcreduce.Communicator().allreduce(x), ipcreduce.Communicator(None).allreduce(x)):
    assert (made == x).all() and not np.shares_memory(made, x)
assert ipcreduce.allreduce(2.5, "avg") == 2.5 and ipcreduce.get_communicator().size == 1
"""
REFUSED = """
import ipcreduce
for made in (ipcreduce.Communicator, lambda: ipcreduce.allreduce(1.0)):
    try: print("not refused:", made())
    except ipcreduce.UnsupportedError as error: print(error)
"""
TORCH = """
sys.modules["torch.distributed"] = types.SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2
)
"""


def test_one_process_without_mpi_is_a_world_of_one(subtests: pytest.Subtests):
    for case, (before, variables) in WITHOUT_MPI.items():
        with subtests.test(case):
            output = python(before + ALONE, **NO_LAUNCHER, **variables)
            assert output.count("MPI cannot be loaded") == 1, output
            assert output.count("no launcher has started this process: it is a group of one rank") == 1


def test_processes_of_multiprocessing_are_warned():
    """Each is a world of its own, and nothing in its environment tells of the others."""
    by_default = "ipcreduce.allreduce(1.0), ipcreduce.Communicator()"
    with_a_group = "from mpi4py import MPI; ipcreduce.Communicator(MPI.COMM_WORLD)"
    without_mpi = WITHOUT_MPI["no mpi4py"][0]
    for before, body, is_child, count in (
        ("", by_default, True, 1), (without_mpi, by_default, True, 1), ("", with_a_group, True, 0),
        ("", by_default, False, 0), (without_mpi, by_default, False, 0),
    ):  # fmt: skip
        program = f"""{before}
import multiprocessing, sys
sys.stderr = sys.stdout
def run():
    import ipcreduce
    {body}
if not {is_child}: sys.exit(run())
process = multiprocessing.get_context("fork").Process(target=run)
process.start(), process.join()
assert not process.exitcode
"""
        assert python(program, **NO_LAUNCHER).count("multiprocessing has started this process") == count, program


def test_ranks_without_mpi_are_told_so(subtests: pytest.Subtests):
    """Each would be a world of its own, and its sums would be wrong without a word."""
    before = UNMADE.format(error="RuntimeError")
    words = (
        "MPI cannot be loaded (no libmpi.so): pip install '.[mpi]' in a clone of ipcreduce, or install MPICH or Open "
        "MPI, or pass Communicator a torch.distributed process group or another ipcreduce.Group\n"
    )
    started = [{rank: "0", size: size_of} for _, rank, size in launchers._LAUNCHERS for size_of in ("1", "2")]
    started += [{"TORCHELASTIC_RUN_ID": "x"}, {"WORLD_SIZE": "2"}, {"PMIX_RANK": "0"}, {"PALS_RANKID": "0"}]
    program = before + f"import os\nfor variables in {started}:\n    os.environ |= variables\n"
    program += "".join(f"    {line}\n" for line in REFUSED.splitlines())
    program += "    for name in variables: del os.environ[name]\n"
    assert python(program, **NO_LAUNCHER) == words * 2 * len(started)
    assert python(before + TORCH + REFUSED, **NO_LAUNCHER) == words * 2


def test_the_public_names():
    """DESIGN's, as far as this version has them; the rest of the package is not in the way."""
    assert sorted(ipcreduce.__all__) == ipcreduce.__all__, "sorted, as readers look them up"
    assert {"allreduce", "Communicator", "get_communicator", "IpcReduceError"} <= set(ipcreduce.__all__)
    assert all(hasattr(ipcreduce, name) for name in ipcreduce.__all__)
    assert ipcreduce.__version__[0].isdigit()
