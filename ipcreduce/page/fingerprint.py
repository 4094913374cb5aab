"""Fingerprints of calls, which the ranks compare to see that they make the same call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
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
