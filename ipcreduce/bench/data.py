"""The data of timed calls, small integers that sum exactly in any order, and the check of the results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..communicator import Communicator
from ..cuda import cupy_runtime

_MOST = 65521  # elements that are drawn. Longer messages repeat them, with this prime period: misplaced data is noticed
_LARGEST = 8  # largest magnitude: the sum over 8 ranks is then exact in every dtype


class Message:
    """This rank's arrays ``source`` and ``target`` of ``nbytes`` bytes: CuPy's, or NumPy's if there are no GPUs."""

    def __init__(self, nbytes: int, dtype: np.dtype[Any], comm: Communicator) -> None:
        self._dtype, self._rank, self._ranks = dtype, comm.rank, comm.size
        self._count = max(1, nbytes // dtype.itemsize)
        self._period = min(self._count, _MOST)
        self.on_host = comm.backend == "mpi"
        library = np if self.on_host else cupy_runtime.load()
        self.source, self.target = library.empty(self._count, dtype), comm.empty(self._count, dtype)
        self._turn = 0

    def renew(self) -> None:
        """Draw new data on every rank, and fill the target with a value that no sum has."""
        self._turn += 1
        low = 0 if self._dtype.kind == "u" else -_LARGEST
        draws = [
            np.random.default_rng([self._turn, rank]).integers(low, _LARGEST, self._period).astype(self._dtype)
            for rank in range(self._ranks)
        ]
        self._expected = np.sum([draw.astype(np.float64) for draw in draws], axis=0)
        for begin in range(0, self._count, self._period):
            piece = draws[self._rank][: self._count - begin]
            part = self.source[begin : begin + self._period]
            if self.on_host:
                part[...] = piece
            else:
                part.set(piece)
        self.target.fill(_LARGEST * self._ranks + 1)

    def is_right(self) -> bool:
        """True if ``target`` is the sum over the ranks."""
        found = self.target if self.on_host else cupy_runtime.load().asnumpy(self.target)
        return all(
            (part.astype(np.float64) == self._expected[: len(part)]).all()
            for part in (found[begin : begin + self._period] for begin in range(0, self._count, self._period))
        )

    def wait(self) -> None:
        """Wait for the calls on CuPy's current stream. Calls on host arrays have ended already."""
        if not self.on_host:
            cupy_runtime.load().cuda.get_current_stream().synchronize()
