"""The arrays of an all-reduce with RMSNorm on a GPU, brought into the form in which kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..calls.norm_shape import NormAddresses, NormShape
from ..cuda import cupy_runtime, torch_runtime
from ..dtypes import FLOAT8
from ..errors import ArgumentError
from ..types import Stream
from . import norms, views
from .norms import NormArguments
from .operands import check_device

_BYTES, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
_OF_X = "x", "weight", "residual", "out", "residual_out"


@dataclass(eq=False)
class Output:
    """A result: kernels write ``destination``. If ``target`` is another array, the caller copies the result there."""

    target: Any
    destination: Any


class DeviceNorm:
    """The arguments of a call on a GPU as CuPy arrays, checked.

    :ivar shape: what the ranks compare, and ``form``: the shape of x.
    :ivar is_plain: no array had to be made, or copied. :ivar is_as_given: none had to be copied.
    :ivar results: those that the caller gets, by the names of arguments.
    :ivar outputs: the results that are written, and ``held``: every array that the call uses.
    """

    def __init__(self, given: NormArguments, stream: Stream, device: int, *, ordered: bool) -> None:
        """Take the arguments of a call on ``stream`` of GPU ``device``.

        :param ordered: see :meth:`DeviceOperands.of`.
        :raises ArgumentError: if an argument is wrong. Nothing is written then.
        """
        self._given, self._stream, self._device, self._ordered = given, stream, device, ordered
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
        self.shape: NormShape = norms.shape_of(given, x)
        self.form: tuple[int, ...] = x.shape
        norms.check(self.shape, self._arrays)
        norms.check_outputs(given, self._arrays)
        for name, array in self._arrays.items():
            if array.size and views.pointer(array) % array.itemsize:
                raise ArgumentError(
                    f"address {views.pointer(array):#x} of {name} is no multiple of the itemsize, {array.itemsize}. "
                    "Copy it to a new array first"
                )
        if "quant_out" in self._arrays and self._arrays["quant_out"].dtype == FLOAT8:
            self._arrays["quant_out"] = self._arrays["quant_out"].view(np.uint8)
        self.is_plain = self.is_as_given = True
        self.outputs: list[Output] = []
        self.held: list[Any] = []
        self.results: dict[str, Any] = {}

    @property
    def in_place(self) -> bool:
        """True if ``residual_out`` is the residual."""
        return "residual_out" in self._arrays and "residual" in self._arrays and bool(
            views.same_elements(self._arrays["residual_out"], self._arrays["residual"])
        )  # fmt: skip

    def place(self, alignment: int, needs_out: bool) -> NormAddresses:
        """Make the new results, and copies of arrays that kernels cannot use as they are.

        :param alignment: of the addresses of arrays of the dtype of x, in bytes.
        :param needs_out: there has to be an array for y, even if the call does not return it.
        """
        shape, x = self.shape, self._arrays["x"]
        every = dict.fromkeys(NormAddresses._fields, 0)
        for name, to in (("x", "source"), ("weight", "weight"), ("residual", "residual"), ("scale", "scales")):
            if name in self._arrays:
                every[to] = self._read(name, alignment if name in _OF_X else _FLOAT32.itemsize)
        every["residual_out"] = self._write("residual_out", self.form, x.dtype, alignment)
        if shape.keeps_y:
            every["out"] = self._write("out", self.form, x.dtype, alignment)
        elif needs_out:
            every["out"] = self._hold(self._empty("out", self.form, x.dtype))
        if shape.scales:
            every["quantised"] = self._write("quant_out", self.form, _BYTES, max(1, alignment // x.itemsize))
            if shape.scales != "given":
                form = norms.scales_shape(shape, self.form)
                every["scales"] = self._write("scales_out", form, _FLOAT32, _FLOAT32.itemsize)
        return NormAddresses(**every)

    def _hold(self, array: Any) -> int:
        self.held.append(array)
        return views.pointer(array)

    def _read(self, name: str, alignment: int) -> int:
        """The address of an argument, or of a copy of it."""
        array = self._arrays[name]
        self.held.append(array)
        if array.size and (not views.is_contiguous(array) or views.pointer(array) % alignment):
            array = views.contiguous_copy(array, self._stream)
            self.is_plain = self.is_as_given = False
        return self._hold(array)

    def _write(self, name: str, form: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> int:
        """The address for a result: of the caller's array, a new one, or a temporary one."""
        by_columns = name == "scales_out" and self.shape.column_major
        target = self._arrays.get(name)
        if target is None:
            destination, self.results[name] = self._new(name, form, dtype)
            target = destination
        else:
            self.results[name], destination = getattr(self._given, name), target
            fits = target.strides == _column_strides(self.shape, form) if by_columns else views.is_contiguous(target)
            if target.size and (not fits or views.pointer(target) % alignment):
                destination, self.is_as_given = self._empty(name, form, dtype), False
        self.held.append(target)
        self.outputs.append(Output(target, destination))
        return self._hold(destination)

    def _empty(self, name: str, form: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        self.is_plain = False
        if name == "scales_out" and self.shape.column_major:
            base = views.empty((form[-1], self.shape.scales_stride), dtype, self._stream, self._device)
            return _columns(base, self.shape, form)
        return views.empty(form, dtype, self._stream, self._device)

    def _new(self, name: str, form: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """A new CuPy array, and the array of the library of x over its memory.

        In a recording the memory belongs to the graph.
        """
        self.is_plain = False
        x, is_tensor = self._given.x, self._is_tensor
        by_columns = name == "scales_out" and self.shape.column_major
        base_form = (form[-1], self.shape.scales_stride) if by_columns else form
        if is_tensor and self._ordered:
            tensor = torch_runtime.new_on(x, base_form, dtype, self._stream)
            base = views.of_new(tensor, base_form, dtype, self._device)
        else:
            base = views.empty(base_form, dtype, self._stream, self._device)
            tensor = torch_runtime.over(base, x) if is_tensor else None
        array = _columns(base, self.shape, form) if by_columns else base
        if tensor is None:
            float8 = cupy_runtime.float8() if name == "quant_out" else None
            return array, array if float8 is None else array.view(float8)
        if by_columns:
            strides = tuple(step // dtype.itemsize for step in _column_strides(self.shape, form))
            tensor = tensor.as_strided(form, strides)
        return array, torch_runtime.of_bytes(tensor) if name == "quant_out" else tensor

    @property
    def result(self) -> tuple[Any, ...]:
        """The tuple to return."""
        found = self.results
        if not self.shape.scales:
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
