"""What the ranks compare: a call, and how a recording ended."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """What every rank's call must agree on: a text for people, and its checksum."""

    text: str
    crc: int

    @classmethod
    def of(cls, text: str, checked: str | None = None) -> Signature:
        """The signature of ``text``; the checksum is that of ``checked``, if it is given."""
        return cls(text, zlib.crc32((checked or text).encode()))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Vote:
    """How a recording ended on one rank: its last call number, its all-reduces, and what went wrong, if not ``ok``."""

    call: int
    ok: bool
    count: int
    crc: int
    text: str


def signature(shape: tuple[int, ...], dtype: str, op: str) -> Signature:
    """The signature of an all-reduce on the device."""
    return Signature.of(f"{op} of {dtype} {shape}")
