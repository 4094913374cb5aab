"""The memory of eager calls: a call that is like one before is launched without the checks of the slow path.

Calls are known in three ways, from the quickest on. ``hits/`` looks them up, a module for each kind; all else is here.

============ =========================================== ===================================================
by           what has to be the same                     comes into being
============ =========================================== ===================================================
its objects  the arrays themselves, while they live      when a call comes to a place for the second time
its place    the addresses of the arrays                 the first time as a mark, the second as a launch
its form     all but addresses and numbers: shapes, say  when a call was made by the slow path
============ =========================================== ===================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..cuda import cupy_runtime, torch_lists, torch_runtime
from ..types import Stream
from .prepared import Prepared, Ready, keep
from .stream_order import StreamOrder

_MAX = 4096  # entries of a table
_MAX_TARGETS = 8  # of the results of one known call: an allocator uses few in turn
NOT_READY = None, None, None
Found = tuple[Ready | None, Any, Stream | None]  # a launch, the result of the call, and its stream


class Limited(NamedTuple):
    """The op of calls with a limit of blocks, in the keys of tables. No caller passes it: its type is private."""

    op: str
    sms: int


class Layout(Protocol):
    """The arrangement of the arrays of a form's calls, by which their addresses become arguments."""

    def settle(self, addresses: Any, new: bool) -> Any:
        """The addresses as :meth:`Prepared.start` takes them; None if kernels cannot take arrays there as they are.

        :param new: the results were made for this call.
        """


class Kind(Protocol):
    """A kind of calls."""

    def form_of(self, given: Any, result: Any, prepared: Prepared) -> tuple[Any, Form] | None:
        """A call's form and its key, after it was made by the slow path; None if it has no form."""


class Form:
    """All calls that differ only in addresses and numbers.

    :ivar library: cupy_runtime or torch_runtime, of which all arrays are.
    :ivar anew: the call at a place that comes for the first time: one object, whose argument is set for each call.
    """

    __slots__ = ("anew", "layout", "library", "prepared")

    def __init__(self, prepared: Prepared, library: Any, layout: Any) -> None:
        self.prepared, self.library, self.layout = prepared, library, layout
        self.anew = Ready(prepared.what, prepared.quickest, None)


class Known:
    """A call on objects that have come before, as long as all of these live.

    :ivar ready: the launch. ``to_new``: the launches to new results, by their addresses.
    :ivar read: reads the addresses of tensors, which may change; None for CuPy's arrays, of which only the shape may.
    :ivar addresses: what ``read`` has to return. ``source``: the first one.
    :ivar more: what the kind of call keeps to compare the arrays.
    """

    __slots__ = ("addresses", "form", "library", "more", "read", "ready", "refs", "source", "to_new")

    def __init__(self, form: Form, ready: Ready, source: Any, more: Any) -> None:
        self.form, self.library, self.ready, self.source, self.more = form, form.library, ready, source, more
        self.read: Callable[[Sequence[Any]], list[int] | None] | None = None
        self.addresses: list[int] | None = None
        self.to_new: dict[int, Ready] = {}
        self.refs: list[Any] = []


class LaunchCache:
    """The calls on one backend that have come before. The communicator's lock is held around every method.

    :param make_ready: makes the launch for addresses that come again.
    """

    def __init__(self, device: int, order: StreamOrder, make_ready: Callable[[Prepared, Any], Ready]) -> None:
        self.device, self._order, self._make_ready = device, order, make_ready
        # The tables are never replaced. The kinds share them, as their keys differ in form. A place without a launch
        # has come once.
        self.forms: dict[Any, Form] = {}
        self.places: dict[tuple[Form, Any], Ready | None] = {}
        self.objects: dict[Any, Known] = {}
        self.kinds: dict[type, Kind] = {}  # by the type of a call's arguments

    def at(
        self, form: Form, addresses: Any, new: bool, know: Callable[[Form, Ready], None] | None = None
    ) -> Ready | None:
        """The launch at a place that has not come twice. None: only the slow path can make it.

        :param know: makes the call known by its objects.
        """
        argument = form.layout.settle(addresses, new)
        if argument is None:
            return None
        place = form, addresses
        if place not in self.places:
            keep(self.places, place, None, _MAX)
            form.anew.argument = argument
            return form.anew
        ready = self._make_ready(form.prepared, argument)
        keep(self.places, place, ready, _MAX)
        if know is not None:
            know(form, ready)
        return ready

    def to_new(self, known: Known, addresses: Any, target: int) -> Ready | None:
        """The launch of a known call to a new result at address ``target``."""
        ready: Ready | None = self.places.get((known.form, addresses)) or self.at(known.form, addresses, new=True)
        if ready is not None and ready is not known.form.anew:
            keep(known.to_new, target, ready, _MAX_TARGETS)
        return ready

    def insert(self, key: Any, known: Known, objects: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Know a call by its objects, until one of them dies.

        :param tensors: those whose addresses are compared, if they are tensors.
        """
        if known.library is torch_runtime:
            known.read = torch_lists.reader(tensors, self.device)
            known.addresses = None if known.read is None else known.read(tensors)
            if known.addresses is None:  # in a trace, say
                return
        forget = partial(_forget, weakref.ref(self), key)
        known.refs = [weakref.ref(one, forget) for one in objects]
        keep(self.objects, key, known, _MAX)

    def evict(self, key: Any) -> None:
        """Forget a call of which an object has died or changed. Python may call this at any time, in any thread."""
        self.objects.pop(key, None)

    def learn(self, given: Any, result: Any, prepared: Prepared) -> None:
        """Remember the form of a call that was made by the slow path, if calls like it can be ready."""
        if any(through is not None for through in prepared.through):
            return
        found = self.kinds[type(given)].form_of(given, result, prepared)
        if found is not None:
            key, form = found
            if key not in self.forms:
                keep(self.forms, key, form, _MAX)

    # ---- streams, and memory for new results
    def current(self, library: Any, stream: Any, only_current: bool) -> Stream | None:
        """The stream of a call. None if it is not the current one, although only that one will do."""
        current: Stream = library.stream_handle(self.device)
        if stream is None:
            return current
        return given_stream(stream, current, only_current or library is torch_runtime)

    def can_allocate(self, current: Stream) -> bool:
        """True if new results can be made: not in a capture, say, into which allocations go their own way."""
        return current < 2 or self._order.quick(current) is not None


def given_stream(stream: Any, current: Stream, only_current: bool) -> Stream | None:
    """The handle of the stream of a call. None if it is another one than the current one, on which memory is made."""
    given = cupy_runtime.stream_of(stream)[0]
    return None if given != current and only_current else given


def library_of(array: Any) -> Any:
    """The library of an array, if it is one of the two that are known; the other arrays have to be of it, too."""
    return cupy_runtime if type(array) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime


def _forget(cache: Callable[[], LaunchCache | None], key: Any, _: Any) -> None:
    found = cache()
    if found is not None:
        found.evict(key)
