"""Collectives for the tensor-parallel groups of the servers vLLM and SGLang, in place of the servers' own.

Set the environment variable ``IPCREDUCE_ENGINES=1`` to use it. Without the variable, the two entry points below do
nothing. ``ipcreduce.serving.all_reduce`` has the class that the servers make. It has run in vLLM 0.26.0 and SGLang
0.5.17.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any

from ..collectives import traced
from ..errors import UnsupportedError
from ..options import is_on

_VLLM_MODULE = "vllm.distributed.device_communicators.custom_all_reduce"
_SGLANG_TARGET = "sglang.srt.distributed.device_communicators.custom_all_reduce.dispatch_custom_allreduce"
_SGLANG_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__"
_SGLANG_FLASHINFER = "sglang.srt.layers.flashinfer_comm_fusion"
_SGLANG_FUSED, _SGLANG_PLAIN = "flashinfer_allreduce_residual_rmsnorm", "can_use_flashinfer_allreduce"
_PASS_MANAGER = "ipcreduce.serving.passes.PassManager"
_FLASHINFER = "VLLM_ALLREDUCE_USE_FLASHINFER"  # 0 by default in vLLM 0.26.0, and 1 in 0.33.0
_INVARIANT = "VLLM_BATCH_INVARIANT"
_NOT_HERE = "%s keeps its own all-reduce: IPCREDUCE_ENGINES is for NVIDIA's GPUs"
_log = logging.getLogger("ipcreduce.serving")


def vllm_plugin() -> None:
    """Let vLLM make ServingAllReduce in place of its CustomAllreduce. Entry point of ``vllm.general_plugins``.

    The log of ipcreduce then goes where vLLM's log goes. vLLM may call this more than once.

    :raises UnsupportedError: if this vLLM has no CustomAllreduce.
    """
    if not is_on("IPCREDUCE_ENGINES"):
        return
    from importlib.util import find_spec

    from vllm.platforms import current_platform

    logging.getLogger("ipcreduce").parent = logging.getLogger("vllm")  # which 0.33.0 may configure later
    if not current_platform.is_cuda():
        _log.warning(_NOT_HERE, "vLLM")
        return
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cuda_communicator, custom_all_reduce

    from . import groups
    from .all_reduce import ServingAllReduce

    if not hasattr(custom_all_reduce, "CustomAllreduce"):
        raise UnsupportedError(f"this vLLM has no {_VLLM_MODULE}.CustomAllreduce. Unset IPCREDUCE_ENGINES")
    custom_all_reduce.CustomAllreduce = ServingAllReduce
    _log.info("IPCREDUCE_ENGINES=1: %s.CustomAllreduce is now ipcreduce's ServingAllReduce", _VLLM_MODULE)
    groups.close_with(parallel_state.GroupCoordinator)
    groups.serve(parallel_state.GroupCoordinator, cuda_communicator.CudaCommunicator)
    if not is_on("IPCREDUCE_BATCH_INVARIANT") and os.environ.get(_INVARIANT, "0") not in ("", "0"):
        _log.warning(
            "%s=1: vLLM leaves all sums to NCCL. Set IPCREDUCE_BATCH_INVARIANT=1 to have ipcreduce's", _INVARIANT
        )
    if is_on("IPCREDUCE_FUSED"):
        _bring_the_pass(current_platform)
    if sys.modules.get("flashinfer") or find_spec("flashinfer"):  # find_spec raises for a module without __spec__
        _come_before_flashinfer()


@cache  # said once in a process
def _come_before_flashinfer() -> None:
    """Switch vLLM's use of FlashInfer's all-reduce off, unless the user has set it, and say what else comes first."""
    given = os.environ.setdefault(_FLASHINFER, "0")
    if given != "0":
        _log.warning("%s=%s: vLLM asks FlashInfer first, and seldom ipcreduce. Set it to 0", _FLASHINFER, given)
    _log.info(
        "%s is %s. FlashInfer's pass may still replace all-reduces that a RMSNorm follows. To have ipcreduce's, pass "
        """--compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""", _FLASHINFER, given,
    )  # fmt: skip


@cache  # once in a process
def _bring_the_pass(platform: Any) -> None:
    """Let vLLM compile with our pass, and keep what it compiles apart from what it compiles without."""
    from vllm.config import VllmConfig

    from . import fusion

    fusion.define(_reducer_of)  # now, because a compiled model may come from vLLM's cache
    theirs = VllmConfig.compute_hash
    VllmConfig.compute_hash = lambda self: f"{theirs(self)}-ipcreduce-{fusion.key()}"
    platform.get_pass_manager_cls = lambda: _PASS_MANAGER
    _log.info("IPCREDUCE_FUSED=1: vLLM compiles all-reduces and the RMSNorms that follow them to one call of ipcreduce")


def _reducer_of(name: str) -> Any:
    """The ServingAllReduce of vLLM's group of this name."""
    from vllm.distributed import parallel_state

    from .all_reduce import ServingAllReduce

    group = parallel_state._groups[name]()
    found = None if group is None else group.device_communicator.ca_comm
    if not isinstance(found, ServingAllReduce):
        raise UnsupportedError(f"the group {name} has no all-reduce of ipcreduce. Unset IPCREDUCE_FUSED")
    return found


def sglang_plugin() -> None:
    """Let SGLang choose ServingAllReduce for groups and call its collectives. Entry point of ``sglang.srt.plugins``.

    On NVIDIA's GPUs SGLang asks FlashInfer for an all-reduce with RMSNorm, and never the object of the group. Newer
    releases then ask FlashInfer for others, too. With ``IPCREDUCE_FUSED=1`` they ask this object first.
    """
    if not is_on("IPCREDUCE_ENGINES"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SGLANG_TARGET, _choose, HookType.AROUND)
    HookRegistry.register(_SGLANG_GROUP, _serve, HookType.AFTER)
    _log.info("IPCREDUCE_ENGINES=1: %s now chooses ipcreduce's ServingAllReduce", _SGLANG_TARGET)
    if is_on("IPCREDUCE_FUSED"):
        HookRegistry.register(f"{_SGLANG_FLASHINFER}.{_SGLANG_FUSED}", _normalise, HookType.AROUND)
        if hasattr(import_module(_SGLANG_FLASHINFER), _SGLANG_PLAIN):  # 0.5.17 has it not
            HookRegistry.register(f"{_SGLANG_FLASHINFER}.{_SGLANG_PLAIN}", _asks_flashinfer, HookType.AROUND)
        _log.info("IPCREDUCE_FUSED=1: %s.%s now asks ipcreduce first", _SGLANG_FLASHINFER, _SGLANG_FUSED)
    else:
        _log.info(
            "SGLang asks FlashInfer for all-reduces with RMSNorm of some models. Set IPCREDUCE_FUSED=1 to have ours"
        )


@cache  # said once in a process
def _is_on_nvidia() -> bool:
    """True in a worker of SGLang on NVIDIA's GPUs."""
    from sglang.srt.utils import is_cuda

    found = bool(is_cuda())
    if not found:
        _log.warning(_NOT_HERE, "SGLang")
    return found


def _choose(theirs: Any, **named: Any) -> Any:
    """Choose the class of a group's all-reduce."""
    if not _is_on_nvidia():
        return theirs(**named)
    from .all_reduce import ServingAllReduce

    return ServingAllReduce


def _serve(result: None, group: Any, *_: Any, **__: Any) -> None:
    """Give a group of SGLang, which is made now, the collectives of its ServingAllReduce."""
    if _is_on_nvidia():
        from .groups import take
        from .methods import SGLangMethods

        take(group, SGLangMethods)


@traced
def _normalise(theirs: Any, **named: Any) -> Any:
    """Run SGLang's fused FlashInfer call by ipcreduce, where ipcreduce takes it: tensor-parallel group, not compiled.

    The choice is the same on every rank.
    """
    import torch

    reducer = None if torch.compiler.is_compiling() else _sglang_reducer(_ranks_of(**named))
    found = None
    if reducer is not None:
        x, residual, weight, eps = (named[name] for name in ("input_tensor", "residual", "weight", "eps"))
        found = reducer.fused_allreduce_rmsnorm(x, residual, weight, eps)
    return theirs(**named) if found is None else found


@traced
def _asks_flashinfer(theirs: Any, tensor: Any, **named: Any) -> bool:
    """True if SGLang asks FlashInfer for a plain all-reduce: by its own answer, but for those that ipcreduce takes."""
    import torch

    reducer = None if torch.compiler.is_compiling() else _sglang_reducer(named["expected_world_size"])
    return False if reducer is not None and reducer.should_custom_ar(tensor) else theirs(tensor, **named)


def _ranks_of(*, use_attn_tp_group: bool = True, **_: Any) -> int:
    """The number of ranks of SGLang's fused call: those that share attention, or those that share experts."""
    from sglang.srt.runtime_context import get_parallel

    sizes = get_parallel()
    experts = sizes.moe_ep_size if sizes.moe_ep_size > 1 else sizes.moe_tp_size
    return int(sizes.attn_tp_size if use_attn_tp_group else experts)


def _sglang_reducer(ranks: int) -> Any:
    """The ServingAllReduce of SGLang's tensor-parallel group, if that has so many ranks; else None."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    from .all_reduce import ServingAllReduce

    group = get_tp_group()
    return group.ca_comm if ranks == group.world_size and isinstance(group.ca_comm, ServingAllReduce) else None
