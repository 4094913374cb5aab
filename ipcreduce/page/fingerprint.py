"""Fingerprints of calls, which the ranks compare to see that they make the same call."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..texts import encoded, ranks_in_words


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


def by_rank(calls: Mapping[int, tuple[int, str]]) -> str:
    """The calls of some ranks that differ, in words: "A on rank 3 and B on ranks 0, 1 and 2", the odd ones first.

    :param calls: by rank, the call's checksum, and its text, which may be that of another call as well.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(calls[rank], []).append(rank)
    odd_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return " and ".join(f"{text} on {ranks_in_words(ranks)}" for (_, text), ranks in odd_first)
