"""Words in memory that all ranks see: with each, a rank says that it has unmapped the memory of one graph."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

MARKS = 1024  # words for each rank


class Marks:
    """The marks of ``n`` ranks. A word holds the number, plus 1, of the last graph with this place that was dropped."""

    def __init__(self, descriptor: int, rank: int, n: int) -> None:
        try:
            content = mmap.mmap(descriptor, nbytes(n))
        finally:
            os.close(descriptor)
        self._words: np.ndarray[Any, Any] = np.frombuffer(content, "<u8").reshape(n, MARKS)
        self._rank = rank

    def set(self, serial: int) -> None:
        """Say that this rank has dropped graph number ``serial``."""
        self._words[self._rank, serial % MARKS] = serial + 1

    def all_set(self, serial: int) -> bool:
        """Return True if every rank has dropped graph number ``serial``."""
        return bool((self._words[:, serial % MARKS] == serial + 1).all())


def nbytes(n: int) -> int:
    """The bytes of the marks of ``n`` ranks."""
    return n * MARKS * 8
