"""RMSNorm on the host: its bits, its arguments, its outputs, and what the ranks compare."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ipcreduce
from ipcreduce import FP8, ArgumentError
from ipcreduce.arrays import rmsnorm
from ipcreduce.calls.request import NormShape, with_norm
from tests.shared import norms, reference

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
HALF, BF16, SINGLE = np.dtype(np.float16), reference.BFLOAT16, np.dtype(np.float32)
DTYPES = HALF, BF16, SINGLE


class One:
    """A group of this process alone."""

    rank, size = 0, 1

    def allgather(self, data: bytes) -> list[bytes]:
        return [data]


@pytest.fixture(scope="module")
def comm() -> Iterator[ipcreduce.Communicator]:
    with ipcreduce.Communicator(One()) as made:
        yield made


def some(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0, special: bool = False) -> np.ndarray:
    return reference.random_array(np.random.default_rng((seed, *shape)), shape, dtype, special)


# ---- bits
HIDDENS = 1, 3, 7, 8, 9, 63, 64, 65, 100, 128, 1000, 2880, 8191, 8192, 8193, 16448


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDENS)
def test_bits_of_rows(comm: ipcreduce.Communicator, dtype: np.dtype, hidden: int):
    for residual, bias, special in ((True, 0.0, False), (False, 1.0, False), (True, 0.1, True)):
        x, weight = some((3, hidden), dtype, 1, special), some((hidden,), dtype, 2)
        added = some((3, hidden), dtype, 3, special) if residual else None
        expected = norms.results(x, added, weight, eps=1e-5, weight_bias=bias)
        y, total = comm.allreduce_rmsnorm(x, weight, 1e-5, residual=added, weight_bias=bias)
        assert norms.same(total, expected.residual_out)
        assert norms.same(y, expected.y)


def test_a_bias_of_negative_zero_is_zero(comm: ipcreduce.Communicator):
    """Cached calls do not tell them apart, and -0 + -0 would be another weight."""
    x, weight = np.ones((1, 64), np.float32), np.full(64, -0.0, np.float32)
    for bias in (0.0, -0.0, np.float32(-0.0)):
        y, _ = comm.allreduce_rmsnorm(x, weight, weight_bias=bias)
        assert not np.signbit(y).any(), bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["given", "token", "group"])
def test_bits_of_e4m3(comm: ipcreduce.Communicator, dtype: np.dtype, scales: str):
    for seed, special in ((1, False), (2, True), (3, False)):
        x, weight = some((5, 384), dtype, seed, special), some((384,), dtype, seed + 3)
        if seed == 3:
            x[1], x[2, 130], weight[5] = 0, np.inf, 1000
        scale = np.array([0.03125 if seed == 1 else 0.001], np.float32)
        how = FP8(scale=scale) if scales == "given" else FP8(per="token" if scales == "token" else 128)
        expected = norms.results(x, None, weight, scales=scales, given=scale[0])
        out = np.zeros_like(x)
        found = comm.allreduce_rmsnorm(x, weight, quantize=how, out=out)
        assert len(found) == 3
        assert found[0].dtype == FLOAT8
        assert norms.same(found[0].view(np.uint8), expected.quantised)
        assert found[1] is scale if scales == "given" else reference.same(found[1], expected.scales)
        assert norms.same(found[2], expected.residual_out)
        assert norms.same(out, expected.y)


def test_rows_have_their_bits_alone_and_in_any_batch(comm: ipcreduce.Communicator):
    x, weight, residual = some((700, 640), BF16, 1), some((640,), BF16, 2), some((700, 640), BF16, 3)
    every = comm.allreduce_rmsnorm(x, weight, residual=residual, quantize=FP8(per=128))
    for row in (0, 1, 408, 409, 410, 699):  # 409 rows are normalised together
        one = comm.allreduce_rmsnorm(x[row], weight, residual=residual[row], quantize=FP8(per=128))
        assert all(norms.same(alone, batch[row]) for alone, batch in zip(one, every, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_to_float64(comm: ipcreduce.Communicator, dtype: np.dtype):
    x, weight = some((4, 4096), dtype, 1), some((4096,), dtype, 2)
    wide = x.astype(np.float64)
    exact = wide * weight.astype(np.float64) / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    y, _ = comm.allreduce_rmsnorm(x, weight)
    eps = {HALF: 2**-11, BF16: 2**-8, SINGLE: 2**-21}[dtype]
    assert (np.abs(y.astype(np.float64) - exact) <= np.abs(exact) * eps * 1.01 + 2**-24).all()


@pytest.mark.parametrize("exponent", [127, 128])
def test_every_reciprocal_root_is_rounded_correctly(exponent: int):
    """Both exponents with all significands; others differ by powers of 4, and their roots by powers of 2."""
    for first in range(0, 1 << 23, 1 << 20):
        bits = np.arange(first, first + (1 << 20), dtype=np.uint32) | np.uint32(exponent << 23)
        values = bits.view(np.float32)
        found = rmsnorm.reciprocal_root(values)
        # value * m * m against 1, for the middle m on either side: m has 25 bits, and its square 50. The value is
        # multiplied with the upper and the lower 26 bits of that, both of which are exact, as is the upper one less 1.
        for neighbour, above in (
            (np.nextafter(found, np.float32(2)), True),
            (np.nextafter(found, np.float32(0)), False),
        ):
            middle = (found.astype(np.float64) + neighbour) / 2
            square = middle * middle
            high = (square.view(np.int64) & ~((1 << 27) - 1)).view(np.float64)
            excess = (values * high - 1) + values * (square - high)
            assert (excess > 0).all() if above else (excess < 0).all()


def test_fused_multiply_add_is_rounded_once():
    rng = np.random.default_rng(5)
    for hidden in (1, 3, 640, 2880, 5120, 8191):
        sums = (rng.random(200) * 10.0 ** rng.integers(-30, 30, 200)).astype(np.float32)
        for eps in (np.float32(1e-6), np.float32(0), np.float32(1.5), np.float32(2e-45)):
            found = rmsnorm.fused_mean(sums, hidden, eps)
            factor = np.float32(1 / hidden)
            assert all(norms.fma(one, factor, eps) == got for one, got in zip(sums, found, strict=True))


def test_fused_multiply_add_near_the_middle_of_two_numbers():
    """float64 rounds these sums to the middle between two float32, from which it cannot tell where they were."""
    rng, twice, below, above = np.random.default_rng(6), 0, 0, 0
    for hidden in (3, 7, 5121):
        factor = np.float32(1 / hidden)
        sums = (1 + rng.random(3000)).astype(np.float32)
        product = sums.astype(np.float64) * np.float64(factor)
        low = product.astype(np.float32)
        low = np.where(low > product, np.nextafter(low, np.float32(0)), low)
        middle = (low.astype(np.float64) + np.nextafter(low, np.float32(1))) / 2
        gap = middle - product
        chosen = np.flatnonzero((gap > 0) & (gap < product * 2.0**-31))
        for index, side in itertools.product(chosen, (0, 1)):
            eps = np.nextafter(np.float32(gap[index]), np.float32(side))  # all but what is missing to the middle
            exact = Fraction(float(product[index])) + Fraction(float(eps))
            right = norms.rounded(exact)
            assert rmsnorm.fused_mean(sums[index : index + 1], hidden, eps)[0] == right
            if np.float32(product[index] + np.float64(eps)) != right:
                twice += 1
                above += exact > Fraction(float(middle[index]))
                below += exact < Fraction(float(middle[index]))
    assert above > 5, "two roundings go down where one goes up"
    assert below > 5
    assert twice == above + below


# ---- outputs
def test_in_place_and_outputs(comm: ipcreduce.Communicator):
    x, weight, residual = some((2, 3, 256), BF16, 1), some((256,), BF16, 2), some((2, 3, 256), BF16, 3)
    expected = norms.results(x, residual, weight, scales="group")
    own, added = x.copy(), residual.copy()
    y, total = comm.allreduce_rmsnorm(own, weight, residual=added, out=own, residual_out=added)
    assert y is own
    assert total is added
    assert norms.same(own, expected.y)
    assert norms.same(added, expected.residual_out)
    strided = np.zeros((4, 3, 512), BF16)[::2, :, ::2]
    numbers, scales = np.zeros((2, 3, 512), np.uint8)[..., ::2], np.zeros((3, 2, 2), np.float32).transpose(1, 0, 2)
    for view in (numbers, numbers.view(FLOAT8)):
        strided[...], numbers[...], scales[...] = 0, 0, 0
        found = comm.allreduce_rmsnorm(
            np.asfortranarray(x), weight, residual=residual[:, :, :], out=strided, quantize=FP8(per=128),
            quant_out=view, scales_out=scales,
        )  # fmt: skip
        assert found[0] is view
        assert found[1] is scales
        assert norms.same(strided, expected.y)
        assert norms.same(numbers, expected.quantised)
        assert norms.same(scales, expected.scales)
        assert norms.same(found[2], expected.residual_out)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
def test_column_major_scales(comm: ipcreduce.Communicator, rows: int):
    x, weight = some((rows, 384), HALF, 1), some((384,), HALF, 2)
    (_, by_rows, _), (_, by_columns, _) = (
        comm.allreduce_rmsnorm(x, weight, quantize=FP8(per=128, column_major=order)) for order in (False, True)
    )
    assert norms.same(by_columns, by_rows)
    if rows > 1:
        assert by_columns.strides == (4, 4 * (-(-rows // 4) * 4)), "each column begins at a multiple of 16 bytes"
        assert by_rows.strides == (12, 4)
    _, batch, _ = comm.allreduce_rmsnorm(x.reshape(rows, 1, 384), weight, quantize=FP8(per=128, column_major=True))
    assert norms.same(batch, by_rows.reshape(rows, 1, 3))


def test_no_rows_are_a_call(comm: ipcreduce.Communicator):
    number = comm._state.calls.number
    for how in (None, FP8(per="token"), FP8(per=128), FP8(scale=np.ones((), np.float32))):
        found = comm.allreduce_rmsnorm(np.zeros((2, 0, 128), BF16), np.ones(128, BF16), quantize=how)
        assert found[0].shape == found[-1].shape == (2, 0, 128)
    assert comm._state.calls.number == number + 4


def test_the_modules_function():
    x, weight = some((2, 64), SINGLE, 1), some((64,), SINGLE, 2)
    with ipcreduce.Communicator(One()) as made:
        y, total = ipcreduce.allreduce_rmsnorm(x, weight, comm=made)
        assert norms.same(y, norms.results(x, None, weight).y)
        assert norms.same(total, x)
    with pytest.raises(ArgumentError, match="comm is an int, which is no"):
        ipcreduce.allreduce_rmsnorm(x, weight, comm=3)  # type: ignore[call-overload]


# ---- what is refused
X, W = np.ones((2, 256), np.float32), np.ones(256, np.float32)
SCALE = np.ones(1, np.float32)
BUFFER = np.zeros(2048, np.float32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, "x is a builtins.NoneType"),
    ({"x": [[1.0, 2.0]]}, "x is a builtins.list"),
    ({"x": 1.0}, "x is a float, and no array"),
    ({"x": np.float32(1)}, "x is a float32, and no array"),
    ({"x": np.ones((), np.float32)}, "x has no dimensions"),
    ({"x": np.ones((2, 0), np.float32), "weight": np.ones(0, np.float32)}, "a row without elements"),
    ({"x": np.ma.masked_array(X)}, "x is a masked array"),
    *(
        ({"x": X.astype(dtype), "weight": W.astype(dtype)}, f"x has dtype {np.dtype(dtype)}, which")
        for dtype in (np.float64, np.int32, np.uint8, bool, np.complex64, FLOAT8)
    ),
    ({"weight": None}, "weight is a builtins.NoneType"),
    ({"weight": 1.0}, "weight is a float, and no array"),
    ({"weight": np.ones(255, np.float32)}, r"weight has shape \(255,\)"),
    ({"weight": np.ones((1, 256), np.float32)}, r"weight has shape \(1, 256\)"),
    ({"weight": W.astype(np.float16)}, "weight has shape .* and dtype float16"),
    ({"residual": X[:1]}, r"residual has shape \(1, 256\)"),
    ({"residual": X.astype(BF16)}, "residual has shape .* and dtype bfloat16"),
    ({"residual": 1.0}, "residual is a float, and no array"),
    ({"out": X.astype(np.float64)}, "out has shape .* and dtype float64"),
    ({"residual_out": np.ones(512, np.float32)}, r"residual_out has shape \(512,\)"),
    ({"eps": "1e-6"}, "eps is a str"),
    ({"eps": -1e-6}, "eps is -1e-06"),
    ({"eps": float("nan")}, "eps is nan"),
    ({"eps": 1e39}, "eps is 1e\\+39"),
    ({"eps": np.array(1e-6)}, "eps is an ndarray"),
    ({"eps": True}, "eps is a bool"),
    ({"eps": 10**400}, r"eps is 10000\S+0000\. Pass a finite float32, 0"),
    ({"weight_bias": -(10**5000)}, r"weight_bias is \S+\. Pass a finite float32"),
    ({"weight_bias": float("inf")}, "weight_bias is inf"),
    ({"weight_bias": None}, "weight_bias is a NoneType"),
    ({"quantize": "token"}, "quantize is 'token'"),
    ({"quant_out": np.zeros((2, 256), FLOAT8)}, "quant_out is given, but quantize is not"),
    ({"scales_out": np.zeros((2, 1), np.float32)}, "scales_out is given, but quantize is not"),
    ({"quantize": FP8(scale=SCALE), "scales_out": SCALE}, "beside a given scale"),
    ({"quantize": FP8(scale=np.ones(2, np.float32))}, r"the scale of FP8 has shape \(2,\)"),
    ({"quantize": FP8(scale=np.ones(1))}, "the scale of FP8 has shape .* and dtype float64"),
    ({"quantize": FP8(per="token"), "quant_out": np.zeros((2, 256), np.int8)}, "quant_out has shape .* and dtype int8"),
    ({"quantize": FP8(per="token"), "quant_out": np.zeros((2, 255), FLOAT8)}, r"quant_out has shape \(2, 255\)"),
    ({"quantize": FP8(per="token"), "scales_out": np.zeros(2, np.float32)}, r"scales_out has shape \(2,\)"),
    ({"quantize": FP8(per=128), "scales_out": np.zeros((2, 1), np.float32)}, r"scales_out has shape \(2, 1\)"),
    ({"quantize": FP8(per=128), "scales_out": np.zeros((2, 2))}, "scales_out has shape .* and dtype float64"),
    ({"x": X[:, :200], "weight": W[:200], "quantize": FP8(per=128)}, "x has rows of 200 elements, no multiple of 128"),
    ({"stream": "none"}, "stream is a str"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda one: str(one)[:40] if isinstance(one, str) else "")
def test_wrong_arguments(comm: ipcreduce.Communicator, change: dict[str, Any], words: str):
    arguments = {"x": X, "weight": W} | change
    with pytest.raises(ArgumentError, match=words):
        comm.allreduce_rmsnorm(**arguments)
    comm.allreduce_rmsnorm(X, W)


@np.errstate(all="raise")
def test_numbers_where_the_program_lets_numpy_raise(comm: ipcreduce.Communicator):
    for value in (np.float64(1e-50), np.longdouble("1e-4000")):  # they round to 0
        for name in ("eps", "weight_bias"):
            found, right = (comm.allreduce_rmsnorm(X, W, **{name: one})[0] for one in (value, 0.0))
            assert norms.same(found, right)
    with pytest.raises(ArgumentError, match="eps is nan"):
        comm.allreduce_rmsnorm(X, W, np.float64("nan"))


def test_arrays_that_cannot_be(comm: ipcreduce.Communicator):
    for given in (("x",), (-1,), ((3, 4.5),), (3, "no dtype"), (10**5000,)):
        with pytest.raises(
            ArgumentError, match=r"^rank 0: no array has the shape or dtype that empty\(\) got: .* Pass a"
        ):
            comm.empty(*given)
    assert comm.empty(np.int64(3)).shape == (3,)


def test_outputs_that_share_memory(comm: ipcreduce.Communicator):
    """Of the eight arrays, only out and x may be one, and residual_out and residual, if they are just the same."""
    length = 512

    def at(first: int) -> np.ndarray:
        return BUFFER[first : first + length].reshape(2, 256)

    names = "x", "residual", "out", "residual_out"
    for one, other in itertools.combinations(names, 2):
        for offset in (0, 8, length):
            arrays = {name: np.ones((2, 256), np.float32) for name in names}
            arrays[one], arrays[other] = at(0), at(offset)
            BUFFER[:] = 3
            allowed = offset == length or (offset == 0 and (one, other) in (("x", "out"), ("residual", "residual_out")))
            if allowed or (one, other) == ("x", "residual"):
                comm.allreduce_rmsnorm(weight=W, **arrays)
                continue
            with pytest.raises(ArgumentError, match=r"shares (a part of the )?memory"):
                comm.allreduce_rmsnorm(weight=W, **arrays)
            assert (BUFFER == 3).all(), "nothing is written"
    for name, given in (
        ("weight", {"weight": BUFFER[:256], "out": at(255)}),
        ("scale", {"quantize": FP8(scale=BUFFER[5:6]), "residual_out": at(0)}),
        ("scales_out", {"out": at(0), "quantize": FP8(per="token"), "scales_out": BUFFER[7:9].reshape(2, 1)}),
        ("scales_out", {"quant_out": BUFFER[:128].view(np.uint8).reshape(2, 256), "quantize": FP8(per="token"),
                       "scales_out": BUFFER[127:129].reshape(2, 1)}),
        ("x", {"x": at(0), "quant_out": BUFFER[:128].view(np.uint8).reshape(2, 256), "quantize": FP8(per="token")}),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"shares memory with {name}"):
            comm.allreduce_rmsnorm(**({"x": X, "weight": W} | given))
    rows = np.lib.stride_tricks.as_strided  # the stride along the one row of an array may be any
    for one, other in itertools.product((1024, 8), (2048, 0)):
        alike = [rows(BUFFER, (1, 256), (stride, 4)) for stride in (one, other)]
        comm.allreduce_rmsnorm(alike[0], W, out=alike[1])
    backwards = at(0)[:, ::-1]
    with pytest.raises(ArgumentError, match=r"a part of the memory of x\. Pass x itself as out"):
        comm.allreduce_rmsnorm(at(0), W, out=backwards)
    comm.allreduce_rmsnorm(backwards, W, out=backwards)
    with pytest.raises(ArgumentError, match="residual_out cannot be written: this array is read-only"):
        comm.allreduce_rmsnorm(X, W, residual_out=np.broadcast_to(np.float32(1), (2, 256)))
    repeated = np.lib.stride_tricks.as_strided(np.zeros(256, np.float32), (2, 256), (0, 4))
    with pytest.raises(ArgumentError, match="elements of out share memory"):
        comm.allreduce_rmsnorm(X, W, out=repeated)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "either a scale or per"),
        ({"scale": SCALE, "per": "token"}, "either a scale or per"),
        ({"per": 64}, "no scales per 64"),
        ({"per": 128.0}, "no scales per 128.0"),
        ({"per": True}, "no scales per True"),
        ({"per": "row"}, "no scales per 'row'"),
        ({"scale": 1.0}, "the scale of FP8 is a float, and no array"),
        ({"scale": [1.0]}, "the scale of FP8 is a list, and no array"),
        ({"per": 128, "column_major": 1}, "column_major is 1"),
        ({"per": "token", "column_major": True}, "only scales per 128"),
        ({"scale": SCALE, "column_major": True}, "only scales per 128"),
    ],
)
def test_wrong_quantisation(arguments: dict[str, Any], words: str):
    with pytest.raises(ArgumentError, match=words):
        FP8(**arguments)


def test_quantisation_cannot_be_changed():
    how = FP8(per="token")
    with pytest.raises(AttributeError):
        how.per = 128  # type: ignore[misc]


def test_copies_of_a_quantisation(subtests: pytest.Subtests):
    """A copy has a scale of its own, and nothing of the original but what its arguments say."""
    for one in (FP8(scale=SCALE), FP8(per="token"), FP8(per=128, column_major=True)):
        for how, other in (
            ("copy", copy.copy(one)), ("deepcopy", copy.deepcopy(one)), ("pickle", pickle.loads(pickle.dumps(one)))
        ):  # fmt: skip
            with subtests.test(one=repr(one), how=how):
                assert (other.per, other.column_major) == (one.per, one.column_major)
                assert (other.scale is one.scale) == (how == "copy" or one.scale is None)
                kept = [getattr(other, name) for name in FP8.__slots__]
                assert id(one.scale) not in kept


# ---- what the ranks compare
def test_what_the_ranks_compare():
    """Each difference makes another fingerprint."""
    usual = NormShape(6, 256, "bfloat16", 1e-6, 0.0, True)
    others = [
        NormShape(6, 256, "float16", 1e-6, 0.0, True),
        NormShape(6, 256, "bfloat16", float(np.float32(1e-6)), 0.0, True),
        NormShape(6, 256, "bfloat16", float(np.nextafter(np.float32(1e-6), np.float32(1))), 0.0, True),
        NormShape(6, 256, "bfloat16", 1e-6, 1.0, True),
        NormShape(6, 256, "bfloat16", 1e-6, 1.0000001, True),
        NormShape(6, 256, "bfloat16", 1e-6, 0.0, False),
        *(NormShape(6, 256, "bfloat16", 1e-6, 0.0, True, scales) for scales in ("given", "token", "group")),
        NormShape(6, 256, "bfloat16", 1e-6, 0.0, True, "group", True),
        NormShape(6, 256, "bfloat16", 1e-6, 0.0, True, "group", False, False),
    ]
    found = [with_norm(of, usual).fingerprint for of in ((6, 256), (2, 3, 256), (3, 2, 256))]
    found += [with_norm((6, 256), other).fingerprint for other in others]
    found.append(with_norm((6, 256), usual, on_host=True).fingerprint)
    different = [found[0]] + [one for one in found[1:] if one.crc != found[0].crc]
    assert len({one.crc for one in found}) == len(different) == len(found) - 1, "eps is compared as float32"
