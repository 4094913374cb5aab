"""A seeded sweep over dtype x op x shape x alignment x in or out of place x algorithm, checked on every rank.

tests/gpu/sweep.py runs it on GPUs, tests/sim on the simulated device. The array module is handed in: it has
``buffer(numpy_bytes)``, ``view(buffer, offset, shape, dtype, strides)`` and ``read(buffer)``.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from tests import reference

GUARD = 256  # canary bytes on either side of every array


@dataclass(frozen=True)
class Case:
    """One all-reduce, the same on every rank but for the alignments and the values."""

    number: int
    dtype: np.dtype
    op: str
    shape: tuple[int, ...]
    layout: str  # of the output: "new", "out", "in place", "strided out", "shifted" (overlaps the input in part)
    strided_input: bool
    special: bool
    late: int  # rank that comes late, or -1

    @classmethod
    def draw(cls, seed: int, number: int, world: int, sizes: tuple[int, int]) -> Case:
        rng = np.random.default_rng([seed, number])
        dtype = reference.DTYPES[int(rng.integers(len(reference.DTYPES)))]
        op = str(rng.choice(reference.OPS))
        kind = rng.random()
        if kind < 0.06:
            shape: tuple[int, ...] = [(), (0,), (3, 0, 2), (1,)][int(rng.integers(4))]
        else:
            low, high = (np.log2(max(1, size / dtype.itemsize)) for size in sizes)
            count = int(2 ** rng.uniform(low, high))
            shape = (count,) if kind < 0.6 else (max(1, count // 7), 7) if kind < 0.8 else (max(1, count // 6), 2, 3)
        layout = str(rng.choice(["new", "out", "in place", "strided out", "shifted"], p=[0.3, 0.25, 0.25, 0.1, 0.1]))
        strided = bool(rng.random() < 0.15) and len(shape) == 2 and layout != "in place"
        late = int(rng.integers(world)) if rng.random() < 0.05 else -1
        return cls(number, dtype, op, shape, layout, strided, bool(rng.random() < 0.4), late)


def run(
    module: Any, communicators: dict[str, Any], seed: int, cases: int, sizes: tuple[int, int], late_seconds: float
) -> dict[str, Any]:
    """Runs the cases on each communicator, twice on the first. :raises AssertionError: at the first that is wrong."""
    import time

    world = MPI.COMM_WORLD
    first = next(iter(communicators.values()))
    rank, n = first.rank, first.size
    counted: Counter[str] = Counter()
    for number in range(cases):
        case = Case.draw(seed, number, n, sizes)
        values = [
            reference.random_array(np.random.default_rng([seed, number, r]), case.shape, case.dtype, case.special)
            for r in range(n)
        ]
        expected = reference.reduce(values, case.op)
        checksums = []
        for name, comm in [*communicators.items(), *list(communicators.items())[:1]]:
            if case.late == rank:
                time.sleep(late_seconds)
            found = _one(module, comm, case, values[rank], np.random.default_rng([seed, number, rank, 1]))
            where = f"rank {rank}, {name}: {case}"
            assert reference.same(found, expected), f"{where}\nfound {found}\nexpected {expected}"
            assert case.special or reference.close(found, values, case.op), f"{where}: too far from the float64 result"
            checksums.append(zlib.crc32(found.tobytes()))
        everyone = world.allgather(checksums)
        assert len({c for one in everyone for c in one}) == 1, f"{case}: bits differ: {everyone}"
        counted[case.dtype.name] += 1
        counted[case.op] += 1
        counted[case.layout] += 1
    return {"cases": cases, "calls": cases * (len(communicators) + 1), "counted": dict(counted)}


def _one(module: Any, comm: Any, case: Case, value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    size = case.dtype.itemsize
    shift = int(rng.integers(0, 16)) if size == 1 else int(rng.integers(0, 16 // size)) * size
    strides = None
    span = value.nbytes
    if case.strided_input:  # every second element of each row, rows backwards
        strides, span = (-2 * case.shape[1] * size, 2 * size), 2 * value.nbytes
    source, source_bytes = _guarded(module, case, value, shift, span, strides, rng)
    before = module.read(source_bytes).copy()
    if case.layout == "new":
        result = comm.allreduce(source, case.op)
        found = module.read(result)
    elif case.layout == "in place":
        assert comm.allreduce(source, case.op, out=source) is source
        found = module.read(source)
        after = module.read(source_bytes)
        begin = GUARD + shift
        assert (after[:begin] == before[:begin]).all(), f"{case}: wrote before the array"
        assert (after[begin + span :] == before[begin + span :]).all(), f"{case}: wrote after the array"
        return found
    elif case.layout == "shifted" and not case.strided_input:  # out begins one element after the input
        out = module.view(source_bytes, GUARD + shift + size, case.shape, case.dtype, None)
        comm.allreduce(source, case.op, out=out)
        found = module.read(out)
        begin, end = GUARD + shift + size, GUARD + shift + size + value.nbytes
        after = module.read(source_bytes)
        assert (after[:begin] == before[:begin]).all(), f"{case}: wrote before the output"
        assert (after[end:] == before[end:]).all(), f"{case}: wrote after the output"
        return found
    else:
        strided = case.layout == "strided out" and len(case.shape) == 1
        other = int(rng.integers(0, 16 // size)) * size
        poison = np.full(case.shape, 0xA5, np.uint8) if size == 1 else np.zeros(case.shape, case.dtype)
        poison = poison.view(case.dtype) if size == 1 else poison
        out_span = value.nbytes * (2 if strided else 1)
        out, out_bytes = _guarded(module, case, poison, other, out_span, (2 * size,) if strided else None, rng)
        guard = module.read(out_bytes).copy()
        assert comm.allreduce(source, case.op, out=out) is out
        found = module.read(out)
        after, mask = module.read(out_bytes), np.ones(len(guard), bool)
        for element in range(int(np.prod(case.shape)) if strided else 1):
            begin = GUARD + other + element * 2 * size
            mask[begin : begin + (size if strided else out_span)] = False
        assert (after == guard)[mask].all(), f"{case}: wrote beside the output"
    assert (module.read(source_bytes) == before).all(), f"{case}: changed its input"
    return found


def _guarded(
    module: Any, case: Case, value: np.ndarray, shift: int, span: int, strides: tuple[int, ...] | None,
    rng: np.random.Generator,
) -> tuple[Any, Any]:  # fmt: skip
    """A device array with these values within a buffer of random bytes, and the buffer."""
    raw = rng.integers(0, 256, GUARD + shift + span + case.dtype.itemsize + GUARD, np.uint8)
    start = GUARD + shift
    if strides is not None and len(strides) == 2 and value.size:
        start += (case.shape[0] - 1) * -strides[0]
    if value.size:
        host = np.ndarray(case.shape, case.dtype, raw.data, start, strides)
        host[...] = value
    buffer = module.buffer(raw)
    return module.view(buffer, start, case.shape, case.dtype, strides), buffer
