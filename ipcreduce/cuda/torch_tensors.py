"""The PyTorch tensors that a call cannot take, with the remedy for each.

The memory of some is not their values. From others, a call would lose the derivative or the trace.
:func:`torch_runtime.plain` takes none of these tensors.
"""

from __future__ import annotations

import sys
from typing import Any

from . import torch_runtime

_AUTOGRAD = "AutogradFunctionality"  # PyTorch's name of all dispatch keys of autograd
_OPERATOR = "the call's operator in torch.ops.ipcreduce, such as all_reduce (import ipcreduce.torch)"


def problem(tensor: Any) -> str:
    """The reason for which a call cannot take a tensor, and the remedy; "" if it can.

    The text follows the argument's name: "is on the device meta, ...".
    """
    if not torch_runtime.is_tensor(tensor):
        return ""
    is_plain = torch_runtime.is_plain_type(type(tensor))
    if not is_plain and torch_runtime.is_wrapper_type(type(tensor)):
        return _wrapped(type(tensor))
    if tracer := _tracer():
        return f"is used in a trace by {tracer}, which would take the result for a constant. Use {_OPERATOR}"
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
    return f"is a {name}, which overrides __torch_dispatch__ and may have no memory of its own. {way}"


def _tracer() -> str:
    """The name of the tracer that is on in this thread; "" if there is none.

    A tracer lists PyTorch's operators, or runs them without data.
    """
    if torch_runtime.is_tracing():
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
        return f"is a tensor of layout {tensor.layout}, and only dense tensors can be reduced. Pass tensor.to_dense()"
    if tensor.is_quantized:
        return "is a quantised tensor. Pass tensor.dequantize()"
    if tensor.device.type == "meta":
        return "is a tensor on the device meta, which has no memory. Make it on a GPU"
    for name, meaning in (("neg", "negated"), ("conj", "conjugated")):
        if getattr(tensor, f"is_{name}")():
            return f"is a tensor whose memory PyTorch reads as {meaning}. Pass tensor.resolve_{name}()"
    if torch_runtime.is_zero(tensor):
        return "is a tensor that PyTorch knows to be zero, without memory of its own. Pass tensor.clone()"
    if torch_runtime.is_transformed(tensor):
        return f"is a tensor of torch.func's transforms, without memory of its own. Use {_OPERATOR}"
    return ""


def _differentiated(tensor: Any) -> str:
    if tensor.requires_grad and torch_runtime.torch.is_grad_enabled():
        return (
            "is a tensor that requires grad, and a call has no gradient. Pass tensor.detach(), call within "
            f"torch.no_grad(), or use {_OPERATOR}, which has a gradient"
        )
    duals = torch_runtime.duals
    if duals._current_level < 0 or torch_runtime.torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return ""  # this call comes from the operator, below autograd
    if duals.unpack_dual(tensor).tangent is None:
        return ""
    return (
        "is a tensor with a forward-mode derivative, which a call would lose. Pass tensor.detach(), or use "
        f"{_OPERATOR}, which takes the derivative along"
    )
