"""Random all-reduces with RMSNorm on every rank, by the fused kernels and by the unfused pair, checked against NumPy.

tests/gpu/norm_sweep.py runs them on GPUs, and tests/sim on the simulated device. The array module is handed in, as in
tests/shared/sweep_cases.py.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ipcreduce
from ipcreduce.bench.limit import our_backend
from ipcreduce.calls.addresses import NormAddresses
from ipcreduce.calls.request import NormShape
from ipcreduce.cuda import cupy_runtime
from ipcreduce.ipc import launches
from tests.shared import norms, reference

POISON = 0xA5
GUARD = 64  # bytes before and behind an array
HIDDEN = (64, 128, 192, 1024, 2880, 4096, 5120, 7168, 8192, 16_384)


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank but for the values.

    :ivar in_place: "", "x" (out is the input), "residual" (residual_out is the residual), or "both".
    :ivar late: a rank that comes late, or -1.
    :ivar plain: bytes of a plain all-reduce that follows, or 0.
    """

    number: int
    shape: NormShape
    in_place: str
    special: bool
    turns: int
    late: int
    plain: int

    @classmethod
    def draw(cls, seed: int, number: int, ranks: int, largest: int, rows: int) -> Case:
        """Case ``number``: of up to ``largest`` bytes and ``rows`` rows."""
        rng = np.random.default_rng([seed, number])
        hidden = int(rng.choice(HIDDEN)) if rng.random() < 0.6 else 64 * int(2 ** rng.uniform(0, 8))
        dtype = str(rng.choice(["float16", "bfloat16", "bfloat16", "float32"]))
        if rng.random() < 0.1:
            hidden = int(rng.integers(1, 3000))
        scales = str(rng.choice(["", "", "given", "token", "group"]))
        if scales == "group" and hidden % 128:
            scales = "token"
        most = max(1, min(rows, largest // (hidden * norms.DTYPES[dtype].itemsize)))
        shape = NormShape(
            rows=int(rng.integers(1, most + 1)) if rng.random() < 0.5 else int(2 ** rng.uniform(0, np.log2(most))),
            hidden=hidden, dtype=dtype,
            eps=float(np.float32(rng.choice([1e-6, 1e-5, 0.1]))), weight_bias=float(rng.choice([0.0, 1.0])),
            residual=bool(rng.random() < 0.8), scales=scales,
            column_major=scales == "group" and bool(rng.random() < 0.5),
            keeps_y=not scales or bool(rng.random() < 0.5),
        )  # fmt: skip
        late = int(rng.integers(ranks)) if rng.random() < 0.1 else -1
        return cls(
            number, shape, str(rng.choice(["", "x", "residual", "both"])), bool(rng.random() < 0.3),
            int(rng.choice([1, 1, 3])), late, int(2 ** rng.uniform(4, 16)) * bool(rng.random() < 0.5),
        )  # fmt: skip


def run(
    module: Any, communicators: dict[str, Any], seed: int, cases: int, largest: int, *, rows: int = 300,
    late_seconds: float = 0.002, first: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Run cases, each on the next one of the communicators. :raises AssertionError: at the first that is wrong."""
    counted: Counter[str] = Counter()
    names = list(communicators)
    for number in range(first, first + cases):
        comm = communicators[names[number % len(names)]]
        case = Case.draw(seed, number, comm.size, largest, rows)
        if case.late == comm.rank:
            time.sleep(late_seconds)
        with np.errstate(all="ignore"):
            counted.update(Played(module, comm, case, seed).run())
        counted[case.shape.scales or "no scales"] += 1
        counted["rows"] += case.shape.rows
    return {"cases": cases, "counted": dict(counted)}


class Played:
    """A case on one rank: its arrays, launches and comparisons."""

    def __init__(self, module: Any, comm: Any, case: Case, seed: int) -> None:
        self.module, self.comm, self.case, self.seed = module, comm, case, seed
        self.backend = our_backend(comm, "a sweep of norms")
        self.launches, self.shape = self.backend.launches, case.shape
        self.dtype, self.size = norms.DTYPES[case.shape.dtype], (case.shape.rows, case.shape.hidden)

    def run(self) -> Counter[str]:
        """Run it by the fused kernel, if there is one, and by the pair. Returns the number of calls by kernel."""
        found: Counter[str] = Counter()
        fused = self.launches.fused_norm(self.shape)
        pair = self.launches.norm_kernels.pair_launch(self.shape)
        for turn in range(self.case.turns):
            values = self._values(turn)
            if fused is not None:
                self._call(values, turn, lambda one: self._start(fused, one), "fused")
                found[self._kernel()] += 1
            self._call(values, turn, lambda one: self._start_pair(pair, one), "pair")
            found["pair"] += 1
            self._reduce_plainly(turn)
        return found

    def _kernel(self) -> str:
        plan = self.launches.norm_plan(self.shape)
        assert plan is not None
        tiled = " in tiles" if plan.tiles(self.shape.rows) > 1 else ""
        return f"{plan.kernel}, {plan.cluster} blocks a row, depth {plan.depth}{tiled}"

    def _values(self, turn: int) -> tuple[list[Any], Any, Any, np.float32]:
        """The inputs of all ranks, this rank's residual and weight, and the scale if that is given."""
        rng = np.random.default_rng([self.seed, self.case.number, turn])
        inputs = [reference.random_array(rng, self.size, self.dtype, False) for _ in range(self.comm.size)]
        if self.case.special:
            for values in inputs:
                at = int(rng.integers(self.shape.rows)), int(rng.integers(self.shape.hidden))
                bits = reference.random_array(rng, (1,), self.dtype, True)
                values[at] = bits[0]
        residual = reference.random_array(rng, self.size, self.dtype, False)
        weight = reference.random_array(rng, (self.shape.hidden,), self.dtype, False)
        return inputs, residual, weight, np.float32(rng.uniform(0.001, 0.1))

    def _call(self, values: Any, turn: int, start: Any, how: str, late: bool | None = None) -> None:
        """One call on new arrays, with all results poisoned before, and compared afterwards.

        :param late: the last rank comes too late, and this rank is that one.
        """
        inputs, residual, weight, given = values
        shape, in_place = self.shape, self.case.in_place
        source, added = self._array(inputs[self.comm.rank]), self._array(residual)
        row = self._array(weight)
        out = source if in_place in ("x", "both") else self._array(np.zeros_like(residual), POISON)
        residual_in_place = shape.residual and in_place in ("residual", "both")
        residual_out = added if residual_in_place else self._array(np.zeros_like(residual), POISON)
        quantised = self._array(np.zeros(self.size, np.uint8), POISON)
        groups = shape.hidden // 128 if shape.scales == "group" else 1
        size = (groups, shape.scales_stride) if shape.column_major else (shape.rows, groups)
        scales = self._array(np.full(size, given, np.float32))
        arrays = (source, row, added, out, residual_out, quantised, scales)
        start(
            NormAddresses(
                source=source.address,
                weight=row.address,
                residual=added.address * shape.residual,
                out=out.address * (shape.keeps_y or how == "pair"),
                residual_out=residual_out.address,
                quantised=quantised.address * bool(shape.scales),
                scales=scales.address * bool(shape.scales),
            )
        )
        if late is None:
            self.comm.synchronize()
        else:  # which would tell the fault
            cupy_runtime.load().cuda.get_current_stream().synchronize()
        right = norms.results(
            reference.reduce(inputs, "sum"), residual if shape.residual else None, weight, dtype=shape.dtype,
            eps=shape.eps, weight_bias=shape.weight_bias, scales=shape.scales, given=float(given),
        )  # fmt: skip
        found = norms.Results(
            residual_out.read(),
            out.read(),
            quantised.read() if shape.scales else None,
            (scales.read().T[: shape.rows].copy() if shape.column_major else scales.read())
            if right.scales is not None
            else None,
        )
        self.compare(found, right, f"{how}, turn {turn}, {self.case}", late)
        for array in arrays:
            array.check(f"{how}, {self.case}")

    def compare(self, found: norms.Results, right: norms.Results, what: str, late: bool | None) -> None:
        """:raises AssertionError: if a result has not the bits of the contract."""
        for name, one, other in zip(found._fields, found, right, strict=True):
            if one is not None and other is not None and (name != "y" or self.shape.keeps_y):
                assert norms.same(one, other), f"{name}: {what}"

    def _array(self, values: Any, poison: int | None = None) -> Guarded:
        return Guarded(self.module, values, poison)

    def _start(self, launch: Any, addresses: NormAddresses) -> None:
        launch.set(addresses)
        stream, owner = cupy_runtime.stream_of()
        self.backend.order.launch(launch.launch.run, stream, owner)

    def _start_pair(self, launch: Any, addresses: NormAddresses) -> None:
        """The plain all-reduce into ``out``, and then the norm of it in place."""
        given = self.launches.prepare(
            self.size, self.dtype, self.shape.dtype, "sum", self.shape.elements * self.dtype.itemsize
        )  # fmt: skip
        stream, owner = cupy_runtime.stream_of()
        self.backend.run(partial(self.backend.start, given, addresses.source, addresses.out), stream, owner)
        self._start(launch, addresses._replace(source=addresses.out))

    def _reduce_plainly(self, turn: int) -> None:
        """A plain all-reduce between two fused ones, which shares workspace and epochs with them."""
        if not self.case.plain:
            return
        count = -(-self.case.plain // 4)
        result = self.comm.allreduce(self.module.buffer(np.full(4 * count, 0, np.uint8)).view(np.float32) + turn + 1)
        assert (self.module.read(result) == (turn + 1) * self.comm.size).all(), f"a plain all-reduce after {self.case}"


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


def abandoned(module: Any, world: Any, seconds: float = 1.0) -> int:
    """Launches for which the last rank comes when the others' waits have ended. Returns their number.

    :raises AssertionError: if those have a result that is not NaN, or if the late rank has a wrong one.
    """
    for number, (rows, hidden, algorithm) in enumerate(ABANDONED):
        scales = ("", "given", "token", "group")[number % 4] if hidden % 128 == 0 else "token"
        shape = NormShape(rows, hidden, ("float16", "bfloat16")[number % 2], 1e-6, 0.0, number % 3 > 0, scales)
        comm = ipcreduce.Communicator(backend="ipc", algorithm=algorithm)
        Late(module, comm, Case(number, shape, "", False, 1, -1, 0), number).run_late(world, seconds)
        with contextlib.suppress(ipcreduce.IpcReduceError):  # the fault is told at the next call
            comm.close()
    return len(ABANDONED)


class Late(Played):
    """A launch for which the last rank comes too late."""

    def run_late(self, world: Any, seconds: float) -> None:
        """Run it on the other ranks, and then on the last one."""
        fused = self.launches.fused_norm(self.shape)
        assert fused is not None, self.shape
        fused.args[launches._TIMEOUT] = int(seconds * 1e9)  # of the kernel alone: start-up takes longer
        self.comm.allreduce(self.module.buffer(np.zeros(4, np.uint8)))  # all have compiled what they need
        self.comm.synchronize()
        world.Barrier()
        if world.rank == world.size - 1:
            world.Barrier()
        values = self._values(0)
        self._call(values, 0, lambda one: self._start(fused, one), "fused", late=world.rank == world.size - 1)
        if world.rank != world.size - 1:
            world.Barrier()

    def compare(self, found: norms.Results, right: norms.Results, what: str, late: bool | None) -> None:
        """All NaN; on the late rank a row may be right instead."""
        none = 0x7F
        nan = np.array(norms.NAN_BITS[self.shape.dtype], np.uint16).view(found.y.dtype)
        for row in range(self.shape.rows):
            for name, one, other in zip(found._fields, found, right, strict=True):
                if one is None or other is None:
                    continue
                given = {"quantised": np.uint8(none), "scales": np.float32(np.nan)}.get(name, nan)
                lost = one[row].tobytes() == np.full_like(one[row], given).tobytes()
                same = one[row].tobytes() == other[row].tobytes()
                if name == "residual_out" and late:  # NaN is what is missing of it
                    missing = one[row].view(np.uint16) == nan.view(np.uint16)
                    same = bool((missing | (one[row].view(np.uint16) == other[row].view(np.uint16))).all())
                assert lost or (same and late), f"{name} of row {row}: {what}"


class Guarded:
    """A device array, with bytes around it that nothing may write."""

    def __init__(self, module: Any, values: Any, poison: int | None) -> None:
        self._module, self._shape, self._dtype = module, values.shape, values.dtype
        raw = np.full(values.nbytes + 2 * GUARD, POISON, np.uint8)
        if poison is None:
            raw[GUARD : GUARD + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self._buffer = module.buffer(raw)
        self.address = int(self._buffer.data.ptr) + GUARD
        assert self.address % 16 == 0

    def read(self) -> Any:
        """The values, on the host."""
        return self._bytes()[GUARD:-GUARD].view(self._dtype).reshape(self._shape)

    def check(self, what: str) -> None:
        """:raises AssertionError: if what lies around the array has changed."""
        found = self._bytes()
        around = np.concatenate([found[:GUARD], found[-GUARD:]])
        assert (around == POISON).all(), f"written beside an array: {what}"

    def _bytes(self) -> Any:
        return self._module.read(self._buffer)
