"""The arrays of an all-reduce with RMSNorm on the host: NumPy's, and PyTorch's tensors there."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls.norm_shape import NormShape
from ..cuda import torch_runtime
from ..dtypes import FLOAT8
from . import norms
from .host_operands import as_numpy
from .norms import NormArguments

Array = np.ndarray[Any, Any]


class HostNorm:
    """The arguments of a call on the host as NumPy arrays, checked.

    :ivar shape: what the ranks compare.
    :ivar source: the array to be reduced.
    """

    def __init__(self, given: NormArguments) -> None:
        """Take the arguments of a call. :raises ArgumentError: if one is wrong. Nothing is written then."""
        self._given = given
        arrays = given.arrays()
        if "quant_out" in arrays:
            arrays["quant_out"] = torch_runtime.as_bytes(arrays["quant_out"])
        self._arrays = {name: as_numpy(array, name) for name, array in arrays.items()}
        self.source = self._arrays["x"]
        self.shape: NormShape = norms.shape_of(given, self.source)
        norms.check(self.shape, self._arrays)
        norms.check_outputs(given, self._arrays)

    @property
    def weight(self) -> Array:
        """The weight, of shape (hidden,)."""
        return self._arrays["weight"]

    @property
    def residual(self) -> Array | None:
        """The residual as rows, or None."""
        residual = self._arrays.get("residual")
        return None if residual is None else self.as_rows(residual)

    @property
    def scale(self) -> Array | None:
        """The given scale, or None."""
        return self._arrays.get("scale")

    def as_rows(self, array: Array) -> Array:
        """An array of the shape of x as one of shape (rows, hidden), C-contiguous."""
        return np.ascontiguousarray(array).reshape(self.shape.rows, self.shape.hidden)

    def results(self, y: Array, residual_out: Array, quantised: Array | None, scales: Array | None) -> tuple[Any, ...]:
        """The tuple to return: the caller's outputs, filled, and new arrays for the others.

        :param y: this and the other results are arrays of rows.
        """
        shape, form = self.shape, self.source.shape
        normed = self._give("out", y.reshape(form)) if shape.keeps_y else None
        added = self._give("residual_out", residual_out.reshape(form))
        if quantised is None:
            return normed, added
        given_scales = self._given.scale
        if scales is not None:
            new = _scales(shape, norms.scales_shape(shape, form))
            new[...] = scales.reshape(new.shape)
            given_scales = self._give("scales_out", new)
        return self._give("quant_out", quantised.reshape(form)), given_scales, added

    def _give(self, name: str, value: Array) -> Any:
        target = self._arrays.get(name)
        if target is not None:
            (target.view(np.uint8) if target.dtype == FLOAT8 else target)[...] = value
            return getattr(self._given, name)
        if torch_runtime.is_tensor(self._given.x):
            tensor = torch_runtime.of_numpy(value)
            return torch_runtime.of_bytes(tensor) if name == "quant_out" else tensor
        return value.view(FLOAT8) if name == "quant_out" else value


def _scales(shape: NormShape, form: tuple[int, ...]) -> Array:
    """A new array for scales, in the order in memory that the shape says."""
    if not shape.column_major:
        return np.empty(form, np.float32)
    columns = np.empty((form[-1], shape.scales_stride), np.float32)[:, : shape.rows]
    return columns.T.reshape(form)
