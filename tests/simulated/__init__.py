"""A simulated device: the library runs as it is, with no GPU, on the project's own kernels compiled for the CPU.

    from tests import simulated
    simulated.install()      # before anything of ipcreduce is imported
    import cupy, ipcreduce   # CuPy, the driver and the compiler are the simulated ones

Environment: SIM_DEVICES GPUs (default: one a rank), each seen by all ranks unless CUDA_VISIBLE_DEVICES says otherwise;
SIM_NO_P2P and SIM_BROKEN_P2P, such as "0-2,1-3": pairs without peer access, and pairs that have it but lose the data;
SIM_PCIE: pairs without NVLink; SIM_SPLIT_PACKETS=1: packets arrive in two halves; SIM_MEMORY: bytes of each GPU
(default 1 GiB); SIM_MULTIPROCESSORS: of each GPU (default 132); SIM_EXCLUSIVE=1: its
compute mode keeps this process out; SIM_NO_VMM: see virtual_memory.py; SIM_LATE: seconds, at most, by which each piece
of work begins late, at random: what nothing orders comes in the wrong order at some time; SIM_SHARED: a folder for
files that the ranks have in common.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_VERIFY_ROUNDS = 5  # of the start-up check, in each of which two processes have to run in turn
_STANDS_FOR = {
    "ipcreduce.cuda.driver": "tests.simulated.driver",
    "ipcreduce.cuda.streams": "tests.simulated.driver_streams",
    "ipcreduce.cuda.graph": "tests.simulated.graph",
    "ipcreduce.cuda.compiler": "tests.simulated.compiler",
    "ipcreduce.graphs.direct.driver_calls": "tests.simulated.direct_calls",
    "cupy": "tests.simulated.cupy",
    "nccl": "tests.simulated.nccl_package",
    "nccl.bindings": "tests.simulated.nccl_package",
    "nccl.bindings.nccl": "tests.simulated.nccl",
}


class _Substitutes(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in _STANDS_FOR else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == "nccl" and os.environ.get("SIM_NO_NCCL"):
            raise ModuleNotFoundError("No module named 'nccl'", name="nccl")
        return importlib.import_module(_STANDS_FOR[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        pass  # it has been, under its own name


def install() -> None:
    """Makes the simulated driver, compiler and CuPy the ones that ``ipcreduce`` imports.

    :raises RuntimeError: if one of the real ones has been imported already.
    """
    for name in ("ipcreduce", "cupy"):
        if name in sys.modules:
            raise RuntimeError(f"{name} is imported already: call tests.simulated.install() first")
    gc.disable()  # machine_streams.py collects instead, and often
    sys.meta_path.insert(0, _Substitutes())
    importlib.import_module("ipcreduce")
    from ipcreduce.ipc import peers, plan
    from tests.simulated import driver

    plan.BULK_BYTES = plan.SPREAD_BYTES = 4 * plan.KB  # so that short messages take those ways
    if not driver.splits_packets():  # which is seen in few of many rounds
        peers._VERIFY_ROUNDS = _VERIFY_ROUNDS
