"""Nests of lists, tuples and dicts, which may be deep and contain themselves. So nothing here is recursive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any


def parts(nest: Any) -> Collection[Any]:
    """The members of a list, a tuple or a dict; none of any other object, also of a subclass of these."""
    return nest.values() if type(nest) is dict else nest if type(nest) in (list, tuple) else ()


def objects(nest: Any) -> Iterator[Any]:
    """Yield each object of a nest once."""
    met, left = set(), [nest]
    while left:
        one = left.pop()
        if id(one) not in met:
            met.add(id(one))
            left += parts(one)
            yield one


def holders(nest: Any, is_wanted: Callable[[Any], bool]) -> set[int]:
    """The ids of a nest's objects that are wanted, and of the containers that hold one, at any depth."""
    above: dict[int, list[Any]] = {}
    found = []
    for one in objects(nest):
        for part in parts(one):
            above.setdefault(id(part), []).append(one)
        if is_wanted(one):
            found.append(one)
    met: set[int] = set()
    while found:
        one = found.pop()
        if id(one) not in met:
            met.add(id(one))
            found += above.get(id(one), ())
    return met


def rebuilt(nest: Any, leaf: Callable[[Any], Any], only: Collection[int] | None = None) -> Any:
    """A copy of a nest with ``leaf(one)`` in place of each object that is not a list, tuple or dict.

    What is one object in the nest is one in the copy. A tuple is made after its members, and a list or dict empty at
    first: only through these can a nest contain itself.

    :param only: the ids of the objects that are copied or replaced; None for all. The others stay themselves.
    """
    made: dict[int, Any] = {}
    shells, left = [], deque([nest])
    while left:
        one = left.pop()
        if id(one) in made:
            continue
        if only is not None and id(one) not in only:
            made[id(one)] = one
        elif type(one) is tuple:
            missing = [part for part in one if id(part) not in made]
            if missing:
                left += one, *missing
            else:
                made[id(one)] = tuple(made[id(part)] for part in one)
        elif type(one) in (list, dict):
            made[id(one)] = type(one)()
            shells.append(one)
            left.extendleft(parts(one))  # after the tuples that wait for this one
        else:
            made[id(one)] = leaf(one)
    for one in shells:
        if type(one) is dict:
            made[id(one)].update((key, made[id(part)]) for key, part in one.items())
        else:
            made[id(one)].extend(made[id(part)] for part in one)
    return made[id(nest)]
