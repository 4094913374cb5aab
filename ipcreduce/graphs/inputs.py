"""A graph's named inputs, and the check of their addresses at replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..texts import shown
from .addresses import AddressCheck

CHECKS = ("first", "always", "never")


@dataclass(frozen=True)
class Inputs:
    """Nests of arrays by name. The paths of a nest's arrays begin with its name."""

    roots: list[tuple[str, Any]]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Return ``value`` if it is an ``Inputs``, else wrap it under the name "inputs"."""
        return value if isinstance(value, Inputs) else cls([("inputs", value)])


class InputCheck:
    """Comparison of a replay's inputs with the recording's. It keeps no array alive.

    :param when: one of :data:`CHECKS`.
    :raises ArgumentError: see :class:`AddressCheck`.
    """

    def __init__(self, when: str, inputs: Inputs) -> None:
        self._always = when == "always"
        self._check = None if when == "never" else AddressCheck(inputs.roots)

    @property
    def due(self) -> bool:
        """True while :meth:`verify` still compares."""
        return self._check is not None

    def verify(self, inputs: Inputs) -> None:
        """Compare before a replay, once or always. :raises AddressChangedError: if an array differs."""
        if self._check is not None:
            self._check.verify(inputs.roots)
            if not self._always:
                self._check = None


def check_word(word: Any) -> None:
    """:raises ArgumentError: if ``word`` is not one of :data:`CHECKS`."""
    if not isinstance(word, str) or word not in CHECKS:
        raise ArgumentError(f"check must be one of {', '.join(CHECKS)}; found {shown(word)}")
