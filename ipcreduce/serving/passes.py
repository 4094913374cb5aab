"""vLLM's pass manager with ipcreduce's pass. With IPCREDUCE_FUSED=1 the plug-in names the class to vLLM."""

from __future__ import annotations

import logging
from typing import Any

from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.distributed import parallel_state

from . import fusion
from .all_reduce import ServingAllReduce

_log = logging.getLogger("ipcreduce.serving")


class FusedNorms(InductorPass):  # type: ignore[misc]
    """The pass that fuses the all-reduces and norms of one group."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __call__(self, graph: Any) -> None:
        count = fusion.fuse(graph, self._group)
        _log.info("%d all-reduces of a compiled graph now include the RMSNorm that follows them", count)

    def uuid(self) -> str:
        """The key for compiled code."""
        return f"{fusion.key()} {self._group}"


class PassManager(PostGradPassManager):  # type: ignore[misc]
    """vLLM's own passes, and ipcreduce's before those that fuse norms with other things."""

    def configure(self, config: Any) -> None:
        """Called by vLLM, once."""
        super().configure(config)
        passes = config.compilation_config.pass_config
        group = parallel_state.get_tp_group()
        reducer = getattr(group.device_communicator, "ca_comm", None)
        in_parts = getattr(passes, "enable_sp", False)  # vLLM 0.33.0 has no such pass any more
        if in_parts or not isinstance(reducer, ServingAllReduce) or reducer.disabled:
            _log.warning("IPCREDUCE_FUSED has no effect: this server has no all-reduces of ipcreduce to fuse")
            return
        self.passes.insert(int(bool(passes.eliminate_noops)), FusedNorms(group.unique_name))
