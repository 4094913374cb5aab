"""The groups of a release of vLLM or SGLang with our collectives, over tensors on the host.

    mpirun -n 2 python -m tests.programs.real_servers vllm PLACE

PLACE has the package, as ``serving_sources.fetch`` unpacks it. The modules of its groups are the server's own, without
NCCL; some others of its modules, and packages that this Python lacks, are stand-ins whose names are mocks. Results are
compared bit by bit with PyTorch's. Every rank prints "right".
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist

from ipcreduce import serving
from tests.gpu.serving import LENGTHS, RANK, SIZE, gathered, join, same, scattered, sent, values
from tests.shared import worker

VLLM_MOCKED = (
    "_aiter_ops", "_custom_ops", "compilation", "config", "distributed.device_communicators.aiter_custom_all_reduce",
    "distributed.device_communicators.shm_broadcast", "distributed.ec_transfer", "distributed.eplb",
    "distributed.kv_transfer", "distributed.weight_transfer", "model_executor", "multimodal", "transformers_utils",
    "utils.flashinfer", "v1",
)  # fmt: skip
SGLANG_MOCKED = (
    "kernels", "srt.configs", "srt.distributed.device_communicators", "srt.layers", "srt.managers", "srt.models",
    "srt.platforms", "srt.server_args", "srt.utils",
)  # fmt: skip
PROBED = "amdsmi", "flashinfer", "libtpu", "tpu_inference", "triton"  # the servers see whether these are there
REAL = "sglang.srt.utils.custom_op", "sglang.srt.distributed.device_communicators.custom_all_reduce"


class Mocked:
    """What stands for a class of another module."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what the class may take."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Take what a base may take."""


class Mocks(MetaPathFinder, Loader):
    """Finds modules whose names are mocks: those named and what is below them, but for REAL; without names, any."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        named = any(f"{name}.".startswith(f"{one}.") for one in self.names)
        fits = named and name not in REAL if self.names else name.partition(".")[0] not in PROBED
        return ModuleSpec(name, self, is_package=True) if fits else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__path__ = [os.path.join(sys.argv[2], *spec.name.split("."))]
        vars(made)["__getattr__"] = mocked
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def mocked(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Mocked,), {}) if name[0].isupper() else MagicMock()


def main() -> None:
    os.environ |= dict.fromkeys(("IPCREDUCE_ENGINES", "IPCREDUCE_BATCH_INVARIANT", "VLLM_DISABLE_PYNCCL"), "1")
    os.environ |= dict.fromkeys(("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"), "0")
    server, place = sys.argv[1:]
    sys.path.insert(0, place)
    sys.meta_path.append(Mocks())
    join()
    {"vllm": vllm, "sglang": sglang}[server]()
    dist.barrier()
    dist.destroy_process_group()
    print("right", flush=True)


def vllm() -> None:
    sys.meta_path.insert(0, Mocks(*(f"vllm.{name}" for name in VLLM_MOCKED)))
    importlib.import_module("vllm.config").get_current_vllm_config_or_none = lambda: None
    aiter = types.SimpleNamespace(is_custom_all_reduce_enabled=lambda: False, is_enabled=lambda: False)
    importlib.import_module("vllm._aiter_ops").rocm_aiter_ops = aiter
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    state = importlib.import_module("vllm.distributed.parallel_state")
    cuda = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
    platform.is_cuda = lambda self: True
    platform.is_cuda_alike = lambda self: False
    platform.get_device_communicator_cls = classmethod(lambda cls: cuda)
    platform.use_custom_op_collectives = classmethod(lambda cls: True)
    serving.vllm_plugin()
    state.set_custom_all_reduce(False)  # as vLLM does where the batch must not change a bit
    group = state.GroupCoordinator([[*range(SIZE)]], RANK, "gloo", True, False, "tp")
    other = state.GroupCoordinator([[*range(SIZE)]], RANK, "gloo", True, False, "ep")
    assert other.device_communicator.ca_comm is None
    x = values(2 * SIZE, 3 * SIZE, 4 * SIZE)
    for dim in range(-3, 3):
        equal(f"all_gather {dim}", group.all_gather(x, dim), gathered(x, dim % 3))
        equal(f"reduce_scatter {dim}", group.reduce_scatter(x, dim), scattered(x, dim % 3))
    equal("all_reduce", group.all_reduce(x), gathered(scattered(x, 0), 0))
    equal("broadcast", group.broadcast(x.clone(), SIZE - 1), sent(x.clone(), SIZE - 1))
    mine, whole = values(LENGTHS[RANK], 5), values(sum(LENGTHS), 5)
    both = [gathered(one, 0, LENGTHS) for one in (mine, mine.int())]
    equal("all_gatherv", group.all_gatherv([mine, mine.int()], 0, LENGTHS), both)
    equal("reduce_scatterv", group.reduce_scatterv(whole, 0, LENGTHS), scattered(whole, 0, LENGTHS))
    compiled(lambda x: group.all_gather(group.reduce_scatter(x * 2, 0) + 1))
    group.destroy()
    assert group.device_communicator.ca_comm is None


def sglang() -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed"):
        sys.modules[name] = Mocks().create_module(ModuleSpec(name, None))
    sys.meta_path.insert(0, Mocks(*(f"sglang.{name}" for name in SGLANG_MOCKED)))
    utils = importlib.import_module("sglang.srt.utils")
    for name in ("cpu", "cuda_alike", "gfx95_supported", "hip", "musa", "npu", "shm_available", "xpu"):
        setattr(utils, f"is_{name}", lambda *_: False)
    library = torch.library.Library("sglang", "FRAGMENT")

    def register(op_name: str, op_func: Callable[..., Any], mutates_args: list[str], fake_impl: Any) -> None:
        library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args))
        library.impl(op_name, op_func, "CPU")
        library._register_fake(op_name, fake_impl)

    importlib.import_module("sglang.srt.utils.common").direct_register_custom_op = register
    logged = importlib.import_module("sglang.kernels.kernel_api_logging")
    logged.debug_torch_op = lambda function, name: getattr(torch.ops.sglang, name)
    communicators = "sglang.srt.distributed.device_communicators"
    importlib.import_module(f"{communicators}.pcie_ipc_ar").eligible_group = lambda **_: False
    importlib.import_module(f"{communicators}.pynccl_allocator").use_symmetric_memory = lambda *_, **__: nullcontext()
    importlib.import_module("sglang.srt.layers.dp_attention").is_allocation_symmetric = lambda: False
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    serving.sglang_plugin()
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    state._group_coordinator_device = lambda rank: torch.device("cpu")
    registry.apply_hooks()
    kind = state.GroupCoordinator
    uses = {name: False for name in inspect.signature(kind.__init__).parameters if name.startswith("use_")}
    group = kind([[*range(SIZE)]], RANK, "gloo", **uses, group_name="tp")
    x = values(2 * SIZE, 4 * SIZE)
    whole = x.new_empty(2 * SIZE * SIZE, 4 * SIZE)
    group.all_gather_into_tensor(whole, x)
    equal("all_gather_into_tensor", whole, gathered(x, 0))
    for dim in range(-2, 2):
        equal(f"all_gather {dim}", group.all_gather(x, dim), gathered(x, dim % 2))
        equal(f"reduce_scatter {dim}", group.reduce_scatter_along_dim(x, dim), scattered(x, dim % 2))
    equal("broadcast", group.broadcast(x.clone(), SIZE - 1), sent(x.clone(), SIZE - 1))
    mine, whole = values(LENGTHS[RANK], 5), values(sum(LENGTHS), 5)
    both = [gathered(one, 0, LENGTHS) for one in (mine, mine.int())]
    equal("all_gatherv", group.all_gatherv([mine, mine.int()], LENGTHS), both)
    equal("reduce_scatterv", group.reduce_scatterv(whole, sizes=LENGTHS), scattered(whole, 0, LENGTHS))

    def model(x: torch.Tensor) -> torch.Tensor:
        part = x.new_empty(x.shape[0] // SIZE, x.shape[1])
        group.reduce_scatter_tensor(part, x * 2)
        return group.all_gather(part + 1)

    compiled(model)
    group.ca_comm.close()


def equal(what: str, found: Any, right: Any) -> None:
    assert same(found, right), what


def compiled(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A sum's part of the rows, doubled, and one more, and all parts side by side, by a whole graph."""
    made = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2 * SIZE, 4 * SIZE):
        x = values(rows, 6)
        equal("compiled", made(x), gathered(scattered(x * 2, 0) + 1, 1))


if __name__ == "__main__":
    worker.run(main)
