"""A random call of a kind of tests/shared/cases.py: its arrays, where they lie, and how it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = list[np.ndarray]  # of all inputs of a call, on one rank


@dataclass(frozen=True)
class Array:
    """One array of a call, somewhere in a buffer."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, dtype: np.dtype, shape: tuple[int, ...], step: int = 1, backwards: bool = False) -> Array:
        """With so many elements from one to the next; ``backwards``: the last row lies first."""
        strides, stride = [], step * dtype.itemsize
        for length in reversed(shape):
            strides.insert(0, stride)
            stride *= max(1, length)
        return cls(dtype, shape, (-strides[0], *strides[1:]) if backwards else tuple(strides))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def first(self) -> int:
        """Bytes from the lowest element to that of index 0."""
        return sum(-stride * (n - 1) for n, stride in zip(self.shape, self.strides, strict=True) if stride < 0 < n)

    @property
    def span(self) -> int:
        """Bytes from the lowest element to the end of the highest one."""
        reach = sum(abs(stride) * (n - 1) for n, stride in zip(self.shape, self.strides, strict=True))
        return reach + self.dtype.itemsize if self.size else 0

    def within(self, raw: np.ndarray, at: int) -> np.ndarray:
        """It, in bytes on the host in which its lowest element is at ``at``."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, raw.data, at + self.first, self.strides)


@dataclass(frozen=True)
class Case:
    """One call.

    :ivar what: the op; of a norm its shape.
    :ivar outputs: what it writes; they need not lie in the inputs' dtype or shape.
    :ivar over: for each output the input in whose place it lies, or None.
    :ivar shifted: the output lies one element behind the place of the input, which it overlaps.
    :ivar new: no output is given, and the call makes its own.
    :ivar turns: calls on the same arrays, of other values.
    :ivar late: a rank that comes late, or -1.
    :ivar alignment: of the places of all arrays, in bytes, if it is more than that of their dtype.
    :ivar more: what else the kind needs: the type of a list; the factor of an expression, and whether its operand of
        the array's shape is the output itself.
    """

    kind: str
    what: Any
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    over: tuple[int | None, ...]
    new: bool = False
    shifted: bool = False
    special: bool = False
    turns: int = 1
    late: int = -1
    alignment: int = 1
    more: Any = None

    def __str__(self) -> str:
        arrays = ", ".join(f"{one.dtype.name} {one.shape} {one.strides}" for one in self.inputs[:8])
        how = "new" if self.new else "shifted" if self.shifted else f"outputs in the places {self.over[:8]}"
        return f"{self.kind} {self.what}, {self.more}, {how}, {self.turns} turns, {len(self.inputs)} inputs: {arrays}"


@dataclass(frozen=True)
class Limits:
    """Bytes of a call's arrays together, members of a list, rows of a norm, and how many expressions of all."""

    largest: int = 1 << 20
    smallest: int = 1  # of a plain call that is not empty
    members: int = 2000
    rows: int = 300
    expressions: int = 1 << 20


def placed(how: str, count: int) -> dict[str, Any]:
    """Where the outputs lie, as arguments of a case: "new", "out", "in place" or "shifted"."""
    over = tuple(range(count)) if how in ("in place", "shifted") else (None,) * count
    return {"over": over, "new": how == "new", "shifted": how == "shifted"}
