"""The walk through a nest of containers to the device arrays in it.

No code of the containers' types is run but our own, since a property may launch work, raise, or make a new array. The
walk is iterative, since nests may be deep.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from ..arrays import locations
from ..arrays.maps import Map
from ..arrays.norms import FP8
from ..cuda import array_protocols
from ..cuda.array_protocols import Locate
from ..errors import ArgumentError, Location

LIMIT = 10**5  # the most objects that a walk visits
_SKIPPED = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType

Roots = Sequence[tuple[str, Any]]
Suffix = Callable[[Any], str]  # maps a key to its part of a path
_Content = tuple[Sequence[Any], Sequence[Any]]  # a container's keys and values
Read = Callable[[Any], _Content]  # maps a container to them


def collect_addresses(obj: Any) -> dict[str, int]:
    """Find every device array in a nest of containers. Returns its address by path, in the nest's order.

    Containers are dicts, lists, tuples, and objects with a ``__dict__`` or ``__slots__``; of :class:`ipcreduce.FP8` the
    ``scale``, and of :class:`ipcreduce.Map` the ``operands``. Modules, classes, functions and attributes whose names
    begin with ``_`` are skipped. A path continues the name of ``obj``, as in ``.layers[14].query_start_loc`` or
    ``["x"][0]``. An array is listed under each path that leads to it. A path ends where it returns to a container that
    it passed through.

    :raises ArgumentError: if there are more than 100,000 objects, each counted once for every path to it; or if a
        device array does not give its address, or has no memory of its own.
    """
    return {path: place[0] for path, place in Walk([("", obj)]).locations().items()}


# ---- reading objects without running their code
class _Part(NamedTuple):
    """One aspect of an object as a container: its items, slots or attributes."""

    read: Read
    suffix: Suffix


class _Layout(NamedTuple):
    """The handling of a type: its objects may be arrays (``locate``) and containers (``parts``).

    An object with ``attributes`` of its own may also be an array through these.
    """

    locate: Locate | None
    parts: tuple[_Part, ...]
    attributes: Callable[[Any], dict[str, Any]] | None = None


def _layout(kind: type) -> _Layout:
    if issubclass(kind, _SKIPPED):
        return _Layout(None, ())
    namespaces = array_protocols.namespaces(kind)
    parts = []
    if issubclass(kind, dict):
        parts.append(_ITEMS)
    elif issubclass(kind, list):
        parts.append(_Part(partial(_elements, list.__iter__, ()), "[{}]".format))
    elif issubclass(kind, tuple):
        fields = next((namespace["_fields"] for namespace in namespaces if "_fields" in namespace), ())
        parts.append(_Part(partial(_elements, tuple.__iter__, fields), (".{}" if fields else "[{}]").format))
    slots: dict[str, Any] = {name: get for own, name, get in OWN if issubclass(kind, own)}
    for namespace in reversed(namespaces):
        for name, member in namespace.items() if "__slots__" in namespace else ():
            if type(member) is types.MemberDescriptorType and not name.startswith("_"):
                slots[name] = member.__get__
    if slots:
        parts.append(_Part(partial(_slots, slots), ".{}".format))
    attributes = array_protocols.attributes(kind)
    if attributes is not None:
        parts.append(_Part(partial(_attributes, attributes), ".{}".format))
    return _Layout(locations.locator(kind), tuple(parts), attributes)


# Our own classes of arguments, with the name of what holds their arrays, and how it is read, also of a subclass.
OWN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (FP8, "scale", lambda one: FP8.scale.__get__(one)),
    (Map, "operands", lambda one: dict(Map.operands.__get__(one))),
)


def item(key: Any) -> str:
    """The part of a path for a dict's key or a position."""
    if type(key) is str:
        return f"[{json.dumps(key, ensure_ascii=False)}]"
    try:
        return f"[{key!r}]"
    except Exception:
        return f"[{object.__repr__(key)}]"


_ITEMS = _Part(lambda container: ([*dict.keys(container)], [*dict.values(container)]), item)


def _elements(iterate: Callable[[Any], Iterator[Any]], fields: tuple[str, ...], container: Any) -> _Content:
    values = [*iterate(container)]
    return fields if len(fields) == len(values) else range(len(values)), values


def _slots(slots: dict[str, Callable[[Any], Any]], container: Any) -> _Content:
    found = {}
    for name, get in slots.items():
        with suppress(AttributeError):  # an unset slot
            found[name] = get(container)
    return [*found], [*found.values()]


def _attributes(get: Callable[[Any], dict[str, Any]], container: Any) -> _Content:
    attributes = dict.items(get(container))
    found = {
        name: value
        for name, value in attributes  # protocols are kept: an object that gains one later has become an array
        if type(name) is str and (name[:1] != "_" or name in array_protocols.PROTOCOLS)
    }
    return [*found], [*found.values()]


# ---- walking
class _Container(NamedTuple):
    number: int
    container: Any
    parts: tuple[_Part, ...]


class _Step(NamedTuple):
    """The recorded content of one part of container number ``container``, and the function that reads it again."""

    container: int
    read: Read
    keys: Sequence[Any]
    types: list[type]
    arrays: list[tuple[int, Locate, Location | None]]  # by position; None for an array that is not on a GPU
    containers: list[tuple[int, int]]  # positions and container numbers


class Walk:
    """All paths from the roots to device arrays, and the steps that compare other roots with them.

    Containers are numbered in the order in which they are met, once for every path. Number 0 holds the roots.
    """

    def __init__(self, roots: Roots) -> None:
        self._steps: list[_Step] = []
        self._names: list[tuple[int, Suffix, Any]] = [(0, str, "")]  # by container: its parent, suffix, key
        self._arrays: list[tuple[int, Suffix, Any, Location]] = []
        self._above: dict[int, int] = {}  # containers on the present path: id to number
        self._layouts: dict[int, _Layout] = {}  # by type id: a metaclass may have a __hash__. Steps keep types alive
        self._objects = 0
        stack = [self._enter(0, dict(roots), (_Part(_ITEMS.read, str),))]
        while stack:
            inner = next(stack[-1], None)
            if inner is None:
                stack.pop()
            else:
                stack.append(self._enter(*inner))

    def _enter(self, number: int, container: Any, parts: tuple[_Part, ...]) -> Iterator[_Container]:
        """Note a container's content, and yield the containers in it, interleaved with its arrays in order."""
        self._above[id(container)] = number
        inside: list[tuple[Suffix, Any, Location | _Container]] = []
        for read, suffix in parts:
            keys, values = read(container)
            self._objects += len(values)
            if self._objects > LIMIT:
                raise ArgumentError(
                    f"the search for arrays met more than {LIMIT} objects, {len(values)} of them in "
                    f"{short(self._path(number)) or 'the outermost one'}. Pass the arrays themselves, or skip the "
                    'check: check="never"'
                )
            step = _Step(number, read, keys, [*map(type, values)], [], [])
            self._steps.append(step)
            for position, (key, value) in enumerate(zip(keys, values, strict=True)):
                layout = self._layout(type(value))
                locate = layout.locate
                if locate is None and layout.attributes is not None:
                    locate = array_protocols.carried(type(value), layout.attributes(value))
                if locate is not None:
                    try:
                        place = locations.checked(locate(value), type(value))
                    except ArgumentError as error:
                        raise ArgumentError(f"{short(self._path(number) + suffix(key))}: {error}") from error
                    step.arrays.append((position, locate, place))
                    if place is not None:
                        inside.append((suffix, key, place))
                        continue
                if not layout.parts:
                    continue
                known = self._above.get(id(value))
                if known is None:
                    known = len(self._names)
                    self._names.append((number, suffix, key))
                    inside.append((suffix, key, _Container(known, value, layout.parts)))
                step.containers.append((position, known))
        for suffix, key, what in inside:
            if isinstance(what, _Container):
                yield what
            else:
                self._arrays.append((number, suffix, key, what))
        del self._above[id(container)]

    def _layout(self, kind: type) -> _Layout:
        if id(kind) not in self._layouts:
            self._layouts[id(kind)] = _layout(kind)
        return self._layouts[id(kind)]

    def holds_for(self, roots: Roots) -> bool:
        """Return True if ``roots`` have the same containers, types and arrays. A dict's order may make it False."""
        met: list[Any] = [dict(roots)]
        for container, read, keys, kinds, located, containers in self._steps:
            found, values = read(met[container])
            if len(values) != len(kinds) or found != keys or not all(map(is_, map(type, values), kinds)):
                return False
            for position, locate, place in located:
                if locate(values[position]) != place:
                    return False
            for position, number in containers:
                if number == len(met):
                    met.append(values[position])
                elif met[number] is not values[position]:  # a cycle must close at the same container
                    return False
        return True

    def locations(self) -> dict[str, Location]:
        """The location of each array, by path."""
        found: dict[str, Location] = {}
        for number, suffix, key, place in self._arrays:
            path = self._path(number) + suffix(key)
            while path in found:  # distinct keys with the same text
                path += "'"
            found[path] = place
        return found

    def _path(self, number: int) -> str:
        names = []
        while number:
            number, suffix, key = self._names[number]
            names.append(suffix(key))
        return "".join(reversed(names))


def short(path: str) -> str:
    """A path as a message shows it: of a long one, its two ends."""
    return path if len(path) <= 200 else f"{path[:100]} ... {path[-100:]}"
