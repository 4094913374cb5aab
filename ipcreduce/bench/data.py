"""The data of timed calls, small integers that sum exactly in any order, and the check of the results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ..communicator import Communicator
from ..cuda import cupy_runtime

_MOST = 65521  # elements that are drawn. Longer messages repeat them, with this prime period: misplaced data is noticed
_LARGEST = 8  # largest magnitude: the sum over 8 ranks is then exact in every dtype


class Message:
    """This rank's data of ``nbytes`` bytes, and room for the sum: CuPy's arrays, or NumPy's if there are no GPUs.

    :param arrays: into how many arrays of the same length, or one more, the data are split; 0 for one array.
    :ivar source: an array, or a list of ``arrays`` arrays; and ``target``.
    :ivar what: what contenders compute, and ``fields``: further fields of a stored row.
    """

    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, nbytes: int, dtype: np.dtype[Any], comm: Communicator, arrays: int = 0) -> None:
        self._dtype, self._rank, self._ranks, self.nbytes = dtype, comm.rank, comm.size, nbytes
        self._count = max(1, nbytes // dtype.itemsize)
        self._period = min(self._count, _MOST)
        self.on_host = comm.backend == "mpi"
        library = np if self.on_host else cupy_runtime.load()
        parts = max(1, arrays)
        self._begins = [self._count * part // parts for part in range(parts + 1)]
        counts = [end - begin for begin, end in pairwise(self._begins)]
        self._sources = [library.empty(count, dtype) for count in counts]
        self._targets = [comm.empty(count, dtype) for count in counts]
        self.source: Any = self._sources if arrays else self._sources[0]
        self.target: Any = self._targets if arrays else self._targets[0]
        self.what = f"the sum of {nbytes} bytes"
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
        for begin, source, target in zip(self._begins, self._sources, self._targets, strict=False):
            mine = np.roll(draws[self._rank], -begin)
            for part in self._periods(source):
                if self.on_host:
                    part[...] = mine[: len(part)]
                else:
                    part.set(mine[: len(part)])
            target.fill(_LARGEST * self._ranks + 1)

    def is_right(self, gives: str = "all") -> bool:
        """True if ``target`` is the sum over the ranks. :param gives: what a contender gives, which is all here."""
        for begin, target in zip(self._begins, self._targets, strict=False):
            expected = np.roll(self._expected, -begin)
            found = target if self.on_host else cupy_runtime.load().asnumpy(target)
            if not all((part.astype(np.float64) == expected[: len(part)]).all() for part in self._periods(found)):
                return False
        return True

    def _periods(self, array: Any) -> Iterator[Any]:
        """The parts of an array in each of which the data begin anew."""
        return (array[begin : begin + self._period] for begin in range(0, len(array), self._period))

    def wait(self) -> None:
        """Wait for the calls on CuPy's current stream. Calls on host arrays have ended already."""
        if not self.on_host:
            cupy_runtime.load().cuda.get_current_stream().synchronize()
