"""The arrays of an all-reduce with RMSNorm on the host: NumPy's, and PyTorch's tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..calls import request
from ..calls.request import NormShape
from ..cuda import torch_runtime
from ..dtypes import FLOAT8
from . import norms
from .host_operands import Array, Part, as_numpy
from .norms import NormCall
from .rmsnorm import normalise


class HostNorm:
    """The host arrays of an all-reduce with RMSNorm, checked. Nothing is written before :meth:`result`."""

    def __init__(self, given: NormCall) -> None:
        self._given = given
        arrays = given.arrays()
        if "quant_out" in arrays:
            arrays["quant_out"] = torch_runtime.as_bytes(arrays["quant_out"])
        self._arrays = {name: as_numpy(array, name) for name, array in arrays.items()}
        self._source = self._arrays["x"]
        self._shape: NormShape = norms.shape_of(given, self._source)
        norms.check(self._shape, self._arrays)
        norms.check_outputs(given, self._arrays)
        self.request = request.with_norm(self._source.shape, self._shape, on_host=True)

    def parts(self) -> list[Part]:
        """The one all-reduce to make. Its sum goes into a new array, which is normalised then."""
        return [(self._source, "sum", None)]

    def result(self, reduced: Sequence[Array]) -> Any:
        """The tuple that the call returns, made of the sum."""
        residual = self._arrays.get("residual")
        rows = None if residual is None else self._as_rows(residual)
        weight, scale = self._arrays["weight"], self._arrays.get("scale")
        return self._results(*normalise(self._shape, self._as_rows(reduced[0]), weight, rows, scale))

    def _as_rows(self, array: Array) -> Array:
        """An array of the shape of x as one of shape (rows, hidden), C-contiguous."""
        return np.ascontiguousarray(array).reshape(self._shape.rows, self._shape.hidden)

    def _results(self, y: Array, residual_out: Array, quantised: Array | None, scales: Array | None) -> tuple[Any, ...]:
        """The tuple to return: the caller's outputs, filled, and new arrays for the others.

        :param y: this and the other results are arrays of rows.
        """
        shape, form = self._shape, self._source.shape
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
