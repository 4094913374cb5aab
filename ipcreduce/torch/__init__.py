"""All-reduce in PyTorch: operators for torch.compile, export and autograd, and a hook for DistributedDataParallel.

Importing this package imports PyTorch.

    register("tp", comm)
    all_reduce(x, op="sum", communicator="tp")                        returns a new contiguous tensor
    all_reduce_(x, op="sum", communicator="tp")                       works in place
    all_reduce_rmsnorm(x, weight, residual, communicator="tp")        returns y and the residual sum
    all_reduce_rmsnorm_(x, weight, residual, communicator="tp")       writes y to x, and the residual sum to residual
    all_reduce_rmsnorm_static_fp8(x, weight, scale, residual, ...)    returns y in e4m3, and the residual sum
    all_reduce_rmsnorm_dynamic_fp8(x, weight, residual, per=..., ...) returns y in e4m3, its scales and the residual sum
    model.register_comm_hook(None, ddp_hook(comm))                    averages the gradients of a model

The operators are those of torch.ops.ipcreduce. Tensors, streams and errors are those of :meth:`Communicator.allreduce`
and :meth:`Communicator.allreduce_rmsnorm`, and ``op`` is one of their names. ``communicator`` is a name, because a
compiled or exported graph cannot hold an object. Without it, the operators use the default communicator. ``all_reduce``
and ``all_reduce_`` have derivatives, see :mod:`ipcreduce.torch.sums`; the others have none.
"""

from __future__ import annotations

from .gradients import ddp_hook
from .names import register
from .norms import (
    all_reduce_rmsnorm,
    all_reduce_rmsnorm_,
    all_reduce_rmsnorm_dynamic_fp8,
    all_reduce_rmsnorm_static_fp8,
)
from .sums import all_reduce, all_reduce_

__all__ = [
    "all_reduce",
    "all_reduce_",
    "all_reduce_rmsnorm",
    "all_reduce_rmsnorm_",
    "all_reduce_rmsnorm_dynamic_fp8",
    "all_reduce_rmsnorm_static_fp8",
    "ddp_hook",
    "register",
]
