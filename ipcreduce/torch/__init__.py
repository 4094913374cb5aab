"""The collectives in PyTorch: operators for torch.compile, export and autograd, and DistributedDataParallel and FSDP.

Importing this package imports PyTorch.

    register("tp", comm)
    all_reduce(x, op="sum", communicator="tp")                        returns a new contiguous tensor
    all_reduce_(x, op="sum", communicator="tp")                       works in place
    all_gather(x, axis=0, sizes=None, communicator="tp")              returns every rank's x
    reduce_scatter(x, op="sum", axis=0, sizes=None, ...)              returns this rank's part of the reduction
    broadcast_(x, root=0, communicator="tp")                          works in place
    all_reduce_rmsnorm(x, weight, residual, communicator="tp")        returns y and the residual sum
    all_reduce_rmsnorm_(x, weight, residual, communicator="tp")       writes y to x, and the residual sum to residual
    all_reduce_rmsnorm_static_fp8(x, weight, scale, residual, ...)    returns y in e4m3, and the residual sum
    all_reduce_rmsnorm_dynamic_fp8(x, weight, residual, per=..., ...) returns y in e4m3, its scales and the residual sum
    model.register_comm_hook(None, ddp_hook(comm))                    averages the gradients of a model
    sharded.set_custom_all_gather(FSDPAllGather(comm))                gathers parameters of fully_shard()

The operators are those of torch.ops.ipcreduce. Tensors, streams and errors are those of :meth:`Communicator.allreduce`
and :meth:`Communicator.allreduce_rmsnorm`, and ``op`` is one of their names. ``communicator`` is a name, because a
compiled or exported graph cannot hold an object. Without it, the operators use the default communicator. Those without
RMSNorm have derivatives: see :mod:`ipcreduce.torch.sums` and :mod:`ipcreduce.torch.splits`.
"""

from __future__ import annotations

from .ddp import ddp_hook
from .fsdp import FSDPAllGather, FSDPReduceScatter
from .names import register
from .norms import (
    all_reduce_rmsnorm,
    all_reduce_rmsnorm_,
    all_reduce_rmsnorm_dynamic_fp8,
    all_reduce_rmsnorm_static_fp8,
)
from .splits import all_gather, broadcast_, reduce_scatter
from .sums import all_reduce, all_reduce_

__all__ = [
    "FSDPAllGather",
    "FSDPReduceScatter",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_reduce_rmsnorm",
    "all_reduce_rmsnorm_",
    "all_reduce_rmsnorm_dynamic_fp8",
    "all_reduce_rmsnorm_static_fp8",
    "broadcast_",
    "ddp_hook",
    "reduce_scatter",
    "register",
]
