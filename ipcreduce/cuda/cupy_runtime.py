"""CuPy's device, stream and allocator in a thread. The only importer of CuPy, at the first device array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentError, CudaError, UnsupportedError
from ..types import Stream
from . import driver

_LEGACY_STREAM = (0, 1)  # the default stream of a context; it lives as long as the context
_ON_THE_DEVICE = 3  # cudaMemcpyDeviceToDevice
_PER_THREAD_STREAM = 2  # another one in every thread
cupy: Any = None  # once it is imported
# CuPy's, for speed: by the bindings a graph's launch takes 0.2 to 0.5 us more (NOTES.md).
get_current_stream: Any = None
current_context: Any = None  # this thread's
is_capturing: Any = None  # a stream
launch_graph: Any = None  # an executable's handle, on a stream
record_event: Any = None  # an event, on a stream
wait_event: Any = None  # a stream, for an event


def load() -> Any:
    """CuPy. :raises UnsupportedError: if it is missing."""
    global cupy, get_current_stream, current_context, is_capturing, launch_graph, record_event, wait_event
    if cupy is None:
        try:
            import cupy as found
        except ImportError as error:
            raise UnsupportedError(
                f"CuPy is not installed ({error}): pip install 'ipcreduce[cuda13]', or [cuda12] for a driver of CUDA 12"
            ) from None
        get_current_stream, current_context = found.cuda.get_current_stream, found.cuda.driver.ctxGetCurrent
        runtime = found.cuda.runtime
        is_capturing = runtime.streamIsCapturing
        launch_graph, record_event, wait_event = runtime.graphLaunch, runtime.eventRecord, runtime.streamWaitEvent
        cupy = found  # last: then other threads use all of them
    return cupy


def nccl() -> Any:
    """CuPy's NCCL, for bench. :raises UnsupportedError: if it is missing."""
    load()
    try:
        from cupy.cuda import nccl as found
    except ImportError as error:
        raise UnsupportedError(f"no NCCL in CuPy ({error})") from None
    if not found.available:
        raise UnsupportedError("CuPy finds no libnccl.so: pip install nvidia-nccl-cu13, or -cu12")
    return found


def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Copy memory of one device on a stream. :raises CudaError: if it fails."""
    try:
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, _ON_THE_DEVICE, stream)
    except RuntimeError as error:
        raise runtime_error("cudaMemcpyAsync", error) from None


class Launchable(Protocol):
    """An executable graph."""

    handle: int


def launch(executable: Launchable, stream: Stream) -> None:
    """Launch a graph on a stream. :raises CudaError: if it fails."""
    try:
        launch_graph(executable.handle, stream)
    except RuntimeError as error:
        raise launch_error(error) from None


def launch_error(error: Exception) -> Exception:
    """An exception of :func:`launch_graph`: CuPy's as a CudaError, any other as it is."""
    return runtime_error("cudaGraphLaunch", error)


def runtime_error(name: str, error: Exception) -> Exception:
    """An exception of the runtime's call ``name``: CuPy's as a CudaError, any other as it is."""
    status = runtime_status(error)
    return CudaError(name, status, str(error)) if status else error


# ---- the fast path's part: see also torch_runtime
def plain(array: Any, device: int) -> tuple[int, Any, Any] | None:
    """(address, shape, dtype) of a C-contiguous CuPy array on this GPU; None for all else."""
    if type(array) is not cupy.ndarray or not array._c_contiguous:
        return None
    place = array.data
    address = place.ptr
    return (address, array.shape, array.dtype) if address and place.device_id == device else None


def dtype_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's dtype for CuPy's: the same."""
    return dtype


def stream_handle(device: int) -> Stream:
    """The handle of CuPy's current stream."""
    return Stream(get_current_stream().ptr)


def can_be_known(dtype: np.dtype[Any]) -> bool:
    """True if a call on the same arrays can be known again."""
    return True


def empty_like(array: Any, device: int) -> tuple[Any, int]:
    """A new C-contiguous array of the same shape and dtype, from CuPy's allocator, for its current stream.

    :returns: also its address; 0 if it is not on this GPU, because another one is CuPy's current one.
    """
    result = cupy.empty(array.shape, array.dtype)
    place = result.data
    return result, place.ptr if place.device_id == device else 0


# ---- devices and streams
def current_device() -> int:
    """CuPy's current device. :raises UnsupportedError: if CuPy cannot use this machine's driver."""
    try:
        return int(load().cuda.runtime.getDevice())
    except RuntimeError as error:
        raise UnsupportedError(f"CuPy does not work here: {error}") from error


def use_device(ordinal: int) -> None:
    """Make a device CuPy's current one in this thread. :raises CudaError: if this process cannot use it."""
    device = load().cuda.Device(ordinal)
    try:
        device.use()
    except RuntimeError as error:
        raise runtime_error("cudaSetDevice", error) from error


def stream_of(stream: Any = None) -> tuple[Stream, Any]:
    """The handle of a CuPy or PyTorch stream, one with ``__cuda_stream__``, or an int; None: CuPy's current stream.

    :returns: also the object that it is the handle of.
    :raises ArgumentError: if it is none of these.
    """
    if stream is None:
        stream = (cupy or load()).cuda.get_current_stream()
        return stream.ptr, stream
    return _handle(stream), stream


def keeps(owner: Any, handle: Stream) -> bool:
    """True if ``handle`` is known to stay valid, and to mean the same stream, as long as ``owner`` lives.

    That is known of CuPy's own streams and of the default stream only.
    """
    if handle in _LEGACY_STREAM:
        return True
    if type(owner) is not load().cuda.Stream or getattr(owner, "_foreign_stream_ref", None) is not None:
        return False
    return handle != _PER_THREAD_STREAM


def _handle(stream: Any) -> Stream:
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return Stream(stream)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return Stream(int((protocol() if callable(protocol) else protocol)[1]))
    for attribute in ("ptr", "cuda_stream"):
        if isinstance(getattr(stream, attribute, None), int):
            return Stream(int(getattr(stream, attribute)))
    raise ArgumentError(
        f"stream must be an int, a CuPy stream or an object with __cuda_stream__; found {type(stream).__name__}. "
        "Leave it out for the current stream"
    )


class _Foreign:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@cache
def _borrowed() -> Any:
    """A type of its own, since :func:`keeps` takes a cupy.cuda.Stream for the owner of its stream."""
    return type("BorrowedStream", (load().cuda.Stream,), {})


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Make this stream CuPy's current one in the block. The program's own object stays, if it is current already.

    Any other ends with the block. CuPy's MemoryAsyncPool keeps the stream object of an allocation weakly: once that has
    gone, it gives the memory back on whatever stream is current then. So it is not used in such a block.
    """
    cuda, device = load().cuda, current_device()
    before = cuda.get_current_stream()
    try:
        if before.ptr == stream:
            yield
            return
        lent = _borrowed().from_external(_Foreign(stream))
        with lent, cuda.using_allocator(_lasting(cuda.get_allocator())):
            yield
    finally:  # CuPy restores the stream of the with block around, not one that use() has made current
        if cuda.get_current_stream(device) is not before:
            with cuda.Device(device):
                before.use()


# ---- allocators
def _lasting(allocate: Callable[[int], Any]) -> Callable[[int], Any]:
    """An allocator with CuPy's default pool, which knows streams by handles, in the place of a MemoryAsyncPool."""

    def malloc(nbytes: int) -> Any:
        place = allocate(nbytes)
        if getattr(place.mem, "stream_ref", None) is None:
            return place
        return cupy.get_default_memory_pool().malloc(nbytes)

    return malloc


class _Block:
    """Memory that is given back with the last array in it."""

    def __init__(self, address: int, free: Callable[[int], None]) -> None:
        self._address, self._free = address, free

    def __del__(self) -> None:
        self._free(self._address)


def make_allocator(
    device: int, allocate: Callable[[int, Stream], int], free: Callable[[int], None], held: Callable[[], int],
    reclaim: Callable[[], None],
) -> Callable[[int], Any]:  # fmt: skip
    """A CuPy allocator of memory on ``device``, whatever device is current.

    Over ``allocate(nbytes, stream)``, ``free(address)``, ``held()``, the bytes so far, and ``reclaim()``, which gives
    the driver what it can when memory is short.

    Not a cupy.cuda.PythonFunctionAllocator: that crashes when an array is collected in a cycle (CuPy 14.2).
    """
    cuda = load().cuda

    def malloc(nbytes: int) -> Any:
        stream = stream_of()[0]
        try:
            address = allocate(nbytes, stream)
        except CudaError as error:
            if error.code != driver.OUT_OF_MEMORY:
                raise
            reclaim()
            with cuda.Device(device):
                load().get_default_memory_pool().free_all_blocks()
            try:
                address = allocate(nbytes, stream)
            except CudaError:
                raise cuda.memory.OutOfMemoryError(nbytes, held()) from None
        memory = cuda.UnownedMemory(address, nbytes, _Block(address, free), device)
        return cuda.MemoryPointer(memory, 0)

    return malloc


@contextmanager
def allocating(allocator: Any, stream: Stream) -> Iterator[None]:
    """Make ``allocator`` and ``stream`` CuPy's in this thread in the block."""
    with load().cuda.using_allocator(allocator), on_stream(stream):
        yield


# ---- errors
def runtime_status(error: BaseException) -> int:
    """The cudaError_t of a call of CuPy's that failed; 0 for any other error."""
    return int(error.status) if cupy is not None and isinstance(error, cupy.cuda.runtime.CUDARuntimeError) else 0


def raised_by_cupy(error: BaseException) -> bool:
    """True if the exception was raised within CuPy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "cupy" in str(trace.tb_frame.f_globals.get("__name__"))
