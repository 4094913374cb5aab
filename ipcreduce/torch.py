"""All-reduce as operators of PyTorch, for torch.compile, export and autograd. Importing this module imports PyTorch.

    register("tp", comm)
    all_reduce(x, op="sum", communicator="tp")     a new contiguous tensor, which every rank gets
    all_reduce_(x, op="sum", communicator="tp")    in place

They are torch.ops.ipcreduce.all_reduce and torch.ops.ipcreduce.all_reduce_. Tensors, streams and errors are those of
:meth:`Communicator.allreduce`, and ``op`` is one of its names. ``communicator`` is a registered name, because a graph
that is compiled or exported can hold no object; without it they use the default communicator. The derivative of a sum
is the sum of the ranks' derivatives, and that of an average their average, backward and forward. Other ops have none.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import default, process
from .communicator import Communicator
from .dtypes import op_name
from .errors import ArgumentError
from .texts import shown

_PLAIN = torch.Tensor, torch.nn.Parameter
DEFAULT = "default"  # the name of ipcreduce.get_communicator(), which is looked for at each call

_named: dict[str, weakref.ref[Communicator]] = {}  # a name stays when its communicator is gone, for the message
_lock = threading.Lock()


def register(name: str, comm: Communicator) -> None:
    """Name a communicator for the operators. It is held weakly, so keep it as long as they use it.

    A communicator may have several names, and the ranks' names may differ. An exported program looks for the name in
    the process that runs it. A name becomes free when its communicator is closed or dropped.

    :raises ArgumentError: if an open communicator has the name, or an argument is of the wrong type.
    """
    if not isinstance(comm, Communicator):
        raise ArgumentError(
            f"comm must be an ipcreduce.Communicator; found {type(comm).__qualname__}. Call register(name, comm)"
        )
    if not isinstance(name, str) or name == DEFAULT:
        raise ArgumentError(f"name must be a str other than {DEFAULT!r}; found {shown(name)}. Choose another one")
    with _lock:
        holder = _named[name]() if name in _named else None
        if holder is not None and holder is not comm and process.resources_of(holder) is not None:
            raise ArgumentError(f"{name!r} is the name of {holder!r}. Choose another one, or close that communicator")
        _named[name] = weakref.ref(comm)


def _find(name: str) -> Communicator | None:
    """The communicator of this name; None for the default one. :raises ArgumentError: if there is none."""
    if name == DEFAULT:
        return None
    found = _named.get(name)
    comm = None if found is None else found()
    if comm is None:
        state = "no communicator has been given this name" if found is None else "its communicator is gone"
        raise ArgumentError(
            f"communicator must be a name of ipcreduce.torch.register(name, comm); found {name!r}: {state}. Register "
            "one, and keep it as long as it is used"
        )
    return comm


# ---- the operators. By torch.library.custom_op an eager call would cost the host twice as much.
_library: Any = torch.library.Library("ipcreduce", "DEF")
_library.define(f'all_reduce(Tensor x, str op="sum", str communicator="{DEFAULT}") -> Tensor')
_library.define(f'all_reduce_(Tensor(a!) x, str op="sum", str communicator="{DEFAULT}") -> ()')


# PyTorch leaves out arguments that have the schema's defaults.
def _all_reduce(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    return default.allreduce(x.detach(), op, comm=_find(communicator))


def _all_reduce_in_place(x: torch.Tensor, op: Any = "sum", communicator: str = DEFAULT) -> None:
    x = x.detach()
    default.allreduce(x, op, out=x, comm=_find(communicator))
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # a backward that has saved the old values then raises


def _fake(x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT) -> torch.Tensor:
    op_name(op)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_in_place(x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT) -> None:
    op_name(op)


# ---- derivatives
def _is_plain(x: torch.Tensor) -> bool:
    """True if the dispatcher has nothing to do between autograd and the functions above: 2 us less of a call."""
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
    """The derivative of the ranks' result; of a sum and an average the same as the function, in both directions."""
    if op_name(ctx.op) not in ("sum", "avg"):
        raise ArgumentError(
            f"op must be sum or avg for a derivative; found {ctx.op}. Pass x.detach(), or call within torch.no_grad()"
        )
    return all_reduce(derivative, ctx.op, ctx.communicator)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _linear(ctx, gradient), None, None


def _jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
    return _linear(ctx, tangent)


def _batched(
    info: Any, in_dims: tuple[int, None, None], x: torch.Tensor, op: str = "sum", communicator: str = DEFAULT
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """One call on the whole batch."""
    return all_reduce(x.movedim(in_dims[0], 0), op, communicator), 0


# torch.library.register_autograd() would make one for backward alone, and none that torch.func takes.
_Differentiable: Any = type(
    "AllReduce",
    (torch.autograd.Function,),
    {
        "forward": staticmethod(_forward), "setup_context": staticmethod(_save), "backward": staticmethod(_backward),
        "jvp": staticmethod(_jvp),
    },
)  # fmt: skip
_apply: Any = super(torch.autograd.Function, _Differentiable).apply  # Function.apply() itself takes 20 us more


def _is_differentiated(x: torch.Tensor) -> bool:
    """True if autograd may have to know of a call."""
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
    # The dispatcher goes from one of torch.func's transforms to the next by itself: this is autograd for one of them.
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
            "x must be no leaf that requires grad, nor a view of one, as PyTorch changes none in place. Use "
            "all_reduce, or call within torch.no_grad()"
        )
    x.copy_(all_reduce(x, op, communicator))


# For tensors of every device: CUDA's and the host's.
_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
_library.impl("all_reduce_", _all_reduce_in_place, "CompositeExplicitAutograd")
_library.impl("all_reduce", _differentiable, "Autograd")
_library.impl("all_reduce_", _differentiable_in_place, "Autograd")
torch.library.register_fake("ipcreduce::all_reduce", _fake, lib=_library)
torch.library.register_fake("ipcreduce::all_reduce_", _fake_in_place, lib=_library)
if hasattr(torch.library, "register_vmap"):  # without it PyTorch makes a call for each element of the batch
    torch.library.register_vmap("ipcreduce::all_reduce", _batched, lib=_library)
all_reduce: Any = torch.ops.ipcreduce.all_reduce
all_reduce_: Any = torch.ops.ipcreduce.all_reduce_
