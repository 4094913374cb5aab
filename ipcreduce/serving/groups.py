"""The servers' groups of ranks: each gets its reducer's collectives, and closes the all-reduce when it ends.

Servers make no all-reduce of their own where the batch must not change a bit, and leave all sums to NCCL. Those of
ipcreduce do not depend on the batch either: with IPCREDUCE_BATCH_INVARIANT=1 tensor-parallel groups get its all-reduce
even then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..options import is_on

_wrapped: set[tuple[type, str]] = set()


def close_with(group: type) -> None:
    """Let a group of this class close its all-reduce before it ends, on every rank, as vLLM only drops it."""

    def then(theirs: Any, self: Any, *given: Any, **named: Any) -> None:
        from .all_reduce import ServingAllReduce

        found = getattr(getattr(self, "device_communicator", None), "ca_comm", None)
        if isinstance(found, ServingAllReduce):
            found.close()  # while the group is whole
        theirs(self, *given, **named)

    _wrap(group, "destroy", then)


def serve(group: type, communicator: type) -> None:
    """Let vLLM's groups with our all-reduce have our other collectives, too."""

    def then(theirs: Any, self: Any, *given: Any, **named: Any) -> None:
        from .methods import CommunicatorMethods

        theirs(self, *given, **named)
        take(self, CommunicatorMethods)

    def then_group(theirs: Any, self: Any, *given: Any, **named: Any) -> None:
        from .methods import CommunicatorMethods, VllmGroupMethods, give

        theirs(self, *given, **named)
        if isinstance(self.device_communicator, CommunicatorMethods):
            give(self, VllmGroupMethods)

    _wrap(communicator, "__init__", then)
    _wrap(group, "__init__", then_group)


def take(owner: Any, methods: type) -> None:
    """Give the methods to an object that has our all-reduce as ``ca_comm``.

    A tensor-parallel group that has none gets it before, if IPCREDUCE_BATCH_INVARIANT is set.
    """
    from .all_reduce import ServingAllReduce
    from .methods import give

    is_ours = owner.world_size > 1 and owner.unique_name.partition(":")[0] == "tp"
    if owner.ca_comm is None and is_ours and is_on("IPCREDUCE_BATCH_INVARIANT"):
        owner.ca_comm = ServingAllReduce(owner.cpu_group, owner.device)
    if isinstance(owner.ca_comm, ServingAllReduce):
        give(owner, methods)


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
