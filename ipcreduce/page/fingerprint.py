"""Fingerprints of calls, which the ranks compare to see that they make the same call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..texts import encoded


@dataclass(frozen=True)
class Fingerprint:
    """A description of a call for people, and its checksum, which every rank's call of that number must have.

    :ivar operations: of the call: the launches of kernels that exchange packets.
    """

    text: str
    crc: int
    operations: int = field(default=0, compare=False)

    @classmethod
    def of(cls, text: str, checked: str | None = None) -> Fingerprint:
        """The fingerprint of ``text``. ``checked`` is checksummed in its place, if given."""
        return cls(text, zlib.crc32(encoded(checked or text)))

    def made_by(self, operations: int) -> Fingerprint:
        """A copy of the fingerprint with this number of :attr:`operations`."""
        return replace(self, operations=operations)

    def __str__(self) -> str:
        return self.text


def by_rank(texts: Mapping[int, str]) -> str:
    """The calls of some ranks that differ, in words."""
    return " and ".join(f"{text} on rank {rank}" for rank, text in texts.items())
