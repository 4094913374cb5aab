"""Whether the device arrays that a graph was recorded with still lie where they did.

A replay works on the addresses of its recording: an array made anew since then is not seen, silently. So all arrays in
a nest of containers are found and compared. No code of the containers' types is run: a property may launch work, raise
or make a new array. Nothing recurses, as nests may be deep.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple

from .. import arrays
from ..cuda import array_protocols
from ..cuda.array_protocols import Locate
from ..errors import AddressChangedError, ArgumentError, Location

LIMIT = 10**5  # objects
SHOWN = 20  # differences in a message
_SKIPPED = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType

Roots = Sequence[tuple[str, Any]]
Suffix = Callable[[Any], str]  # what a key adds to a path
Read = Callable[[Any], tuple[Sequence[Any], Sequence[Any]]]  # the keys and values in a container


def collect_addresses(obj: Any) -> dict[str, int]:
    """The address of every device array in a nest of containers, by path, in the nest's order.

    Containers are dicts, lists, tuples, and objects with a ``__dict__`` or ``__slots__``; modules, classes, functions
    and attributes whose names begin with ``_`` are skipped. A path goes on from the name of ``obj``, as in
    ``.layers[14].query_start_loc`` or ``["x"][0]``. An array that several paths lead to is under each of them; a path
    ends where it comes back to a container that it went through.

    :raises ArgumentError: if there are more than 100,000 objects, each counted once for every path to it; if a device
        array does not give its address.
    """
    return {path: place[0] for path, place in _Walk([("", obj)]).locations().items()}


class AddressCheck:
    """Where all device arrays in a recording's arguments lie. It keeps none of them alive.

    :param roots: (name, object) pairs, such as ``("args[0]", x)``. Paths begin with the names, which are distinct.
    :raises ArgumentError: see :func:`collect_addresses`.
    """

    def __init__(self, roots: Roots) -> None:
        self._recorded = _Walk(roots)

    def verify(self, roots: Roots) -> None:
        """Compares a replay's arguments with the recording's.

        :raises AddressChangedError: if an array is missing or new, or has another address, shape, dtype or strides.
        :raises ArgumentError: see :func:`collect_addresses`.
        """
        if self._recorded.holds_for(roots):
            return
        found = _Walk(roots)
        old, new = self._recorded.locations(), found.locations()
        if old != new:
            raise _difference(old, new)
        self._recorded = found  # the same arrays in other containers: compare with those from now on


# ---- reading objects without running their code
class _Part(NamedTuple):
    """The items, or the attributes, of an object."""

    read: Read
    suffix: Suffix


class _Layout(NamedTuple):
    """What objects of a type can be: arrays, if there is ``locate``; containers, if there are ``parts``.

    Those with ``attributes`` of their own can be arrays by these.
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
        parts.append(_Part(_elements(list.__iter__), "[{}]".format))
    elif issubclass(kind, tuple):
        fields = next((namespace["_fields"] for namespace in namespaces if "_fields" in namespace), ())
        parts.append(_Part(_elements(tuple.__iter__, fields), (".{}" if fields else "[{}]").format))
    slots: dict[str, Any] = {}
    for namespace in reversed(namespaces):
        for name, member in namespace.items() if "__slots__" in namespace else ():
            if type(member) is types.MemberDescriptorType and not name.startswith("_"):
                slots[name] = member.__get__
    if slots:
        parts.append(_Part(_slots(slots), ".{}".format))
    attributes = array_protocols.attributes(kind)
    if attributes is not None:
        parts.append(_Part(_attributes(attributes), ".{}".format))
    return _Layout(arrays.locator(kind), tuple(parts), attributes)


def item(key: Any) -> str:
    """What a dict's key, or a position, adds to a path."""
    if type(key) is str:
        return f"[{json.dumps(key, ensure_ascii=False)}]"
    try:
        return f"[{key!r}]"
    except Exception:
        return f"[{object.__repr__(key)}]"


_ITEMS = _Part(lambda container: ([*dict.keys(container)], [*dict.values(container)]), item)


def _elements(iterate: Callable[[Any], Iterator[Any]], fields: tuple[str, ...] = ()) -> Read:
    def read(container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        values = [*iterate(container)]
        return fields if len(fields) == len(values) else range(len(values)), values

    return read


def _slots(slots: dict[str, Callable[[Any], Any]]) -> Read:
    def read(container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        found = {}
        for name, get in slots.items():
            with suppress(AttributeError):  # not set
                found[name] = get(container)
        return [*found], [*found.values()]

    return read


def _attributes(get: Callable[[Any], dict[str, Any]]) -> Read:
    def read(container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        attributes = dict.items(get(container))
        found = {
            name: value
            for name, value in attributes  # those that make it an array are compared too: it may get them later
            if type(name) is str and (name[:1] != "_" or name in array_protocols.PROTOCOLS)
        }
        return [*found], [*found.values()]

    return read


# ---- walking
class _Container(NamedTuple):
    number: int
    container: Any
    parts: tuple[_Part, ...]


class _Step(NamedTuple):
    """What one part of container number ``container`` held, and how to read that again."""

    container: int
    read: Read
    keys: Sequence[Any]
    types: list[type]
    arrays: list[tuple[int, Locate, Location | None]]  # positions; None: an array, but not on a GPU
    containers: list[tuple[int, int]]  # positions and numbers


class _Walk:
    """All paths from the roots to device arrays, and the steps that tell whether others have the same.

    Containers are numbered as they are met, once for every path; number 0 holds the roots.
    """

    def __init__(self, roots: Roots) -> None:
        self._steps: list[_Step] = []
        self._names: list[tuple[int, Suffix, Any]] = [(0, str, "")]  # of a container: the one it is in, suffix, key
        self._arrays: list[tuple[int, Suffix, Any, Location]] = []
        self._above: dict[int, int] = {}  # the containers on the path, by id: the id's number
        self._layouts: dict[int, _Layout] = {}  # by id, as a metaclass may have a __hash__; the steps hold the types
        self._objects = 0
        stack = [self._enter(0, dict(roots), (_Part(_ITEMS.read, str),))]
        while stack:
            inner = next(stack[-1], None)
            if inner is None:
                stack.pop()
            else:
                stack.append(self._enter(*inner))

    def _enter(self, number: int, container: Any, parts: tuple[_Part, ...]) -> Iterator[_Container]:
        """Notes what a container holds; gives the containers in it, each when its turn has come."""
        self._above[id(container)] = number
        inside: list[tuple[Suffix, Any, Location | _Container]] = []
        for read, suffix in parts:
            keys, values = read(container)
            self._objects += len(values)
            if self._objects > LIMIT:
                raise ArgumentError(
                    f"arrays are looked for in more than {LIMIT} objects, of which {len(values)} are in "
                    f"{_short(self._path(number)) or 'the outermost one'}. Pass the arrays themselves, or skip the "
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
                        place = locate(value)
                    except ArgumentError as error:
                        raise ArgumentError(f"{_short(self._path(number) + suffix(key))}: {error}") from error
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
        """Whether the roots have the same containers, types and arrays. False may be due to the order of a dict."""
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
                elif met[number] is not values[position]:  # a way back
                    return False
        return True

    def locations(self) -> dict[str, Location]:
        """Where each array lies, by path."""
        found: dict[str, Location] = {}
        for number, suffix, key, place in self._arrays:
            path = self._path(number) + suffix(key)
            while path in found:  # keys whose texts are the same
                path += "'"
            found[path] = place
        return found

    def _path(self, number: int) -> str:
        names = []
        while number:
            number, suffix, key = self._names[number]
            names.append(suffix(key))
        return "".join(reversed(names))


# ---- differences
def _difference(old: dict[str, Location], new: dict[str, Location]) -> AddressChangedError:
    missing = [path for path in old if path not in new]
    added = [path for path in new if path not in old]
    changed = {path: (old[path], new[path]) for path in old if path in new and old[path] != new[path]}
    lines = [
        *(f"changed {_short(path)}: {_change(*pair)}" for path, pair in changed.items()),
        *(f"missing {_short(path)}: {old[path][0]:#x}" for path in missing),
        *(f"added   {_short(path)}: {new[path][0]:#x}" for path in added),
    ]
    more = [f"and {len(lines) - SHOWN} more, see .changed, .missing and .added"] if len(lines) > SHOWN else []
    message = "\n  ".join([
        "expected the recording's device arrays; found others. Copy into those, array[...] = new, or record again",
        *lines[:SHOWN],
        *more,
    ])  # fmt: skip
    return AddressChangedError(message, missing, added, changed)


def _change(old: Location, new: Location) -> str:
    names = "", "shape ", "dtype ", "strides "
    texts = [(hex(old[0]), hex(new[0])), *((str(was), str(now)) for was, now in zip(old[1:], new[1:], strict=True))]
    return ", ".join(f"{name}{was} -> {now}" for name, (was, now) in zip(names, texts, strict=True) if was != now)


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]} ... {path[-100:]}"
