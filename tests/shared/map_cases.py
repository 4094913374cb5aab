"""Random calls with a user's expression, on every rank, checked against NumPy.

tests/gpu/map_sweep.py runs them on GPUs, and tests/sim on the simulated device. The values are small integers, and the
factor a power of two: then no result depends on whether a compiler contracts a product and a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ipcreduce import Map
from tests.shared import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GUARD = 64  # canary bytes on both sides of an array
# Dtype and op of the call, and the dtypes of its operands. Each is a kernel of its own.
KINDS = [
    (np.dtype(dtype), op, np.dtype(row), np.dtype(full))
    for dtype, op, row, full in (
        (BFLOAT16, "sum", "f4", BFLOAT16), ("f4", "prod", BFLOAT16, "f4"), ("i1", "sum", "i1", "i4"),
        ("f8", "avg", "f8", "i2"), ("f2", "max", "i1", "f2"), ("i4", "avg", "i4", "i8"), ("u8", "sum", "u1", "u8"),
        ("f4", "sum", "f4", "f4"), (BFLOAT16, "avg", BFLOAT16, "f2"), ("i2", "prod", "i2", "i2"),
        ("u1", "min", "u1", "u1"), ("i8", "max", "i8", "i1"), ("u2", "sum", "u4", "u2"), ("u4", "avg", "u2", "u4"),
        ("f2", "prod", "f2", "f4"), ("f8", "min", "f4", "f8"), (BFLOAT16, "sum", BFLOAT16, BFLOAT16),
        ("f2", "sum", "u2", "u1"),
    )
]  # fmt: skip
EXPRESSION = "v * s + b\n- f"


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank but for the values and the places of the arrays.

    :ivar places: of the array, the result, and the two operands: bytes before each beyond alignment, and the elements
        from one to the next.
    :ivar same: the operand of the array's shape is the output itself.
    """

    number: int
    kind: tuple[np.dtype[Any], str, np.dtype[Any], np.dtype[Any]]
    shape: tuple[int, ...]
    how: str  # "new", "out" or "in place"
    places: tuple[tuple[int, int], ...]
    same: bool
    factor: Any

    @classmethod
    def draw(cls, seed: int, number: int, rank: int, largest: int, kinds: int) -> Case:
        """Case ``number`` on one rank, of up to ``largest`` bytes."""
        rng, own = np.random.default_rng([seed, number]), np.random.default_rng([seed, number, rank, 1])
        kind = KINDS[int(rng.integers(kinds))]
        most = max(1, int(largest * rng.random() ** 3) // kind[0].itemsize)
        columns = int(rng.choice([1, 3, 16, 64, 1003, 4096, most]))
        columns = min(columns, most)
        shape: tuple[int, ...] = (int(rng.integers(1, max(1, most // columns) + 1)), columns)
        form = rng.integers(8)
        shape = () if form == 0 else (most,) if form == 1 else (1, *shape) if form == 2 else shape
        if form == 3:
            shape = (0, columns)
        how = str(rng.choice(["new", "out", "in place"]))
        aligned = own.random() < 0.5
        places = tuple(
            (
                0 if aligned else int(own.integers(0, 16)),
                1 if aligned or own.random() < 0.7 else int(own.integers(2, 4)),
            )
            for _ in range(4)
        )
        same = bool(how != "new" and kind[0] == kind[3] and own.random() < 0.3)
        factors = [2, -4, np.int8(2), True] if kind[0].kind in "iu" else [2, -4, 0.5, np.float16(-0.25), np.int32(2)]
        return cls(number, kind, shape, how, places, same, factors[int(rng.integers(len(factors)))])

    def values(self, seed: int, rank: int, which: int) -> np.ndarray[Any, Any]:
        """Those of the array (0), the row (1) or the other operand (2)."""
        dtype = (self.kind[0], self.kind[2], self.kind[3])[which]
        shape = self.shape[-1:] if which == 1 else self.shape
        rng = np.random.default_rng([seed, self.number, rank, which])
        if self.kind[1] == "prod" and which == 0:
            return rng.choice([1, 2, 1, 2] if dtype.kind == "u" else [-2, -1, 1, 2], shape).astype(dtype)
        return np.asarray(rng.integers(0 if dtype.kind == "u" else -8, 9, shape)).astype(dtype)


def expected(case: Case, values: list[np.ndarray[Any, Any]], row: Any, full: Any) -> np.ndarray[Any, Any]:
    """By NumPy: the reduction rounded to its dtype, then the expression, then one conversion."""
    dtype = case.kind[0]
    reduced = reference.reduce(values, case.kind[1])
    if dtype.kind in "iu":
        with np.errstate(all="ignore"):
            wide = reduced.astype(np.int64) * np.int64(int(case.factor)) + row.astype(np.int64) - full.astype(np.int64)
        return wide.astype(dtype)
    accumulate = np.float64 if dtype == np.float64 else np.float32
    v, s = reduced.astype(accumulate), accumulate(case.factor)
    return (v * s + row.astype(accumulate) - full.astype(accumulate)).astype(dtype)


class Sweep:
    """Random cases on one rank. ``module``: see tests/gpu/cupy_module.py."""

    def __init__(self, module: Any, communicators: dict[str, Any], seed: int) -> None:
        self.module, self.communicators, self.seed = module, communicators, seed

    def run(self, cases: int, largest: int, kinds: int, first: int = 0) -> int:
        """Run cases, each on every communicator. Returns the number of calls."""
        calls = 0
        for number in range(first, first + cases):
            for name, comm in self.communicators.items():
                self._run(Case.draw(self.seed, number, comm.rank, largest, kinds), name, comm)
                calls += 1
        return calls

    def _run(self, case: Case, name: str, comm: Any) -> None:
        op = case.kind[1]
        own = [case.values(self.seed, comm.rank, which) for which in range(3)]
        array, row, full = (self._place(value, *case.places[at]) for at, value in enumerate(own))
        out, guard = None, None
        if case.how == "in place":
            out, guard = array
        elif case.how == "out":
            out, guard = self._place(np.zeros_like(own[0]), *case.places[3])
        if case.same and out is not None:
            out[...] = full[0] if case.how == "out" else out
            full = out, full[1]
            own[2] = own[2] if case.how == "out" else own[0]
        if case.shape == ():
            row = self._place(own[1].reshape(()), 0, 1)  # it has no last dimension
            own[1] = own[1].reshape(())
        then = Map(EXPRESSION, s=case.factor, b=row[0], f=full[0])
        result = comm.allreduce(array[0], op, out=out, then=then)
        comm.synchronize()
        assert out is None or result is out
        found = self.module.read(result)
        values = [case.values(self.seed, rank, 0) for rank in range(comm.size)]
        wanted = expected(case, values, own[1], own[2])
        right = reference.same(found, wanted)
        bad = np.flatnonzero(found.reshape(-1) != wanted.reshape(-1))[:4] if found.shape == wanted.shape else ()
        assert right, (
            f"rank {comm.rank}, {name}: {case}\nfirst at {bad}: {found.reshape(-1)[bad]}, not {wanted.reshape(-1)[bad]}"
        )
        for buffer, mask in filter(None, (guard, array[1], row[1], full[1])):
            assert (self.module.read(buffer)[mask] == 0xA5).all(), f"rank {comm.rank}, {name}: {case} wrote beside it"

    def _place(self, value: np.ndarray[Any, Any], before: int, step: int) -> tuple[Any, Any]:
        """An array with these values at an odd place; and its buffer, with a mask of the bytes beside it."""
        itemsize = value.dtype.itemsize
        offset = GUARD + before // itemsize * itemsize if itemsize < 16 else GUARD
        strides, span = [], itemsize * step
        for length in reversed(value.shape):
            strides.append(span)
            span *= max(1, length)
        strides = tuple(reversed(strides))
        raw = np.full(offset + math.prod(value.shape) * itemsize * step + GUARD, 0xA5, np.uint8)
        mask = np.ones(len(raw), bool)
        if value.size:
            np.ndarray(value.shape, value.dtype, raw.data, offset, strides)[...] = value
            np.ndarray((*value.shape, itemsize), bool, mask.data, offset, (*strides, 1))[...] = False
        buffer = self.module.buffer(raw)
        return self.module.view(buffer, offset, value.shape, value.dtype, strides), (buffer, mask)
