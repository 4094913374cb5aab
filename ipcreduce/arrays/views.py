"""Views of every library's arrays: as CuPy arrays on the GPU, and as NumPy arrays on the host."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from .. import advice
from ..cuda import array_protocols, cupy_runtime, streams, torch_runtime, torch_tensors
from ..cuda.cupy_runtime import current_device, load, on_stream, stream_of
from ..dtypes import KIND_NAMES
from ..errors import ArgumentError, IpcReduceError
from ..texts import kind_of, text_of, type_name
from ..types import Stream

NUMBERS = (np.generic, bool, int, float, complex)
_ON_HOST = (1, 3, 11)  # DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost
_ON_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
_MAX_WORK = 100_000  # steps of numpy.shares_memory, which take 3 ms


def is_device(array: Any, what: str = "array") -> bool:
    """True if ``array`` lies on a GPU; False for arrays on the host, and for numbers.

    :param what: the argument's name, for messages.
    :raises ArgumentError: for anything else.
    """
    try:
        if isinstance(array, np.ndarray):
            return False
        if cupy_runtime.cupy is not None and isinstance(array, cupy_runtime.cupy.ndarray):
            return True
        return not isinstance(array, NUMBERS) and _is_device(array, what)
    except IpcReduceError:
        raise
    except Exception as error:  # JAX raises for an array that is sharded or deleted
        raise ArgumentError(_refused(array, error, what)) from error


def _is_device(array: Any, what: str) -> bool:
    if problem := torch_tensors.problem(array):
        raise ArgumentError(f"{what} {problem}")
    kind = type(array)
    name = f"{kind.__module__}.{type_name(array)}"
    if array_protocols.has(array, "__dlpack_device__"):
        device_type = int(array.__dlpack_device__()[0])
        if device_type in (*_ON_GPU, *_ON_HOST):
            return device_type in _ON_GPU
        raise ArgumentError(
            f"{what}, a {name}, lies on DLPack device type {device_type}. Move it to an NVIDIA GPU, or to the host"
        )
    if array_protocols.has(array, "__cuda_array_interface__"):
        return True
    if not isinstance(array, type) and any(getattr(array, one, None) is not None for one in array_protocols.PROTOCOLS):
        raise ArgumentError(
            f"{what} is a {name}, which hands on the protocols of an array that it holds, and may add a unit or a mask "
            "of its own. Pass the array that it holds"
        )
    remedy = advice.for_array(array, what)
    raise ArgumentError(f"{what} is a {name}, which has neither __dlpack__ nor __cuda_array_interface__. {remedy}")


def check_plain(array: Any, plain: type, what: str = "array") -> None:
    """Check that an array's memory is its whole value. ``plain``: its library's class, of which it may be a subclass.

    :raises ArgumentError: if its class computes in a way of its own, as arrays with units or a mask do.
    """
    kind = type(array)
    if getattr(kind, "__array_ufunc__", None) is not getattr(plain, "__array_ufunc__", None):
        raise ArgumentError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, whose __array_ufunc__ is not {plain.__qualname__}'s: "
            "its memory may not be its whole value, as with units or a mask. Pass a plain array of the values that you "
            "mean"
        )


def view(array: Any, stream: Stream, ordered: bool = True) -> Any:
    """A CuPy array over the same memory, ready to be used on ``stream``.

    :param ordered: whether ``stream`` waits for the work that produces the array: by an event for the stream that
        ``__cuda_array_interface__`` names, and by the producer itself, which is told ``stream``, for DLPack. A
        recording cannot wait for work outside of it, and passes False.
    :raises ArgumentError: if the array's library gives no view, or if the array has no memory of its own.
    """
    cupy = load()
    if type(array) is cupy.ndarray:
        found = array
    elif isinstance(array, cupy.ndarray):  # of a subclass, which may index, copy and reshape in its own way
        check_plain(array, cupy.ndarray)
        found = cupy.ndarray.view(array, type=cupy.ndarray)
    else:
        found = _viewed(array, stream, ordered)
    if not pointer(found) and found.size:
        raise ArgumentError(array_protocols.no_memory(type(array)))
    return found


def _viewed(array: Any, stream: Stream, ordered: bool) -> Any:
    cupy = load()
    try:
        if torch_runtime.is_tensor(array) and (place := torch_runtime.place_of(array)) is not None:
            return _from_tensor(array, place, stream, ordered)
        if array_protocols.has(array, "__dlpack__"):
            with on_stream(stream):
                return cupy.from_dlpack(array if ordered else _Unordered(array))
        return _from_interface(array, stream, ordered)
    except ArgumentError:
        raise
    except Exception as error:  # each library raises errors of its own
        raise ArgumentError(_refused(array, error)) from error


def host_view(array: Any, what: str = "array") -> np.ndarray[Any, Any]:
    """A NumPy array over the same memory as ``array``, which lies on the host and has DLPack.

    :param what: the argument's name, for messages.
    :raises ArgumentError: if the array's library gives no view, or NumPy does not have the dtype.
    """
    bfloat16 = "bfloat16" in _dtype_text(array)
    try:
        if torch_runtime.is_tensor(array):
            view = array_protocols.host_view(torch_runtime.detached(array))
            return view.view(ml_dtypes.bfloat16) if bfloat16 else view
        return array_protocols.host_view(array)
    except Exception as error:  # each library raises errors of its own
        if bfloat16:
            raise ArgumentError(
                f"{what} is {kind_of(array)} of bfloat16 on the host, which NumPy does not take by DLPack. Pass "
                "NumPy's view of it, with dtype ml_dtypes.bfloat16"
            ) from error
        raise ArgumentError(_refused(array, error, what)) from error


def _refused(array: Any, error: object, what: str = "array") -> str:
    dtype = _dtype_text(array)
    name = dtype.rpartition(".")[2]  # PyTorch's dtypes begin with "torch."
    if name and name not in KIND_NAMES:
        allowed = ", ".join(KIND_NAMES)
        remedy = advice.for_dtype_named(name)
        return f"{kind_of(array)} of {dtype} cannot be reduced. The dtypes are {allowed}. {remedy}"
    reason = text_of(error).rstrip(".")
    with suppress(Exception):
        if array.is_deleted():  # one of JAX, whose own text is about a NoneType
            reason = "it was deleted, or donated to a function"
    return f"{what}, {kind_of(array)}, does not give its memory: {reason}. Pass an array that does, or a copy"


def _dtype_text(array: Any) -> str:
    """The dtype of any library's array; "" if it has none, or does not tell."""
    with suppress(Exception):
        return str(array.dtype)
    return ""


class _Unordered:
    """An array that asks its producer, in DLPack's way, to add no wait."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__dlpack_device__ = array.__dlpack_device__

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options | {"stream": -1})


def _from_tensor(tensor: Any, place: torch_runtime.Place, stream: Stream, ordered: bool) -> Any:
    """A view of a PyTorch tensor's memory. It takes a tenth of the time that DLPack takes."""
    address, shape, dtype, strides, device = place
    if ordered:
        torch_runtime.order(device, stream)
    # A recording has to keep the memory: a tensor may later be given other memory (set_(), .data).
    return _over(address, shape, dtype, strides, tensor if ordered else tensor.detach(), device)


def _from_interface(array: Any, stream: Stream, ordered: bool) -> Any:
    """A view by ``__cuda_array_interface__`` (versions 2 and 3)."""
    interface = array.__cuda_array_interface__
    dtype = array_protocols.interface_dtype(array, interface)
    if interface.get("mask") is not None:
        raise ArgumentError("array has a mask in its __cuda_array_interface__. Pass an array without one")
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    address, _ = interface["data"]
    producer = interface.get("stream") if ordered else None
    if producer is not None and producer != stream and not (producer == 1 and stream == 0):
        streams.let_wait(stream, producer)
    return _over(address, shape, dtype, strides, array, current_device() if not address or 0 in shape else -1)


def _over(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None, owner: Any, device: int
) -> Any:  # fmt: skip
    """A CuPy array over memory that ``owner`` keeps alive. ``address`` is that of element 0."""
    cupy = load()
    low, past = _reach(shape, strides, dtype.itemsize)
    memory = cupy.cuda.UnownedMemory(address + low, past - low, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides=strides)


def _reach(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> tuple[int, int]:
    """The first byte of an array, and the one past its last, relative to the address of its element 0."""
    if 0 in shape:
        return 0, 0
    if strides is None:
        return 0, math.prod(shape) * itemsize
    first, past = 0, itemsize
    for length, stride in zip(shape, strides, strict=True):
        if stride < 0:
            first += (length - 1) * stride
        else:
            past += (length - 1) * stride
    return first, past


def is_readonly(array: Any) -> bool:
    """True if the array's library forbids writing to its memory, or does not say that it allows it."""
    if isinstance(array, np.ndarray):
        return not array.flags.writeable
    if is_cupy(array) or torch_runtime.is_tensor(array):  # their libraries have no read-only arrays
        return False
    return array_protocols.is_readonly(array)


def pointer(array: Any) -> int:
    """The address of a device array's first element."""
    return array.data.ptr


def device_of(array: Any) -> int:
    """The ordinal of the device that a device array lies on."""
    return array.data.device_id


def is_contiguous(array: Any) -> bool:
    """True if a device array is C-contiguous."""
    return array._c_contiguous  # as flags.c_contiguous, without a flags object (0.3 us)


def extent(array: Any) -> tuple[int, int]:
    """The first address of a device or host array, and the one past its last."""
    start = _start(array)
    if not isinstance(array, np.ndarray) and is_contiguous(array):  # saves 1 us of each call in a recording
        return start, start + array.nbytes
    first, past = _reach(array.shape, array.strides, array.dtype.itemsize)
    return start + first, start + past


def _start(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else pointer(array)


def steps(array: Any) -> tuple[int, ...]:
    """The strides of an array; 0 along an axis of one element, whose stride is never taken, and may be any."""
    return tuple(stride * (length > 1) for length, stride in zip(array.shape, array.strides, strict=True))


def same_elements(array: Any, other: Any) -> bool:
    """True if two arrays of one shape, both on the device or both on the host, are the same elements."""
    if _start(array) != _start(other) or array.dtype != other.dtype:
        return False
    return bool(array.strides == other.strides or steps(array) == steps(other))


def overlap(array: Any, other: Any) -> bool:
    """True if the address ranges of two device arrays overlap. Strided arrays may still have no byte in common."""
    (first, past), (other_first, other_past) = extent(array), extent(other)
    return first < other_past and other_first < past


def share_memory(array: Any, other: Any) -> bool:
    """True if two arrays, both on the device or both on the host, have a byte in common.

    True also if that takes too long to find out.
    """
    if not isinstance(array, np.ndarray):
        return overlap(array, other) and share_memory(_geometry(array), _geometry(other))
    try:
        return bool(np.shares_memory(array, other, max_work=_MAX_WORK))  # type: ignore[arg-type]  # its stub is strict
    except np.exceptions.TooHardError:  # with odd strides the exact answer may take hours
        return True


def _geometry(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array with the device array's addresses, for comparisons. Reading its elements would crash."""
    place = SimpleNamespace(__array_interface__={
        "shape": array.shape, "typestr": f"|V{array.itemsize}", "strides": array.strides,
        "data": (pointer(array), True), "version": 3,
    })  # fmt: skip
    return np.asarray(place)


def has_shared_elements(array: Any) -> bool:
    """True if two elements of a device or host array lie in the same bytes."""
    if not array.size:
        return False
    pairs = zip(array.shape, array.strides, strict=True)
    steps = sorted((abs(stride), length) for length, stride in pairs if length > 1)
    past = itemsize = array.dtype.itemsize
    nested = True
    for stride, length in steps:
        nested = nested and stride >= past
        past += (length - 1) * stride
    if nested:
        return False
    if steps[0][0] < itemsize or past < array.nbytes:
        return True
    places = np.zeros(1, np.int64)  # strides such as only as_strided makes: compare the places of all elements
    for stride, length in steps:
        places = np.add.outer(places, stride * np.arange(length)).reshape(-1)
    places.sort()
    return bool((np.diff(places) < itemsize).any())


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], stream: Stream, device: int) -> Any:
    """A new array on ``device``, from CuPy's allocator, for use on ``stream``."""
    cupy = load()
    if stream == stream_of()[0]:
        array = cupy.empty(shape, dtype)
    else:
        with on_stream(stream):
            array = cupy.empty(shape, dtype)
    if array.data.device_id != device:  # the thread's current device was another one: looked at only now, for speed
        with cupy.cuda.Device(device), on_stream(stream):
            array = cupy.empty(shape, dtype)
    return array


def contiguous_copy(array: Any, stream: Stream, dtype: np.dtype[Any] | None = None) -> Any:
    """A C-contiguous copy of a device array, made on ``stream``. It has another dtype if one is given."""
    with load().cuda.Device(device_of(array)), on_stream(stream):
        return array.copy(order="C") if dtype is None else array.astype(dtype, order="C")


def copy_into(target: Any, value: Any, stream: Stream) -> None:
    """Copy one device array into another of the same shape, on ``stream``. The arrays may overlap."""
    if same_elements(target, value):
        return
    if overlap(target, value):
        value = contiguous_copy(value, stream)
    with load().cuda.Device(device_of(target)), on_stream(stream):
        target[...] = value


def of_new(tensor: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
    """A CuPy array over a new contiguous tensor of PyTorch, of which all is known: no check, and no wait."""
    return _over(tensor.data_ptr(), shape, dtype, None, tensor, device)


def at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
    """A CuPy array over contiguous memory that lives as long as it is used."""
    return _over(address, shape, dtype, None, None, device)


def is_cupy(array: Any) -> bool:
    """True for a CuPy array."""
    return cupy_runtime.cupy is not None and isinstance(array, cupy_runtime.cupy.ndarray)


def view_of(array: Any, owner: Any) -> Any:
    """A CuPy array over the same memory that keeps ``owner`` alive, in place of the memory's block."""
    return _over(pointer(array), array.shape, array.dtype, array.strides, owner, device_of(array))
