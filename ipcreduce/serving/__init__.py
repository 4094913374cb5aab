"""All-reduce for the tensor-parallel groups of vLLM and SGLang, in the place of their own. Asked for by an environment
variable: without ``IPCREDUCE_ENGINES=1`` the two entry points below do nothing, so an installation changes no server.

``ipcreduce.serving.seat`` has the class that the engines make. It was never run in a real server.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ..errors import ArgumentError, UnsupportedError

_VLLM_MODULE = "vllm.distributed.device_communicators.custom_all_reduce"
_SGLANG_TARGET = "sglang.srt.distributed.device_communicators.custom_all_reduce.dispatch_custom_allreduce"
_log = logging.getLogger("ipcreduce.serving")


def is_wanted() -> bool:
    """True if ``IPCREDUCE_ENGINES`` is 1. :raises ArgumentError: if it is set to anything but 0, 1 or nothing."""
    text = os.environ.get("IPCREDUCE_ENGINES", "")
    if text not in ("", "0", "1"):
        raise ArgumentError(f"IPCREDUCE_ENGINES must be 0 or 1; found {text!r}")
    return text == "1"


def vllm_plugin() -> None:
    """Entry point of ``vllm.general_plugins``: let vLLM make our class where it makes its CustomAllreduce.

    The log of ipcreduce then goes where vLLM's goes. It may be called more than once.

    :raises UnsupportedError: if this vLLM has no CustomAllreduce.
    """
    if not is_wanted():
        return
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms import current_platform

    from .seat import EngineAllReduce

    log, theirs = logging.getLogger("ipcreduce"), logging.getLogger("vllm")
    for handler in set(theirs.handlers) - set(log.handlers):
        log.addHandler(handler)
    log.setLevel(theirs.getEffectiveLevel())
    if not current_platform.is_cuda():
        _log.warning("vLLM keeps its own all-reduce: IPCREDUCE_ENGINES is for NVIDIA's GPUs")
        return
    if not hasattr(custom_all_reduce, "CustomAllreduce"):
        raise UnsupportedError(
            f"expected {_VLLM_MODULE}.CustomAllreduce; found none in this vLLM. Unset IPCREDUCE_ENGINES"
        )
    custom_all_reduce.CustomAllreduce = EngineAllReduce
    _log.info("IPCREDUCE_ENGINES=1: %s.CustomAllreduce is now ipcreduce's EngineAllReduce", _VLLM_MODULE)


def sglang_plugin() -> None:
    """Entry point of ``sglang.srt.plugins``: let SGLang choose our class for its groups."""
    if not is_wanted():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SGLANG_TARGET, _choose, HookType.REPLACE)
    _log.info("IPCREDUCE_ENGINES=1: %s now chooses ipcreduce's EngineAllReduce", _SGLANG_TARGET)


def _choose(group: Any, device: Any) -> type:
    from .seat import EngineAllReduce

    return EngineAllReduce
