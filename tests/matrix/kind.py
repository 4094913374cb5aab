"""What a kind of calls is. The kinds are in kinds.py and split_kinds.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

Values = dict[str, Any]  # by an argument's name, an array or a list of arrays


def whole(turn: int, rank: int, shape: Any, dtype: Any = np.float32) -> np.ndarray:
    """Small whole numbers of a rank in a turn."""
    return np.random.default_rng((turn, rank)).integers(-4, 5, shape).astype(dtype)


@dataclass(frozen=True)
class Kind:
    """A call that every rank makes. Its fields are what the ranks compare.

    :cvar in_place: the arguments for results that may be another argument, with that one.
    :cvar has_outs: there are arguments for results.
    :cvar variants: the fields of calls that differ from this one, with words by which an error describes them.
    :cvar words: by which an error describes this call.
    :ivar number: of what the ranks do not compare: another number makes the same call with other values.
    """

    name: ClassVar[str]
    in_place: ClassVar[Mapping[str, str]] = {}
    has_outs: ClassVar[bool] = True
    words: ClassVar[str]
    variants: ClassVar[tuple[tuple[dict[str, Any], str], ...]]
    size: int = 1
    number: int = 0

    def inputs(self, turn: int, rank: int) -> Values:
        """The arrays that a rank passes."""
        raise NotImplementedError

    def results(self, turn: int) -> Values:
        """What they must give."""
        raise NotImplementedError

    def results_of(self, turn: int, rank: int) -> Values:
        """What they must give on a rank, if that depends on the rank."""
        return self.results(turn)

    def from_others(self, result: np.ndarray, rank: int) -> np.ndarray:
        """What other ranks' data take part in, of a result on a rank."""
        return result

    def overlap(self, inputs: Values, outs: Values, rank: int) -> None:
        """Make an argument a part of a result, or the other way round, where that is allowed."""

    def call(self, comm: Any, given: Values, stream: Any) -> Values:
        """Make the call, with the arrays for its results if they are among the given ones."""
        raise NotImplementedError

    def wrong(self, given: Values) -> tuple[Values, str]:
        """Arguments that a rank refuses, in place of some of the given ones, and words of the error."""
        raise NotImplementedError

    def of_all(self, turn: int, name: str) -> list[Any]:
        """An input of every rank."""
        return [self.inputs(turn, rank)[name] for rank in range(self.size)]
