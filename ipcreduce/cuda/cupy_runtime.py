"""CuPy's device, stream and allocator in a thread. Only this module imports CuPy, when a device array needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from traceback import walk_tb
from typing import Any

import numpy as np

from ..dtypes import FLOAT8
from ..errors import INSTALL, ArgumentError, CudaError, IpcReduceError, UnsupportedError, unreadable
from ..interrupts import uninterrupted
from ..texts import kind_of
from ..types import Stream
from . import driver
from .graph import Executable

_LEGACY_STREAM = (0, 1)  # the default stream of a context; it lives as long as the context
_ON_THE_DEVICE = 3  # cudaMemcpyDeviceToDevice
_PER_THREAD_STREAM = 2  # this handle means another stream in every thread
_shape, _ndim, _size = attrgetter("shape"), attrgetter("ndim"), attrgetter("size")
cupy: Any = None  # the module, once it is imported
# Functions of CuPy, for speed: cuda.bindings takes 0.2 to 0.5 us more to launch a graph (benchmarks/NOTES.md).
get_current_stream: Any = None
current_context: Any = None  # of this thread
is_capturing: Any = None  # (stream)
launch_graph: Any = None  # (handle of an executable, stream)
record_event: Any = None  # (event, stream)
wait_event: Any = None  # (stream, event)


def load() -> Any:
    """The module CuPy, imported if need be. :raises UnsupportedError: if it is missing."""
    global cupy, get_current_stream, current_context, is_capturing, launch_graph, record_event, wait_event
    if cupy is None:
        try:
            import cupy as found
        except ImportError as error:
            raise UnsupportedError(f"CuPy is not installed ({error}): {INSTALL} for a driver of CUDA 12") from None
        get_current_stream, current_context = found.cuda.get_current_stream, found.cuda.driver.ctxGetCurrent
        runtime = found.cuda.runtime
        is_capturing = runtime.streamIsCapturing
        launch_graph, record_event, wait_event = runtime.graphLaunch, runtime.eventRecord, runtime.streamWaitEvent
        cupy = found  # last: other threads use the names above once they see this one
    return cupy


def nccl() -> Any:
    """CuPy's module for NCCL, which bench measures. :raises UnsupportedError: if it is missing."""
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


def launch(executable: Executable, stream: Stream) -> None:
    """Launch a graph on a stream. :raises CudaError: if it fails."""
    try:
        launch_graph(executable.handle, stream)
    except RuntimeError as error:
        raise runtime_error("cudaGraphLaunch", error) from None


def runtime_error(name: str, error: Exception) -> Exception:
    """The exception to raise for one of the runtime's call ``name``: a CudaError for CuPy's, any other as it is."""
    status = runtime_status(error)
    return CudaError(name, status, str(error)) if status else error


# ---- for the fast path: torch_runtime has the same functions
def plain(array: Any, device: int) -> tuple[int, Any, Any] | None:
    """Address, shape and dtype of a C-contiguous CuPy array on this GPU; None for any other array."""
    if type(array) is not cupy.ndarray or not array._c_contiguous:
        return None
    place = array.data
    address = place.ptr
    return (address, array.shape, array.dtype) if address and place.device_id == device else None


def reader(arrays: Sequence[Any], device: int) -> Callable[[Sequence[Any]], list[int] | None] | None:
    """A function that returns the addresses of lists like this one, and None for other lists.

    Each array there has shape and dtype of the one here, and is :func:`plain`, but for an address of 0.

    :returns: None instead of a function, if this is not a list of plain arrays.
    """
    kind, length = cupy.ndarray, len(arrays)
    if [*map(type, arrays)].count(kind) != length:
        return None
    dtypes, have_shapes = [array.dtype for array in arrays], same_shapes(arrays, of_any_size=True)

    def read(others: Sequence[Any]) -> list[int] | None:
        if len(others) != length:
            return None
        addresses = [  # dtypes and shapes are compared as lists, below: in this loop they would take a tenth longer
            place.ptr
            for array in others
            if type(array) is kind and array._c_contiguous
            for place in (array.data,)
            if place.device_id == device
        ]
        if len(addresses) != length or [array.dtype for array in others] != dtypes:
            return None
        return addresses if have_shapes(others) else None

    return None if read(arrays) is None else read


def same_shapes(arrays: Sequence[Any], *, of_any_size: bool = False) -> Callable[[Sequence[Any]], bool]:
    """A function that tells if as many other arrays have the shapes of these.

    A shape takes as long to read as four numbers. So where a few numbers tell shapes apart, they are asked for instead.

    :param of_any_size: False for a function that is called with the same arrays, whose size a program cannot change.
    """
    shapes = [array.shape for array in arrays]
    axes = {*map(len, shapes)}
    by: list[Callable[[Any], Any]] = [_shape]
    if axes == {1}:
        by = [_ndim, len] if of_any_size else [_ndim]
    elif axes <= {1, 2} and not any(0 in shape for shape in shapes):
        by = [_ndim, len, _size] if of_any_size else [_ndim, len]
    expected = [(tell, [*map(tell, arrays)]) for tell in by]

    def have_shapes(others: Sequence[Any]) -> bool:
        # The axes come first, as len() raises for an array without one.
        for tell, known in expected:  # noqa: SIM110  (all() takes 0.1 us longer)
            if [*map(tell, others)] != known:
                return False
        return True

    return have_shapes


def form(array: Any) -> tuple[int, int, Any]:
    """An array's axes and length, and its shape if that may change while the two stay: see :func:`same_shapes`."""
    return array.ndim, len(array), array.shape if array.ndim > 2 or array.size == 0 else None


def dtype_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's dtype for a dtype of CuPy, which is the same."""
    return dtype


def stream_handle(device: int) -> Stream:
    """The handle of CuPy's current stream."""
    handle: Stream = get_current_stream().ptr  # to call Stream() would take as long as to read it
    return handle


def can_be_cached(dtype: np.dtype[Any]) -> bool:
    """True: a call on the same arrays can be looked up for every dtype."""
    return True


def empty_like(array: Any, device: int) -> tuple[Any, int]:
    """A new C-contiguous array of the same shape and dtype, from CuPy's allocator for its current stream.

    :returns: the array and its address. The address is 0 if CuPy's current device is another GPU than ``device``.
    """
    result = cupy.empty(array.shape, array.dtype)
    place = result.data
    return result, place.ptr if place.device_id == device else 0


def empty(like: Any, shape: Any, dtype: Any, device: int) -> tuple[Any, int]:
    """A new C-contiguous array of this shape and CuPy dtype, and its address: see :func:`empty_like`."""
    result = cupy.empty(shape, dtype)
    place = result.data
    return result, place.ptr if place.device_id == device else 0


@cache
def float8() -> np.dtype[Any] | None:
    """CuPy's dtype for e4m3; None for a CuPy that has no such arrays."""
    try:
        found: np.dtype[Any] = load().empty(0, FLOAT8).dtype
        return found
    except (TypeError, ValueError):
        return None


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
    """The handle of a stream, and the object that keeps the handle valid.

    :param stream: a stream of CuPy or PyTorch, an object with ``__cuda_stream__``, or a handle as an int. None stands
        for CuPy's current stream.
    :raises ArgumentError: if ``stream`` is none of these.
    """
    if stream is None:
        stream = (cupy or load()).cuda.get_current_stream()
        return stream.ptr, stream
    try:
        return _handle(stream), stream
    except (IpcReduceError, MemoryError):  # reading() would pass the same errors on, but takes longer
        raise
    except Exception as error:
        raise unreadable("stream", stream, error) from error


def keeps(owner: Any, handle: Stream) -> bool:
    """True if ``handle`` certainly means the same stream as long as ``owner`` lives.

    That is certain for CuPy's own streams and for the default stream.
    """
    if handle in _LEGACY_STREAM:
        return True
    if type(owner) is not load().cuda.Stream or getattr(owner, "_foreign_stream_ref", None) is not None:
        return False
    return handle != _PER_THREAD_STREAM


def _handle(stream: Any) -> Stream:
    found = None
    if isinstance(stream, int) and not isinstance(stream, bool):
        found = stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        found = int((protocol() if callable(protocol) else protocol)[1])
    else:
        handles = (getattr(stream, name, None) for name in ("ptr", "cuda_stream"))
        found = next((handle for handle in handles if isinstance(handle, int)), None)
    if found is not None and 0 <= found < 1 << 64:
        return Stream(int(found))
    raise ArgumentError(
        f"stream is {kind_of(stream)}, which is no stream. Pass an int, a CuPy stream or an object with "
        "__cuda_stream__, or leave stream= away for the current stream"
    )


class _Foreign:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@cache
def _borrowed() -> Any:
    """A subclass of cupy.cuda.Stream for foreign handles. :func:`keeps` takes a plain Stream for the handle's owner."""
    return type("BorrowedStream", (load().cuda.Stream,), {})


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Make this stream CuPy's current one in the block.

    If the stream is current already, the program's object for it stays. Otherwise a new object serves the block. CuPy's
    MemoryAsyncPool refers weakly to the stream object of an allocation. Without that object, it returns the memory on
    whatever stream is current. So that pool is not used in a block with a new object.
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
    finally:  # CuPy restores the stream of the surrounding with block, but not one that use() has made current
        if cuda.get_current_stream(device) is not before:
            with cuda.Device(device):
                before.use()


# ---- allocators
def _lasting(allocate: Callable[[int], Any]) -> Callable[[int], Any]:
    """An allocator that uses CuPy's default pool, which knows streams by handles, instead of a MemoryAsyncPool."""

    def malloc(nbytes: int) -> Any:
        place = allocate(nbytes)
        if getattr(place.mem, "stream_ref", None) is None:
            return place
        return cupy.get_default_memory_pool().malloc(nbytes)

    return malloc


class _Block:
    """Memory that is freed with the last array in it, or as soon as an interrupt has kept it from being used."""

    address = 0

    def __init__(self, allocate: Callable[[], int], free: Callable[[int], None]) -> None:
        self._free = free
        with uninterrupted():
            self.address = allocate()

    def __del__(self) -> None:
        if self.address:
            self._free(self.address)


def make_allocator(
    device: int, allocate: Callable[[int, Stream], int], free: Callable[[int], None], held: Callable[[], int],
    reclaim: Callable[[], None],
) -> Callable[[int], Any]:  # fmt: skip
    """A CuPy allocator of memory on ``device``, whatever device is current.

    :param allocate: returns the address of new memory.
    :param free: takes the address of memory that is not used any more.
    :param held: the number of bytes allocated so far.
    :param reclaim: is called when memory is short, and returns unused memory to the driver.

    It is no cupy.cuda.PythonFunctionAllocator, which crashes when an array is collected in a cycle (CuPy 14.2).
    """
    cuda = load().cuda

    def malloc(nbytes: int) -> Any:
        allocated = partial(_Block, partial(allocate, nbytes, stream_of()[0]), free)
        try:
            block = allocated()
        except CudaError as error:
            if error.code != driver.OUT_OF_MEMORY:
                raise
            reclaim()
            with cuda.Device(device):
                load().get_default_memory_pool().free_all_blocks()
            try:
                block = allocated()
            except CudaError:
                raise cuda.memory.OutOfMemoryError(nbytes, held()) from None
        memory = cuda.UnownedMemory(block.address, nbytes, block, device)
        return cuda.MemoryPointer(memory, 0)

    return malloc


@contextmanager
def allocating(allocator: Any, stream: Stream) -> Iterator[None]:
    """Let CuPy use ``allocator`` and ``stream`` in this thread, in the block."""
    with load().cuda.using_allocator(allocator), on_stream(stream):
        yield


# ---- errors
def runtime_status(error: BaseException) -> int:
    """The cudaError_t of a CUDA call that failed in CuPy; 0 for any other error."""
    return int(error.status) if cupy is not None and isinstance(error, cupy.cuda.runtime.CUDARuntimeError) else 0


def raised_by_cupy(error: BaseException) -> bool:
    """True if the exception was raised within CuPy."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and "cupy" in str(frames[-1].f_globals.get("__name__"))
