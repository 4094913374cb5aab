"""Random calls of every kind, the same on all ranks but for layouts and values, and what NumPy says that they give.

:data:`KINDS` is the table. A kind is drawn, gets values, is called, and its results are compared: a new collective is
one more row with functions of its own. tests/shared/sweep.py lays out the arrays, and looks at every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ipcreduce import FP8, Map
from ipcreduce.bench.limit import our_backend
from ipcreduce.calls.addresses import NormAddresses
from ipcreduce.calls.request import NormShape, Request, with_norm
from ipcreduce.cuda import cupy_runtime
from ipcreduce.device import epilogues
from tests.shared import norms, reference, splits
from tests.shared.case import Array, Case, Limits, Values, placed
from tests.shared.reference import BFLOAT16

# Dtype and op of a call with an expression, and the dtypes of its operands. Each is a kernel of its own.
EXPRESSIONS = [
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
MANY = (162, 163, 400, 1356, 1357, 2000)  # members of a list: around the places of the kernels' tables
HIDDEN = (64, 128, 192, 1024, 2880, 4096, 5120, 7168, 8192, 16_384)


# ---- one array, and a list of arrays
def draw_plain(rng: np.random.Generator, own: np.random.Generator, ranks: int, limits: Limits) -> Case:
    dtype = reference.DTYPES[int(rng.integers(len(reference.DTYPES)))]
    op = str(rng.choice(reference.OPS))
    kind = rng.random()
    if kind < 0.06:
        shape: tuple[int, ...] = [(), (0,), (3, 0, 2), (1,)][int(rng.integers(4))]
    else:
        low, high = (np.log2(max(1, size / dtype.itemsize)) for size in (limits.smallest, limits.largest))
        count = int(2 ** rng.uniform(low, high))
        shape = (count,) if kind < 0.6 else (max(1, count // 7), 7) if kind < 0.8 else (max(1, count // 6), 2, 3)
    how = str(rng.choice(["new", "out", "in place", "strided out", "shifted"], p=[0.3, 0.25, 0.25, 0.1, 0.1]))
    strided = bool(rng.random() < 0.15) and len(shape) == 2 and how != "in place"
    late = int(rng.integers(ranks)) if rng.random() < 0.05 else -1
    source = Array.of(dtype, shape, 2 if strided else 1, backwards=strided)
    out = Array.of(dtype, shape, 2 if how == "strided out" else 1)
    where = placed("out" if how == "shifted" and strided else how, 1)
    return Case("plain", op, (source,), (out,), special=bool(rng.random() < 0.4), late=late, **where)


def call_plain(comm: Any, case: Case, way: str, inputs: list[Any], outs: list[Any]) -> list[Any] | None:
    out = None if case.new else outs[0]
    result = comm.allreduce(inputs[0], case.what, out=out)
    assert out is None or result is out
    return [result] if case.new else None


def draw_list(rng: np.random.Generator, own: np.random.Generator, ranks: int, limits: Limits) -> Case:
    count = int(2 ** rng.uniform(0, 6.5)) if rng.random() < 0.9 else int(rng.choice(MANY))
    count = 0 if rng.random() < 0.02 else min(count, limits.members)
    dtypes = rng.choice(len(reference.DTYPES), 1 if rng.random() < 0.6 else 3)
    left = int(2 ** rng.uniform(4, np.log2(limits.largest)))
    pairs = []
    for _ in range(count):
        dtype = reference.DTYPES[int(rng.choice(dtypes))]
        pairs.append(_draw_member(rng, dtype, max(1, min(left, int(rng.exponential(left / count))))))
        left = max(1, left - pairs[-1][0].size * dtype.itemsize)
    how = str(rng.choice(["new", "out", "in place"]))
    late = int(rng.integers(ranks)) if rng.random() < 0.03 else -1
    turns = 3 if rng.random() < 0.3 else 1
    op, form = str(rng.choice(reference.OPS)), tuple if rng.random() < 0.2 else list
    inputs, outputs = (tuple(pair[which] for pair in pairs) for which in (0, 1))
    return Case(
        "list", op, inputs, outputs, special=bool(rng.random() < 0.3), turns=turns, late=late, more=form,
        **placed(how, count),
    )  # fmt: skip


def _draw_member(rng: np.random.Generator, dtype: np.dtype, nbytes: int) -> tuple[Array, Array]:
    kind, count = rng.random(), max(1, nbytes // dtype.itemsize)
    shape: tuple[int, ...] = (count,)
    if kind < 0.1:
        shape = [(), (0,), (3, 0, 2), (1,)][int(rng.integers(4))]
    elif kind < 0.3:
        shape = (max(1, count // 7), 7)
    source, out = (Array.of(dtype, shape, int(rng.choice((1, 1, 1, 1, 2)))) for _ in range(2))
    return source, out


def list_ways(comm: Any, case: Case) -> list[str]:
    """Some are called one by one, too: the bits are the same."""
    return ["list", "one by one"] if comm.backend != "nccl" and len(case.inputs) % 4 == 0 else ["list"]


def call_list(comm: Any, case: Case, way: str, inputs: list[Any], outs: list[Any]) -> list[Any] | None:
    if way == "one by one":
        return [comm.allreduce(one, case.what) for one in inputs]
    given = case.more(inputs)
    out = None if case.new else given if case.over[:1] == (0,) else case.more(outs)
    result = comm.allreduce(given, case.what, out=out)
    assert type(result) is list if case.new else result is out
    return result if case.new else None


def values_of_any_kind(case: Case, rank: int, own: np.random.Generator, common: np.random.Generator) -> Values:
    return [reference.random_array(own, one.shape, one.dtype, case.special) for one in case.inputs]


def reduced(case: Case, values: list[Values], rank: int) -> list[np.ndarray]:
    """The reductions, of all members of a dtype at once."""
    results: dict[int, np.ndarray] = {}
    members = case.inputs
    for dtype in dict.fromkeys(one.dtype for one in members):
        chosen = [index for index, one in enumerate(members) if one.dtype == dtype]
        flat = [np.concatenate([of_rank[index].reshape(-1) for index in chosen]) for of_rank in values]
        parts = np.split(reference.wrapping(flat, case.what), np.cumsum([members[at].size for at in chosen])[:-1])
        results |= {index: part.reshape(members[index].shape) for index, part in zip(chosen, parts, strict=True)}
    return [results[index] for index in range(len(members))]


def is_reduction(case: Case, comm: Any, found: np.ndarray, wanted: np.ndarray, values: Values) -> bool:
    """The bits of the contract, and near the result in float64; over NCCL, what any order may give."""
    if comm.backend == "nccl":
        return reference.near(found, values, case.what)
    return reference.same(found, wanted) and (case.special or reference.close(found, values, case.what))


# ---- with an expression: small integers, and a power of two as the factor, so that nothing depends on contraction
def draw_map(rng: np.random.Generator, own: np.random.Generator, ranks: int, limits: Limits) -> Case:
    dtype, op, row, full = EXPRESSIONS[int(rng.integers(min(limits.expressions, len(EXPRESSIONS))))]
    most = max(1, int(limits.largest * rng.random() ** 3) // dtype.itemsize)
    columns = min(int(rng.choice([1, 3, 16, 64, 1003, 4096, most])), most)
    shape: tuple[int, ...] = (int(rng.integers(1, max(1, most // columns) + 1)), columns)
    form = rng.integers(8)
    shape = () if form == 0 else (most,) if form == 1 else (1, *shape) if form == 2 else shape
    if form == 3:
        shape = (0, columns)
    how = str(rng.choice(["new", "out", "in place"]))
    strided = 0.3 * (own.random() < 0.5)
    steps = [int(own.integers(2, 4)) if own.random() < strided else 1 for _ in range(4)]
    dtypes, shapes = (dtype, row, full, dtype), (shape, shape[-1:], shape, shape)
    *inputs, out = map(Array.of, dtypes, shapes, steps)
    same = bool(how != "new" and dtype == full and own.random() < 0.3)
    factors = [2, -4, np.int8(2), True] if dtype.kind in "iu" else [2, -4, 0.5, np.float16(-0.25), np.int32(2)]
    more = factors[int(rng.integers(len(factors)))], same
    return Case("map", op, tuple(inputs), (out,), more=more, **placed(how, 1))


def small_values(case: Case, rank: int, own: np.random.Generator, common: np.random.Generator) -> Values:
    """Those of the array, the row and the other operand."""
    values = []
    for which, one in enumerate(case.inputs):
        unsigned = one.dtype.kind == "u"
        few = [1, 2] if unsigned else [-2, -1, 1, 2]
        is_factor = case.what == "prod" and which == 0
        drawn = own.choice(few, one.shape) if is_factor else own.integers(0 if unsigned else -8, 9, one.shape)
        values.append(np.asarray(drawn).astype(one.dtype))
    return values


def call_map(comm: Any, case: Case, way: str, inputs: list[Any], outs: list[Any]) -> list[Any] | None:
    (array, row, full), (factor, same) = inputs, case.more
    out = None if case.new else outs[0]
    if same:
        out[...] = full if case.over == (None,) else out
        full = out
    then = Map("v * s + b\n- f", s=factor, b=row, f=full)
    result = comm.allreduce(array, case.what, out=out, then=then)
    assert out is None or result is out
    return [result] if case.new else None


def mapped(case: Case, values: list[Values], rank: int) -> list[np.ndarray]:
    """The reduction rounded to its dtype, then the expression, then one conversion."""
    dtype, (factor, same) = case.inputs[0].dtype, case.more
    own, row, full = values[rank]
    full = own if same and case.over == (0,) else full
    result = reference.reduce([of_rank[0] for of_rank in values], case.what)
    if dtype.kind in "iu":
        wide = result.astype(np.int64) * np.int64(int(factor)) + row.astype(np.int64) - full.astype(np.int64)
        return [wide.astype(dtype)]
    kind = np.float64 if dtype == np.float64 else np.float32
    return [(result.astype(kind) * kind(factor) + row.astype(kind) - full.astype(kind)).astype(dtype)]


# ---- with RMSNorm: the public call, and below it the fused kernel and the unfused pair
def draw_norm(rng: np.random.Generator, own: np.random.Generator, ranks: int, limits: Limits) -> Case:
    hidden = int(rng.choice(HIDDEN)) if rng.random() < 0.6 else 64 * int(2 ** rng.uniform(0, 8))
    dtype = str(rng.choice(["float16", "bfloat16", "bfloat16", "float32"]))
    if rng.random() < 0.1:
        hidden = int(rng.integers(1, 3000))
    scales = str(rng.choice(["", "", "given", "token", "group"]))
    if scales == "group" and hidden % norms.SCALE_GROUP:
        scales = "token"
    most = max(1, min(limits.rows, limits.largest // (hidden * norms.DTYPES[dtype].itemsize)))
    shape = NormShape(
        rows=int(rng.integers(1, most + 1)) if rng.random() < 0.5 else int(2 ** rng.uniform(0, np.log2(most))),
        hidden=hidden, dtype=dtype,
        eps=float(np.float32(rng.choice([1e-6, 1e-5, 0.1]))), weight_bias=float(rng.choice([0.0, 1.0])),
        residual=bool(rng.random() < 0.8), scales=scales,
        column_major=scales == "group" and bool(rng.random() < 0.5),
        keeps_y=not scales or bool(rng.random() < 0.5),
    )  # fmt: skip
    late = int(rng.integers(ranks)) if rng.random() < 0.1 else -1
    in_place = str(rng.choice(["", "x", "residual", "both"]))
    special = bool(rng.random() < 0.3)
    turns, step = int(rng.choice([1, 1, 3])), int(rng.choice([1, 1, 1, 2]))
    return normed(shape, in_place, step, special=special, turns=turns, late=late)


def normed(shape: NormShape, in_place: str = "", step: int = 1, **more: Any) -> Case:
    """The case of a shape. ``in_place``: "", "x" (y lies over it), "residual" (residual_out does), or "both".

    ``step``: of the elements of a row, which kernels take if it is 1.
    """
    rows = Array.of(norms.DTYPES[shape.dtype], (shape.rows, shape.hidden), step)
    row = Array.of(rows.dtype, (shape.hidden,))
    one = Array.of(np.dtype("f4"), (1,))
    groups = shape.hidden // norms.SCALE_GROUP if shape.scales == "group" else 1
    scales = Array.of(np.dtype("f4"), (shape.rows, groups))
    if shape.column_major:
        scales = Array(scales.dtype, scales.shape, (4, 4 * shape.scales_stride))
    over = (
        0 if in_place in ("x", "both") else None,
        2 if in_place in ("residual", "both") and shape.residual else None,
        None, None,
    )  # fmt: skip
    outputs = rows, rows, Array.of(np.dtype("u1"), rows.shape), scales
    return Case("norm", shape, (rows, row, rows, one), outputs, over, alignment=16 if step == 1 else 1, **more)


def values_of_norm(case: Case, rank: int, own: np.random.Generator, common: np.random.Generator) -> Values:
    """Those of x, the weight, the residual, and the given scale: but x, all are the same on all ranks."""
    x, weight, residual, _ = (
        reference.random_array(rng, one.shape, one.dtype, False)
        for one, rng in zip(case.inputs, (own, common, common, common), strict=True)
    )
    if case.special:
        at = int(own.integers(x.shape[0])), int(own.integers(x.shape[1]))
        x[at] = reference.random_array(own, (1,), x.dtype, True)[0]
    return [x, weight, residual, common.uniform(0.001, 0.1, 1).astype(np.float32)]


def norm_ways(comm: Any, case: Case) -> list[str]:
    """The call; where arrays lie as kernels want them, the fused kernel, if the shape has one, and the pair."""
    launches, shape = our_backend(comm, "a sweep of norms").launches, case.what
    plan = launches.norm_plan(shape) if launches.fused(norm_request(shape)) is not None else None
    if case.alignment == 1 or plan is None:
        return ["norm"] if case.alignment == 1 else ["norm", "pair"]
    tiled = " in tiles" if plan.tiles(shape.rows) > 1 else ""
    return ["norm", f"{plan.kernel}, {plan.cluster} blocks a row, depth {plan.depth}{tiled}", "pair"]


def call_norm(comm: Any, case: Case, way: str, inputs: list[Any], outs: list[Any]) -> None:
    if way == "norm":
        _call_norm(comm, case.what, *inputs, *outs)
        return
    backend, shape = our_backend(comm, "a sweep of norms"), case.what
    stream, owner = cupy_runtime.stream_of()
    x, weight, residual, given, y, residual_out, quantised, scales = (int(one.data.ptr) for one in (*inputs, *outs))
    scales = {"": 0, "given": given}.get(shape.scales, scales)
    addresses = NormAddresses(
        source=x, weight=weight, residual=residual * shape.residual, out=y * (shape.keeps_y or way == "pair"),
        residual_out=residual_out, quantised=quantised * bool(shape.scales), scales=scales,
    )  # fmt: skip
    request = norm_request(shape)
    prepared = backend.launches.fused(request)
    if way == "pair":  # the plain all-reduce into y, and then the norm of that
        plain = backend.prepare(request.without_epilogue())
        prepared = epilogues.behind(plain, request, backend.kernels, backend.device.ordinal)
    assert prepared is not None
    backend.run(partial(prepared.start, addresses), stream, owner)


def _call_norm(
    comm: Any, shape: NormShape, x: Any, weight: Any, residual: Any, given: Any, y: Any, residual_out: Any,
    quantised: Any, scales: Any,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"residual_out": residual_out}
    options |= {"residual": residual} if shape.residual else {}
    options |= {"out": y} if shape.keeps_y else {}
    if shape.scales == "given":
        options |= {"quantize": FP8(given), "quant_out": quantised}
    elif shape.scales:
        per = "token" if shape.scales == "token" else norms.SCALE_GROUP
        how = FP8(per=per, column_major=shape.column_major)
        options |= {"quantize": how, "quant_out": quantised, "scales_out": scales}
    comm.allreduce_rmsnorm(x, weight, shape.eps, weight_bias=shape.weight_bias, **options)


def norm_request(shape: NormShape) -> Request:
    """The call with RMSNorm of an array of so many rows."""
    return with_norm((shape.rows, shape.hidden), shape)


def norm_of(case: Case, values: list[Values], rank: int) -> list[np.ndarray | None]:
    """y, residual_out, the quantised rows and the scales; None for what this call does not give."""
    shape, (_, weight, residual, given) = case.what, values[rank]
    right = norms.results(
        reference.reduce([of_rank[0] for of_rank in values], "sum"), residual if shape.residual else None, weight,
        eps=shape.eps, weight_bias=shape.weight_bias, scales=shape.scales, given=float(given[0]),
    )  # fmt: skip
    return [right.y if shape.keeps_y else None, right.residual_out, right.quantised, right.scales]


class Kind(NamedTuple):
    """A row of the table.

    :ivar draw: a case, from numbers that are the same on all ranks and from numbers of this rank.
    :ivar values: of the inputs on one rank.
    :ivar call: makes the call one of its ``ways``; returns the results that it has made, or None if it was given all.
    :ivar expected: the outputs on a rank, from the values of all ranks; None for one that is not looked at.
    :ivar right: True if one output may be what has been found; it also gets the values of all ranks of its input.
    :ivar alike: all ranks have the same results.
    :ivar everywhere: each case is called on every communicator, and again on the first. False: on one of them.
    """

    draw: Callable[[np.random.Generator, np.random.Generator, int, Limits], Case]
    values: Callable[[Case, int, np.random.Generator, np.random.Generator], Values]
    call: Callable[[Any, Case, str, list[Any], list[Any]], list[Any] | None]
    expected: Callable[[Case, list[Values], int], list[Any]]
    right: Callable[[Case, Any, np.ndarray, np.ndarray, Values], bool]
    ways: Callable[[Any, Case], list[str]] = lambda comm, case: [case.kind]
    alike: bool = True
    everywhere: bool = False
    over_nccl: bool = True


def _same(case: Case, comm: Any, found: np.ndarray, wanted: np.ndarray, values: Values) -> bool:
    return reference.same(found, wanted)


def _same_bits(case: Case, comm: Any, found: np.ndarray, wanted: np.ndarray, values: Values) -> bool:
    return norms.same(found, wanted)


def is_split(case: Case, comm: Any, found: np.ndarray, wanted: np.ndarray, values: Values) -> bool:
    """As of an all-reduce, or of bytes that are moved."""
    if case.what.collective != "reduce_scatter":
        return found.tobytes() == wanted.tobytes()
    if comm.backend != "nccl":
        return reference.same(found, wanted)
    place = case.what.place(values[0].shape, comm.rank)
    own, beside = found, []
    if case.what.how == "in place":  # the whole array, in which the other parts stay
        own, beside = found[place], [one.copy() for one in (found, wanted)]
        for one in beside:
            one[place] = 0
    return reference.near(own, [one[place] for one in values], case.what.op) and (
        not beside or beside[0].tobytes() == beside[1].tobytes()
    )


KINDS = {
    "plain": Kind(draw_plain, values_of_any_kind, call_plain, reduced, is_reduction, everywhere=True),
    "list": Kind(draw_list, values_of_any_kind, call_list, reduced, is_reduction, list_ways),
    "map": Kind(draw_map, small_values, call_map, mapped, _same, alike=False, everywhere=True),
    "norm": Kind(draw_norm, values_of_norm, call_norm, norm_of, _same_bits, norm_ways, over_nccl=False),
    "split": Kind(splits.draw, splits.values, splits.call, splits.expected, is_split, alike=False, everywhere=True),
}
