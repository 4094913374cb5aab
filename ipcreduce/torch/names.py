"""The names of communicators. An operator of PyTorch finds its communicator by a name."""

from __future__ import annotations

import weakref
from typing import Any

from .. import process
from ..communicator import Communicator
from ..errors import ArgumentError
from ..originals import RLock
from ..texts import kind_of, shown

DEFAULT = "default"  # the name of the default communicator, which each call looks up

_named: dict[str, weakref.ref[Communicator]] = {}  # a name stays after its communicator is gone, for the message
_lock = RLock()  # re-entrant, for a finaliser or a signal handler that names one too


def register(name: str, comm: Communicator) -> None:
    """Name a communicator for the operators. Keep a reference to it: this module refers to it weakly.

    A communicator may have several names, and the ranks may use different names. An exported program looks up the name
    in the process that runs it. A name can be given again once its communicator is closed or dropped.

    :raises ArgumentError: if an open communicator has the name, or an argument is of the wrong type.
    """
    process.check_not_forked()  # before the lock, which a thread of the parent may have held
    check_is_communicator(comm, "register(name, comm)")
    if not isinstance(name, str) or name == DEFAULT:
        raise ArgumentError(f"{shown(name)} cannot name a communicator. Pass a str other than {DEFAULT!r}")
    with _lock:
        holder = _named[name]() if name in _named else None
        if holder is not None and holder is not comm and process.resources_of(holder) is not None:
            raise ArgumentError(f"{name!r} is the name of {holder!r}. Choose another name, or close that communicator")
        _named[name] = weakref.ref(comm)


def check_is_communicator(comm: Any, call: str) -> None:
    """:raises ArgumentError: if ``comm`` is not a Communicator. ``call`` is what to call instead."""
    if not issubclass(type(comm), Communicator):
        raise ArgumentError(f"comm is {kind_of(comm)}, which is no ipcreduce.Communicator. Call {call}")


def find(name: str) -> Communicator | None:
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
