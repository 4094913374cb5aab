"""The arguments of a runner's call, copied into those of the recording.

They may overlap the recorded arguments in any way, as when two arrays change places. So an array that another copy
would overwrite before it is read is first copied elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ..arrays import locations, views
from ..arrays.maps import NUMBERS
from ..arrays.norms import FP8
from ..errors import ArgumentError
from ..types import Stream
from .addresses import OWN, item, short


class _Path(NamedTuple):
    """The path to an object in the arguments. It becomes text only in messages, as that of a deep nest is long."""

    above: _Path | None
    suffix: Callable[[Any], str]  # maps the key to its part of the text
    key: Any

    def __str__(self) -> str:
        parts = []
        at: _Path | None = self
        while at is not None:
            parts.append(at.suffix(at.key))
            at = at.above
        return short("".join(reversed(parts)))


_Pair = tuple[_Path, Any, Any]  # path, object, the recording's object


def copy_arguments(new: Any, recorded: Any, stream: Stream) -> None:
    """Copy the device arrays of a call's arguments into the recording's, which they may overlap.

    :param new: [positional arguments, keyword arguments], as ``recorded``.
    :raises ArgumentError: if the two nests do not correspond.
    """
    pairs: list[_Pair] = []
    for name, source, target in _pairs(new, recorded):
        there, here = views.view(target, stream), views.view(source, stream)
        if here.shape != there.shape or here.dtype != there.dtype:
            raise ArgumentError(
                f"{name} is {here.dtype} {here.shape}, but was {there.dtype} {there.shape} at the recording. Pass an "
                "array of the recorded dtype and shape, or record with this one"
            )
        if here.size:
            pairs.append((name, here, there))
    moved = [(here, there) for _, here, there in pairs if not views.same_elements(here, there)]
    if not moved:
        return
    _check_apart(pairs)
    written = _united(views.extent(there) for _, there in moved)
    sources = [views.contiguous_copy(here, stream) if _meets(here, written) else here for here, _ in moved]
    for source, (_, there) in zip(sources, moved, strict=True):
        views.copy_into(there, source, stream)


def uncopied(arguments: Any) -> Iterator[tuple[str, Any]]:
    """The objects among the arguments, by path, whose arrays no copy reaches: all but arrays and known containers."""
    met: dict[int, Any] = {}
    left = [(_Path(None, str, name), one, one) for name, one in zip(("args", "kwargs"), arguments, strict=True)]
    while left:
        path, one, _ = pair = left.pop()
        if met.setdefault(id(one), pair) is not pair:
            continue
        inside = _inside(*pair)
        if inside is not None:
            left += inside[::-1]
        elif not _is_array(one):
            yield str(path), one


def _is_array(argument: Any) -> bool:
    with suppress(ArgumentError):  # the address check says what is wrong with it
        return locations.locate(argument) is not None
    return False


def _check_apart(pairs: list[_Pair]) -> None:
    """Check that two arguments share memory exactly as at the recording. :raises ArgumentError: if not."""
    open_ones: list[_Pair] = []  # pairs whose arrays begin before the present one
    for pair in sorted(pairs, key=lambda one: views.extent(one[2])[0]):
        name, here, there = pair
        if views.steps(here) != views.steps(there) and views.has_shared_elements(there):
            raise ArgumentError(
                f"{name} has strides {here.strides}, but had {there.strides} at the recording, where elements share "
                "memory. Record with an array whose elements have memory of their own"
            )
        first = views.extent(there)[0]
        open_ones = [one for one in open_ones if views.extent(one[2])[1] > first]
        for other in open_ones:
            if views.share_memory(there, other[2]) and not _alike(pair, other):
                raise ArgumentError(
                    f"{other[0]} and {name} shared memory at the recording, so a replay cannot have a value for each. "
                    "Pass arrays that share it in the same way, or record with arrays of their own"
                )
        open_ones.append(pair)


def _alike(pair: _Pair, other: _Pair) -> bool:
    """Return True if two arguments share memory in the same way as at the recording."""
    (_, here, there), (_, other_here, other_there) = pair, other
    if views.same_elements(here, other_here) and views.same_elements(there, other_there):
        return True
    moved_alike = views.pointer(here) - views.pointer(there) == views.pointer(other_here) - views.pointer(other_there)
    one, two = (views.steps(a) == views.steps(b) for a, b in ((here, there), (other_here, other_there)))
    return moved_alike and one and two


def _united(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges of addresses that overlap. The result is in order."""
    found: list[tuple[int, int]] = []
    for first, past in sorted(ranges):
        if found and first < found[-1][1]:
            found[-1] = found[-1][0], max(past, found[-1][1])
        else:
            found.append((first, past))
    return found


def _meets(array: Any, ranges: list[tuple[int, int]]) -> bool:
    """Return True if an array overlaps one of these ranges."""
    first, past = views.extent(array)
    index = bisect_left(ranges, (past,)) - 1  # the last one that begins before its end
    return index >= 0 and ranges[index][1] > first


def _pairs(new: Any, recorded: Any) -> Iterator[_Pair]:
    """Yield (path, array, recorded array) for each device array, once, in the order of the arguments."""
    met: dict[tuple[int, int], _Pair] = {}  # keeps the objects, whose ids others would get
    roots = zip(("args", "kwargs"), new, recorded, strict=True)
    left = [(_Path(None, str, name), one, other) for name, one, other in roots][::-1]
    while left:
        pair = path, new, recorded = left.pop()
        if met.setdefault((id(new), id(recorded)), pair) is not pair:
            continue
        inside = _inside(*pair)
        if inside is not None:
            left += inside[::-1]
        elif locations.locate(recorded) is not None:
            if locations.locate(new) is None:
                kind = type(new).__qualname__
                raise ArgumentError(f"{path} was a device array at the recording, and is {kind} now")
            yield pair
        elif locations.locate(new) is not None:
            kind = type(recorded).__qualname__
            raise ArgumentError(f"{path} is a device array now, and was {kind} at the recording")


def _inside(path: _Path, new: Any, recorded: Any) -> list[_Pair] | None:
    """The members of a container of the recording, each with the one in its place; None if it is not a container."""
    if type(recorded) in (list, tuple, dict):
        same = type(new) is type(recorded) and len(new) == len(recorded)
        if not same or (type(new) is dict and new.keys() != recorded.keys()):
            raise ArgumentError(f"{path} must have {len(recorded)} entries, as at the recording")
        keys = recorded if type(recorded) is dict else range(len(recorded))
        return [(_Path(path, item, key), new[key], recorded[key]) for key in keys]
    own = [part for part in OWN if isinstance(recorded, part[0])]
    if own and (type(new) is not type(recorded) or _form(new) != _form(recorded)):
        raise ArgumentError(
            f"{path} differs from the {type(recorded).__qualname__} of the recording in more than its arrays. Pass "
            "one that differs in its arrays alone, or record with this one"
        )
    return [(_Path(path, ".{}".format, name), read(new), read(recorded)) for _, name, read in own] or None


def _form(argument: Any) -> tuple[Any, ...]:
    """All that a recording has of an argument of our own classes, but for its arrays."""
    if isinstance(argument, FP8):
        return argument.per, argument.column_major
    numbers = [(name, type(one), one) for name, one in argument.operands.items() if isinstance(one, NUMBERS)]
    return argument.expression, *numbers
