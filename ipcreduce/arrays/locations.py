"""The addresses of device arrays of every library, read without a copy and without a CUDA call."""

from __future__ import annotations

import sys
from typing import Any

from ..cuda import array_protocols, cupy_runtime, torch_runtime, torch_tensors
from ..cuda.array_protocols import Locate
from ..errors import ArgumentError, Location


def locator(kind: type) -> Locate | None:
    """A function that reads where an array of this type lies, without copy or CUDA call; None for other types.

    The function returns the :data:`Location`, or None for an array that is not on a GPU.
    """
    cupy = cupy_runtime.cupy or sys.modules.get("cupy")
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return lambda array: (array.data.ptr, array.shape, array_protocols.dtype_name(array.dtype), array.strides)
    if torch_runtime.is_plain_type(kind):
        return _locate_tensor
    if torch_runtime.is_wrapper_type(kind):
        return _refuse_wrapper
    return array_protocols.locator(kind)


def _refuse_wrapper(tensor: Any) -> None:
    if tensor.device.type == "cuda":
        raise ArgumentError(f"array {torch_tensors.problem(tensor)}")


def _locate_tensor(tensor: Any) -> Location | None:
    """Read the tensor's own attributes: its protocols fail if it requires grad, also within torch.no_grad()."""
    problem = torch_tensors.own_problem(tensor)
    if problem and tensor.is_cuda and torch_runtime.is_zero(tensor):
        raise ArgumentError(f"array {problem}")
    place = None if problem else torch_runtime.place_of(tensor)
    if place is None:  # it is not on a GPU, or has a dtype that NumPy lacks, or its memory is not its values
        read = array_protocols.locator(type(tensor))
        return None if read is None else read(tensor)
    address, shape, dtype, strides, _ = place
    return address, shape, array_protocols.dtype_name(dtype), strides


def locate(array: Any) -> Location | None:
    """The location of a device array; None for any other object.

    :raises ArgumentError: if the array does not give its address, or has no memory of its own.
    """
    kind = type(array)
    find, attributes = locator(kind), array_protocols.attributes(kind)
    if find is None and attributes is not None:
        find = array_protocols.carried(kind, attributes(array))
    return None if find is None else checked(find(array), kind)


def checked(place: Location | None, kind: type) -> Location | None:
    """The location itself, checked. :raises ArgumentError: if its address is 0 although it has elements.

    :param kind: the array's type, for the message.
    """
    if place is not None and not place[0] and 0 not in place[1]:
        raise ArgumentError(array_protocols.no_memory(kind))
    return place
