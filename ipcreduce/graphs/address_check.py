"""The check of addresses at replay: the device arrays of its arguments, compared with the recording's.

A replay uses the addresses of its recording, and cannot see an array that was allocated since then.
"""

from __future__ import annotations

from typing import Any

from ..errors import AddressChangedError, Location
from .addresses import Walk, short

CHECKS = ("first", "always", "never")
SHOWN = 20  # the most differences in a message


class Inputs(list[tuple[str, Any]]):
    """Nests of arrays by name. The names are distinct, and the paths of a nest's arrays begin with its name."""


def named(inputs: Any) -> Inputs:
    """Return ``inputs`` if it is an ``Inputs``, else wrap it under the name "inputs"."""
    return inputs if isinstance(inputs, Inputs) else Inputs([("inputs", inputs)])


class AddressCheck:
    """The locations of all device arrays in a recording's inputs, to compare a replay's with. It keeps no array alive.

    :param inputs: as :class:`Inputs`, such as ``[("args[0]", x)]``.
    :param when: one of :data:`CHECKS`.
    :raises ArgumentError: see :func:`collect_addresses`.
    """

    def __init__(self, inputs: list[tuple[str, Any]], when: str = "always") -> None:
        self._always = when == "always"
        self._recorded = None if when == "never" else Walk(inputs)

    @property
    def due(self) -> bool:
        """True while :meth:`verify` still compares."""
        return self._recorded is not None

    def verify(self, inputs: list[tuple[str, Any]]) -> None:
        """Compare the arrays of a replay with the recording's: in the first replay, or in every one.

        :raises AddressChangedError: if an array is missing or new, or has another address, shape, dtype or strides.
        :raises ArgumentError: see :func:`collect_addresses`.
        """
        recorded = self._recorded
        if recorded is not None and not recorded.holds_for(inputs):
            found = Walk(inputs)
            old, new = recorded.locations(), found.locations()
            if old != new:
                raise _difference(old, new)
            self._recorded = found  # same arrays in other containers: the next comparison with these is fast
        if not self._always:
            self._recorded = None


def _difference(old: dict[str, Location], new: dict[str, Location]) -> AddressChangedError:
    missing = [path for path in old if path not in new]
    added = [path for path in new if path not in old]
    changed = {path: (old[path], new[path]) for path in old if path in new and old[path] != new[path]}
    lines = [
        *(f"changed {short(path)}: {_change(*pair)}" for path, pair in changed.items()),
        *(f"missing {short(path)}: {old[path][0]:#x}" for path in missing),
        *(f"added   {short(path)}: {new[path][0]:#x}" for path in added),
    ]
    more = [f"and {len(lines) - SHOWN} more, see .changed, .missing and .added"] if len(lines) > SHOWN else []
    message = "\n  ".join([
        "a replay uses the device arrays of its recording, and these are not the same. Copy new values into the "
        "recorded arrays (array[...] = new), or record again",
        *lines[:SHOWN],
        *more,
    ])  # fmt: skip
    return AddressChangedError(message, missing, added, changed)


def _change(old: Location, new: Location) -> str:
    names = "", "shape ", "dtype ", "strides "
    texts = [(hex(old[0]), hex(new[0])), *((str(was), str(now)) for was, now in zip(old[1:], new[1:], strict=True))]
    return ", ".join(f"{name}{was} -> {now}" for name, (was, now) in zip(names, texts, strict=True) if was != now)
