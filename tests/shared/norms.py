"""What an all-reduce with RMSNorm must give, from NumPy alone: nothing of ipcreduce is used here."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.shared.reference import BFLOAT16

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32)}
NAN_BITS = {"float16": 0x7FFF, "bfloat16": 0x7FFF, "float32": 0x7FC00000}
E4M3, LARGEST, E4M3_NAN = ml_dtypes.float8_e4m3fn, 448, 0x7F
UNIT, UNITS, CHUNK_GROUPS, LANES, SCALE_GROUP = 8, 8, 128, 32, 128
SINGLE = np.float32


class Results(NamedTuple):
    """``scales`` is float32 of shape (rows, 1) or (rows, groups), and None where it is given or there is none."""

    residual_out: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]
    quantised: np.ndarray[Any, Any] | None = None
    scales: np.ndarray[Any, Any] | None = None


def rounded(x: Any, dtype: str) -> Any:
    """float32 rounded to a dtype, with its one NaN."""
    result = x.astype(DTYPES[dtype])
    bits = result.view(f"u{result.dtype.itemsize}")
    bits[np.isnan(x)] = NAN_BITS[dtype]
    return result


def tree(x: Any) -> Any:
    """The sum over the last axis, as a tree of neighbours."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def sum_of_squares(x: Any) -> Any:
    """The sums of the rows of a float32 matrix."""
    rows, hidden = x.shape
    chunk = UNIT * UNITS * CHUNK_GROUPS
    squares = np.zeros((rows, -(-hidden // chunk) * chunk), SINGLE)
    squares[:, :hidden] = x * x
    unit = squares.reshape(rows, -1, UNIT)
    even = ((unit[..., 0] + unit[..., 2]) + unit[..., 4]) + unit[..., 6]
    odd = ((unit[..., 1] + unit[..., 3]) + unit[..., 5]) + unit[..., 7]
    groups = tree((even + odd).reshape(rows, -1, UNITS)).reshape(rows, -1, LANES, CHUNK_GROUPS // LANES)
    parts = (groups[..., 0] + groups[..., 1]) + (groups[..., 2] + groups[..., 3])
    lanes = parts[:, 0]
    for number in range(1, parts.shape[1]):
        lanes = lanes + parts[:, number]
    return tree(lanes)


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """fma() of float32: the double sum is rounded to odd, so that the second rounding is right."""
    product, other = a.astype(np.float64) * np.float64(b), np.float64(c)
    total = np.asarray(product + other)
    back = total - product
    error = (product - (total - back)) + (other - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    bits[inexact] += np.where(away, 1, -1)[inexact]
    return total.astype(SINGLE)


def e4m3(x: Any) -> Any:
    """float32 as bytes of e4m3."""
    result = np.clip(x, -LARGEST, LARGEST).astype(E4M3).view(np.uint8)
    result[np.isnan(x)] = E4M3_NAN
    return result


def results(
    reduced: Any, residual: Any, weight: Any, *, dtype: str, eps: float, weight_bias: float = 0.0, scales: str = "",
    given: float = 1.0,
) -> Results:  # fmt: skip
    """The results for matrices of rows: ``reduced``, ``residual`` (or None), and the row ``weight``."""
    with np.errstate(all="ignore"):
        added = reduced.astype(SINGLE) if residual is None else reduced.astype(SINGLE) + residual.astype(SINGLE)
        residual_out = rounded(added, dtype)
        x = residual_out.astype(SINGLE)
        mean = multiply_add(sum_of_squares(x), SINGLE(1 / x.shape[1]), SINGLE(eps))
        rstd = (1 / np.sqrt(mean.astype(np.float64))).astype(SINGLE)[:, None]
        y = rounded((x * (weight.astype(SINGLE) + SINGLE(weight_bias))) * rstd, dtype)
        wide = y.astype(SINGLE)
        if not scales:
            return Results(residual_out, y)
        if scales == "given":
            return Results(residual_out, y, e4m3(wide * (SINGLE(1) / SINGLE(given))))
        grouped = wide.reshape(len(wide), -1, SCALE_GROUP if scales == "group" else wide.shape[1])
        most = np.max(np.abs(grouped), axis=2)  # NaN wins
        most = np.where(np.isposinf(rstd), SINGLE(np.nan), most)
        scale = np.maximum(most / SINGLE(LARGEST), SINGLE(1e-10))
        scale[np.isnan(scale)] = np.nan
        return Results(residual_out, y, e4m3(grouped / scale[..., None]).reshape(wide.shape), scale)


def same(a: Any, b: Any) -> bool:
    """The same bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
