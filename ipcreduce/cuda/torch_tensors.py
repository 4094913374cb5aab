"""PyTorch's tensors whose memory is not their values, or whose derivatives or traces a call would not reach.

Each is named with its remedy. :func:`torch_runtime.plain` takes none of them.
"""

from __future__ import annotations

import sys
from typing import Any

from . import torch_runtime

_AUTOGRAD = "AutogradFunctionality"  # PyTorch's name of all dispatch keys of autograd
_OPERATOR = "torch.ops.ipcreduce.all_reduce (import ipcreduce.torch)"


def problem(tensor: Any) -> str:
    """The reason for which a call cannot take a tensor, and the remedy; "" if there is none."""
    if not torch_runtime.is_tensor(tensor):
        return ""
    is_plain = torch_runtime.is_plain_kind(tensor)
    if not is_plain and torch_runtime.is_wrapper_type(type(tensor)):
        return _wrapped(type(tensor))
    if tracer := _tracer():
        return f"a tensor outside of a trace; found one in {tracer}, to which the result is a constant. Use {_OPERATOR}"
    return own_problem(tensor) if is_plain else ""


def own_problem(tensor: Any) -> str:
    """:func:`problem` of a torch.Tensor or Parameter, wherever it is used."""
    return _lazy(tensor) or _differentiated(tensor)


def _wrapped(kind: type) -> str:
    if hasattr(kind, "to_local"):  # DTensor
        way = "Pass tensor.to_local()"
    elif hasattr(kind, "wait"):  # AsyncCollectiveTensor
        way = "Pass tensor.wait()"
    else:
        way = f"Use {_OPERATOR}, or pass the tensor that it holds"
    name = kind.__qualname__
    return f"a tensor with memory of its own; found one of type {name}, which overrides __torch_dispatch__. {way}"


def _tracer() -> str:
    """The tracer in this thread, which lists PyTorch's operators or runs them on no data; "" if there is none."""
    if torch_runtime.tracing_state() is not None:
        return "torch.jit.trace"
    if not torch_runtime.modes._is_in_torch_dispatch_mode:
        return ""
    found = torch_runtime.torch._C
    modes = [found._get_dispatch_mode(getattr(found._TorchDispatchModeKey, name)) for name in ("PROXY", "FAKE")]
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    modes += [] if proxies is None else [proxies.get_proxy_mode()]  # make_fx(pre_dispatch=True) has modes of its own
    return next((type(mode).__qualname__ for mode in modes if mode is not None), "")


def _lazy(tensor: Any) -> str:
    if tensor.layout is not torch_runtime.strided:
        return f"a dense tensor; found one of layout {tensor.layout}. Pass tensor.to_dense()"
    if tensor.is_quantized:
        return "a tensor of numbers; found a quantised one. Pass tensor.dequantize()"
    if tensor.device.type == "meta":
        return "a tensor with memory; found one on the device meta. Make it on a GPU"
    for name in ("neg", "conj"):
        if getattr(tensor, f"is_{name}")():
            return (
                "a tensor that holds its values; found one whose memory PyTorch reads as negated or conjugated. Pass "
                f"tensor.resolve_{name}()"
            )
    if torch_runtime.is_zero(tensor):
        return "a tensor with memory of its own; found one that PyTorch knows to be zero. Pass tensor.clone()"
    if torch_runtime.is_transformed(tensor):
        return f"a tensor with memory of its own; found one of torch.func's transforms. Use {_OPERATOR}"
    return ""


def _differentiated(tensor: Any) -> str:
    if tensor.requires_grad and torch_runtime.torch.is_grad_enabled():
        return (
            "a tensor without gradient; found one that requires grad. Pass tensor.detach(), call within "
            f"torch.no_grad(), or use {_OPERATOR}, which has a gradient"
        )
    duals = torch_runtime.duals
    if duals._current_level < 0 or torch_runtime.torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return ""  # the operator's own call comes from below autograd
    if duals.unpack_dual(tensor).tangent is None:
        return ""
    return (
        "a tensor without derivative; found one with a forward-mode derivative. Pass tensor.detach(), or use "
        f"{_OPERATOR}, which takes it along"
    )
