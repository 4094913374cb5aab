"""Stands for CuPy: as much of it as ``ipcreduce.arrays.views`` and the tests use, over simulated memory.

Device memory can be reached from the host here, so an array keeps a NumPy view of its memory for its geometry and its
arithmetic; the view's contents are touched only by work on a stream.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from ipcreduce.errors import CudaError
from tests.simulated import driver, graph, machine, machine_streams, pools

__version__ = "0 (simulated)"

float16, float32 = np.float16, np.float32

_thread = threading.local()


# ---- devices
def _device() -> int:
    context = machine.current()
    return context.gpu.ordinal if context is not None else 0


def _require_context() -> int:
    """The current device, with its primary context made current if this thread has none, as the runtime API does."""
    if machine.current() is None:
        Device(_device()).use()
    machine.require()
    return _device()


class Device:
    """``with Device(1): ...`` or ``Device(1).use()``."""

    _retained: dict[int, machine.Context] = {}  # once, for the life of the process  # noqa: RUF012

    def __init__(self, device: int | None = None) -> None:
        self.id = _device() if device is None else device

    def use(self) -> Device:
        if self.id not in self._retained:
            with _its_errors():
                self._retained[self.id] = machine.retain(self.id)
        machine.make_current(self._retained[self.id].handle)
        return self

    def synchronize(self) -> None:
        with self:
            machine_streams.synchronize_context()

    def __enter__(self) -> Device:
        self._previous = _device()
        return self.use()

    def __exit__(self, *_: object) -> None:
        Device(self._previous).use()


# ---- streams and events
class Graph:
    def __init__(self, nodes: machine_streams.Nodes) -> None:
        self.all_nodes, self._executable = nodes, machine_streams.in_some_order(nodes)

    @property
    def nodes(self) -> list[machine_streams.Node]:
        """Those that work, each after those that it follows, directly or through nodes of events."""
        return machine_streams.without_events(self.all_nodes)

    def launch(self, stream: Stream | None = None) -> None:
        machine_streams.launch(self._executable, (stream or get_current_stream()).ptr)


@contextmanager
def _its_errors() -> Iterator[None]:
    try:
        yield
    except machine.Fault as fault:
        raise pools.CUDARuntimeError(fault.code) from None


class ExternalStream:
    """A stream that others made. ``with`` makes it current in this thread; it can be entered more than once."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __enter__(self) -> ExternalStream:
        _stack().append(self)
        return self.use()

    def __exit__(self, *_: object) -> None:
        _stack().pop()
        _stack()[-1].use()  # and not the one of an earlier use(): so it is in CuPy

    def use(self) -> ExternalStream:
        _stack()
        _thread.current = self
        return self

    def synchronize(self) -> None:
        with _its_errors():
            machine_streams.synchronize(self.ptr)

    @property
    def done(self) -> bool:
        with _its_errors():
            return machine_streams.is_idle(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with _its_errors():
            machine_streams.wait_event(self.ptr, event.ptr)

    def is_capturing(self) -> bool:
        with _its_errors():
            return machine_streams.capture_id(self.ptr) != 0

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        machine_streams.submit(self.ptr, lambda: callback(arg))

    def begin_capture(self, mode: str = "relaxed") -> None:
        """``mode`` is a word here: "relaxed", "global", "thread_local"."""
        machine_streams.begin_capture(self.ptr, mode)

    def end_capture(self) -> Graph:
        with _its_errors():
            return Graph(machine_streams.end_capture(self.ptr))


class Stream(ExternalStream):
    """``Stream.null`` is the legacy default stream, ``Stream.ptds`` the per-thread one."""

    null: ExternalStream
    ptds: ExternalStream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        _require_context()
        self._own = not (null or ptds)
        super().__init__(machine_streams.create(not non_blocking) if self._own else 2 if ptds else 0, _device())

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        found = cls.__new__(cls)
        found.ptr, found.device_id, found._foreign_stream_ref = stream.__cuda_stream__()[1], -1, stream
        return found

    def __del__(self) -> None:
        if getattr(self, "_own", False) and machine_streams is not None:  # it is None at the interpreter's end
            machine_streams.destroy(self.ptr)


Stream.null, Stream.ptds = ExternalStream(0), ExternalStream(2)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        _require_context()
        self.ptr, self.seconds, self._timed = machine_streams.create_event(), 0.0, not disable_timing
        weakref.finalize(self, machine_streams.drop_event, self.ptr)

    def record(self, stream: ExternalStream | None = None) -> None:
        handle = (stream or get_current_stream()).ptr
        if self._timed and not machine_streams.capture_id(handle):
            machine_streams.submit(handle, lambda: setattr(self, "seconds", time.perf_counter()))
        machine_streams.record_event(self.ptr, handle)

    @property
    def done(self) -> bool:
        with _its_errors():
            return machine_streams.is_over(self.ptr)

    def synchronize(self) -> None:
        with _its_errors():
            machine_streams.synchronize_event(self.ptr)


def get_elapsed_time(start: Event, end: Event) -> float:
    """Milliseconds."""
    return (end.seconds - start.seconds) * 1e3


def _stack() -> list[ExternalStream]:
    if not hasattr(_thread, "stack"):
        _thread.stack, _thread.current = [Stream.null], Stream.null
    return _thread.stack


def get_current_stream(device_id: int = -1) -> ExternalStream:
    _stack()
    return _thread.current


# ---- memory
_free: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # by device, stream and bytes


class Memory:
    """From the pool: blocks of 512 bytes, kept for the stream that was current. All of them go back at once."""

    used = 0  # bytes, by all

    def __init__(self, nbytes: int) -> None:
        self.device_id = _require_context()
        self.size = -(-nbytes // 512) * 512
        self._key = self.device_id, get_current_stream().ptr, self.size
        self.ptr = 0
        if self.size:
            self.ptr = _free[self._key].pop() if _free[self._key] else self._new()
            Memory.used += self.size

    def _new(self) -> int:
        machine_streams.refuse_while_capturing()
        try:
            return machine.allocate(self.size)
        except machine.Fault as fault:
            if fault.code != 2:
                raise
        free_all_blocks()
        try:
            return machine.allocate(self.size)
        except machine.Fault:
            raise pools.OutOfMemoryError(self.size) from None

    def __del__(self) -> None:
        if getattr(self, "ptr", 0) and _free is not None:  # it is None at the interpreter's end
            _free[self._key].append(self.ptr)
            Memory.used -= self.size


class UnownedMemory:
    """Somebody else's; ``owner`` is kept."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0:
            if ptr == 0:
                raise RuntimeError(
                    "simulated CuPy: a null pointer does not tell its device, and device_id is not given"
                )
            index = machine.block_at(ptr).gpu
            device_id = next(gpu.ordinal for gpu in machine.gpus() if gpu.index == index)
        self.ptr, self.size, self.device_id, self._owner = ptr, size, device_id, owner


class MemoryPointer:
    def __init__(self, mem: Memory | UnownedMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def _allocate(nbytes: int) -> MemoryPointer:
    allocator = pools.current_allocator()
    return allocator(nbytes) if allocator and nbytes else _from_the_pool(nbytes)


def _from_the_pool(nbytes: int) -> MemoryPointer:
    return MemoryPointer(Memory(nbytes), 0)


class MemoryAsyncPool:
    def malloc(self, nbytes: int) -> MemoryPointer:
        return MemoryPointer(pools.MemoryAsync(nbytes, _require_context(), get_current_stream(), get_current_stream), 0)


def free_all_blocks() -> None:
    """Gives the pool's free blocks back to the driver, which waits for what runs; a capture does not mind."""
    machine_streams.wait_for_all()
    for blocks in _free.values():
        while blocks:
            machine.free(blocks.pop())


# ---- arrays
class ndarray:
    """Basic indexing gives views; ``[...] = value`` and :meth:`fill` write on the current stream."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None
    ) -> None:
        shape = (shape,) if np.ndim(shape) == 0 else tuple(shape)
        geometry = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)  # never read
        memptr = memptr or _allocate(geometry.nbytes)
        steps = [(length - 1) * step for length, step in zip(geometry.shape, geometry.strides, strict=True)]
        low, high = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
        if geometry.size and memptr.ptr:  # at address 0 NumPy would take memory of its own
            buffer = (ctypes.c_char * (high + geometry.itemsize - low)).from_address(memptr.ptr + low)
            geometry = np.ndarray(shape, dtype, buffer, -low, geometry.strides)
        self._take(geometry, memptr.mem)
        self.data = memptr

    def _take(self, view: np.ndarray, mem: Memory | UnownedMemory) -> ndarray:
        self._view, self._mem = view, mem
        self.dtype, self.strides = view.dtype, view.strides
        self.size, self.ndim, self.itemsize, self.nbytes = view.size, view.ndim, view.itemsize, view.nbytes
        self._c_contiguous = view.flags.c_contiguous  # which arrays.py reads, as it is quicker in the real one
        self.flags = SimpleNamespace(c_contiguous=view.flags.c_contiguous, f_contiguous=view.flags.f_contiguous)
        self.data = MemoryPointer(mem, view.__array_interface__["data"][0] - mem.ptr if view.size else 0)
        return self

    def _wrap(self, view: np.ndarray) -> ndarray:
        return ndarray.__new__(ndarray)._take(view, self._mem)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self._take(self._view.reshape(shape), self._mem)

    # views
    def __getitem__(self, key: Any) -> ndarray:
        key = key if isinstance(key, tuple) else (key,)
        return self._wrap(self._view[key if any(part is ... for part in key) else (*key, ...)])  # 0-d views too

    def reshape(self, *shape: Any) -> ndarray:
        return self._wrap(self._view.reshape(*shape)) if self.flags.c_contiguous else self.copy().reshape(*shape)

    def transpose(self, *axes: Any) -> ndarray:
        return self._wrap(self._view.transpose(*axes))

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._wrap(self._view if dtype is None else self._view.view(dtype))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    @property
    def T(self) -> ndarray:
        return self.transpose()

    # contents, on the current stream
    def __setitem__(self, key: Any, value: Any) -> None:
        target, source = self[key]._view, value._view if isinstance(value, ndarray) else np.array(value, self.dtype)
        _on_stream(lambda: _copy(target, source), self, value)

    def fill(self, value: Any) -> None:
        self[...] = value

    def _into(self, result: ndarray, function: Callable[..., Any], *others: Any, **options: Any) -> ndarray:
        """``result`` filled with ``function(self, *others)``."""
        values = [self._view, *(other._view if isinstance(other, ndarray) else other for other in others)]
        target = result._view
        _on_stream(lambda: function(*values, out=target, **options), self, others, result)
        return result

    def _with(self, function: Callable[..., Any], *others: Any) -> ndarray:
        """A new array, of the shape and dtype that NumPy's function gives."""
        every = [self, *others]
        shape = np.broadcast_shapes(*(one.shape for one in every if isinstance(one, ndarray)))
        dtype = function(*(np.ones((), one.dtype) if isinstance(one, ndarray) else one for one in every)).dtype
        return self._into(ndarray(shape, dtype), function, *others)

    def __add__(self, other: Any) -> ndarray:
        return self._with(np.add, other)

    def __sub__(self, other: Any) -> ndarray:
        return self._with(np.subtract, other)

    def __mul__(self, other: Any) -> ndarray:
        return self._with(np.multiply, other)

    def __truediv__(self, other: Any) -> ndarray:
        return self._with(np.true_divide, other)

    def __rtruediv__(self, other: Any) -> ndarray:
        return self._with(lambda mine, theirs, **out: np.true_divide(theirs, mine, **out), other)

    def __pow__(self, other: Any) -> ndarray:
        return self._with(np.power, other)

    def __le__(self, other: Any) -> ndarray:
        return self._with(np.less_equal, other)

    def __eq__(self, other: Any) -> ndarray:  # type: ignore[override]
        return self._with(np.equal, other)

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, other: Any) -> ndarray:
        return self._into(self, np.add, other, casting="unsafe")

    def __isub__(self, other: Any) -> ndarray:
        return self._into(self, np.subtract, other, casting="unsafe")

    def _reduced(self, function: np.ufunc, axis: int, keepdims: bool) -> ndarray:
        axis %= self.ndim
        shape = self.shape[:axis] + (1,) * keepdims + self.shape[axis + 1 :]
        return self._into(ndarray(shape, self.dtype), function.reduce, axis=axis, keepdims=keepdims)

    def sum(self, axis: int, keepdims: bool = False) -> ndarray:
        return self._reduced(np.add, axis, keepdims)

    def max(self, axis: int, keepdims: bool = False) -> ndarray:
        return self._reduced(np.maximum, axis, keepdims)

    def astype(self, dtype: Any, order: str = "C") -> ndarray:
        result = ndarray(self.shape, dtype)
        result[...] = self
        return result

    def copy(self, order: str = "C") -> ndarray:
        result = ndarray(self.shape, self.dtype)
        result[...] = self
        return result

    def __reduce__(self) -> Any:
        return asarray, (self.get(),)

    def get(self) -> np.ndarray:
        """Waits for the current stream."""
        result, source = np.empty(self.shape, self.dtype), self._view
        _on_stream(lambda: np.copyto(result, source), self)
        get_current_stream().synchronize()
        return result

    def set(self, value: np.ndarray) -> None:
        self[...] = value

    def all(self) -> ndarray:
        return asarray(self.get().all())

    def item(self) -> Any:
        return self.get().item()

    def __float__(self) -> float:
        return float(self.get())

    def __gt__(self, other: Any) -> ndarray:
        return self._with(np.greater, other)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __array__(self, *_: object) -> np.ndarray:
        raise TypeError("simulated CuPy: no implicit copy to the host")

    def __len__(self) -> int:
        return len(self._view)

    # exchange
    @property
    def device(self) -> Device:
        return Device(self.data.device_id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
            "version": 3,
            "stream": get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> ndarray:
        """Not a capsule: what this CuPy's :func:`from_dlpack` takes in its place."""
        if stream is not None and stream != (get_current_stream().ptr or 1):
            event = get_current_stream().record()
            ExternalStream(stream).wait_event(event)
        return self


def _on_stream(work: Callable[[], Any], *used: object) -> None:
    """``used`` lives until the work is done; but in a capture nothing is kept: nodes know only addresses."""
    _require_context()
    machine_streams.collect()
    stream = get_current_stream().ptr
    machine_streams.submit(stream, work if machine_streams.capture_id(stream) else lambda: (work(), used))


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """As CuPy does: arrays that overlap are copied over themselves, unless they are the same."""
    same = target.ctypes.data == source.ctypes.data and target.strides == source.strides
    if target.size and np.may_share_memory(target, source) and not same:
        source = np.broadcast_to(source, target.shape)
        for index in np.ndindex(target.shape):
            target[index] = source[index]
    else:
        np.copyto(target, source, casting="unsafe")


def from_dlpack(array: Any) -> ndarray:
    device_type, _ = array.__dlpack_device__()
    if device_type not in (2, 13):
        raise TypeError("simulated CuPy: not on a GPU")
    return array.__dlpack__(stream=get_current_stream().ptr or 1)


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def asarray(value: Any, dtype: Any = None) -> ndarray:
    if isinstance(value, ndarray):
        return value
    host = np.asarray(value, dtype)
    result = ndarray(host.shape, host.dtype)
    result[...] = host
    return result


array = asarray


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    result = ndarray(shape, dtype or np.asarray(value).dtype)
    result.fill(value)
    return result


def arange(*args: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*args, dtype=dtype))


def exp(array: ndarray) -> ndarray:
    return array._with(np.exp)


def maximum(array: ndarray, other: Any) -> ndarray:
    return array._with(np.maximum, other)


def minimum(array: ndarray, other: Any) -> ndarray:
    return array._with(np.minimum, other)


def where(condition: ndarray, array: Any, other: Any) -> ndarray:
    def choose(*values: Any, out: Any = None) -> Any:
        chosen = np.where(*values)
        if out is not None:
            out[...] = chosen
        return chosen

    return condition._with(choose, array, other)


def asnumpy(value: ndarray | np.ndarray) -> np.ndarray:
    return value.get() if isinstance(value, ndarray) else value


def get_default_memory_pool() -> SimpleNamespace:
    return SimpleNamespace(
        free_all_blocks=free_all_blocks,
        malloc=_from_the_pool,
        used_bytes=lambda: Memory.used,
    )


class _Runtime:
    CUDARuntimeError = pools.CUDARuntimeError
    getDevice = staticmethod(_device)
    getDeviceCount = staticmethod(lambda: len(machine.gpus()))

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        _require_context()
        return machine.memory_info()

    @staticmethod
    def eventRecord(event: int, stream: int) -> None:
        with _its_errors():
            machine_streams.record_event(event, stream)

    @staticmethod
    def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
        with _its_errors():
            machine_streams.wait_event(stream, event)

    @staticmethod
    def streamIsCapturing(stream: int) -> bool:
        with _its_errors():
            return machine_streams.capture_id(stream) != 0

    @staticmethod
    def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 3
        with _its_errors():
            machine_streams.submit(stream, lambda: ctypes.memmove(target, source, nbytes))

    @staticmethod
    def graphLaunch(executable: int, stream: int) -> None:
        _require_context()
        graph.launch_through_the_runtime(executable, stream)


class _Driver:
    class CUDADriverError(RuntimeError):
        pass

    @classmethod
    def ctxGetCurrent(cls) -> int:
        try:
            return driver.current_context()
        except CudaError as error:
            raise cls.CUDADriverError(error) from None


cuda = SimpleNamespace(
    Device=Device,
    Event=Event,
    ExternalStream=ExternalStream,
    MemoryAsyncPool=MemoryAsyncPool,
    Memory=Memory,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=UnownedMemory,
    get_allocator=lambda: pools.current_allocator() or _from_the_pool,
    get_current_stream=get_current_stream,
    get_elapsed_time=get_elapsed_time,
    memory=SimpleNamespace(OutOfMemoryError=pools.OutOfMemoryError),
    driver=_Driver,
    runtime=_Runtime,
    set_allocator=pools.set_allocator,
    using_allocator=pools.using_allocator,
)
