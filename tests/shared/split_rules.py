"""What holds for calls that split arrays, on NumPy's arrays and on CuPy's: bits, empty parts, and forms of arguments.

Random calls are in tests/shared/splits.py. The array module is handed in, as in tests/shared/sweep.py.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.shared import reference
from tests.shared.bad_call_table import ours, read_only
from tests.shared.world import WORLD

RANK, N = WORLD.rank, WORLD.size
PATTERNS = {  # quiet and signalling NaN with payloads, -0, a denormal, and what an empty slot has
    "f2": (0x7E01, 0x7D55, 0xFE01, 0x8000, 0x0001, 0xFFFF), "f4": (0x7FC00001, 0x7FA55555, 0x80000000, 1, 0xFFFFFFFF),
    "f8": (0x7FF8000000000001, 0x7FF5555555555555, 1 << 63, 1, (1 << 64) - 1, 0xFFFFFFFF, 0xFFFFFFFF << 32),
    "i4": (0xFFFFFFFF, 0, 0x7FFFFFFF),
}  # fmt: skip


def same_bits(module: Any, found: Any, due: np.ndarray, what: Any) -> None:
    values = np.array(module.read(found), order="C")
    assert values.shape == due.shape, f"rank {RANK}: {what} has shape {values.shape}, not {due.shape}"
    assert values.tobytes() == due.tobytes(), f"rank {RANK}: {what} is {values}, not {due}"


def new(module: Any, values: np.ndarray) -> Any:
    return ours(module, values, values.dtype)


def sizes_of(length: int, first: int = 0) -> list[int]:
    """Unequal lengths, of which the last one is 0 if there are more than two."""
    sizes = [(length - first) // N + rank for rank in range(N)]
    if N > 2:
        sizes[-1] = 0
    sizes[0] += length - sum(sizes)
    return sizes


def parts_have_the_bits_of_allreduce(module: Any, comm: Any, lengths: tuple[int, ...] = (37,)) -> None:
    """For all dtypes and ops, and bits of any kind: at any place of any array, the same ones."""
    rng = np.random.default_rng((5, RANK))
    for length in lengths:
        few = length > 10_000
        for dtype in (reference.BFLOAT16, np.dtype("i1")) if few else (*reference.DTYPES, np.dtype("c8")):
            for op in ("sum", "avg") if few or dtype.kind == "c" else reference.OPS:
                kind = np.dtype("f4") if dtype.kind == "c" else dtype
                words = 2 if dtype.kind == "c" else 1
                values = reference.random_array(rng, (length, 3 * words), kind, True).view(dtype)
                x = new(module, values)
                whole, sizes = module.read(comm.allreduce(x, op)), sizes_of(length)
                begin = sum(sizes[:RANK])
                due = whole[begin : begin + sizes[RANK]]
                same_bits(module, comm.reduce_scatter(x, op, sizes=sizes), due, (dtype, op))
                if not few:
                    turned = new(module, np.ascontiguousarray(values.T))
                    found = comm.reduce_scatter(turned, op, axis=-1, sizes=sizes)
                    same_bits(module, found, np.ascontiguousarray(due.T), (dtype, op, "axis -1"))


def bits_are_moved_as_they_are(module: Any, comm: Any) -> None:
    for letters, patterns in PATTERNS.items():
        unsigned = np.dtype(f"u{letters[1]}")
        values = np.array(patterns * 5, unsigned).view(letters)
        parts = [np.roll(values, rank) for rank in range(N)]
        same_bits(module, comm.allgather(new(module, parts[RANK])), np.concatenate(parts), letters)
        square = [part.reshape(5, -1) for part in parts]
        found = comm.allgather(new(module, square[RANK]), axis=1)
        same_bits(module, found, np.concatenate(square, 1), letters)
        x = new(module, parts[RANK])
        assert comm.broadcast(x, N - 1) is x
        same_bits(module, x, parts[-1], letters)
    for dtype in ("?", "c8", "c16", "u1", "i8"):
        values = np.arange(6 * N).reshape(2 * N, 3).astype(dtype)
        x = new(module, values[2 * RANK : 2 * RANK + 2])
        same_bits(module, comm.allgather(x), values, dtype)


def zeros_take_part(module: Any, comm: Any, turns: int = 50) -> None:
    """Ranks without rows, in turns with all-reduces, and with no word between the calls.

    A row takes several warps, so that what one call leaves in slots is there for a warp of the next.
    """
    total, found = N * (N + 1) // 2, []
    for turn in range(turns):
        sizes = [0] * N
        sizes[turn % N] = 1 + turn % 5
        mine = np.full((sizes[RANK], 301), RANK + turn, "f4")
        due = np.full((sum(sizes), 301), turn % N + turn, "f4")
        found.append((comm.allgather(new(module, mine), sizes=sizes), due))
        rows = np.full((sum(sizes), 301), RANK + 1, "i4")
        part = np.full((sizes[RANK], 301), total, "i4")
        found.append((comm.reduce_scatter(new(module, rows), sizes=sizes), part))
        if turn % 3 == 0:
            whole = new(module, np.full(turn + 1, RANK + 1, "f4"))
            found.append((comm.allreduce(whole), np.full(turn + 1, total, "f4")))
        if turn % 4 == 0:
            x = new(module, np.full(7, RANK, "i8"))
            found.append((comm.broadcast(x, turn % N), np.full(7, turn % N, "i8")))
    for result, due in found:
        same_bits(module, result, due, "a result")
    nothing = comm.allgather(new(module, np.zeros((0, 3), "f4")))
    assert nothing.shape == (0, 3)
    assert comm.reduce_scatter(new(module, np.zeros((N, 0), "f4"))).shape == (1, 0)
    x = new(module, np.zeros(0, "f4"))
    assert comm.broadcast(x) is x
    assert comm.allgather([]) == comm.reduce_scatter([]) == []


def forms_of_arguments(module: Any, comm: Any) -> None:
    every = np.arange(N)
    for of in (int, float, lambda rank: rank % 2 == 1, lambda rank: rank * 1j, np.float32, np.int8):
        found = comm.allgather(of(RANK))
        assert isinstance(found, np.ndarray), type(found)
        assert (found == np.array([of(rank) for rank in range(N)])).all(), found
        assert found.dtype == np.asarray(of(RANK)).dtype
    same_bits(module, comm.allgather(new(module, np.array(RANK, "f4"))), every.astype("f4"), "of no axes")
    same_bits(module, comm.allgather(new(module, np.array(RANK, "f4")), axis=-1), every.astype("f4"), "of no axes")
    scalar = new(module, np.array(RANK, "f4"))
    comm.broadcast(scalar, N - 1)
    same_bits(module, scalar, np.array(N - 1, "f4"), "of no axes")
    x = new(module, np.full((2, 3), RANK, "f4"))
    for axis, shape in ((np.int64(1), (2, 3 * N)), (-2, (2 * N, 3)), (np.int8(-1), (2, 3 * N))):
        assert comm.allgather(x, axis=axis).shape == shape
        assert comm.reduce_scatter(comm.allgather(x, axis=axis), axis=axis).shape == (2, 3)
    for sizes in ([2] * N, (2,) * N, np.full(N, 2), [np.int32(2)] * N):
        assert comm.allgather(x, sizes=sizes).shape == (2 * N, 3)
        assert comm.reduce_scatter(comm.allgather(x), sizes=sizes).shape == (2, 3)
    frozen = new(module, np.full(5, RANK, "f4"))
    if RANK == N - 1:
        if isinstance(frozen, np.ndarray):
            frozen.flags.writeable = False
        else:
            frozen = read_only(frozen)
    assert comm.broadcast(frozen, N - 1) is frozen
    if RANK != N - 1:
        same_bits(module, frozen, np.full(5, N - 1, "f4"), "broadcast from a read-only array")


def layouts_are_written_through(module: Any, comm: Any) -> None:
    """And nothing beside them."""
    values = np.arange(6.0, dtype="f4").reshape(2, 3) + 10 * RANK
    due = np.concatenate([np.arange(6.0, dtype="f4").reshape(2, 3) + 10 * rank for rank in range(N)])
    wide = new(module, np.full((2 * N, 6), -1, "f4"))
    out = wide[:, ::2]
    assert comm.allgather(new(module, values), out=out) is out
    assert (module.read(wide)[:, ::2] == due).all()
    assert (module.read(wide)[:, 1::2] == -1).all()
    turned = new(module, np.full((3, 2 * N), -1, "f4")).T
    assert comm.allgather(new(module, values.copy().T).T, out=turned) is turned
    assert (module.read(turned) == due).all()
    part = new(module, np.full((2, 6), -1, "f4"))
    total = np.float32(N * 10 * (N - 1) // 2) + N * np.arange(6.0, dtype="f4").reshape(2, 3)
    comm.reduce_scatter(new(module, np.concatenate([values] * N)), out=part[:, ::2])
    assert (module.read(part)[:, ::2] == total).all()
    assert (module.read(part)[:, 1::2] == -1).all()
    x = new(module, np.full((4, 6), RANK, "f4"))
    rest = x[:, ::2]
    assert comm.broadcast(rest, N - 1) is rest
    assert (module.read(x)[:, ::2] == N - 1).all()
    assert (module.read(x)[:, 1::2] == RANK).all()


def lists_of_all_dtypes(module: Any, comm: Any) -> None:
    """In one call, of any shapes, and with outputs of their own."""
    dtypes = "f4", "i1", "f8", "f4", ml_dtypes.bfloat16, "u2"
    whole = [np.arange(2 * N * count).reshape(2 * N, count).astype(dtype) for count, dtype in enumerate(dtypes)]
    arrays = [new(module, one[2 * RANK : 2 * RANK + 2]) for one in whole]
    outs = [new(module, np.zeros_like(one)) for one in whole]
    assert comm.allgather(arrays, out=outs) is outs
    for results in (outs, comm.allgather(tuple(arrays))):
        for found, due in zip(results, whole, strict=True):
            same_bits(module, found, due, "a member")
    parts = comm.reduce_scatter([new(module, one) for one in whole], "max")
    for found, due in zip(parts, whole, strict=True):
        same_bits(module, found, due[2 * RANK : 2 * RANK + 2], "a member")
    given = [new(module, one + RANK) for one in whole]
    assert comm.broadcast(given) is given
    for found, due in zip(given, whole, strict=True):
        same_bits(module, found, due, "a member")


def ranks_count_an_axis_from_either_end(module: Any, comm: Any) -> None:
    """It is one call, also of a list, if the arrays have as many axes, and also when it comes again."""
    values = np.arange(6.0, dtype="f4").reshape(2, 3)
    x, own = new(module, values + RANK), (1, -1)[RANK % 2]
    due = np.concatenate([values + rank for rank in range(N)], 1)
    for _ in range(4):
        found = [comm.allgather(x, axis=own), *comm.allgather([x, x], axis=own)]
        for one in (*found, *comm.allgather([x], axis=own)):
            same_bits(module, one, due, f"axis {own}")
        for one in comm.reduce_scatter(found, "max", axis=own):
            same_bits(module, one, due[:, 3 * RANK : 3 * RANK + 3], f"axis {own}")


RULES = (
    parts_have_the_bits_of_allreduce, bits_are_moved_as_they_are, zeros_take_part, forms_of_arguments,
    layouts_are_written_through, lists_of_all_dtypes, ranks_count_an_axis_from_either_end,
)  # fmt: skip
