"""The hook by which DistributedDataParallel averages its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..buckets import Buckets
from ..communicator import Communicator
from ..options import checked_sms
from .names import check_is_communicator


def ddp_hook(comm: Communicator, sms: int | None = 8) -> Callable[[Any, Any], Any]:
    """A communication hook for ``DistributedDataParallel`` that averages the gradients over the ranks.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ipcreduce.torch.ddp_hook(comm))

    Each model needs a hook of its own. The average has the same bits on every rank: those of ``comm.allreduce(bucket,
    "mean")``. On the GPU the all-reduces run on a stream of their own, beside the rest of the backward pass. With
    tensors on the host each is done before the backward pass goes on.

    The hook's state is the model's process group, or None for the default group. In the first backward pass the ranks
    compare it with the communicator.

    ``backward()`` then raises the errors of :meth:`Communicator.allreduce`, and ArgumentError on every rank if the
    processes of the group are not the communicator's ranks, in their order. If ``backward()`` raises on one rank, the
    others get PeerFailedError. DistributedDataParallel cannot go on with that model: wrap it again, on every rank.

    :param sms: the most blocks of an all-reduce of 4 MB or more, which then leaves most multiprocessors to the backward
        pass; the same on every rank. None: as many as are fastest alone. See :meth:`Communicator.allreduce`.
    :raises ArgumentError: if ``comm`` is no Communicator, or ``sms`` no int from 1 on.
    """
    check_is_communicator(comm, "ddp_hook(comm)")
    buckets = Buckets(comm, torch, None if sms is None else checked_sms(sms))

    def hook(state: Any, bucket: Any) -> Any:
        return buckets.average(state, bucket)

    hook.__annotations__.clear()  # PyTorch checks them, and takes none or its own classes, not their names
    hook.__qualname__ = "ipcreduce.torch.ddp_hook"  # for PyTorch's log
    return hook
