"""What an all-reduce must give, from NumPy alone: nothing of ipcreduce is used here."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [BFLOAT16] + [np.dtype(t) for t in ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]]
OPS = ["sum", "prod", "min", "max", "avg"]


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == BFLOAT16


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, special: bool) -> np.ndarray:
    """Any bits for integers; for floats numbers around one, or any bits too (NaN, infinities, denormals)."""
    count = int(np.prod(shape))
    if is_float(dtype) and not special:
        return (rng.standard_normal(count) + rng.choice([-2.0, 2.0], count)).astype(dtype).reshape(shape)
    data = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    ones = rng.random(count) < 0.2  # the pattern that an empty slot has
    data.reshape(count, dtype.itemsize)[ones] = 0xFF
    return data.view(dtype).reshape(shape)


def reduce(values: list[np.ndarray], op: str) -> np.ndarray:
    """In the order of the ranks, half types in float32 and rounded once, integers exactly and wrapped at the end."""
    dtype, n = values[0].dtype, len(values)
    with np.errstate(all="ignore"):
        if op in ("min", "max"):
            ufunc = np.minimum if op == "min" else np.maximum
            wide = [v.astype(np.float64) if is_float(dtype) else v for v in values]
            result = wide[0]
            for value in wide[1:]:
                result = ufunc(result, value)
            return result.astype(dtype)
        if is_float(dtype):
            accumulate = np.float64 if dtype == np.float64 else np.float32
            result = values[0].astype(accumulate)
            for value in values[1:]:
                value = value.astype(accumulate)
                result = result * value if op == "prod" else result + value
            if op == "avg":
                result = result / accumulate(n)
            return result.astype(dtype)
    exact = values[0].reshape(-1).astype(object)
    for value in values[1:]:
        other = value.reshape(-1).astype(object)
        exact = exact * other if op == "prod" else exact + other
    flat = [abs(int(x)) // n * (1 if x >= 0 else -1) if op == "avg" else int(x) for x in exact]
    mask = (1 << 8 * dtype.itemsize) - 1
    unsigned = np.array([x & mask for x in flat], dtype=f"u{dtype.itemsize}")
    return unsigned.view(dtype).reshape(values[0].shape)


def wrapping(values: list[np.ndarray], op: str) -> np.ndarray:
    """:func:`reduce`, quicker for sums and products of integers, which NumPy wraps by itself."""
    if is_float(values[0].dtype) or op not in ("sum", "prod"):
        return reduce(values, op)
    result = values[0].copy()
    with np.errstate(all="ignore"):
        for value in values[1:]:
            result = result + value if op == "sum" else result * value
    return result


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """The same bits, but any NaN for a NaN and either zero for a zero of min and max."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if not is_float(found.dtype):
        return bool((found == expected).all())
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return bool((np.isnan(found) == np.isnan(expected)).all() and (found == expected)[~np.isnan(expected)].all())


def close(found: np.ndarray, values: list[np.ndarray], op: str) -> bool:
    """Sums, products and averages within the rounding of their dtype of the float64 result, where that is finite."""
    if not is_float(found.dtype) or op in ("min", "max"):
        return True
    n = len(values)
    with np.errstate(all="ignore"):
        wide = [v.astype(np.float64) for v in values]
        result = np.prod(wide, axis=0) if op == "prod" else np.sum(wide, axis=0) / (n if op == "avg" else 1)
        size = np.prod(np.abs(wide), axis=0) if op == "prod" else np.sum(np.abs(wide), axis=0)
        step = {2: 2.0**-8 if found.dtype == BFLOAT16 else 2.0**-11, 4: 2.0**-24, 8: 2.0**-52}[found.dtype.itemsize]
        error = np.abs(found.astype(np.float64) - result)
        limit = step * np.abs(result) + (n + 1) * (2.0**-52 if found.dtype.itemsize == 8 else 2.0**-23) * size + 1e-7
        regular = np.isfinite(result) & (np.abs(result) < 6e4)
    return bool((error <= limit)[regular].all())


def near(found: np.ndarray, values: list[np.ndarray], op: str) -> bool:
    """What NCCL may give: any order, rounded at every step; an average of integers is that of the wrapped sum.

    Floats are compared where all values are of ordinary size, and extremes where none is NaN.
    """
    dtype, n = values[0].dtype, len(values)
    if not is_float(dtype):
        if op != "avg" or dtype.name in ("int16", "uint16"):  # those two are reduced as 32-bit integers
            return same(found, reduce(values, op))
        wrapped = reduce(values, "sum").reshape(-1).astype(object)
        expected = [abs(int(x)) // n * (1 if x >= 0 else -1) for x in wrapped]
        return found.dtype == dtype and found.reshape(-1).astype(object).tolist() == expected
    wide = np.stack([v.astype(np.float64) for v in values])
    if op in ("min", "max"):
        extreme = wide.min(0) if op == "min" else wide.max(0)
        regular = ~np.isnan(wide).any(0)
        return found.dtype == dtype and bool((found.astype(np.float64) == extreme)[regular].all())
    with np.errstate(all="ignore"):
        result = wide.prod(0) if op == "prod" else wide.sum(0) / (n if op == "avg" else 1)
        size = np.abs(wide).prod(0) if op == "prod" else np.abs(wide).sum(0)
        step = {2: 2.0**-8 if dtype == BFLOAT16 else 2.0**-11, 4: 2.0**-24, 8: 2.0**-53}[dtype.itemsize]
        error = np.abs(found.astype(np.float64) - result)
        regular = ((np.abs(wide) > 1e-2) & (np.abs(wide) < 10)).all(0)
    return found.dtype == dtype and bool((error <= (n + 1) * step * size)[regular].all())
