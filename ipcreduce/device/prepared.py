"""A call that is prepared: planned, compiled and filled in, but for the addresses of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..calls.request import Request
from ..cuda import driver
from ..page.fingerprint import Fingerprint
from ..types import Stream
from .arguments import Setter

_K = TypeVar("_K")
_V = TypeVar("_V")
Start = Callable[[Any, Stream], Any]  # puts work on a stream, for addresses or what a step makes of them


class BoundLaunch:
    """A launch with its addresses: ``launch(argument, stream)``. Without an argument it cannot be made any more."""

    __slots__ = ("__weakref__", "argument", "fingerprint", "launch")

    def __init__(self, fingerprint: Fingerprint, launch: Start, argument: Any) -> None:
        self.fingerprint, self.launch, self.argument = fingerprint, launch, argument


class Step:
    """A part of a call: the launch of one kernel, or calls of NCCL.

    :ivar start: a function that puts the step on a stream, for the addresses of the call.
    """

    __slots__ = ()
    start: Start

    def bound(self, addresses: Any) -> tuple[Start, Any]:
        """The function to call, and its first argument, for a call that is repeated with these addresses."""
        return self.start, addresses


class KernelStep(Step):
    """One launch of a kernel.

    :ivar set: sets the addresses of a call in the launch's arguments.
    :ivar plan: that of the launch, if it exchanges data.
    """

    __slots__ = ("launch", "plan", "set")

    def __init__(self, launch: driver.Launch, set_addresses: Setter, plan: Any = None) -> None:
        self.launch, self.set, self.plan = launch, set_addresses, plan

    def start(self, addresses: Any, stream: Stream) -> None:
        """Launch it."""
        self.set(addresses)
        self.launch.run(stream)


class OwnStep(Step):
    """A step made by a function of the backend. ``bind``: makes :meth:`bound`'s result; None: ``start`` itself."""

    __slots__ = ("_bind", "start")

    def __init__(self, start: Start, bind: Callable[[Any], tuple[Start, Any]] | None = None) -> None:
        self.start, self._bind = start, bind

    def bound(self, addresses: Any) -> tuple[Start, Any]:
        """The function to call, and its first argument, made by ``bind`` if that is given."""
        return super().bound(addresses) if self._bind is None else self._bind(addresses)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a backend knows of a call before its addresses are given.

    :ivar kernels: the names of the kernels, or of the library, that run it.
    :ivar nbytes: of the arrays that are reduced, which say if a launch is short.
    :ivar wire_dtypes: by member, the dtype as which it is reduced, if not the array's own.
    :ivar alignment: of the addresses of arrays of the call's dtype, in bytes; 0 for their itemsize.
    :ivar hands_on: an all-reduce comes first, and leaves its result in memory for what follows.
    :ivar packed: the parts of arrays that are split lie one after the other where the steps read or write them.
    """

    request: Request
    fingerprint: Fingerprint
    kernels: str
    nbytes: int
    steps: tuple[Step, ...]
    wire_dtypes: tuple[np.dtype[Any] | None, ...] = (None,)
    alignment: int = 0
    hands_on: bool = False
    packed: bool = False

    def start(self, addresses: Any, stream: Stream) -> None:
        """Put the call on ``stream``. The form of ``addresses`` depends on the kind of call."""
        for step in self.steps:
            step.start(addresses, stream)

    @property
    def quickest(self) -> Start:
        """:meth:`start`, or the one step's ``start``, which saves a function call."""
        return self.steps[0].start if len(self.steps) == 1 else self.start

    def bind(self, addresses: Any) -> BoundLaunch:
        """Make a launch with fixed addresses, for a call that is repeated."""
        bound = [step.bound(addresses) for step in self.steps]
        if len(bound) == 1:
            return BoundLaunch(self.fingerprint, *bound[0])
        return BoundLaunch(self.fingerprint, _start_all, bound)


def _start_all(bound: list[tuple[Start, Any]], stream: Stream) -> None:
    for start, argument in bound:
        start(argument, stream)


def keep(table: dict[_K, _V], key: _K, value: _V, most: int) -> _V:
    """Put an entry into a table. A full one is emptied first: calls that go on soon fill it again."""
    if len(table) >= most and key not in table:
        table.clear()
    table[key] = value
    return value
