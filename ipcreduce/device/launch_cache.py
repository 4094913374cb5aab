"""The launch cache: an eager call that is like one before is launched without the checks of the slow path.

``hits/`` looks calls up, a module for each kind, in three ways, from the quickest on; all else is here.

============ =========================================== ===================================================
by           what has to be the same                     is inserted
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
from .prepared import BoundLaunch, Prepared, keep
from .stream_order import StreamOrder

_MAX = 4096  # entries of a table
_MAX_TARGETS = 8  # of the results of one entry: an allocator uses few in turn
MISS = None, None, None
Found = tuple[BoundLaunch | None, Any, Stream | None]  # a launch, the result of the call, and its stream


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
        self.anew = BoundLaunch(prepared.fingerprint, prepared.quickest, None)


class Entry:
    """A call on objects that have come before, as long as all of these live.

    :ivar bound: the launch. ``to_new``: the launches to new results, by their addresses.
    :ivar read: reads the addresses of tensors, which may change; None for CuPy's arrays, of which only the shape may.
    :ivar addresses: what ``read`` has to return. ``source``: the first one.
    :ivar more: what the kind of call keeps to compare the arrays.
    """

    __slots__ = ("addresses", "bound", "form", "library", "more", "read", "refs", "source", "to_new")

    def __init__(self, form: Form, bound: BoundLaunch, source: Any, more: Any) -> None:
        self.form, self.library, self.bound, self.source, self.more = form, form.library, bound, source, more
        self.read: Callable[[Sequence[Any]], list[int] | None] | None = None
        self.addresses: list[int] | None = None
        self.to_new: dict[int, BoundLaunch] = {}
        self.refs: list[Any] = []


class LaunchCache:
    """The calls on one backend that have come before. The communicator's lock is held around every method.

    :param bind: makes a launch with fixed addresses, for a call that is repeated.
    """

    def __init__(self, device: int, order: StreamOrder, bind: Callable[[Prepared, Any], BoundLaunch]) -> None:
        self.device, self._order, self._bind = device, order, bind
        # The tables are never replaced. The kinds share them, as their keys differ in form. A place without a launch
        # has come once.
        self.forms: dict[Any, Form] = {}
        self.places: dict[tuple[Form, Any], BoundLaunch | None] = {}
        self.objects: dict[Any, Entry] = {}
        self.kinds: dict[type, Kind] = {}  # by the type of a call's arguments

    def at(
        self, form: Form, addresses: Any, new: bool, insert: Callable[[Form, BoundLaunch], None] | None = None
    ) -> BoundLaunch | None:
        """The launch at a place that has not come twice. None: only the slow path can make it.

        :param insert: inserts the call by its objects.
        """
        argument = form.layout.settle(addresses, new)
        if argument is None:
            return None
        place = form, addresses
        if place not in self.places:
            keep(self.places, place, None, _MAX)
            form.anew.argument = argument
            return form.anew
        bound = self._bind(form.prepared, argument)
        keep(self.places, place, bound, _MAX)
        if insert is not None:
            insert(form, bound)
        return bound

    def to_new(self, entry: Entry, addresses: Any, target: int) -> BoundLaunch | None:
        """The launch of an entry's call to a new result at address ``target``."""
        bound: BoundLaunch | None = self.places.get((entry.form, addresses)) or self.at(entry.form, addresses, new=True)
        if bound is not None and bound is not entry.form.anew:
            keep(entry.to_new, target, bound, _MAX_TARGETS)
        return bound

    def insert(self, key: Any, entry: Entry, objects: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Insert a call by its objects, until one of them dies.

        :param tensors: those whose addresses are compared, if they are tensors.
        """
        if entry.library is torch_runtime:
            entry.read = torch_lists.reader(tensors, self.device)
            entry.addresses = None if entry.read is None else entry.read(tensors)
            if entry.addresses is None:  # in a trace, say
                return
        evict = partial(_evict, weakref.ref(self), key)
        entry.refs = [weakref.ref(one, evict) for one in objects]
        keep(self.objects, key, entry, _MAX)

    def evict(self, key: Any) -> None:
        """Evict a call of which an object has died or changed. Python may call this at any time, in any thread."""
        self.objects.pop(key, None)

    def insert_form(self, given: Any, result: Any, prepared: Prepared) -> None:
        """Insert the form of a call that was made by the slow path, if calls like it can have a launch."""
        if any(wire_dtype is not None for wire_dtype in prepared.wire_dtypes):
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
    """The library of an array, if it is one of the cache's two; the other arrays have to be of it, too."""
    return cupy_runtime if type(array) is getattr(cupy_runtime.cupy, "ndarray", None) else torch_runtime


def _evict(cache: Callable[[], LaunchCache | None], key: Any, _: Any) -> None:
    found = cache()
    if found is not None:
        found.evict(key)
