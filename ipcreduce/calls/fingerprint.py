"""Fingerprints of calls, which the ranks compare to see that they make the same call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..texts import encoded


@dataclass(frozen=True)
class Fingerprint:
    """A description of a call for people, and its checksum, which every rank's call of that number must have."""

    text: str
    crc: int

    @classmethod
    def of(cls, text: str, checked: str | None = None) -> Fingerprint:
        """The fingerprint of ``text``. ``checked`` is checksummed in its place, if given."""
        return cls(text, zlib.crc32(encoded(checked or text)))

    def __str__(self) -> str:
        return self.text


def by_rank(texts: Mapping[int, str]) -> str:
    """The calls of some ranks that differ, in words."""
    return " and ".join(f"{text} on rank {rank}" for rank, text in texts.items())


def of_list(members: Sequence[tuple[tuple[int, ...], str]], op: str, where: str = "") -> Fingerprint:
    """The fingerprint of an all-reduce of a list of arrays, of these shapes and dtypes."""
    every = ", ".join(f"{dtype} {shape}" for shape, dtype in members)
    text = f"{op} of {len(members)} arrays{where}"
    return Fingerprint.of(f"{text}: {every}")


def of_map(shape: tuple[int, ...], dtype: str, op: str, expression: str, source: str, where: str = "") -> Fingerprint:
    """The fingerprint of an all-reduce with a user's expression.

    :param expression: it and its operands, in one line. :param source: the expression as it is compiled.
    """
    text = f"{op} of {dtype} {shape}{where}, then {expression}"
    return Fingerprint.of(text, f"{text}\0{source}")


def of_allreduce(shape: tuple[int, ...], dtype: str, op: str) -> Fingerprint:
    """The fingerprint of an all-reduce on the device."""
    return Fingerprint.of(f"{op} of {dtype} {shape}")
