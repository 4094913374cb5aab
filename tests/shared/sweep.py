"""Random cases of tests/shared/cases.py on this rank: their arrays in memory, the calls, and a look at every byte.

The array module is handed in: it has ``buffer(numpy_bytes)``, ``view(buffer, offset, shape, dtype, strides)`` and
``read(array)``.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import ipcreduce
from ipcreduce.bench.limit import our_backend
from ipcreduce.calls.request import NormShape, with_norm
from tests.shared import norms
from tests.shared.cases import KINDS, Array, Case, Limits, Values, normed
from tests.shared.world import WORLD

GUARD = 64  # bytes before the first array of a buffer and behind the last one
GAPS = (0, 0, 4, 16, 40)  # bytes between two arrays, beyond what alignment takes
PACKET, PAGE = 16, 4096


class Memory:
    """Arrays in one buffer, in an order and at places of this rank's own. All other bytes are random, and stay.

    :param behind: more bytes at the end.
    :param tight: the last array and those bytes end where the memory does, so that an access behind them is a fault:
        under memcheck with no pool on a GPU, and at once on the simulated device, whose memory consists of pages; there
        an array that has to be aligned ends within the last packet.
    """

    def __init__(
        self, module: Any, arrays: Sequence[Array], rng: np.random.Generator, alignment: int, behind: int, tight: bool
    ) -> None:
        self.module, self.arrays, self._rng = module, arrays, rng
        self.places, at = [0] * len(arrays), GUARD
        for index in rng.permutation(len(arrays)):
            one = arrays[index]
            at += int(rng.choice(GAPS)) + one.dtype.itemsize * int(rng.integers(0, 4))
            at += -at % max(alignment, one.dtype.itemsize)
            self.places[index] = at
            at += one.span
        end = at + behind + (0 if tight else GUARD)
        unit = max([alignment, *(one.dtype.itemsize for one in arrays)])
        front = -end % PAGE // unit * unit if tight else 0
        self.places = [place + front for place in self.places]
        self.buffer = module.buffer(np.zeros(front + end, np.uint8))
        self.views = [self.view(one, place) for one, place in zip(arrays, self.places, strict=True)]

    def view(self, one: Array, place: int) -> Any:
        """An array on the device, whose lowest element is at ``place``."""
        return self.module.view(self.buffer, place + one.first, one.shape, one.dtype, one.strides)

    def fill(self, values: Values) -> np.ndarray:
        """Put values into the arrays, if there are any, and random bytes beside them. Returns all bytes."""
        raw = self._rng.integers(0, 256, len(self.buffer), np.uint8)
        for one, place, value in zip(self.arrays, self.places, values, strict=bool(values)):
            one.within(raw, place)[...] = value
        self.buffer[...] = self.module.buffer(raw)
        return raw

    def read(self) -> np.ndarray:
        """All bytes."""
        return self.module.read(self.buffer).copy()


class Played:
    """A case on this rank: the inputs lie in one buffer, and the outputs that have places of their own in another."""

    def __init__(self, module: Any, comm: Any, case: Case, rng: np.random.Generator, tight: bool = False) -> None:
        self.comm, self.case, self.module = comm, case, module
        shift = case.inputs[0].dtype.itemsize if case.shifted else 0
        alignment = PACKET if rng.random() < 0.4 else case.alignment  # of all arrays at once, as kernels want it
        self.sources = Memory(module, case.inputs, rng, alignment, shift, tight)
        self.targets = Memory(module, case.outputs, rng, alignment, 0, tight)
        self.places, self.outs = [], []
        for index, (one, over) in enumerate(zip(case.outputs, case.over, strict=True)):
            memory = self.targets if over is None else self.sources
            laid_out = one if over is None or shift else case.inputs[over]
            place = self.targets.places[index] if over is None else self.sources.places[over] + shift
            self.places.append((memory, laid_out, place))
            same = memory.views[index if over is None else over]
            self.outs.append(memory.view(laid_out, place) if shift else same)

    def run(self, way: str, values: Values) -> list[np.ndarray]:
        """Make the call with these values of the inputs. Returns the outputs.

        :raises AssertionError: if a byte beside the outputs has changed.
        """
        before = {memory: memory.fill(given) for memory, given in ((self.sources, values), (self.targets, []))}
        made = KINDS[self.case.kind].call(self.comm, self.case, way, self.sources.views, self.outs)
        after = {memory: memory.read() for memory in before}
        changed = {memory: after[memory] != raw for memory, raw in before.items()}
        found = []
        for memory, one, place in self.places:
            found.append(one.within(after[memory], place).copy())
            if made is None and one.size:
                strides = (*one.strides, 1)
                mask = np.ndarray(
                    (*one.shape, one.dtype.itemsize), bool, changed[memory].data, place + one.first, strides
                )
                mask[...] = False
        for memory, bad in changed.items():
            what = "inputs" if memory is self.sources else "outputs"
            assert not bad.any(), f"{self.case}: byte {np.flatnonzero(bad)[:4]} of the {what} has changed"
        return found if made is None else [self.module.read(one) for one in made]


def run(
    module: Any, communicators: dict[str, Any], kinds: Sequence[str], seed: int, cases: int, limits: Limits, *,
    first: int = 0, late_seconds: float = 0.002, tight: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run random cases of these kinds. :raises AssertionError: at the first that is wrong, on the rank where it is."""
    counted: Counter[str] = Counter()
    with np.errstate(all="ignore"):
        for number in range(first, first + cases):
            kind = kinds[int(np.random.default_rng([seed, number, 4]).integers(len(kinds)))]
            counted.update(_run_case(module, communicators, kind, (seed, number), limits, late_seconds, tight))
    return {"kinds": list(kinds), "cases": cases, "calls": counted.pop("calls", 0), "counted": dict(counted)}


def _run_case(
    module: Any, communicators: dict[str, Any], name: str, seeds: tuple[int, int], limits: Limits, late: float,
    tight: bool,
) -> Counter[str]:  # fmt: skip
    kind, names, counted = KINDS[name], list(communicators), Counter[str]()
    rank, ranks = WORLD.rank, WORLD.size
    own = np.random.default_rng([*seeds, rank, 1])
    case = kind.draw(np.random.default_rng(seeds), own, ranks, limits)
    turns = []
    for turn in range(case.turns):
        values = [
            kind.values(case, r, np.random.default_rng([*seeds, r, turn, 2]), np.random.default_rng([*seeds, turn, 3]))
            for r in range(ranks)
        ]
        turns.append((values, kind.expected(case, values, rank)))
    checksums: list[set[int]] = [set() for _ in turns]
    for on in [*names, names[0]] if kind.everywhere else [names[seeds[1] % len(names)]]:
        comm = communicators[on]
        if case.late == rank:
            time.sleep(late)
        played = Played(module, comm, case, own, tight)
        for turn, (values, wanted) in enumerate(turns):
            for way in kind.ways(comm, case):
                found = played.run(way, values[rank])
                where = f"rank {rank}, case {seeds[1]}, turn {turn}, {on}, {way}: {case}"
                looked_at = [
                    (*both, at) for at, both in enumerate(zip(found, wanted, strict=True)) if both[1] is not None
                ]
                for one, other, at in looked_at:
                    of_ranks = [of_rank[min(at, len(of_rank) - 1)] for of_rank in values]
                    right = kind.right(case, comm, one, other, of_ranks)
                    assert right, f"{where}\noutput {at}: found {one}\nexpected {other}"
                checksums[turn].add(zlib.crc32(b"".join(one.tobytes() for one, _, _ in looked_at)))
                counted.update(("calls", way))
    everyone = WORLD.allgather(checksums) if kind.alike else [checksums]
    assert all(len(one) == 1 for one in checksums), f"{case}: bits differ between communicators or ways"
    assert all(one == checksums for one in everyone), f"{case}: bits differ between the ranks: {everyone}"
    counted.update(f"{one.dtype.name} of {name}" for one in case.inputs)
    told = f"{name} {case.what}" if isinstance(case.what, str) else getattr(case.what, "scales", "") or "no scales"
    counted.update({getattr(case.what, "collective", told): 1})
    return counted


# Rows, elements of a row, and the algorithm of launches in which the last rank comes too late.
ABANDONED = (
    (1, 2048, "one_shot"),
    (3, 512, "one_shot"),
    (40, 192, "one_shot"),
    (2, 16_384, "one_shot"),
    (1, 4096, "two_shot"),
    (5, 320, "two_shot"),
    (40, 1024, "two_shot"),
)


def abandoned(module: Any, seconds: float = 1.0) -> int:
    """Fused norms for which the last rank comes when the others' waits have ended. Returns their number.

    :raises AssertionError: if those have a result that is not NaN, or if the late rank has a wrong one.
    """
    rank, late = WORLD.rank, WORLD.rank == WORLD.size - 1
    for number, (rows, hidden, algorithm) in enumerate(ABANDONED):
        scales = ("", "given", "token", "group")[number % 4] if hidden % norms.SCALE_GROUP == 0 else "token"
        shape = NormShape(rows, hidden, ("float16", "bfloat16")[number % 2], 1e-6, 0.0, number % 3 > 0, scales)
        comm = ipcreduce.Communicator(backend="ipc", algorithm=algorithm)
        case, kind = normed(shape), KINDS["norm"]
        launches = our_backend(comm, "a sweep of norms").launches
        assert launches.fused(with_norm((rows, hidden), shape)) is not None, shape
        comm.allreduce(module.buffer(np.zeros(4, np.uint8)))  # all have compiled what they need
        comm.synchronize()
        launches._timeout = seconds  # of the kernel alone: start-up takes longer
        values = [
            kind.values(case, r, np.random.default_rng([number, r]), np.random.default_rng(number))
            for r in range(WORLD.size)
        ]
        played = Played(module, comm, case, np.random.default_rng([number, rank, 1]))
        WORLD.Barrier()
        if late:
            WORLD.Barrier()
        found = played.run("fused", values[rank])
        if not late:
            WORLD.Barrier()
        _look_at_abandoned(case, late, found, kind.expected(case, values, rank))
        with contextlib.suppress(ipcreduce.IpcReduceError):  # the fault is told at the next call
            comm.close()
    return len(ABANDONED)


def _look_at_abandoned(case: Case, late: bool, found: list[np.ndarray], right: list[Any]) -> None:
    """All is NaN; on the late rank a row may be right instead."""
    nan = np.array(norms.NAN_BITS[case.what.dtype], np.uint16).view(found[0].dtype)
    lost_values = nan, nan, np.uint8(norms.E4M3_NAN), np.float32(np.nan)
    for at, (output, wanted, lost_value) in enumerate(zip(found, right, lost_values, strict=True)):
        for row in range(len(output) if wanted is not None else 0):
            lost = output[row].tobytes() == np.full_like(output[row], lost_value).tobytes()
            same = output[row].tobytes() == wanted[row].tobytes()
            if at == 1 and late:  # in residual_out NaN is what is missing of it
                bits, other = (one[row].view(np.uint16) for one in (output, wanted))
                same = bool(((bits == nan.view(np.uint16)) | (bits == other)).all())
            assert lost or (same and late), f"output {at}, row {row}: {case}"
