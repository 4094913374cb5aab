"""CuPy as tests/shared/sweep_cases.py wants it."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np


def buffer(raw: np.ndarray) -> Any:
    """Device bytes with these values."""
    return cupy.asarray(raw)


def view(buffer: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None) -> Any:
    """An array over a part of a buffer."""
    return cupy.ndarray(shape, dtype, buffer.data + offset, strides=strides)


def read(array: Any) -> np.ndarray:
    """The values, on the host."""
    return array.get() if array.flags.c_contiguous else array.copy().get()
