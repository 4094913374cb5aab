"""What an all-reduce with RMSNorm must give, step by step as docs/fused.md says it: nothing of ipcreduce is used here.

Each number of a row is an array over the rows here. What NumPy does not have is exact arithmetic of fractions.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.shared.reference import BFLOAT16

f32 = np.float32
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(f32)}
NAN_BITS = {"float16": 0x7FFF, "bfloat16": 0x7FFF, "float32": 0x7FC00000}
E4M3_NAN, SCALE_GROUP = 0x7F, 128


class Results(NamedTuple):
    """``scales`` has a number a row or a group, and is None where it is given or there is none."""

    residual_out: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]
    quantised: np.ndarray[Any, Any] | None = None
    scales: np.ndarray[Any, Any] | None = None


def rounded(exact: Fraction) -> np.float32:
    """To nearest, ties to even."""
    if exact == 0:
        return f32(0)
    size, exponent = abs(exact), 0
    while size >= 1 << 24:
        size, exponent = size / 2, exponent + 1
    while size < 1 << 23 and exponent > -149:
        size, exponent = size * 2, exponent - 1
    value = Fraction(round(size)) * Fraction(2) ** exponent
    if value >= Fraction(2) ** 128:
        return f32(np.inf) if exact > 0 else f32(-np.inf)
    return f32(float(value if exact > 0 else -value))


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    if not np.isfinite(a):
        return a * b + c
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def root(value: np.float32) -> np.float32:
    """1 / sqrt(value): the float32 on whose side of both middles, to its neighbours, the exact root lies."""
    near = f32(1 / np.sqrt(np.float64(value)))
    if not np.isfinite(near) or near == 0:
        return near
    for found in (near, np.nextafter(near, f32(np.inf)), np.nextafter(near, f32(0))):
        low, high = np.nextafter(found, f32(0)), np.nextafter(found, f32(np.inf))
        middles = [(Fraction(float(found)) + Fraction(float(other))) / 2 for other in (low, high)]
        if Fraction(float(value)) * middles[0] ** 2 < 1 < Fraction(float(value)) * middles[1] ** 2:
            return found
    raise AssertionError(value)


def butterfly(values: list[Any]) -> Any:
    """The sum over lanes, each of which adds what the lane at its number xor 1, 2, 4, ... has. It is in every lane."""
    step = 1
    while step < len(values):
        values = [value + values[lane ^ step] for lane, value in enumerate(values)]
        step *= 2
    return values[0]


def sum_of_squares(x: np.ndarray) -> np.ndarray:
    """By rows, of float32."""
    rows, hidden = x.shape
    zero = np.zeros(rows, f32)

    def square(place: int) -> Any:
        return x[:, place] * x[:, place] if place < hidden else zero

    def unit(first: int) -> Any:
        e = [square(first + place) for place in range(8)]
        return (((e[0] + e[2]) + e[4]) + e[6]) + (((e[1] + e[3]) + e[5]) + e[7])

    def group(first: int) -> Any:
        return butterfly([unit(first + 8 * place) for place in range(8)]) if first < hidden else zero

    lanes = [zero] * 32
    for chunk in range(0, hidden, 8192):
        for lane in range(32):
            g = [group(chunk + 64 * (4 * lane + place)) for place in range(4)]
            part = (g[0] + g[1]) + (g[2] + g[3])
            lanes[lane] = part if chunk == 0 else lanes[lane] + part
    return butterfly(lanes)


_POSITIVE = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 to 448, in order


def e4m3(values: np.ndarray) -> np.ndarray:
    """The bytes of the nearest numbers, ties to an even last bit; 448 for all that is larger."""
    size = np.minimum(np.abs(values.astype(np.float64)), 448)
    above = np.clip(np.searchsorted(_POSITIVE, size), 1, 0x7E)
    low, high = size - _POSITIVE[above - 1], _POSITIVE[above] - size
    found = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.where(np.isnan(values), E4M3_NAN, found | np.signbit(values) * 0x80).astype(np.uint8)


def canonical(array: np.ndarray) -> np.ndarray:
    """With the one NaN of the kernels."""
    if np.isnan(array).any():
        bits = NAN_BITS["float32" if array.itemsize == 4 else "float16"]
        array[np.isnan(array)] = np.array(bits, f"u{array.itemsize}").view(array.dtype)
    return array


def results(
    reduced: np.ndarray, residual: np.ndarray | None, weight: np.ndarray, *, eps: float = 1e-6,
    weight_bias: float = 0.0, scales: str = "", given: float = 1.0,
) -> Results:  # fmt: skip
    """The results of one call, from the sum that the plain all-reduce gives.

    :param scales: "given", "token" or "group"; "" for none.
    """
    form, dtype, hidden = reduced.shape, reduced.dtype, reduced.shape[-1]
    with np.errstate(all="ignore"):
        total = reduced.reshape(-1, hidden).astype(f32)
        if residual is not None:
            total = total + residual.reshape(-1, hidden).astype(f32)
        added = canonical(total.astype(dtype))
        x = added.astype(f32)
        means = [fma(one, f32(1 / hidden), f32(eps)) for one in sum_of_squares(x)]
        rstd = np.array([root(one) for one in means], f32).reshape(-1, 1)
        y = canonical(((x * (weight.astype(f32) + f32(weight_bias))) * rstd).astype(dtype))
        found = Results(added.reshape(form), y.reshape(form))
        values = y.astype(f32)
        if scales == "given":
            return found._replace(quantised=e4m3(values * (f32(1) / f32(given))).reshape(form))
        if not scales:
            return found
        values[np.isinf(rstd[:, 0])] = np.nan  # of rows whose sum is 0, without eps
        length = hidden if scales == "token" else SCALE_GROUP
        parts = values.reshape(len(values), hidden // length, length)
        each = canonical(np.maximum(np.abs(parts).max(axis=2) / f32(448), f32(1e-10)))
        quantised = e4m3(parts / each[..., None]).reshape(form)
        return found._replace(quantised=quantised, scales=each.reshape(*form[:-1], parts.shape[1]))


def same(a: Any, b: Any) -> bool:
    """The same shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
