"""Random lists of arrays in one call, on every rank, checked against NumPy.

tests/gpu/list_sweep.py runs them on GPUs, tests/sim on the simulated device, and tests/mpi on NumPy arrays. The array
module is handed in, as in tests/shared/sweep_cases.py.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.shared import reference
from tests.shared.world import WORLD

GUARD = 64  # canary bytes before the first array and behind the last one
MANY = (162, 163, 400, 1356, 1357, 2000)  # members: around the places of the kernels' tables


@dataclass(frozen=True)
class Member:
    """One array of a list.

    :ivar step: elements from one to the next in the input, and ``out_step`` in the output.
    :ivar gaps: free bytes before the input and before the output, beyond what alignment takes. They may be none.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: int = 1
    out_step: int = 1
    gaps: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Case:
    """One call on a list, the same on every rank but for the values and the alignments."""

    number: int
    op: str
    members: tuple[Member, ...]
    how: str  # "new", "out" or "in place"
    as_tuple: bool
    special: bool
    turns: int  # calls on the same arrays, of other values
    late: int  # rank that comes late, or -1

    @classmethod
    def draw(cls, seed: int, number: int, ranks: int, largest: int, most: int) -> Case:
        """Case ``number``: of up to ``largest`` bytes, for the members together, and of up to ``most`` members."""
        rng = np.random.default_rng([seed, number])
        count = int(2 ** rng.uniform(0, 6.5)) if rng.random() < 0.9 else int(rng.choice(MANY))
        count = 0 if rng.random() < 0.02 else min(count, most)
        dtypes = rng.choice(len(reference.DTYPES), 1 if rng.random() < 0.6 else 3)
        left = int(2 ** rng.uniform(4, np.log2(largest)))
        members = []
        for _ in range(count):
            dtype = reference.DTYPES[int(rng.choice(dtypes))]
            members.append(_draw_member(rng, dtype, max(1, min(left, int(rng.exponential(left / count))))))
            left = max(1, left - members[-1].size * dtype.itemsize)
        how = str(rng.choice(["new", "out", "in place"]))
        late = int(rng.integers(ranks)) if rng.random() < 0.03 else -1
        turns = 3 if rng.random() < 0.3 else 1
        return cls(
            number, str(rng.choice(reference.OPS)), tuple(members), how, bool(rng.random() < 0.2),
            bool(rng.random() < 0.3), turns, late,
        )  # fmt: skip

    def __str__(self) -> str:
        shown = ", ".join(f"{one.dtype.name} {one.shape}" for one in self.members[:8])
        return f"case {self.number}: {self.op} of {len(self.members)} arrays, {self.how}: {shown}"


def _draw_member(rng: np.random.Generator, dtype: np.dtype[Any], nbytes: int) -> Member:
    kind, count = rng.random(), max(1, nbytes // dtype.itemsize)
    shape: tuple[int, ...] = (count,)
    if kind < 0.1:
        shape = [(), (0,), (3, 0, 2), (1,)][int(rng.integers(4))]
    elif kind < 0.3:
        shape = (max(1, count // 7), 7)
    steps = (int(rng.choice((1, 1, 1, 1, 2))), int(rng.choice((1, 1, 1, 1, 2))))
    gaps = (int(rng.choice((0, 0, 4, 16, 40))), int(rng.choice((0, 0, 4, 16, 40))))
    return Member(dtype, shape, *steps, gaps)


def run(
    module: Any, communicators: dict[str, Any], seed: int, cases: int, largest: int, *, most: int = 2000,
    late_seconds: float = 0.002, first: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Run cases, each on the next one of the communicators. :raises AssertionError: at the first that is wrong.

    Every eighth case is compared with the calls one by one, too.
    """
    counted: Counter[str] = Counter()
    names = list(communicators)
    for number in range(first, first + cases):
        comm = communicators[names[number % len(names)]]
        case = Case.draw(seed, number, comm.size, largest, most)
        if case.late == comm.rank:
            time.sleep(late_seconds)
        with np.errstate(invalid="ignore"):  # as signalling NaN are widened to be compared
            Played(module, comm, case, seed).run(singly=number % 8 == 0)
        counted["members"] += len(case.members)
        counted["bytes"] += sum(one.size * one.dtype.itemsize for one in case.members)
        counted["calls"] += case.turns
        counted[case.op] += 1
        counted[case.how] += 1
    return {"cases": cases, "counted": dict(counted)}


class Played:
    """A case on this rank: all inputs lie in one buffer and all outputs in another one, with canaries around."""

    def __init__(self, module: Any, comm: Any, case: Case, seed: int) -> None:
        self.module, self.comm, self.case, self.seed = module, comm, case, seed
        self.rng = np.random.default_rng([seed, case.number, comm.rank, 1])
        self.places = self._lay_out([one.step for one in case.members], 0)
        self.sources, self.inputs = self._arrays(self.places)
        self.targets = self._lay_out([one.out_step for one in case.members], 1)
        self.outs, self.outputs = self._arrays(self.targets)

    def _lay_out(self, steps: list[int], which: int) -> list[tuple[int, int]]:
        """(offset, step) of each array, in an order of this rank's own."""
        places, at = {}, GUARD
        for index in self.rng.permutation(len(steps)):
            one = self.case.members[index]
            size, step = one.dtype.itemsize, steps[index]
            at += one.gaps[which] + size * int(self.rng.integers(0, 3))
            at += -at % size
            places[int(index)] = (at, step)
            at += max(0, (one.size - 1) * step + 1) * size if one.size else 0
        self.nbytes = at + GUARD
        return [places[index] for index in range(len(steps))]

    def _arrays(self, places: list[tuple[int, int]]) -> tuple[Any, list[Any]]:
        buffer = self.module.buffer(np.zeros(self.nbytes, np.uint8))
        arrays = []
        for one, (at, step) in zip(self.case.members, places, strict=True):
            arrays.append(self.module.view(buffer, at, one.shape, one.dtype, _strides(one, step)))
        return buffer, arrays

    def run(self, *, singly: bool) -> None:
        """Make the calls, and look at every byte."""
        case, checksums = self.case, []
        for turn in range(case.turns):
            values = [self._values(turn, rank) for rank in range(self.comm.size)]
            before = self._fill(values[self.comm.rank])
            found = self._call(self.inputs, self.outputs)
            expected = self._expected(values)
            for index, (one, wanted) in enumerate(zip(found, expected, strict=True)):
                where = f"rank {self.comm.rank}, turn {turn}, member {index} of {case}"
                if self.comm.backend == "nccl":
                    right = reference.near(one, [of_rank[index] for of_rank in values], case.op)
                else:
                    right = reference.same(one, wanted)
                assert right, f"{where}\nfound {one}\nexpected {wanted}"
            self._look_beside(before)
            checksums.append(zlib.crc32(b"".join(one.tobytes() for one in found)))
        if singly and self.comm.backend != "nccl":
            self._fill(values[self.comm.rank])
            alone = [self.module.read(self.comm.allreduce(one, case.op)) for one in self.inputs]
            checksums.append(zlib.crc32(b"".join(one.tobytes() for one in alone)))
            assert checksums[-1] == checksums[-2], f"{case}: its bits are not those of the calls one by one"
        everyone = WORLD.allgather(checksums)
        assert all(one == checksums for one in everyone), f"{case}: bits differ between the ranks: {everyone}"

    def _values(self, turn: int, rank: int) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng([self.seed, self.case.number, rank, turn, 2])
        special = self.case.special and self.comm.backend != "nccl"
        return [reference.random_array(rng, one.shape, one.dtype, special) for one in self.case.members]

    def _fill(self, values: list[np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Put values into the inputs, and poison into all other bytes. Returns the bytes of both buffers."""
        raws = (
            self.rng.integers(0, 256, len(self.sources), np.uint8),
            self.rng.integers(0, 256, len(self.outs), np.uint8),
        )
        for one, (at, step), value in zip(self.case.members, self.places, values, strict=True):
            if one.size:
                np.ndarray(one.shape, one.dtype, raws[0].data, at, _strides(one, step))[...] = value
        self.sources[...], self.outs[...] = (self.module.buffer(raw) for raw in raws)
        return raws

    def _call(self, inputs: list[Any], outputs: list[Any]) -> list[np.ndarray[Any, Any]]:
        case = self.case
        given = tuple(inputs) if case.as_tuple else inputs
        if case.how == "new":
            result = self.comm.allreduce(given, case.op)
            assert type(result) is list
            assert len(result) == len(inputs)
            return [self.module.read(one) for one in result]
        out = given if case.how == "in place" else tuple(outputs) if case.as_tuple else outputs
        result = self.comm.allreduce(given, case.op, out=out)
        assert result is out, "out= is returned"
        places, buffer = (self.places, self.sources) if case.how == "in place" else (self.targets, self.outs)
        raw = self.module.read(buffer).copy()  # at once: it takes a while for each of a thousand arrays
        return [
            np.ndarray(one.shape, one.dtype, raw.data, at, _strides(one, step)) if one.size else self.module.read(array)
            for one, (at, step), array in zip(case.members, places, out, strict=True)
        ]

    def _expected(self, values: list[list[np.ndarray[Any, Any]]]) -> list[np.ndarray[Any, Any]]:
        """The results, reduced for all members of a dtype at once."""
        results: dict[int, np.ndarray[Any, Any]] = {}
        members = self.case.members
        for dtype in dict.fromkeys(one.dtype for one in members):
            chosen = [index for index, one in enumerate(members) if one.dtype == dtype]
            flat = [np.concatenate([of_rank[index].reshape(-1) for index in chosen]) for of_rank in values]
            parts = np.split(
                reference.wrapping(flat, self.case.op), np.cumsum([members[at].size for at in chosen])[:-1]
            )
            results |= {index: part.reshape(members[index].shape) for index, part in zip(chosen, parts, strict=True)}
        return [results[index] for index in range(len(members))]

    def _look_beside(self, before: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
        """:raises AssertionError: if a byte beside the outputs has changed."""
        how = self.case.how
        for what, buffer, raw, places in (
            ("inputs", self.sources, before[0], self.places if how == "in place" else None),
            ("outputs", self.outs, before[1], self.targets if how == "out" else None),
        ):
            changed = self.module.read(buffer) != raw
            for one, (at, step) in zip(self.case.members, places or (), strict=places is not None):
                if one.size:
                    np.ndarray((*one.shape, one.dtype.itemsize), bool, changed.data, at, (*_strides(one, step), 1))[
                        ...
                    ] = 0
            assert not changed.any(), f"{self.case}: byte {np.flatnonzero(changed)[:4]} of the {what} has changed"


def _strides(one: Member, step: int) -> tuple[int, ...]:
    strides, span = [], step * one.dtype.itemsize
    for length in reversed(one.shape):
        strides.append(span)
        span *= max(1, length)
    return tuple(reversed(strides))
