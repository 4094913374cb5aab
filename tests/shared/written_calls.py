"""Calls as people write them: other names of ops, numbers, and bool and complex arrays, checked on every rank.

tests/mpi runs it on NumPy arrays, tests/sim and tests/gpu on device arrays. The array module is handed in, as in
tests/shared/sweep.py.
"""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from tests.shared import reference
from tests.shared.bad_call_table import HostTensor
from tests.shared.world import WORLD

NAMES = (("mean", "avg"), ("product", "prod"), (MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"))
VIEWS = {"?": ("u1", ("min", "max")), "F": ("f4", ("sum", "avg")), "D": ("f8", ("sum", "avg"))}
SHAPES = [(), (0,), (1,), (7,), (5, 3), (1001,), (40_000,)]
LAYOUTS = ("plain", "shifted", "every second, backwards")
OUTPUTS = ("new", "out", "strided out", "in place")


def run(module: Any, comm: Any) -> int:
    """Makes all of them. :returns: how many calls. :raises AssertionError: at the first result that is wrong."""
    numbers(comm)
    return names_of_ops(module, comm) + truth_values(module, comm) + views(module, comm)


def numbers(comm: Any) -> None:
    """Python's and NumPy's, which come back as the same type; every rank brings another value."""
    n, r, total = comm.size, comm.rank, comm.size * (comm.size + 1) // 2
    for value, op, due in (
        (r + 1, "sum", total),
        (r + 1.5, MPI.SUM, total + n / 2),
        (0.1, "sum", functools.reduce(operator.add, [0.1] * n)),
        (r == 0, "max", True),
        (r == 0, "min", n == 1),
        (r == 0, "any", True),
        (r == 0, MPI.LAND, n == 1),
        (complex(r, 1), "mean", complex((n - 1) / 2, 1)),
        (-2 * r - 3, "avg", -(n + 2)),
        (np.float32(r + 1), MPI.MAX, np.float32(n)),
        (np.float64(r + 1), "mean", np.float64(total / n)),
        (np.int8(r + 1), "min", np.int8(1)),
        (np.bool_(r == n - 1), "max", np.True_),
        (np.complex64(r + 1j), "sum", np.complex64(complex(total - n, n))),
        (ml_dtypes.bfloat16(r + 1), "sum", ml_dtypes.bfloat16(total)),
    ):
        found = comm.allreduce(value, op)
        where = f"rank {r}: {op} of {value!r} is {found!r}, not {due!r}"
        assert type(found) is type(value), where
        assert found == due, where
    for dtype in ("f8", "?", "F"):
        array = np.full((), 1, dtype)
        for given in (array, HostTensor(array)):
            found = comm.allreduce(given, "max" if dtype == "?" else "sum")
            assert type(found) is np.ndarray
            assert (found.shape, found.dtype, found) == ((), array.dtype, 1 if dtype == "?" else n)


def names_of_ops(module: Any, comm: Any) -> int:
    """Ranks may write an op's name in different ways."""
    for turn, (written, op) in enumerate(NAMES):
        values = [np.arange(6, dtype=np.float32) + rank for rank in range(comm.size)]
        array = place(module, values[comm.rank])
        for _ in range(3):
            found = comm.allreduce(array, op if comm.rank == turn % comm.size else written)
            comm.synchronize()
            assert np.array_equal(module.read(found), reference.reduce(values, op)), f"rank {comm.rank}: {op}"
    return 3 * len(NAMES)


def truth_values(module: Any, comm: Any) -> int:
    """Bool arrays, of which each rank has another part True; ranks may write the op in different ways."""
    n, r = comm.size, comm.rank
    mine = np.arange(3 * n) // 3 == r
    mine[0] = True
    everywhere = (mine if n == 1 else np.arange(3 * n) == 0).tolist()
    for written, other, due in (("any", MPI.LOR, [True] * 3 * n), ("all", MPI.LAND, everywhere)):
        array, out = place(module, mine), place(module, ~mine)
        for turn in range(4):
            op = written if turn < 3 or r % 2 else other
            found = comm.allreduce(array, op)
            assert comm.allreduce(array, op, out=out) is out
            comm.synchronize()
            assert [module.read(one).tolist() for one in (found, out)] == [due, due], f"rank {r}: {op}"
    return 2


def views(module: Any, comm: Any) -> int:
    """dtype x op x shape x layout x output: the same bits on every rank, and those of the real parts."""
    checksums = []
    for number, (dtype, op, shape) in enumerate(cases()):
        view = VIEWS[dtype][0]
        values = []
        for rank in range(comm.size):
            rng = np.random.default_rng([number, rank])
            if dtype == "?":
                values.append(rng.integers(0, 2, shape).astype(bool))
            else:
                parts = reference.random_array(rng, (*shape, 2), np.dtype(view), special=number % 2 == 1)
                values.append(parts.view(dtype).reshape(shape))
        seen = [value.view(view) if dtype == "?" else as_parts(value, view) for value in values]
        with np.errstate(invalid="ignore"):  # as signalling NaN are widened to be compared
            due = reference.reduce(seen, op)
            layout, output = LAYOUTS[(number + comm.rank) % 3], OUTPUTS[number // 2 % 4]
            found = one(module, comm, values[comm.rank], op, layout, output)
            bits = found.view(view) if dtype == "?" else as_parts(found, view)
            where = f"rank {comm.rank}: {op} of {np.dtype(dtype)} {shape}, {layout}, {output}"
            same = reference.near(bits, seen, op) if comm.backend == "nccl" else reference.same(bits, due)
            assert same, f"{where}\nfound {found}\nexpected {due}"
        checksums.append(zlib.crc32(bits.tobytes()))
    for case, of_ranks in zip(cases(), zip(*WORLD.allgather(checksums), strict=True), strict=True):
        assert len(set(of_ranks)) == 1, f"{case}: the bits differ between ranks"
    return len(checksums)


def cases() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for dtype, (_, ops) in VIEWS.items():
        for shape, op, _ in itertools.product(SHAPES, ops, range(2)):
            yield dtype, op, shape


def as_parts(value: np.ndarray, view: str) -> np.ndarray:
    return np.stack([value.real, value.imag], -1).astype(view, copy=False)


def place(module: Any, value: np.ndarray, layout: str = "plain") -> Any:
    """An array of the module's kind with these values, laid out so in a larger buffer."""
    size, count = value.itemsize, value.size
    front, step = {"plain": (0, size), "shifted": (size, size)}.get(layout, (2 * size * max(0, count - 1), -2 * size))
    raw = np.full(size * (2 * count + 2), 7, np.uint8)
    strides: list[int] = []
    for length in value.shape[::-1]:
        strides.insert(0, step)
        step *= max(1, length)
    np.ndarray(value.shape, value.dtype, raw.data, front, tuple(strides))[...] = value
    return module.view(module.buffer(raw), front, value.shape, value.dtype, tuple(strides))


def one(module: Any, comm: Any, value: np.ndarray, op: str, layout: str, output: str) -> np.ndarray:
    """The result of one call."""
    array = place(module, value, layout)
    if output == "new":
        result = comm.allreduce(array, op)
        assert isinstance(result, type(array))
        assert (result.shape, result.dtype, result.flags.c_contiguous) == (value.shape, value.dtype, True)
    else:
        out = array
        if output != "in place":
            out = place(module, np.zeros_like(value), LAYOUTS[2] if output == "strided out" else "plain")
        result = comm.allreduce(array, op, out=out)
        assert result is out
    comm.synchronize()
    if output != "in place":
        assert module.read(array).tobytes() == value.tobytes(), "changed its input"
    return module.read(result).copy()
