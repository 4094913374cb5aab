"""All-reduce in PyTorch: operators for torch.compile, export and autograd, and a hook for DistributedDataParallel.

Importing this module imports PyTorch.

    register("tp", comm)
    all_reduce(x, op="sum", communicator="tp")       returns a new contiguous tensor
    all_reduce_(x, op="sum", communicator="tp")      works in place
    model.register_comm_hook(None, ddp_hook(comm))   averages the gradients of a model

The operators are torch.ops.ipcreduce.all_reduce and torch.ops.ipcreduce.all_reduce_. Tensors, streams and errors are
those of :meth:`Communicator.allreduce`, and ``op`` is one of its names. ``communicator`` is a name, because a compiled
or exported graph cannot hold an object. Without it, the operators use the default communicator. The derivative of a sum
is the sum of the ranks' derivatives, and the derivative of an average is their average, backward and forward. Other ops
have no derivative.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import default, process
from .buckets import Buckets
from .communicator import Communicator
from .dtypes import op_name
from .errors import ArgumentError
from .texts import shown

_PLAIN = torch.Tensor, torch.nn.Parameter
DEFAULT = "default"  # the name of the default communicator, which each call looks up

_named: dict[str, weakref.ref[Communicator]] = {}  # a name stays after its communicator is gone, for the message
_lock = threading.Lock()


def register(name: str, comm: Communicator) -> None:
    """Name a communicator for the operators. Keep a reference to it: this module refers to it weakly.

    A communicator may have several names, and the ranks may use different names. An exported program looks up the name
    in the process that runs it. A name can be given again once its communicator is closed or dropped.

    :raises ArgumentError: if an open communicator has the name, or an argument is of the wrong type.
    """
    _check_is_communicator(comm, "register(name, comm)")
    if not isinstance(name, str) or name == DEFAULT:
        raise ArgumentError(f"{shown(name)} cannot name a communicator. Pass a str other than {DEFAULT!r}")
    with _lock:
        holder = _named[name]() if name in _named else None
        if holder is not None and holder is not comm and process.resources_of(holder) is not None:
            raise ArgumentError(f"{name!r} is the name of {holder!r}. Choose another name, or close that communicator")
        _named[name] = weakref.ref(comm)


def _check_is_communicator(comm: Any, call: str) -> None:
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"comm is a {type(comm).__qualname__}, which is no ipcreduce.Communicator. Call {call}")


def ddp_hook(comm: Communicator) -> Callable[[Any, Any], Any]:
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

    :raises ArgumentError: if ``comm`` is no Communicator.
    """
    _check_is_communicator(comm, "ddp_hook(comm)")
    buckets = Buckets(comm, torch)

    def hook(state: Any, bucket: Any) -> Any:
        return buckets.average(state, bucket)

    hook.__annotations__.clear()  # PyTorch checks them, and takes none or its own classes, not their names
    hook.__qualname__ = "ipcreduce.torch.ddp_hook"  # for PyTorch's log
    return hook


def _find(name: str) -> Communicator | None:
    """The communicator of this name; None for the default communicator. :raises ArgumentError: if there is none."""
    if name == DEFAULT:
        return None
    found = _named.get(name)
    comm = None if found is None else found()
    if comm is None:
        state = "no communicator has been given this name" if found is None else "its communicator is gone"
        raise ArgumentError(
            f"there is no communicator {name!r}: {state}. Call ipcreduce.torch.register(name, comm), and keep comm as "
            "long as the operators use it"
        )
    return comm


# ---- the operators. With torch.library.custom_op an eager call would take the host twice as long.
_library: Any = torch.library.Library("ipcreduce", "DEF")
_library.define(f'all_reduce(Tensor x, str op="sum", str communicator="{DEFAULT}") -> Tensor')
_library.define(f'all_reduce_(Tensor(a!) x, str op="sum", str communicator="{DEFAULT}") -> ()')


# The functions need the schema's defaults: PyTorch does not pass arguments that equal them.
def _all_reduce(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    return default.allreduce(x.detach(), op, comm=_find(communicator))


def _all_reduce_in_place(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> None:
    x = x.detach()
    default.allreduce(x, op, out=x, comm=_find(communicator))
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # a backward pass that needs the old values then raises


def _fake(x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    op_name(op)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_in_place(x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT) -> None:
    op_name(op)


# ---- derivatives
def _is_plain(x: torch.Tensor) -> bool:
    """True if a call may skip PyTorch's dispatcher below autograd, which saves 2 us."""
    return bool(
        type(x) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not (x.is_meta or x.is_conj() or x.is_neg() or x._is_zerotensor())
    )


def _forward(x: torch.Tensor, op: str, communicator: str) -> torch.Tensor:
    if torch._C._are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return all_reduce(x, op, communicator)  # with derivatives, for the outer transforms
    if _is_plain(x):
        return _all_reduce(x, op, communicator)
    with torch._C._AutoDispatchBelowAutograd():
        return all_reduce(x, op, communicator)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.op, ctx.communicator = inputs


def _linear(ctx: Any, derivative: torch.Tensor) -> torch.Tensor:
    """The derivative of the result. For a sum and an average it is the same function, backward and forward."""
    if op_name(ctx.op) not in ("sum", "avg"):
        raise ArgumentError(
            f"op {ctx.op} has no derivative: only sum and avg have one. Pass x.detach(), or call within torch.no_grad()"
        )
    return all_reduce(derivative, ctx.op, ctx.communicator)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _linear(ctx, gradient), None, None


def _jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
    return _linear(ctx, tangent)


def _batched(
    info: Any, in_dims: tuple[int, None, None], x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Reduce the whole batch in one call."""
    return all_reduce(x.movedim(in_dims[0], 0), op, communicator), 0


# torch.library.register_autograd() would give a backward derivative only, and nothing that torch.func can use.
_Differentiable: Any = type(
    "AllReduce",
    (torch.autograd.Function,),
    {
        "forward": staticmethod(_forward), "setup_context": staticmethod(_save), "backward": staticmethod(_backward),
        "jvp": staticmethod(_jvp),
    },
)  # fmt: skip
_apply: Any = super(torch.autograd.Function, _Differentiable).apply  # Function.apply() would take 20 us more


def _is_differentiated(x: torch.Tensor) -> bool:
    """True if autograd may need to record a call."""
    return bool(
        (x.requires_grad and torch.is_grad_enabled())
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def _differentiable(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    if not _is_differentiated(x):
        return _forward(x, op, communicator)
    if not torch._C._are_functorch_transforms_active():
        return _apply(x, op, communicator)
    # The dispatcher calls this once for each transform of torch.func. This call is autograd for one of them.
    with enable_single_level_autograd_function():
        return _apply(x, op, communicator)


def _differentiable_in_place(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> None:
    if not _is_differentiated(x):
        if _is_plain(x):
            return _all_reduce_in_place(x, op, communicator)
        with torch._C._AutoDispatchBelowAutograd():
            return all_reduce_(x, op, communicator)
    base = x._base if x._is_view() else x
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        raise ArgumentError(
            "x is a leaf that requires grad, or a view of one, which PyTorch does not change in place. Use all_reduce, "
            "or call within torch.no_grad()"
        )
    x.copy_(all_reduce(x, op, communicator))


# These serve tensors on GPUs and on the host.
_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
_library.impl("all_reduce_", _all_reduce_in_place, "CompositeExplicitAutograd")
_library.impl("all_reduce", _differentiable, "Autograd")
_library.impl("all_reduce_", _differentiable_in_place, "Autograd")
torch.library.register_fake("ipcreduce::all_reduce", _fake, lib=_library)
torch.library.register_fake("ipcreduce::all_reduce_", _fake_in_place, lib=_library)
if hasattr(torch.library, "register_vmap"):  # otherwise PyTorch makes one call for each element of the batch
    torch.library.register_vmap("ipcreduce::all_reduce", _batched, lib=_library)
all_reduce: Any = torch.ops.ipcreduce.all_reduce
all_reduce_: Any = torch.ops.ipcreduce.all_reduce_
