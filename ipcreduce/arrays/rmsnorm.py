"""RMSNorm of the rows of an array in NumPy, with the bits that the kernels give.

Each operation is one in float32, rounded to nearest, in a fixed order. NumPy lacks two of them: the fused multiply-add
and the reciprocal square root, each rounded once. They are made of float64 here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..calls.request import GROUP, NormShape
from ..dtypes import FLOAT8, set_nans
from ..float_state import in_standard_state

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_BLOCK = 1 << 18  # elements that are normalised together: their float32 values stay in the processor's cache
_UNIT, _UNITS, _LANES, _EACH = 8, 8, 32, 4  # elements of a unit, units of a group; lanes, and groups of each in a chunk
_LARGEST = np.float32(448)  # of e4m3
_LEAST_SCALE = np.float32(1e-10)
_NAN8 = 0x7F


class Normalised(NamedTuple):
    """The results, each of as many rows as the input. ``quantised`` and ``scales`` are None without quantisation.

    :ivar quantised: the bytes of numbers of e4m3.
    """

    y: Array
    residual_out: Array
    quantised: Array | None
    scales: Array | None


@in_standard_state
@np.errstate(all="ignore")
def normalise(
    shape: NormShape, reduced: Array, weight: Array, residual: Array | None, scale: Floats | None
) -> Normalised:
    """Normalise the rows of the reduced array.

    :param reduced: shape (rows, hidden), C-contiguous, as ``residual`` is.
    :param scale: the one element that "given" scales have.
    """
    rows, hidden = shape.rows, shape.hidden
    groups = {"token": 1, "group": hidden // GROUP}.get(shape.scales, 0)
    found = Normalised(
        np.empty_like(reduced), np.empty_like(reduced), np.empty(reduced.shape, np.uint8) if shape.scales else None,
        np.empty((rows, groups), np.float32) if groups else None,
    )  # fmt: skip
    added = weight.astype(np.float32) + np.float32(shape.weight_bias)
    for first in range(0, rows, max(1, _BLOCK // hidden)):
        block = slice(first, first + max(1, _BLOCK // hidden))
        x = _with_residual(reduced[block], None if residual is None else residual[block], found.residual_out[block])
        factors = reciprocal_root(fused_mean(sum_of_squares(x), hidden, np.float32(shape.eps)))
        y = found.y[block]
        _round((x * added) * factors[:, None], y)
        if found.quantised is not None:
            scales = None if found.scales is None else found.scales[block]
            values = y.astype(np.float32)
            if scales is not None:
                values[np.isinf(factors)] = np.nan  # of rows whose sum is 0, without eps
            _quantise(values, scales, scale, found.quantised[block])
    return found


def _with_residual(reduced: Array, residual: Array | None, out: Array) -> Floats:
    """Write the sum of both to ``out``, rounded, and return the rounded values as float32."""
    values = reduced.astype(np.float32)
    if residual is not None:
        values += residual.astype(np.float32)
    _round(values, out)
    return out.astype(np.float32)


def _round(values: Floats, out: Array) -> None:
    out[...] = values
    set_nans(out, values)


def sum_of_squares(x: Floats) -> Floats:
    """The sum of the squares of each row, in the order of kernels/rmsnorm.cuh. What lies beyond the row counts as 0."""
    rows, hidden = x.shape
    every = np.zeros((rows, -(-hidden // (_UNIT * _UNITS)) * _UNITS, _UNIT), np.float32)
    np.multiply(x, x, out=every.reshape(rows, -1)[:, :hidden])
    halves = every[..., 0:2] + every[..., 2:4]  # the even elements and the odd ones of each unit
    halves += every[..., 4:6]
    halves += every[..., 6:8]
    groups = _tree(halves[..., 0] + halves[..., 1], _UNITS)
    chunks = np.zeros((rows, -(-groups.shape[1] // (_LANES * _EACH)), _LANES, _EACH), np.float32)
    chunks.reshape(rows, -1)[:, : groups.shape[1]] = groups
    parts = (chunks[..., 0] + chunks[..., 1]) + (chunks[..., 2] + chunks[..., 3])
    lanes = parts[:, 0]
    for chunk in range(1, parts.shape[1]):
        lanes = lanes + parts[:, chunk]
    return _tree(lanes, _LANES)[:, 0]


def _tree(values: Floats, length: int) -> Floats:
    """Add every ``length`` neighbours of a row, a power of two: in pairs, then pairs of pairs, and so on."""
    while length > 1:
        values = values[:, 0::2] + values[:, 1::2]
        length //= 2
    return values


def fused_mean(sums: Floats, hidden: int, eps: np.float32) -> Floats:
    """fma(sum, 1 / hidden, eps) in float32, rounded once.

    The product is exact in float64: it has at most 48 bits. The sum in float64 is rounded to odd: of the two neighbours
    of an inexact sum the one with an odd last bit. Rounded once more, to a format with at least two bits less, that
    gives what the exact sum gives (Boldo and Melquiond, 2008).
    """
    product = sums.astype(np.float64) * np.float64(np.float32(1 / hidden))
    other = np.float64(eps)
    total = product + other
    of_other = total - product  # the error of the sum, exactly (Knuth)
    error = (product - (total - of_other)) + (other - of_other)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((error > 0) & even, np.nextafter(total, np.inf), total)
    return np.where((error < 0) & even, np.nextafter(total, -np.inf), odd).astype(np.float32)


def reciprocal_root(values: Floats) -> Floats:
    """1 / sqrt(value), correctly rounded to float32.

    Rounding in float64 first never changes that: tests/unit/test_rmsnorm.py compares every significand, with both
    parities of the exponent, to exact arithmetic. Powers of 4 change the result's exponent alone.
    """
    return (1 / np.sqrt(values.astype(np.float64))).astype(np.float32)


def _quantise(y: Floats, scales: Floats | None, given: Floats | None, out: Array) -> None:
    """Write the bytes of e4m3 of the rounded rows ``y`` to ``out``, and the rows' scales to ``scales``."""
    if scales is None:
        assert given is not None
        scaled = y * (np.float32(1) / given.reshape(()))
    else:
        grouped = y.reshape(len(y), scales.shape[1], -1)
        scales[...] = np.maximum(np.abs(grouped).max(axis=2) / _LARGEST, _LEAST_SCALE)
        set_nans(scales, scales)
        scaled = (grouped / scales[..., None]).reshape(y.shape)
    out[...] = np.clip(scaled, -_LARGEST, _LARGEST).astype(FLOAT8).view(np.uint8)
    out[np.isnan(scaled)] = _NAN8
