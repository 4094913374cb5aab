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

from tests.shared import reference
from tests.shared.world import WORLD

GUARD = 256  # canary bytes on either side of every array
PAGE = 4096


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
    module: Any, communicators: dict[str, Any], seed: int, cases: int, sizes: tuple[int, int], late_seconds: float,
    tight: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Runs the cases on each communicator, twice on the first. :raises AssertionError: at the first that is wrong.

    :param tight: arrays end where their memory does, so that an access behind them is a fault: under memcheck with no
        pool on a GPU, and at once on the simulated device, whose memory consists of pages.
    """
    import time

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
            found = _one(module, comm, case, values[rank], np.random.default_rng([seed, number, rank, 1]), tight)
            where = f"rank {rank}, {name}: {case}"
            if comm.backend == "nccl":
                assert reference.near(found, values, case.op), f"{where}\nfound {found}\nexpected about {expected}"
            else:
                assert reference.same(found, expected), f"{where}\nfound {found}\nexpected {expected}"
                assert case.special or reference.close(found, values, case.op), (
                    f"{where}: too far from float64's result"
                )
            checksums.append(zlib.crc32(found.tobytes()))
        everyone = WORLD.allgather(checksums)
        assert len({c for one in everyone for c in one}) == 1, f"{case}: bits differ: {everyone}"
        counted[case.dtype.name] += 1
        counted[case.op] += 1
        counted[case.layout] += 1
    return {"cases": cases, "calls": cases * (len(communicators) + 1), "counted": dict(counted)}


def _one(module: Any, comm: Any, case: Case, value: np.ndarray, rng: np.random.Generator, tight: bool) -> np.ndarray:
    size = case.dtype.itemsize
    shift = int(rng.integers(0, 16)) if size == 1 else int(rng.integers(0, 16 // size)) * size
    strides = None
    span = value.nbytes
    if case.strided_input:  # every second element of each row, rows backwards
        strides, span = (-2 * case.shape[1] * size, 2 * size), max(0, 2 * value.nbytes - size)
    shifted = case.layout == "shifted" and not case.strided_input  # out begins one element after the input
    behind = (0 if tight else GUARD) + (size if shifted else 0)
    front = -(span + behind) % PAGE if tight else GUARD + shift
    source, source_bytes = _guarded(module, case, value, front, span, behind, strides, rng)
    before = module.read(source_bytes).copy()
    if case.layout == "new":
        result = comm.allreduce(source, case.op)
        found = module.read(result)
    elif case.layout == "in place" or shifted:
        begin = front + (size if shifted else 0)
        out = module.view(source_bytes, begin, case.shape, case.dtype, None) if shifted else source
        assert comm.allreduce(source, case.op, out=out) is out
        found = module.read(out)
        after = module.read(source_bytes)
        assert (after[:begin] == before[:begin]).all(), f"{case}: wrote before the array"
        assert (after[begin + span :] == before[begin + span :]).all(), f"{case}: wrote after the array"
        return found
    else:
        strided = case.layout == "strided out" and len(case.shape) == 1
        poison = np.full(case.shape, 0xA5, np.uint8) if size == 1 else np.zeros(case.shape, case.dtype)
        poison = poison.view(case.dtype) if size == 1 else poison
        out_span = max(0, 2 * value.nbytes - size) if strided else value.nbytes
        front = -out_span % PAGE if tight else GUARD + int(rng.integers(0, 16 // size)) * size
        out_strides = (2 * size,) if strided else None
        out, out_bytes = _guarded(module, case, poison, front, out_span, 0 if tight else GUARD, out_strides, rng)
        guard = module.read(out_bytes).copy()
        assert comm.allreduce(source, case.op, out=out) is out
        found = module.read(out)
        after, mask = module.read(out_bytes), np.ones(len(guard), bool)
        for element in range(int(np.prod(case.shape)) if strided else 1):
            begin = front + element * 2 * size
            mask[begin : begin + (size if strided else out_span)] = False
        assert (after == guard)[mask].all(), f"{case}: wrote beside the output"
    assert (module.read(source_bytes) == before).all(), f"{case}: changed its input"
    return found


def _guarded(
    module: Any, case: Case, value: np.ndarray, front: int, span: int, behind: int, strides: tuple[int, ...] | None,
    rng: np.random.Generator,
) -> tuple[Any, Any]:  # fmt: skip
    """A device array with these values, so many random bytes before and behind it, and the buffer of all."""
    raw = rng.integers(0, 256, max(1, front + span + behind), np.uint8)
    if strides is not None and len(strides) == 2 and value.size:
        front += (case.shape[0] - 1) * -strides[0]
    if value.size:
        host = np.ndarray(case.shape, case.dtype, raw.data, front, strides)
        host[...] = value
    buffer = module.buffer(raw)
    return module.view(buffer, front, case.shape, case.dtype, strides), buffer
