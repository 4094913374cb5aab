"""The data of timed calls, small integers that sum exactly in any order, and the check of the results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..cuda import cupy_runtime
from .collectives import ALLREDUCE, ROOT, Collective

_MAX = 65521  # elements that are drawn. Longer messages repeat them, with this prime period: misplaced data is noticed
_LARGEST = 8  # largest magnitude: the sum over 8 ranks is then exact in every dtype


class Placed:
    """The arrays of a message: CuPy's, or NumPy's if there are no GPUs."""

    def __init__(self, comm: Communicator) -> None:
        self.on_host = comm.backend == "host"
        self._library = np if self.on_host else cupy_runtime.load()

    def _fill(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        if self.on_host:
            array[...] = values
        else:
            array.set(values)

    def _found(self, array: Any) -> np.ndarray[Any, Any]:
        return array if self.on_host else self._library.asnumpy(array)

    def wait(self) -> None:
        """Wait for the calls on CuPy's current stream. Calls on host arrays have ended already."""
        if not self.on_host:
            self._library.cuda.get_current_stream().synchronize()


class Message(Placed):
    """This rank's data of ``nbytes`` bytes, and room for the result: CuPy's arrays, or NumPy's if there are no GPUs.

    :param arrays: into how many arrays of the same length, or one unit more, the data are split; 0 for one array.
    :ivar source: an array, or a list of ``arrays`` arrays; and ``target``. Both are the same in a broadcast.
    :ivar what: what contenders compute, and ``fields``: further fields of a stored row.
    """

    def __init__(
        self, nbytes: int, dtype: np.dtype[Any], comm: Communicator, arrays: int = 0, of: Collective = ALLREDUCE
    ) -> None:
        self._dtype, self._rank, self._n, self.nbytes, self.of = dtype, comm.rank, comm.size, nbytes, of
        unit, parts = of.unit(comm.size), max(1, arrays)
        units = max(1, nbytes // dtype.itemsize // unit)
        self._period = min(unit * units, _MAX)
        super().__init__(comm)
        self._begins = [unit * (units * part // parts) for part in range(parts + 1)]
        counts = [end - begin for begin, end in pairwise(self._begins)]
        self._targets = [comm.empty(of.results(count, comm.size), dtype) for count in counts]
        self._sources = self._targets if of.in_place else [self._library.empty(count, dtype) for count in counts]
        self.source: Any = self._sources if arrays else self._sources[0]
        self.target: Any = self._targets if arrays else self._targets[0]
        self.what = f"the {of.what} of {nbytes} bytes"
        self.fields: dict[str, Any] = {} if of is ALLREDUCE else {"op": of.name}
        self._turn = 0

    def renew(self) -> None:
        """Draw new data on every rank, and fill the target with a value that no sum has."""
        self._turn += 1
        low = 0 if self._dtype.kind == "u" else -_LARGEST
        self._draws = [
            np.random.default_rng([self._turn, rank]).integers(low, _LARGEST, self._period).astype(self._dtype)
            for rank in range(self._n)
        ]
        self._total = np.sum([draw.astype(np.float64) for draw in self._draws], axis=0)
        for begin, source, target in zip(self._begins, self._sources, self._targets, strict=False):
            target.fill(_LARGEST * self._n + 1)
            if self.of.in_place and self._rank != ROOT:
                continue
            mine = np.roll(self._draws[self._rank], -begin)
            for part in self._periods(source):
                self._fill(part, mine[: len(part)])

    def is_right(self, gives: str = "all") -> bool:
        """True if ``target`` is the result. :param gives: what a contender gives, which is all here."""
        for begin, target in zip(self._begins, self._targets, strict=False):
            for array, values, first in self._parts(begin, self._found(target)):
                due = np.roll(values, -first)
                if not all((part.astype(np.float64) == due[: len(part)]).all() for part in self._periods(array)):
                    return False
        return True

    def _parts(self, begin: int, found: Any) -> list[tuple[Any, Any, int]]:
        """The parts of a result: each with the values that repeat in it, and the place among these of its first one."""
        if self.of.name == "allgather":
            return [(part, draw, begin) for part, draw in zip(np.split(found, self._n), self._draws, strict=True)]
        if self.of.in_place:
            return [(found, self._draws[ROOT], begin)]
        skipped = self._rank * len(found) if self.of.name == "reduce_scatter" else 0
        return [(found, self._total, begin + skipped)]

    def _periods(self, array: Any) -> Iterator[Any]:
        """The parts of an array in each of which the data begin anew."""
        return (array[begin : begin + self._period] for begin in range(0, len(array), self._period))
