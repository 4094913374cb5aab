"""The arguments of a call on one array on a GPU, checked and brought into the form in which kernels take them.

The error messages here name neither rank nor call: the communicator adds both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..calls.request import Request
from ..cuda import cupy_runtime, torch_runtime
from ..errors import ArgumentError
from ..texts import kind_of
from ..types import Stream
from . import views


class Site(NamedTuple):
    """The GPU, the stream and the allocator of a call.

    :ivar owner: the object that keeps the handle ``stream`` valid.
    :ivar device: the ordinal of the communicator's GPU.
    :ivar recorded: the call is captured in the open recording, and runs when its segment is launched. A recording
        cannot wait for work outside of it, so its stream does not wait for the work that produces the arrays.
    :ivar allocating: the context in which results and copies are allocated.
    :ivar follow: lets the stream wait for the calls so far, as kernels do, for copies before these.
    """

    stream: Stream
    owner: Any
    device: int
    recorded: bool
    allocating: Callable[[], AbstractContextManager[Any]]
    follow: Callable[[], None]

    def copied(self, array: Any, dtype: np.dtype[Any] | None = None) -> Any:
        """A contiguous copy for kernels to read, of dtype ``dtype`` if one is given."""
        self.follow()
        with self.allocating():
            return views.contiguous_copy(array, self.stream, dtype)


class DeviceCall(Protocol):
    """The arguments of any kind of call on a GPU as CuPy arrays, checked. Nothing is written before :meth:`place`.

    :ivar given: the program's arrays.
    :ivar written: the results; see :class:`Output`.
    """

    given: Sequence[Any]

    @property
    def request(self) -> Request:
        """The call as the ranks compare it. :raises ArgumentError: if dtype or op is wrong."""

    def place(self, prepared: PreparedCall) -> Any:
        """Make what is still missing of results and copies. Returns the addresses for :meth:`Prepared.start`."""

    @property
    def held(self) -> Iterable[Any]:
        """The arrays that a recording has to keep, once they are placed."""

    @property
    def written(self) -> Sequence[Output]: ...

    @property
    def result(self) -> Any:
        """The value that the call returns."""


class PreparedCall(Protocol):
    """The part of :class:`ipcreduce.device.prepared.Prepared` that arguments need."""

    @property
    def wire_dtypes(self) -> Sequence[np.dtype[Any] | None]: ...
    @property
    def alignment(self) -> int: ...
    @property
    def hands_on(self) -> bool: ...
    @property
    def packed(self) -> bool: ...


class Output(Protocol):
    """A result: kernels write ``destination``. If ``target`` is another array, the caller copies the result there."""

    @property
    def target(self) -> Any: ...
    @property
    def destination(self) -> Any: ...


class Written(NamedTuple):
    """An array that kernels write, ``destination``, and the array into which the caller then copies it, ``target``."""

    target: Any
    destination: Any


def stream_of(array: Any, stream: Any) -> tuple[Stream, Any]:
    """The stream of a call on a device array: its handle, and the object that keeps the handle valid.

    :param stream: None stands for PyTorch's current stream if ``array`` is a tensor, and else for CuPy's.
    :raises ArgumentError: if ``stream`` is not a stream.
    """
    if stream is None and not views.is_cupy(array) and torch_runtime.is_tensor(array):
        return torch_runtime.current_stream(array.get_device())
    return cupy_runtime.stream_of(stream)


def note_uses(used: Iterable[Any], stream: Stream, owner: Any) -> None:
    """Tell PyTorch that the work queued on ``stream`` uses the tensors among ``used``."""
    for one in used:
        if torch_runtime.is_tensor(one):
            torch_runtime.use_on(one, stream, owner)


@dataclass(eq=False)
class DeviceOperands:
    """The arrays of a device all-reduce.

    Kernels read ``source`` and write ``destination``. Both are contiguous and aligned, and they are either the same
    array or do not overlap. The result belongs into ``target``: if ``target`` is not ``destination``, the caller copies
    the result there. ``given`` is the caller's array, and ``result`` the array to return.
    """

    given: Any
    source: Any
    source_address: int
    destination: Any
    destination_address: int
    target: Any
    result: Any
    site: Site

    @classmethod
    def of(cls, array: Any, out: Any, site: Site) -> DeviceOperands:
        """Take the arguments of ``allreduce(array, out=out)``. :raises ArgumentError: if an argument is wrong."""
        stream, device, ordered, allocating = site.stream, site.device, not site.recorded, site.allocating
        source = given = views.view(array, stream, ordered)
        check_device(device, source, "array")
        if out is None:
            with allocating():
                target, result = new_result(array, source.shape, source.dtype, site)
        elif out is array:
            target, result = source, out
            if source is not array:
                check_writable(out, out)
        else:
            target, result = _out(source, out, site), out
        copied = not views.is_contiguous(source)
        copied = copied or (out is not None and target is not source and _overlap_in_part(source, target))
        destination = target
        if not views.is_contiguous(target):
            check_own_elements(target)
            with allocating():
                destination = views.empty(source.shape, source.dtype, stream, device)
        if copied:
            source = site.copied(source)
        source_address, destination_address = views.pointer(source), views.pointer(destination)
        for address in (source_address, destination_address):
            if address & (source.itemsize - 1):
                raise ArgumentError(
                    f"address {address:#x} of array or out is no multiple of the itemsize, {source.itemsize}. "
                    "Copy it to a new array first"
                )
        return cls(given, source, source_address, destination, destination_address, target, result, site)

    @property
    def held(self) -> tuple[Any, ...]:
        """The arrays that a recording has to keep: the given one, too, of which ``source`` may be a copy."""
        return self.given, self.source, self.destination, self.target

    def convert(self, dtype: np.dtype[Any] | None) -> None:
        """Copy the source to ``dtype``, and let the kernels work on that copy in place. None: leave it as it is."""
        if dtype is not None:
            self.source = self.destination = self.site.copied(self.source, dtype)
            self.source_address = self.destination_address = views.pointer(self.source)


def new_result(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], site: Site) -> tuple[Any, Any]:
    """A new CuPy array, and an array of ``array``'s library over its memory, which in a recording is the graph's."""
    is_tensor = not views.is_cupy(array) and torch_runtime.is_tensor(array)
    if is_tensor and not site.recorded:
        result = torch_runtime.new_on(array, shape, dtype, site.stream)
        return views.view(result, site.stream, ordered=False), result
    target = views.empty(shape, dtype, site.stream, site.device)
    return target, torch_runtime.over(target, array) if is_tensor else target


def _out(source: Any, out: Any, site: Site) -> Any:
    """The CuPy array over ``out``. :raises ArgumentError: if it does not fit ``source``."""
    target = view_of_out(out, site)
    check_same_kind(source, target)
    if target is not out:
        check_writable(out, out)
    return target


def view_of_out(out: Any, site: Site) -> Any:
    """The CuPy array over ``out``: see :func:`views.view`. :raises ArgumentError: if it is not on the call's GPU."""
    if not views.is_device(out, "out"):
        raise ArgumentError(
            f"array lies on the GPU, but out is {kind_of(out)} on the host. Pass an array on the same GPU "
            "as out, or leave out= away for a new array"
        )
    target = views.view(out, site.stream, not site.recorded)
    check_device(site.device, target, "out")
    return target


def check_same_kind(array: Any, out: Any) -> None:
    """Compare shape and dtype. :raises ArgumentError: if those of ``out`` are not those of ``array``."""
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ArgumentError(
            f"out has shape {out.shape} and dtype {out.dtype}, but array has shape {array.shape} and dtype "
            f"{array.dtype}. Pass an out like array, or leave out= away for a new array"
        )


def check_writable(target: Any, out: Any, name: str = "out") -> None:
    """Look for a mark of read-only memory. :raises ArgumentError: if the owner of ``out``'s memory forbids writing.

    :param target: the array over the memory of ``out``.
    :param name: the argument's; "array" of a broadcast.
    """
    if views.is_readonly(target):
        why = "this array is read-only"
        if not isinstance(out, np.ndarray):
            why = f"this {type(out).__qualname__} is read-only, or does not say by DLPack 1.0 that it may be written"
        remedy = f"Pass a copy in NumPy or CuPy, or leave {name}= away for a new array"
        if name == "array":
            remedy = "Pass one that can be written, such as a copy in NumPy or CuPy, on every rank but the root"
        raise ArgumentError(f"{name} cannot be written: {why}. {remedy}")


def check_own_elements(out: Any, name: str = "out") -> None:
    """Check that each element has memory of its own. :raises ArgumentError: if two elements share memory."""
    if views.has_shared_elements(out):
        raise ArgumentError(
            f"elements of {name} share memory: its shape is {out.shape} and its strides are {out.strides}. Pass a "
            f"copy: {name}.copy()"
        )


def check_device(ordinal: int, array: Any, name: str) -> None:
    """Look where a device array lies. :raises ArgumentError: if it is not on this GPU."""
    if views.device_of(array) != ordinal:
        raise ArgumentError(
            f"{name} lies on GPU {views.device_of(array)}, but this communicator uses GPU {ordinal}. Move {name} to "
            "that GPU, or make the communicator with device="
        )


def _overlap_in_part(source: Any, target: Any) -> bool:
    """True if the arrays overlap without being the same: writing ``target`` could then change unread ``source``."""
    if views.is_contiguous(source) and views.is_contiguous(target):
        first, other = views.pointer(source), views.pointer(target)
        return first != other and abs(first - other) < source.nbytes
    return views.overlap(source, target)
