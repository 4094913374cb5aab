"""The dtypes, the ops, and the reference reduction of NumPy arrays, which the kernels are built to match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

# A name's index in these tuples is its code on the wire and in the slots' offset (ipc/plan.py): never reorder.
DTYPE_NAMES = (
    "float16", "bfloat16", "float32", "float64",
    "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
OPS = ("sum", "prod", "min", "max", "avg")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NAN_BITS = {"float16": 0x7FFF, "bfloat16": 0x7FFF, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}  # as in kernels/
DTYPES = {(BFLOAT16 if name == "bfloat16" else np.dtype(name)): name for name in DTYPE_NAMES}


def reduce(values: Sequence[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """Reduce ``values[0] op values[1] op ...`` elementwise, from left to right.

    float16 and bfloat16 accumulate in float32 and round once. Integer sums and products wrap. The average of floats
    is the sum divided by n; of integers, the exact sum divided by n, truncated toward zero. NaN propagates through
    min and max. Of equal values (-0, +0) the first is kept. Every NaN becomes the dtype's one NaN of the kernels.

    :param values: n arrays of one shape and dtype.
    :param op: one of :data:`OPS`.
    :returns: a new array of that shape and dtype.
    """
    dtype = values[0].dtype
    if dtype.kind in "iu" and op == "avg":
        return _integer_average(values)
    half = dtype in (np.float16, BFLOAT16)
    result = values[0].astype(np.float32 if half else dtype)
    with np.errstate(all="ignore"):
        for value in values[1:]:
            if op in ("sum", "avg"):
                result += value
            elif op == "prod":
                result *= value
            else:
                better = value < result if op == "min" else value > result
                keep = ~better if dtype.kind in "iu" else np.isnan(result) | ~(better | np.isnan(value))
                result = np.where(keep, result, value)
        if op == "avg":
            result /= result.dtype.type(len(values))
        result = result.astype(dtype)
        if dtype.kind not in "iu":  # the surviving NaN payload depends on an element's place in a vector
            bits = np.array(_NAN_BITS[DTYPES[dtype]], f"u{dtype.itemsize}")
            np.copyto(result, bits.view(dtype), where=np.isnan(result))
        return result


def _integer_average(values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    # The sum may overflow, so quotients and remainders (floor division, 0 <= remainder < n) are summed separately.
    n = len(values)
    quotients = np.zeros_like(values[0])
    remainders = np.zeros(values[0].shape, np.int64)
    for value in values:
        floor = value // np.asarray(n, value.dtype)
        remainders += (value - floor * np.asarray(n, value.dtype)).astype(np.int64)
        quotients += floor
    quotients += (remainders // n).astype(quotients.dtype)
    quotients += ((quotients < 0) & (remainders % n > 0)).astype(quotients.dtype)  # from the floor toward zero
    return quotients
