"""What a graph reads from outside, by name, and when it is looked at whether that is still where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from .addresses import AddressCheck

CHECKS = ("first", "always", "never")


@dataclass(frozen=True)
class Inputs:
    """Nests of arrays, each with the name with which its arrays' paths begin."""

    roots: list[tuple[str, Any]]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """``value`` itself, or with the one name "inputs"."""
        return value if isinstance(value, Inputs) else cls([("inputs", value)])


class InputCheck:
    """Compares the inputs of replays with those of the recording. It holds none of them.

    :param when: one of :data:`CHECKS`.
    :raises ArgumentError: see :class:`AddressCheck`.
    """

    def __init__(self, when: str, inputs: Inputs) -> None:
        self._always = when == "always"
        self._check = None if when == "never" else AddressCheck(inputs.roots)

    @property
    def due(self) -> bool:
        """Whether :meth:`verify` still looks at anything."""
        return self._check is not None

    def verify(self, inputs: Inputs) -> None:
        """Before a replay. :raises AddressChangedError: if an array is elsewhere."""
        if self._check is not None:
            self._check.verify(inputs.roots)
            if not self._always:
                self._check = None


def check_word(word: Any) -> None:
    """:raises ArgumentError: if it is none of :data:`CHECKS`."""
    if word not in CHECKS:
        raise ArgumentError(f"check must be one of {', '.join(CHECKS)}; found {word!r}")
