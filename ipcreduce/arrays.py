"""Arrays of every kind as the two kinds that ipcreduce works on: CuPy's on the device, NumPy's on the host.

The only module that knows CuPy, which is imported when the first device array comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from .cuda import driver, location
from .cuda.location import Locate, Location
from .errors import ArgumentError, CudaError, UnsupportedError

OUT_OF_MEMORY = 2  # both as a CUresult and as a cudaError_t
_cupy: Any = None


def _load() -> Any:
    """CuPy. :raises UnsupportedError: if it is missing."""
    global _cupy
    if _cupy is None:
        try:
            import cupy
        except ImportError as error:
            raise UnsupportedError(
                f"CuPy is not installed ({error}): pip install 'ipcreduce[cuda13]', or [cuda12] for a driver of CUDA 12"
            ) from None
        _cupy = cupy
    return _cupy


def available() -> None:
    """:raises UnsupportedError: if CuPy is missing."""
    _load()


# ---- devices and streams
def current_device() -> int:
    """CuPy's current device. :raises UnsupportedError: if CuPy cannot use this machine's driver."""
    try:
        return int(_load().cuda.runtime.getDevice())
    except RuntimeError as error:
        raise UnsupportedError(f"CuPy does not work here: {error}") from error


def use_device(ordinal: int) -> None:
    """Makes a device CuPy's current one in this thread."""
    _load().cuda.Device(ordinal).use()


def current_stream() -> tuple[int, Any]:
    """CuPy's current stream in this thread: its handle, and the object that keeps the handle valid."""
    stream = (_cupy or _load()).cuda.get_current_stream()
    return stream.ptr, stream


def stream_handle(stream: Any) -> int:
    """The handle of an int, a CuPy stream, a PyTorch stream or an object with ``__cuda_stream__``.

    :raises ArgumentError: if it is none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("ptr", "cuda_stream"):
        if isinstance(getattr(stream, attribute, None), int):
            return int(getattr(stream, attribute))
    raise ArgumentError(
        f"stream must be an int, a CuPy stream or an object with __cuda_stream__; found {type(stream).__name__}"
    )


def on_stream(stream: int) -> AbstractContextManager[Any]:
    """Makes CuPy work on this stream within a ``with`` block."""
    context: AbstractContextManager[Any] = _load().cuda.ExternalStream(stream)
    return context


# ---- arrays
def is_device(array: Any, what: str = "array") -> bool:
    """Whether ``array``, argument ``what``, lies on a GPU. :raises ArgumentError: if it is no array that we take."""
    if isinstance(array, np.ndarray):
        return False
    if _cupy is not None and isinstance(array, _cupy.ndarray):
        return True
    kind = type(array)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(kind, "__dlpack_device__"):
        device_type = int(array.__dlpack_device__()[0])
        if device_type in (2, 13):  # kDLCUDA, kDLCUDAManaged
            return True
        raise ArgumentError(
            f"{what} must be a NumPy array or lie on an NVIDIA GPU; found {name} on DLPack device type {device_type}. "
            "Pass numpy.asarray(it), or move it to the GPU"
        )
    if hasattr(kind, "__cuda_array_interface__"):
        return True
    raise ArgumentError(
        f"{what} must be a NumPy array, or a device array with __dlpack__ or __cuda_array_interface__; found "
        f"{name}. Pass numpy.asarray(it) or cupy.asarray(it)"
    )


def view(array: Any, stream: int) -> Any:
    """A CuPy array over the same memory, ready to be used on ``stream``.

    ``__cuda_array_interface__``'s ``stream`` is waited for by an event; DLPack's producer is told ``stream``.

    :raises ArgumentError: if the exporter refuses, or the type is unknown.
    """
    cupy = _load()
    if isinstance(array, cupy.ndarray):
        return array
    try:
        if hasattr(type(array), "__dlpack__"):
            with cupy.cuda.ExternalStream(stream):
                return cupy.from_dlpack(array)
        return _from_interface(array, stream)
    except ArgumentError:
        raise
    except Exception as error:  # exporters raise what they like: PyTorch for a tensor that requires grad, say
        raise ArgumentError(f"the {type(array).__qualname__} does not give its memory: {error}") from error


def _from_interface(array: Any, stream: int) -> Any:
    """By ``__cuda_array_interface__`` (versions 2 and 3), whose typestr for bfloat16 says only two opaque bytes."""
    cupy = _load()
    interface = array.__cuda_array_interface__
    dtype = location.interface_dtype(array, interface)
    if interface.get("mask") is not None:
        raise ArgumentError("array must have no mask; found one in its __cuda_array_interface__")
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    address, _ = interface["data"]
    low, past = _reach(shape, strides, dtype.itemsize)
    producer = interface.get("stream")
    if producer is not None and producer != stream and not (producer == 1 and stream == 0):
        event = driver.create_event()
        driver.record_event(event, producer)
        driver.wait_event(stream, event)
        driver.destroy_event(event)
    memory = cupy.cuda.UnownedMemory(address + low, past - low, array, current_device() if not address else -1)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides=strides)


def _reach(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> tuple[int, int]:
    """(first, past the last) byte that an array touches, from the address of its element 0."""
    if 0 in shape:
        return 0, 0
    if strides is None:
        return 0, int(np.prod(shape, dtype=np.int64)) * itemsize
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + itemsize


def is_readonly(array: Any) -> bool:
    """Whether the owner of the memory forbids writing."""
    if isinstance(array, np.ndarray):
        return not array.flags.writeable
    interface = None if isinstance(array, _load().ndarray) else getattr(array, "__cuda_array_interface__", None)
    return bool(interface and interface["data"][1])


def pointer(array: Any) -> int:
    """The address of a device array's first element."""
    return array.data.ptr


def device_of(array: Any) -> int:
    """The ordinal of the device that a device array lies on."""
    return array.data.device_id


def is_contiguous(array: Any) -> bool:
    """Whether a device array is C-contiguous."""
    return array._c_contiguous  # what flags.c_contiguous says, without making a flags object (0.3 us)


def extent(array: Any) -> tuple[int, int]:
    """(first, past the last) address that a device or host array touches."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else pointer(array)
    first, past = _reach(array.shape, array.strides, array.dtype.itemsize)
    return start + first, start + past


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], stream: int, device: int) -> Any:
    """A new array on ``device``, from CuPy's allocator, for use on ``stream``."""
    cupy = _load()
    if stream == current_stream()[0]:
        array = cupy.empty(shape, dtype)
    else:
        with cupy.cuda.ExternalStream(stream):
            array = cupy.empty(shape, dtype)
    if array.data.device_id != device:  # this thread's current device is another one: looked at only now, for speed
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
            array = cupy.empty(shape, dtype)
    return array


def contiguous_copy(array: Any, stream: int) -> Any:
    """A C-contiguous copy of a device array, made on ``stream``."""
    cupy = _load()
    with cupy.cuda.Device(device_of(array)), cupy.cuda.ExternalStream(stream):
        return array.copy(order="C")


def copy_into(target: Any, value: Any, stream: int) -> None:
    """``target[...] = value``, both device arrays of one shape and dtype, on ``stream``."""
    cupy = _load()
    with cupy.cuda.Device(device_of(target)), cupy.cuda.ExternalStream(stream):
        target[...] = value


def is_cupy(array: Any) -> bool:
    """Whether it is a CuPy array."""
    return _cupy is not None and isinstance(array, _cupy.ndarray)


def view_of(array: Any, owner: Any) -> Any:
    """A CuPy array over the same memory that keeps ``owner`` alive, and not the block that the memory is."""
    cupy = _load()
    first, past = extent(array)
    memory = cupy.cuda.UnownedMemory(first, past - first, owner, device_of(array))
    place = cupy.cuda.MemoryPointer(memory, pointer(array) - first)
    return cupy.ndarray(array.shape, array.dtype, place, strides=array.strides)


def locator(kind: type) -> Locate | None:
    """What tells where an object of this type lies, with no copy and no CUDA call; None if its objects are no arrays.

    For each array that is the :data:`Location`, or None if it is not on a GPU.
    """
    cupy = _cupy or sys.modules.get("cupy")  # nobody has an array of it who has not imported it
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return lambda array: (array.data.ptr, array.shape, location.dtype_name(array.dtype), array.strides)
    return location.locator(kind)


def locate(array: Any) -> Location | None:
    """Where a device array lies; None for any other object. :raises ArgumentError: if it does not give its address."""
    find = locator(type(array))
    return None if find is None else find(array)


# ---- recording
def current_allocator() -> Any:
    """What this thread's CuPy allocates by."""
    return _load().cuda.get_allocator()


def make_pool(allocate: Callable[[int, int], int], free: Callable[[int, int], None]) -> Any:
    """A CuPy memory pool over two functions: ``allocate(nbytes, device)`` and ``free(address, device)``."""
    cupy = _load()

    def translated(nbytes: int, device: int) -> int:
        try:
            return allocate(nbytes, device)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            # What the pool looks for: it then frees what it can, tries again, and raises CuPy's OutOfMemoryError.
            raise cupy.cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY) from None

    return cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(translated, free).malloc)


def runtime_status(error: BaseException) -> int:
    """The cudaError_t of a call of CuPy's that failed; 0 for any other error."""
    return int(error.status) if _cupy is not None and isinstance(error, _cupy.cuda.runtime.CUDARuntimeError) else 0


def raised_by_cupy(error: BaseException) -> bool:
    """Whether it comes from within CuPy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "cupy" in str(trace.tb_frame.f_globals.get("__name__"))


@contextmanager
def allocating(allocator: Any, stream: int) -> Iterator[None]:
    """Within the block this thread's CuPy allocates by ``allocator`` and works on ``stream``."""
    cupy = _load()
    with cupy.cuda.using_allocator(allocator), cupy.cuda.ExternalStream(stream):
        yield
