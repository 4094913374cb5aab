"""The names and the order of arguments that programs bring from other libraries, and what they are here."""

from __future__ import annotations

from typing import Any, NoReturn

BY_POSITION = (
    "allreduce() takes an array and an op by position. The array for the result is the argument out=: "
    "allreduce(x, op, out=y)"
)
_REDUCE, _GATHER, _SCATTER = "allreduce(x, op, out=y)", "allgather(x)", "reduce_scatter(x, op)"
_BROADCAST, _BARRIER = "broadcast(x, root)", "allreduce(0), which waits for every rank"
_HERE = {  # by the other libraries' names, in small letters and without underscores
    "allreduce": _REDUCE, "iallreduce": _REDUCE, "allreducecoalesced": "allreduce([a, b, c])",
    "allgather": _GATHER, "iallgather": _GATHER, "allgatherv": _GATHER, "allgatherintotensor": _GATHER,
    "reducescatter": _SCATTER, "ireducescatter": _SCATTER, "reducescatterblock": _SCATTER,
    "reducescattertensor": _SCATTER,
    "broadcast": _BROADCAST, "bcast": _BROADCAST, "ibcast": _BROADCAST,
    "barrier": _BARRIER, "ibarrier": _BARRIER,
    "getrank": "rank", "getsize": "size", "getworldsize": "size", "free": "close()", "destroy": "close()",
}  # fmt: skip


def not_in_communicator(comm: Any, name: str) -> NoReturn:
    """Refuse an attribute of a communicator. :raises AttributeError: with what it is called here, if that is known."""
    text = f"{type(comm).__name__!r} object has no attribute {name!r}{_advice(name, 'comm')}"
    raise AttributeError(text, name=name, obj=comm)


def not_in_module(name: str) -> NoReturn:
    """Refuse an attribute of ``ipcreduce``. :raises AttributeError: with what it is called here, if that is known."""
    advice = _advice(name, "ipcreduce.get_communicator()").replace("get_communicator().allreduce", "allreduce")
    raise AttributeError(f"module 'ipcreduce' has no attribute {name!r}{advice}", name=name)


def _advice(name: str, owner: str) -> str:
    here = _HERE.get(name.replace("_", "").lower(), "")
    return f". Here it is {owner}.{here}" if here and here.partition("(")[0] != name else ""
