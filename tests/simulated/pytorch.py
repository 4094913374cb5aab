"""PyTorch on the simulated device, as much as the library uses: tensors, current streams, stream-ordered memory.

Memory that is freed serves the next tensor of its stream at once, and waits for other streams only if it was recorded
there. So a missing ``record_stream``, or a call on a wrong stream, gives wrong values.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import cupy
import ml_dtypes
import numpy as np

import ipcreduce
from ipcreduce.dtypes import DTYPES
from tests.simulated import machine_streams

_state = threading.local()
_streams: list[Any] = []
# Memory, and events to wait for, by stream, bytes and MemPool.
_pool: dict[tuple[int, int, int], list[tuple[Any, list[Any]]]] = {}
_pools: list[Any] = []
strided, sparse_coo, contiguous_format = object(), "torch.sparse_coo", object()


class Dtype:
    def __init__(self, name: str) -> None:
        self.numpy = np.dtype(getattr(ml_dtypes, name, name))

    @property
    def is_complex(self) -> bool:
        return self.numpy.kind == "c"

    def __repr__(self) -> str:
        return f"torch.{self.numpy.name}"


_OTHERS = "bool", "complex64", "complex128", "float8_e4m3fn"
_dtypes = {name: Dtype(name) for name in (*(dtype.name for dtype in DTYPES), *_OTHERS)}
globals().update(_dtypes)


class Stream:
    """Of PyTorch's pool: it is never destroyed."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.of_cupy = cupy.cuda.Stream(non_blocking=True)
        _streams.append(self.of_cupy)
        self.cuda_stream, self.stream_id = self.of_cupy.ptr, 2 * len(_streams) + 1

    def wait_stream(self, other: Any) -> None:
        self.of_cupy.wait_event(cupy.cuda.ExternalStream(other.cuda_stream).record())


class ExternalStream(Stream):
    def __init__(self, handle: int, device: Any = None) -> None:
        self.of_cupy = cupy.cuda.ExternalStream(handle)
        self.cuda_stream, self.stream_id = handle, handle & ~1


def current_stream(device: Any = None) -> Any:
    """As PyTorch does, with a new object, of class Stream, for the same stream."""
    current = getattr(_state, "current", None)
    made = Stream.__new__(Stream)
    made.cuda_stream = current.cuda_stream if current is not None else 0
    made.stream_id = current.stream_id if current is not None else 0
    return made


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[None]:
    before, _state.current = getattr(_state, "current", None), chosen
    try:
        with chosen.of_cupy:  # so that the scenarios' work on arrays runs there
            yield
    finally:
        _state.current = before


class Event:
    """Its time is the number of milliseconds in ``clock``, which a scenario sets."""

    clock: ClassVar = [0.0]

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.time, self.is_over = -1.0, False

    def record(self) -> None:
        self.time = self.clock[0]

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, last: Any) -> float:
        assert self.time >= 0, "the event has not been recorded"
        assert last.time >= 0, "the event has not been recorded"
        return float(last.time - self.time)


class Storage:
    def __init__(self, nbytes: int) -> None:
        self.place = (current_stream().cuda_stream, nbytes, in_a_pool())
        self.recorded: set[int] = set()
        free = _pool.setdefault(self.place, [])
        for index in reversed(range(len(free))):  # what was freed last comes first
            array, events = free[index]
            if all(machine_streams.is_over(event.ptr) for event in events):
                self.array = array
                del free[index]
                return
        self.array = cupy.empty((nbytes,), np.uint8)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's exit
            events = [cupy.cuda.ExternalStream(handle).record() for handle in self.recorded]
            if not _state.imported:
                return
            alive = any(pool() is not None and id(pool()) == self.place[2] for pool in _pools)
            _pool.setdefault(self.place if alive else (*self.place[:2], 0), []).append((self.array, events))


def no_dispatch(*_: Any) -> None:
    """In the place of ``__torch_dispatch__``, where a type leaves PyTorch's operators alone."""


class Tensor:
    __torch_dispatch__: Any = no_dispatch

    def __init__(self, array: Any, storage: Any = None, pending: str = "", requires_grad: bool = False) -> None:
        self.array, self.storage, self.pending, self.requires_grad = array, storage, pending, requires_grad
        self.tangent: Any = None
        self.nowhere: int | None = None  # without memory: the offset into it
        self.is_transformed = False  # one of torch.func's, which has none either
        self.layout, self.is_quantized = strided, False
        self.device = SimpleNamespace(type="cuda", index=cupy.cuda.Device().id)

    @property
    def dtype(self) -> Any:
        return "torch.qint8" if self.is_quantized else _dtypes[self.array.dtype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    is_cuda = True

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def is_neg(self) -> bool:
        return self.pending == "neg"

    def is_conj(self) -> bool:
        return self.pending == "conj"

    def get_device(self) -> int:
        return self.device.index

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def _is_zerotensor(self) -> bool:
        return self.nowhere is not None and type(self) is Tensor

    def data_ptr(self) -> int:
        if self.is_transformed:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.array.data.ptr if self.nowhere is None else self.nowhere

    def detach(self) -> Tensor:
        return Tensor(self.array, self.storage, self.pending)

    def view(self, wanted: Any) -> Tensor:
        array = self.array.view(wanted.numpy) if isinstance(wanted, Dtype) else self.array.reshape(wanted)
        return Tensor(array, self.storage)

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        itemsize, base = self.array.itemsize, self.array.data
        steps = tuple(step * itemsize for step in strides)
        return Tensor(cupy.ndarray(shape, self.array.dtype, base, strides=steps), self.storage)

    def record_stream(self, other: Any) -> None:
        if self.layout is not strided:
            raise NotImplementedError(
                "Could not run 'aten::record_stream' with arguments from the 'SparseCUDA' backend"
            )
        if self.storage is not None and other.cuda_stream != self.storage.place[0]:
            self.storage.recorded.add(other.cuda_stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")
        return self.array.__cuda_array_interface__ | {"data": (self.data_ptr(), False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.index

    def __dlpack__(self, *, stream: int, **_: Any) -> Any:
        assert not self.requires_grad, "Can't export tensors that require gradient"
        current = current_stream().cuda_stream
        if stream not in (current or 1, -1):
            cupy.cuda.ExternalStream(stream).wait_event(cupy.cuda.ExternalStream(current).record())
        array = self.array[...]
        array.kept = self.storage
        return array


class Future:
    """With a result on the GPU: who asks for it waits, on the current stream, for the stream on which it was set."""

    def __init__(self, devices: Any = ()) -> None:
        self.devices = devices

    def set_result(self, tensor: Tensor) -> None:
        assert tensor.device in self.devices, "expected the future's value to be on its devices"
        self.tensor, self.done = tensor, cupy.cuda.ExternalStream(current_stream().cuda_stream).record()

    def wait(self) -> Tensor:
        cupy.cuda.ExternalStream(current_stream().cuda_stream).wait_event(self.done)
        self.tensor.record_stream(current_stream())
        return self.tensor


class ProcessGroup:
    """Of all ranks. The scenarios may say otherwise."""

    def __init__(self, rank: int, processes: list[int]) -> None:
        self.rank, self.processes = rank, processes


class GradBucket:
    """Of DistributedDataParallel: one tensor of gradients."""

    def __init__(self, tensor: Tensor, index: int = 0, *, is_last: bool = False) -> None:
        self.index, self.buffer, self.is_last = (lambda: index), (lambda: tensor), (lambda: is_last)


class BackwardPass:
    """The engine, and one pass of it: callbacks of a pass that fails are dropped."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def queue_callback(self, callback: Any) -> None:
        if getattr(_state, "backward", None) is None:
            raise RuntimeError("Final callbacks can only be installed during backward pass.")
        _state.backward.callbacks.append(callback)

    def __enter__(self) -> None:
        self._outer, _state.backward = getattr(_state, "backward", None), self

    def __exit__(self, kind: Any, *_: Any) -> None:
        _state.backward = self._outer
        while self.callbacks:
            callback = self.callbacks.pop()
            if kind is None:
                callback()


class WrapperTensor(Tensor):
    """Interprets PyTorch's operators itself, and has no memory."""

    __torch_dispatch__ = classmethod(no_dispatch)

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self.nowhere = 0


class AsyncCollectiveTensor(WrapperTensor):
    def wait(self) -> Tensor:
        return Tensor(self.array)


class DTensor(WrapperTensor):
    def to_local(self) -> Tensor:
        return Tensor(self.array)


class TwoTensor(WrapperTensor):
    """Of two others."""


def empty_like(tensor: Tensor, memory_format: Any = None, requires_grad: bool = False) -> Tensor:
    """As PyTorch does, with memory of the current stream."""
    storage = Storage(tensor.array.nbytes)
    return Tensor(storage.array.view(tensor.array.dtype).reshape(tensor.shape), storage)


def empty(shape: tuple[int, ...], dtype: Dtype, device: Any = None) -> Tensor:
    assert device.type == "cuda"
    storage = Storage(int(np.prod(shape)) * dtype.numpy.itemsize)
    return Tensor(storage.array.view(dtype.numpy).reshape(shape), storage)


def full_like(tensor: Tensor, value: Any) -> Tensor:
    made = empty_like(tensor)
    made.array.fill(value)
    return made


def as_tensor(array: Any, device: Any = None) -> Tensor:
    assert array.dtype != ml_dtypes.bfloat16
    return Tensor(array)


def is_grad_enabled() -> bool:
    return getattr(_state, "grad", True)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    _state.grad = False
    try:
        yield
    finally:
        _state.grad = True


class MemPool:
    """Memory apart, which is given to others once it is dropped."""

    def __init__(self) -> None:
        _pools.append(weakref.ref(self))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's exit
            for place in [place for place in _pool if place[2] == id(self)]:
                _pool.setdefault((*place[:2], 0), []).extend(_pool.pop(place))


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    assert getattr(_state, "mem_pool", 0) == 0, "beginAllocateToPool: already recording"
    _state.mem_pool = id(pool)
    try:
        yield
    finally:
        _state.mem_pool = 0


def in_a_pool() -> int:
    """For the scenarios: nonzero if this thread allocates from a MemPool."""
    return getattr(_state, "mem_pool", 0)


def pools() -> int:
    """For the scenarios: the number of MemPools that live."""
    return sum(pool() is not None for pool in _pools)


def make_current(chosen: Any) -> None:
    """For the scenarios: as :func:`stream`, for PyTorch alone."""
    _state.current = chosen


cuda = SimpleNamespace(
    current_stream=current_stream, stream=stream, Stream=Stream, ExternalStream=ExternalStream, MemPool=MemPool,
    use_mem_pool=use_mem_pool, is_available=lambda: True, init=lambda: None, Event=Event,
    is_current_stream_capturing=lambda: cupy.cuda.ExternalStream(current_stream().cuda_stream).is_capturing(),
)  # fmt: skip
_modes: dict[str, Any] = {}
_python_dispatch = SimpleNamespace(_is_in_torch_dispatch_mode=False)
utils = SimpleNamespace(_python_dispatch=_python_dispatch)
forward_ad = SimpleNamespace(_current_level=-1, unpack_dual=lambda tensor: SimpleNamespace(tangent=tensor.tangent))
autograd = SimpleNamespace(forward_ad=forward_ad, Variable=SimpleNamespace(_execution_engine=BackwardPass()))
futures = SimpleNamespace(Future=Future)
distributed = SimpleNamespace(
    group=SimpleNamespace(WORLD=None), ProcessGroup=ProcessGroup, get_rank=lambda group: group.rank,
    get_world_size=lambda group: len(group.processes), get_process_group_ranks=lambda group: group.processes,
)  # fmt: skip
_C = SimpleNamespace(
    _cuda_getCurrentRawStream=lambda device: current_stream().cuda_stream,
    _current_graph_task_id=lambda: -1 if getattr(_state, "backward", None) is None else 0,
    _is_tracing=lambda: getattr(_state, "trace", None) is not None,
    _TorchDispatchModeKey=SimpleNamespace(PROXY="proxy", FAKE="fake"),
    _get_dispatch_mode=_modes.get,
    _dispatch_tls_is_dispatch_key_excluded=lambda key: False,
    _functorch=SimpleNamespace(is_functorch_wrapped_tensor=lambda tensor: tensor.is_transformed),
)


@contextlib.contextmanager
def jit_trace() -> Iterator[None]:
    _state.trace = object()
    try:
        yield
    finally:
        _state.trace = None


class FlopCounterMode:
    """Sees PyTorch's operators, and lets them run."""

    key = "of the program"

    def __enter__(self) -> None:
        _modes[self.key], _python_dispatch._is_in_torch_dispatch_mode = self, True

    def __exit__(self, *_: Any) -> None:
        _modes.clear()
        _python_dispatch._is_in_torch_dispatch_mode = False


class ProxyTorchDispatchMode(FlopCounterMode):
    """Of make_fx."""

    key = "proxy"


class FakeTensorMode(FlopCounterMode):
    key = "fake"


@contextlib.contextmanager
def dual_level() -> Iterator[None]:
    forward_ad._current_level = 0
    try:
        yield
    finally:
        forward_ad._current_level = -1


def make_dual(tensor: Tensor, tangent: Tensor) -> Tensor:
    made = Tensor(tensor.array, tensor.storage)
    made.tangent = tangent
    return made


@contextlib.contextmanager
def imported() -> Iterator[None]:
    """In the block the program has imported this."""
    _state.imported = True
    with mock.patch.dict(sys.modules, torch=sys.modules[__name__]):
        yield
    _state.imported = False
    _pool.clear()


def module_of_ipcreduce(name: str) -> Any:
    """``ipcreduce.torch.NAME`` over this PyTorch. The package itself imports operators, which this does not have."""
    package = ModuleType("ipcreduce.torch")
    package.__path__ = [str(Path(ipcreduce.__file__).with_name("torch"))]
    with mock.patch.dict(sys.modules, {"torch": sys.modules[__name__], "ipcreduce.torch": package}):
        return importlib.import_module(f"ipcreduce.torch.{name}")
