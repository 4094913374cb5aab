"""The arrays of a call with RMSNorm on a GPU, brought into the form in which kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..calls import request
from ..calls.addresses import NormAddresses
from ..calls.request import NormShape, Request
from ..cuda import cupy_runtime, torch_runtime
from ..dtypes import FLOAT8
from ..errors import ArgumentError
from . import norms, views
from .norms import NormCall
from .operands import PreparedCall, Site, Written, check_device

_BYTES, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
_OF_X = "x", "weight", "residual", "out", "residual_out"


class DeviceNorm:
    """The device arrays of an all-reduce with RMSNorm, checked: a :class:`DeviceCall`. ``results``: by argument."""

    def __init__(self, given: NormCall, site: Site) -> None:
        self._given, self._stream, self._device, self._ordered = given, site.stream, site.device, not site.recorded
        self._site, stream, device, ordered = site, site.stream, site.device, not site.recorded
        self.given: Sequence[Any] = [*given.arrays().values()]
        self._arrays: dict[str, Any] = {}
        seen: dict[int, Any] = {}  # by the ids of the program's arrays
        for name, array in given.arrays().items():
            if id(array) not in seen:
                seen[id(array)] = views.view(
                    torch_runtime.as_bytes(array) if name == "quant_out" else array, stream, ordered
                )
            self._arrays[name] = seen[id(array)]
            check_device(device, self._arrays[name], name)
        x = self._arrays["x"]
        self._is_tensor = x is not given.x and torch_runtime.is_tensor(given.x)
        self._shape: NormShape = norms.shape_of(given, x)
        self._form: tuple[int, ...] = x.shape
        norms.check(self._shape, self._arrays)
        norms.check_outputs(given, self._arrays)
        for name, array in self._arrays.items():
            if array.size and views.pointer(array) % array.itemsize:
                raise ArgumentError(
                    f"address {views.pointer(array):#x} of {name} is no multiple of the itemsize, {array.itemsize}. "
                    "Copy it to a new array first"
                )
        if "quant_out" in self._arrays and self._arrays["quant_out"].dtype == FLOAT8:
            self._arrays["quant_out"] = self._arrays["quant_out"].view(np.uint8)
        self.written: list[Written] = []
        self.held: list[Any] = []
        self.results: dict[str, Any] = {}

    @property
    def request(self) -> Request:
        """The call as the ranks compare it."""
        return request.with_norm(self._form, self._shape)

    def place(self, prepared: PreparedCall) -> NormAddresses:
        """Make the results and copies that are still missing. Returns the addresses of all arrays."""
        with self._site.allocating():
            return self._place(prepared)

    def _place(self, prepared: PreparedCall) -> NormAddresses:
        shape, x = self._shape, self._arrays["x"]
        alignment = prepared.alignment or x.itemsize
        every = dict.fromkeys(NormAddresses._fields, 0)
        for name, to in (("x", "source"), ("weight", "weight"), ("residual", "residual"), ("scale", "scales")):
            if name in self._arrays:
                every[to] = self._read(name, alignment if name in _OF_X else _FLOAT32.itemsize)
        every["residual_out"] = self._write("residual_out", self._form, x.dtype, alignment)
        if shape.keeps_y:
            every["out"] = self._write("out", self._form, x.dtype, alignment)
        elif prepared.hands_on and self._in_place:  # the residual's array cannot hold the sum that is handed on
            every["out"] = self._hold(self._empty("out", self._form, x.dtype))
        if shape.scales:
            every["quantised"] = self._write("quant_out", self._form, _BYTES, max(1, alignment // x.itemsize))
            if shape.scales != "given":
                form = norms.scales_shape(shape, self._form)
                every["scales"] = self._write("scales_out", form, _FLOAT32, _FLOAT32.itemsize)
        return NormAddresses(**every)

    @property
    def _in_place(self) -> bool:
        """True if ``residual_out`` is the residual."""
        given, residual = self._arrays.get("residual_out"), self._arrays.get("residual")
        return given is not None and residual is not None and bool(views.same_elements(given, residual))

    def _hold(self, array: Any) -> int:
        self.held.append(array)
        return views.pointer(array)

    def _read(self, name: str, alignment: int) -> int:
        """The address of an argument, or of a copy of it."""
        array = self._arrays[name]
        self.held.append(array)
        if array.size and (not views.is_contiguous(array) or views.pointer(array) % alignment):
            array = self._site.copied(array)
        return self._hold(array)

    def _write(self, name: str, form: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> int:
        """The address for a result: of the caller's array, a new one, or a temporary one."""
        by_columns = name == "scales_out" and self._shape.column_major
        target = self._arrays.get(name)
        if target is None:
            destination, self.results[name] = self._new(name, form, dtype)
            target = destination
        else:
            self.results[name], destination = getattr(self._given, name), target
            fits = target.strides == _column_strides(self._shape, form) if by_columns else views.is_contiguous(target)
            if target.size and (not fits or views.pointer(target) % alignment):
                destination = self._empty(name, form, dtype)
        self.held.append(target)
        self.written.append(Written(target, destination))
        return self._hold(destination)

    def _empty(self, name: str, form: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if name == "scales_out" and self._shape.column_major:
            base = views.empty((form[-1], self._shape.scales_stride), dtype, self._stream, self._device)
            return _columns(base, self._shape, form)
        return views.empty(form, dtype, self._stream, self._device)

    def _new(self, name: str, form: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """A new CuPy array, and an array of x's library over its memory, which in a recording is the graph's."""
        x, is_tensor = self._given.x, self._is_tensor
        by_columns = name == "scales_out" and self._shape.column_major
        base_form = (form[-1], self._shape.scales_stride) if by_columns else form
        if is_tensor and self._ordered:
            tensor = torch_runtime.new_on(x, base_form, dtype, self._stream)
            base = views.of_new(tensor, base_form, dtype, self._device)
        else:
            base = views.empty(base_form, dtype, self._stream, self._device)
            tensor = torch_runtime.over(base, x) if is_tensor else None
        array = _columns(base, self._shape, form) if by_columns else base
        if tensor is None:
            float8 = cupy_runtime.float8() if name == "quant_out" else None
            return array, array if float8 is None else array.view(float8)
        if by_columns:
            strides = tuple(step // dtype.itemsize for step in _column_strides(self._shape, form))
            tensor = tensor.as_strided(form, strides)
        return array, torch_runtime.of_bytes(tensor) if name == "quant_out" else tensor

    @property
    def result(self) -> tuple[Any, ...]:
        """The tuple to return."""
        found = self.results
        if not self._shape.scales:
            return found["out"], found["residual_out"]
        return found["quant_out"], found.get("scales_out", self._given.scale), found["residual_out"]


def _columns(base: Any, shape: NormShape, form: tuple[int, ...]) -> Any:
    """The scales of shape ``form`` in an array of columns."""
    return cupy_runtime.load().ndarray(form, base.dtype, base.data, strides=_column_strides(shape, form))


def _column_strides(shape: NormShape, form: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of column-major scales, in bytes."""
    steps, step = [], _FLOAT32.itemsize
    for length in reversed(form[:-1]):
        steps.append(step)
        step *= max(1, length)
    return (*reversed(steps), shape.scales_stride * _FLOAT32.itemsize)
