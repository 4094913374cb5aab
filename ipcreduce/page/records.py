"""Records on the control page: a reader sees all of a record or none of it, in whatever order stores become visible.

Python has no release store. x86 makes stores visible in program order; an Arm processor (GH200, GB200) may show the
word that says "it is there" before the data, and any part of the data before another. So a record carries a checksum
of all its bytes. Until every byte has arrived the checksum is wrong, and the reader takes the record for not written
yet. The serial number makes each record of a rank differ from its last one, so the old checksum cannot fit the new
bytes. A page of zeros holds no record: the checksum of zeros is not zero.

Everything else on the page is single words, each valid by itself (control_page.py).
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..errors import RankMismatchError
from ..originals import Lock, time
from ..texts import encoded

_SEAL_BYTES = 4
_Answer = TypeVar("_Answer")


def record(*fields: tuple[str, str]) -> np.dtype[Any]:
    """The layout of a record with these fields."""
    return np.dtype([("seal", "<u4"), ("padding", "<u4"), ("serial", "<u8"), *fields])


def fence() -> None:
    """Order this thread's earlier accesses of the page before its later ones, as other processors see them.

    The release of a lock orders what came before it, its acquisition what comes after it, and the second acquisition
    follows the first release (POSIX: locks synchronise memory; on Arm STLR before LDAXR of one address). The lock is a
    new one, as a finaliser may come here in between.
    """
    lock = Lock()
    with lock:
        pass
    with lock:
        pass


def ask_twice(ask: Callable[[], _Answer]) -> _Answer:
    """The answer of ``ask()``, to a question that takes two words of another rank. It is asked again 1 ms after a yes.

    Some processors show the second word before the first one, which was written before it.
    """
    if not (found := ask()):
        return found
    time.sleep(1e-3)
    return ask()


def filled(layout: np.dtype[Any], **fields: Any) -> np.ndarray[Any, Any]:
    """One row with these fields, and zeros elsewhere, of shape ``(1,)``. Texts are cut to their room.

    Bytes that are shorter than their room are followed by zeros.
    """
    row = np.zeros(1, layout)
    for name, value in fields.items():
        row[name] = encoded(value, layout[name].itemsize) if isinstance(value, str) else value
    return row


class Slot:
    """The place of one rank's record in the page."""

    def __init__(self, page: mmap.mmap, offset: int, layout: np.dtype[Any]) -> None:
        self._page, self._layout = page, layout
        self._place = slice(offset, offset + layout.itemsize)

    def write(self, serial: int, **fields: Any) -> None:
        """Store a record: see :func:`filled`. Other threads of this process see it in one step."""
        data = filled(self._layout, serial=serial, **fields).tobytes()
        seal = zlib.crc32(data[_SEAL_BYTES:])
        self._page[self._place] = seal.to_bytes(_SEAL_BYTES, "little") + data[_SEAL_BYTES:]

    def read(self) -> Any:
        """The record, a ``numpy.void``; None if there is none, or if parts of it have not arrived yet."""
        data = self._page[self._place]  # copied at once, so that the bytes checked are the bytes used
        if int.from_bytes(data[:_SEAL_BYTES], "little") != zlib.crc32(data[_SEAL_BYTES:]):
            return None
        return np.frombuffer(data, self._layout)[0]

    def clear(self) -> None:
        """Remove the record."""
        self._page[self._place] = bytes(self._layout.itemsize)


def rows(data: bytes, layout: np.dtype[Any], what: str) -> np.ndarray[Any, Any]:
    """The rows that another rank has sent, shape ``(m,)``.

    :raises RankMismatchError: if ``data`` is not made of rows.
    """
    if len(data) % layout.itemsize:
        raise RankMismatchError(
            f"a rank sent {len(data)} bytes of {what}, which come in rows of {layout.itemsize} bytes. "
            "Run the same version of ipcreduce on every rank."
        )
    return np.frombuffer(data, layout)
