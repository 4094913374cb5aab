"""Operands of a call: its arguments, checked and brought into the form in which kernels take them.

The communicator adds rank and call to the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cuda import cupy_runtime, torch_runtime
from ..errors import ArgumentError
from ..types import Stream
from . import views

Allocating = Callable[[], AbstractContextManager[Any]]


def stream_of(array: Any, stream: Any) -> tuple[Stream, Any]:
    """The stream of a call on a device array: its handle, and the object that keeps it.

    None is the current stream: PyTorch's for a tensor, and CuPy's for all else.

    :raises ArgumentError: if ``stream`` is no stream.
    """
    if stream is None and not views.is_cupy(array) and torch_runtime.is_tensor(array):
        return torch_runtime.current_stream(array.get_device())
    return cupy_runtime.stream_of(stream)


def note_uses(used: tuple[Any, ...], stream: Stream, owner: Any) -> None:
    """Let PyTorch know of the tensors that the work on ``stream`` uses by now."""
    for one in used:
        if torch_runtime.is_tensor(one):
            torch_runtime.use_on(one, stream, owner)


@dataclass(eq=False)
class DeviceOperands:
    """The arrays of a device all-reduce.

    Kernels read ``source`` and write ``destination``: both contiguous and aligned, and the same array or apart. The
    result belongs into ``target``; where that is another array than ``destination``, :meth:`write_back` copies it.
    ``result`` is the array to return.
    """

    source: Any
    source_address: int
    destination: Any
    destination_address: int
    target: Any
    result: Any
    stream: Stream

    @classmethod
    def of(
        cls, array: Any, out: Any, stream: Stream, device: int, *, ordered: bool, allocating: Allocating
    ) -> DeviceOperands:  # fmt: skip
        """The operands of ``allreduce(array, out=out)`` on ``stream`` of GPU ``device``.

        :param ordered: False in a recording, which cannot wait for the arrays' producers outside of it.
        :param allocating: the context in which results and copies are allocated.
        :raises ArgumentError: if an argument is wrong.
        """
        source = views.view(array, stream, ordered)
        _check_device(device, source, "array")
        if out is None:
            with allocating():
                target, result = _new(array, source, stream, device, ordered)
        elif out is array:
            target, result = source, out
            if source is not array:
                check_writable(out, out)
        else:
            target, result = _out(device, source, out, stream, ordered), out
        copied = not views.is_contiguous(source)
        copied = copied or (out is not None and target is not source and _overlap_in_part(source, target))
        destination = target
        if not views.is_contiguous(target):
            check_own_elements(target)
            with allocating():
                destination = views.empty(source.shape, source.dtype, stream, device)
        if copied:
            with allocating():
                source = views.contiguous_copy(source, stream)
        source_address, destination_address = views.pointer(source), views.pointer(destination)
        if (source_address | destination_address) & (source.itemsize - 1):
            _check_aligned(source, destination)
        return cls(source, source_address, destination, destination_address, target, result, stream)

    def convert(self, dtype: Any, allocating: Allocating) -> None:
        """Let the kernels work on a copy of the source of another dtype, in place."""
        with allocating():
            self.source = self.destination = views.converted(self.source, dtype, self.stream)
        self.source_address = self.destination_address = views.pointer(self.source)

    @property
    def needs_write_back(self) -> bool:
        return self.destination is not self.target

    def write_back(self) -> None:
        """Copy the result into ``target``."""
        views.copy_into(self.target, self.destination, self.stream)


def _new(array: Any, source: Any, stream: Stream, device: int, ordered: bool) -> tuple[Any, Any]:
    """A CuPy array for the result, and the result, of the library of ``array``, over the same memory.

    A recording's results lie in the memory of its graph.
    """
    if source is array or not torch_runtime.is_tensor(array):
        target = views.empty(source.shape, source.dtype, stream, device)
        return target, target
    if ordered:
        result = torch_runtime.empty_on(array, stream)
        return views.view(result, stream, ordered=False), result
    target = views.empty(source.shape, source.dtype, stream, device)
    return target, torch_runtime.over(target, array)


def _out(device: int, source: Any, out: Any, stream: Stream, ordered: bool) -> Any:
    """The CuPy array over ``out``: see :func:`views.view`. :raises ArgumentError: if it does not fit ``source``."""
    if not views.is_device(out, "out"):
        raise ArgumentError(
            f"out must lie on the device, as array does; found {type(out).__qualname__}. Leave it out for a new array"
        )
    target = views.view(out, stream, ordered)
    check_same_kind(source, target)
    _check_device(device, target, "out")
    if target is not out:
        check_writable(out, out)
    return target


def check_same_kind(array: Any, out: Any) -> None:
    """:raises ArgumentError: if shape or dtype of ``out`` are not those of ``array``."""
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ArgumentError(
            f"out must have array's shape {array.shape} and dtype {array.dtype}; found {out.shape} and {out.dtype}. "
            "Leave it out for a new array"
        )


def check_writable(target: Any, out: Any) -> None:
    """:raises ArgumentError: if the owner of ``out``'s memory, over which ``target`` lies, does not allow writing."""
    if views.is_readonly(target):
        found = "array"
        if not isinstance(out, np.ndarray):
            found = f"{type(out).__qualname__}, or one that does not say by DLPack 1.0 that it may be written"
        raise ArgumentError(
            f"out must be writable; found a read-only {found}. Pass a copy in NumPy or CuPy, or leave it out"
        )


def check_own_elements(out: Any) -> None:
    """:raises ArgumentError: if elements share memory."""
    if views.has_shared_elements(out):
        raise ArgumentError(
            f"out must have memory of its own for each element; found shape {out.shape} with strides {out.strides}, "
            "by which elements share it. Pass a copy: out.copy()"
        )


def _check_device(ordinal: int, array: Any, name: str) -> None:
    if views.device_of(array) != ordinal:
        raise ArgumentError(
            f"{name} must lie on this communicator's GPU {ordinal}; found one on GPU "
            f"{views.device_of(array)}. Move it, or make the communicator with device="
        )


def _check_aligned(*used: Any) -> None:
    for array in used:
        if views.pointer(array) % array.itemsize:
            raise ArgumentError(
                f"array and out must lie at multiples of their itemsize, {array.itemsize}; found address "
                f"{views.pointer(array):#x}. Copy it to a new array first"
            )


def _overlap_in_part(source: Any, target: Any) -> bool:
    """True if writing ``target`` could change parts of ``source`` that are not read yet. In place is safe."""
    first, other = views.pointer(source), views.pointer(target)
    if views.is_contiguous(source) and views.is_contiguous(target):
        return first != other and abs(first - other) < source.nbytes
    (first, past), (other, other_past) = views.extent(source), views.extent(target)
    return first < other_past and other < past
