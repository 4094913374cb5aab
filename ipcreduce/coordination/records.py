"""Records on the control page that another rank reads whole or not at all, whatever order its processor sees stores in.

Python has no release store. x86 shows stores in their order; an Arm processor (GH200, GB200) may show the word that
says "it is there" before what is there, and any part of it before another. So a record carries a checksum of all its
bytes: until every one of them has come, a reader finds the checksum wrong, and takes the record for not written yet.
The serial number makes each record of a rank differ from its last one, so that the old one's checksum cannot be right
for the new one's bytes. A page of zeros has no record: the checksum of zeros is not zero.

What is left are single words, each of which is right by itself, and their readers look again where two have to agree
(control.py).
"""

from __future__ import annotations

import mmap
import zlib
from typing import Any

import numpy as np

_SEAL_BYTES = 4


def record(*fields: tuple[str, str]) -> np.dtype[Any]:
    """The layout of a record with these fields."""
    return np.dtype([("seal", "<u4"), ("padding", "<u4"), ("serial", "<u8"), *fields])


class Slot:
    """The place of one rank's record in the page."""

    def __init__(self, page: mmap.mmap, offset: int, layout: np.dtype[Any]) -> None:
        self._page, self._layout = page, layout
        self._place = slice(offset, offset + layout.itemsize)

    def write(self, serial: int, **fields: Any) -> None:
        """Puts a record there, in one step as other threads of this process see it. Texts are cut to their room."""
        new = np.zeros(1, self._layout)
        new["serial"] = serial
        for name, value in fields.items():
            new[name] = value.encode()[: self._layout[name].itemsize] if isinstance(value, str) else value
        data = new.tobytes()
        seal = zlib.crc32(data[_SEAL_BYTES:])
        self._page[self._place] = seal.to_bytes(_SEAL_BYTES, "little") + data[_SEAL_BYTES:]

    def read(self) -> Any:
        """The record, a ``numpy.void``; None if there is none, or not all of it yet."""
        data = self._page[self._place]  # copied at once: what is checked is what is used
        if int.from_bytes(data[:_SEAL_BYTES], "little") != zlib.crc32(data[_SEAL_BYTES:]):
            return None
        return np.frombuffer(data, self._layout)[0]

    def clear(self) -> None:
        """There is no record any more."""
        self._page[self._place] = bytes(self._layout.itemsize)


def text_of(found: Any, name: str = "text") -> str:
    """A text in a record."""
    return bytes(found[name]).decode(errors="replace")
