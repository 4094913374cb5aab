"""What the ranks reduce, and whether the result is right. Small integers: every order of a sum gives the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..communicator import Communicator
from ..cuda import cupy_runtime

_MOST = 65521  # elements that are drawn; longer messages repeat them. A prime: what is misplaced does not look right
_LARGEST = 8  # in magnitude: the sum over 8 ranks is exact in every dtype


class Message:
    """``source`` and ``target`` of one size, on this rank."""

    def __init__(self, nbytes: int, dtype: np.dtype[Any], comm: Communicator) -> None:
        self._dtype, self._rank, self._ranks = dtype, comm.rank, comm.size
        self._count = max(1, nbytes // dtype.itemsize)
        self._period = min(self._count, _MOST)
        self.source, self.target = cupy_runtime.load().empty(self._count, dtype), comm.empty(self._count, dtype)
        self._turn = 0

    def renew(self) -> None:
        """Other data on every rank, and a target that is wrong everywhere."""
        self._turn += 1
        low = 0 if self._dtype.kind == "u" else -_LARGEST
        draws = [
            np.random.default_rng([self._turn, rank]).integers(low, _LARGEST, self._period).astype(self._dtype)
            for rank in range(self._ranks)
        ]
        self._expected = np.sum([draw.astype(np.float64) for draw in draws], axis=0)
        for begin in range(0, self._count, self._period):
            piece = draws[self._rank][: self._count - begin]
            self.source[begin : begin + self._period].set(piece)
        self.target.fill(_LARGEST * self._ranks + 1)

    def is_right(self) -> bool:
        """Whether ``target`` is the sum over the ranks."""
        found = cupy_runtime.load().asnumpy(self.target)
        return all(
            (part.astype(np.float64) == self._expected[: len(part)]).all()
            for part in (found[begin : begin + self._period] for begin in range(0, self._count, self._period))
        )
