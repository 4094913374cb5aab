"""reduce() against tests/shared/reference.py, Python's own integers and floats, and on the values that go wrong."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipcreduce import dtypes
from ipcreduce.dtypes import reduce
from tests.shared import reference

INTEGERS = [dtype for dtype in reference.DTYPES if not reference.is_float(dtype)]
FLOATS = [dtype for dtype in reference.DTYPES if reference.is_float(dtype)]


def special_values(dtype: np.dtype) -> np.ndarray:
    """Every pattern of bits of 16-bit types; of others those at the edges, and what an empty slot holds."""
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    if not reference.is_float(dtype):
        edge = np.iinfo(dtype)
        return np.array([edge.min, edge.min + 1, 0, 1, 2, 3, 7, edge.max // 2, edge.max - 1, edge.max], dtype)
    edge = np.finfo(dtype)
    size = [0.0, edge.smallest_subnormal, edge.tiny, edge.eps, 1.0, 1.5, 3.0, edge.max, np.inf, np.nan]
    values = np.array([sign * value for sign in (1, -1) for value in size], dtype)
    return np.append(values, np.frombuffer(b"\xff" * dtype.itemsize, dtype))


def check_against_the_reference(dtype: np.dtype, op: str, n: int) -> None:
    rng = np.random.default_rng([dtype.num, n, len(op)])
    special = special_values(dtype)
    values = [
        np.concatenate([
            reference.random_array(rng, (97,), dtype, special=True),
            rng.choice(special, 400),
            reference.random_array(rng, (97,), dtype, special=False),
        ])
        for _ in range(n)
    ]  # fmt: skip
    given_values = [value.copy() for value in values]
    found = reduce(values, op)
    with np.errstate(invalid="ignore"):  # as signalling NaN are widened to be compared
        assert reference.same(found, reference.reduce(values, op))
    regular = slice(497, None)
    assert reference.close(found[regular], [value[regular] for value in values], op)
    assert all(value.tobytes() == before.tobytes() for value, before in zip(values, given_values, strict=True))


def test_agrees_with_the_reference(subtests: pytest.Subtests):
    for dtype, op, n in itertools.product(reference.DTYPES, reference.OPS, range(1, 9)):
        with subtests.test(dtype=str(dtype), op=op, n=n):
            check_against_the_reference(dtype, op, n)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@given(st.data())
@settings(deadline=None, max_examples=60)
def test_integers_are_exact(dtype: np.dtype, data: st.DataObject):
    edge = np.iinfo(dtype)
    low, high = int(edge.min), int(edge.max)
    one = st.integers(low, high) | st.sampled_from([low, low + 1, high - 1, high])
    numbers = data.draw(st.lists(one, min_size=1, max_size=8))
    values = [np.array([number], dtype) for number in numbers]

    def wrapped(number: int) -> int:
        return (number - low) % (high - low + 1) + low

    assert int(reduce(values, "sum")[0]) == wrapped(sum(numbers))
    assert int(reduce(values, "prod")[0]) == wrapped(math.prod(numbers))
    assert int(reduce(values, "min")[0]) == min(numbers)
    assert int(reduce(values, "max")[0]) == max(numbers)
    assert int(reduce(values, "avg")[0]) == math.trunc(Fraction(sum(numbers), len(numbers)))


@given(st.lists(st.floats(width=64), min_size=1, max_size=8))
@settings(deadline=None)
def test_float64_is_accumulated_in_order(numbers: list[float]):
    """Bit for bit what Python's own floats give, one by one from the first; NaN as such."""
    values = [np.array([number]) for number in numbers]
    total = functools.reduce(operator.add, numbers)  # not sum(), which compensates since Python 3.12
    for op, expected in {
        "sum": total, "prod": functools.reduce(operator.mul, numbers), "avg": total / len(numbers),
    }.items():  # fmt: skip
        found = float(reduce(values, op)[0])
        assert found.hex() == expected.hex() or (math.isnan(found) and math.isnan(expected))


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.itemsize == 2], ids=str)
def test_half_types_round_once(dtype: np.dtype):
    """1 + u + u, with u half a unit in the last place: rounded at every step it stays 1, rounded once it does not."""
    unit = float(ml_dtypes.finfo(dtype).eps)
    one, half_unit = np.array([1.0], dtype), np.array([unit / 2], dtype)
    assert float(reduce([one, half_unit, half_unit], "sum")[0]) == 1 + unit
    largest = np.array([ml_dtypes.finfo(dtype).max], dtype)
    if dtype == np.float16:  # the sum passes the largest float16 on the way; float32 holds it
        assert reduce([largest, largest, -largest], "sum") == largest
        assert reduce([largest, largest], "avg") == largest
    assert np.isinf(reduce([largest, largest], "sum"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_zeros_denormals_and_nan(dtype: np.dtype, n: int):
    minus, plus, nan = (np.array([value], dtype) for value in (-0.0, 0.0, np.nan))
    tiny = np.array([1], f"u{dtype.itemsize}").view(dtype)  # the smallest denormal
    assert np.signbit(reduce([minus] * n, "sum")), "a sum starts from rank 0's value, not from +0"
    assert reduce([tiny] * n, "max").tobytes() == tiny.tobytes()
    assert reduce([tiny] * n, "sum").tobytes() == np.array([n], f"u{dtype.itemsize}").tobytes(), "denormals are kept"
    for position in range(n):
        values = [plus] * n
        values[position] = nan
        for op in reference.OPS:
            assert np.isnan(reduce(values, op)), f"{op} lost the NaN of rank {position}"


@pytest.mark.parametrize("op", reference.OPS)
def test_all_nan_become_the_kernels(op: str):
    """cvt.rn.f16.f32 and cvt.rn.bf16.f32 give 7FFF for any NaN; reduce.cuh writes the others itself."""
    kernels = {"float16": "7fff", "bfloat16": "7fff", "float32": "7fc00000", "float64": "7ff8000000000000"}
    for dtype in FLOATS:
        bits, infinite = f"u{dtype.itemsize}", np.array(np.inf, dtype)
        payloads = np.append(infinite.view(bits) + np.arange(1, 100, dtype=bits), np.array(-1).astype(bits))
        nan = payloads.view(dtype)
        pairs = [nan, np.ones_like(nan)], [np.zeros_like(nan), nan], [nan, nan[::-1]], [nan, -nan, nan]
        found = np.concatenate([reduce(pair, op) for pair in pairs]).view(bits)
        assert {format(int(one), "x") for one in found} == {kernels[dtypes.DTYPES[dtype]]}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["min", "max"])
def test_of_equal_values_the_first_stays(dtype: np.dtype, op: str):
    minus, plus = np.array([-0.0], dtype), np.array([0.0], dtype)
    for first, second in ((minus, plus), (plus, minus)):
        assert reduce([first, second, second], op).tobytes() == first.tobytes()


def test_keeps_shape_and_dtype(subtests: pytest.Subtests):
    shapes = ((), (0,), (3, 0, 2), (2, 3), (1, 1, 1, 1, 1, 1, 1, 2))
    for shape, dtype, op in itertools.product(shapes, reference.DTYPES, reference.OPS):
        with subtests.test(shape=shape, dtype=str(dtype), op=op):
            found = reduce([np.ones(shape, dtype)] * 3, op)
            assert isinstance(found, np.ndarray)
            assert (found.shape, found.dtype) == (shape, dtype)


def test_layout_does_not_matter():
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((6, 4)) for _ in range(4)]
    turned = [np.asfortranarray(value)[::-1][::-1] for value in values]
    assert reduce(turned, "sum").tolist() == reduce(values, "sum").tolist()


def test_names_and_codes():
    """Every dtype by its own name, C's synonyms included, and nothing else."""
    assert {dtypes.DTYPES[dtype] for dtype in reference.DTYPES} == set(dtypes.DTYPE_NAMES)
    assert sorted(dtypes.OPS) == sorted(reference.OPS)
    for code in "bhilqBHILQefd":
        dtype = np.dtype(code)
        assert dtypes.DTYPES[dtype] == dtype.name
    for other in ("?", "F", "D", "g", "M8[s]", "m8[s]", ">f4", ">i8", "S4", "U1", "O", "V2", "f4,i4"):
        assert np.dtype(other) not in dtypes.DTYPES
    assert np.dtype(ml_dtypes.float8_e4m3fn) not in dtypes.DTYPES


@pytest.mark.parametrize(("dtype", "n"), [(np.int8, 128), (np.int8, 300), (np.uint8, 256), (np.uint8, 300)])
def test_averages_over_more_ranks_than_the_dtype_counts(dtype: type[np.integer], n: int):
    info = np.iinfo(dtype)
    values = np.random.default_rng(n).integers(info.min, info.max + 1, (n, 50)).astype(dtype)
    values[:, 0], values[:, 1] = info.min, info.max
    due = [int(total / n) for total in values.sum(axis=0, dtype=np.int64)]
    assert reduce([*values], "avg").tolist() == due
