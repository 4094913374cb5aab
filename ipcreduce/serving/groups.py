"""vLLM's groups of ranks: each closes its all-reduce of ipcreduce when it ends.

Under VLLM_BATCH_INVARIANT vLLM makes no all-reduce of its own, and leaves all sums to NCCL. Those of ipcreduce do not
depend on the batch either: with IPCREDUCE_BATCH_INVARIANT=1 tensor-parallel groups get its all-reduce even then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_wrapped: set[tuple[type, str]] = set()


def close_with(group: type) -> None:
    """Let a group of this class close its all-reduce before it ends, on every rank, as vLLM only drops it."""

    def then(theirs: Any, self: Any, *given: Any, **named: Any) -> None:
        from .seat import EngineAllReduce

        found = getattr(getattr(self, "device_communicator", None), "ca_comm", None)
        if isinstance(found, EngineAllReduce):
            found.close()  # while the group is whole
        theirs(self, *given, **named)

    _wrap(group, "destroy", then)


def make_in(communicator: type) -> None:
    """Give tensor-parallel groups our all-reduce where vLLM's communicator of this class has made none."""

    def then(theirs: Any, self: Any, *given: Any, **named: Any) -> None:
        from .seat import EngineAllReduce

        theirs(self, *given, **named)
        if self.ca_comm is None and self.world_size > 1 and self.unique_name.partition(":")[0] == "tp":
            self.ca_comm = EngineAllReduce(self.cpu_group, self.device)

    _wrap(communicator, "__init__", then)


def _wrap(kind: type, name: str, then: Callable[..., None]) -> None:
    """Let ``then`` run in place of a method, which it gets. Once for each class: vLLM may load a plug-in again."""
    if (kind, name) in _wrapped:
        return
    _wrapped.add((kind, name))
    theirs = getattr(kind, name)

    @functools.wraps(theirs)
    def ours(self: Any, *given: Any, **named: Any) -> None:
        then(theirs, self, *given, **named)

    setattr(kind, name, ours)
