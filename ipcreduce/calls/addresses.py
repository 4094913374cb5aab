"""The addresses of a call's arrays on the GPU, by kind of call. Those of one array are (source, target)."""

from __future__ import annotations

from array import array as packed
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

# The addresses of a list's members, as the bytes of 64-bit words, and their bitwise OR, whose lowest bits say how
# all of them are aligned.
Addresses = tuple[bytes, int]
Places = tuple[Addresses, Addresses]  # of sources and targets; in place, both are the same object


def addresses_of(members: Sequence[int]) -> Addresses:
    """Pack the addresses of a list's members."""
    return packed("Q", members).tobytes(), reduce(or_, members, 0)


def numbers_of(words: bytes) -> list[int]:
    """Unpack addresses into numbers, one for each member."""
    return memoryview(words).cast("Q").tolist()


def pairs_of(places: Places) -> Iterator[tuple[int, int]]:
    """The source address and the target address of each member."""
    return zip(*(numbers_of(words) for words, _ in places), strict=True)


class NormAddresses(NamedTuple):
    """The addresses of the arrays of a call with RMSNorm on the GPU, 0 where there is none.

    ``residual_out`` may be ``residual``, and ``out`` may be ``source``: then the call is in place.
    """

    source: int
    weight: int
    residual: int
    out: int
    residual_out: int
    quantised: int
    scales: int

    @property
    def between(self) -> int:
        """The address at which the plain all-reduce of a pair leaves its sum for the norm."""
        return self.out or self.residual_out


class MapAddresses(NamedTuple):
    """The addresses of a call with an expression on the GPU, and the words of its operands.

    Where an all-reduce comes before the expression, it reduces ``source`` into ``reduced``, and the expression reads
    ``between``: the same array, or another one if the all-reduce takes place in another dtype.
    """

    source: int
    target: int
    operands: tuple[int, ...]
    reduced: int
    between: int
