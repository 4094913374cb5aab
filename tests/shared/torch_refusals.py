"""Tensors of PyTorch that no call takes, since they have no memory of their own, and what the errors say of them.

tests/mpi has them on the host, tests/gpu on GPUs. Importing this module imports PyTorch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

OPERATOR = "se the call's operator in torch.ops.ipcreduce, such as all_reduce (import ipcreduce.torch)"


@contextlib.contextmanager
def a_group() -> Iterator[None]:
    """In the block torch.distributed is initialised, with this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def distributed(x: torch.Tensor) -> torch.Tensor:
    """A DTensor of ``x`` alone, within :func:`a_group`. Its mesh is of CPUs: making one of GPUs makes GPU 0 current."""
    spec = DTensorSpec(DeviceMesh("cpu", [0]), (Replicate(),), tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
    return DTensor(x, spec, requires_grad=False)


def without_memory(x: torch.Tensor) -> list[tuple[Any, str]]:
    """Tensors of the shape, dtype and device of ``x``, within :func:`a_group`, and words of the errors."""
    words = "{}, which overrides __torch_dispatch__ and may have no memory of its own. "
    clone = "that PyTorch knows to be zero, without memory of its own. Pass tensor.clone()"
    double = torch._efficientzerotensor((2 * len(x),), dtype=x.dtype, device=x.device)
    return [
        (AsyncCollectiveTensor(x), words.format("AsyncCollectiveTensor") + "Pass tensor.wait()"),
        (distributed(x), words.format("DTensor") + "Pass tensor.to_local()"),
        (TwoTensor(x, x), words.format("TwoTensor") + f"U{OPERATOR}, or pass the tensor that it holds"),
        (FakeTensorMode().from_tensor(x), words.format("FakeTensor") + f"U{OPERATOR}"),
        (torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device), clone),
        (double[len(x) :], clone),
    ]


def within_traces(comm: Any, x: torch.Tensor, out: torch.Tensor) -> list[tuple[Callable[[], Any], str]]:
    """Calls on these tensors, and on ones of the trace, whose results would be constants there, and the words."""

    def fresh(a: torch.Tensor) -> Any:
        return comm.allreduce(a) + 1

    def in_place(a: torch.Tensor) -> Any:
        return comm.allreduce(a, out=a) + 1

    def of_others(a: torch.Tensor) -> Any:
        return comm.allreduce(x) + a

    def into_others(a: torch.Tensor) -> Any:
        return comm.allreduce(x, out=out) + a

    found: list[tuple[Callable[[], Any], str]] = []
    for call in (fresh, in_place, of_others, into_others):
        words = f"which would take the result for a constant. U{OPERATOR}"
        found.append((lambda call=call: torch.jit.trace(call, x.clone()), f"a trace by torch.jit.trace, {words}"))
        for before in (False, True):
            made = make_fx(call, pre_dispatch=before)
            found.append((lambda made=made: made(x.clone()), f"a trace by ProxyTorchDispatchMode, {words}"))
    return found
