"""Stands for ``ipcreduce.cuda.driver``, over the simulated machine.

For tests: :func:`fault_at`, :func:`calls`, :func:`leaks`, and streams and captures until the library has its own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ipcreduce.errors import CudaError, UnsupportedError
from tests.sim import compiler, machine, streams
from tests.sim.machine import ERRORS, Fault

IPC_HANDLE_BYTES = machine.HANDLE_BYTES
PER_THREAD_STREAM = streams.PER_THREAD
INVALID_CONTEXT = (201, 400, 709)

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class DeviceInfo:
    """As in the real driver."""

    ordinal: int
    uuid: bytes
    name: str
    capability: tuple[int, int]
    memory_bytes: int


# ---- for tests
_calls = 0
_fault_at = 0
failed: list[str] = []  # the names of the calls that fault_at() made fail
_alive: Counter[str] = Counter()  # what this module has handed out and not got back, by kind


def fault_at(k: int) -> None:
    """The ``k``-th driver call from now, counted from 1, raises CudaError instead of doing anything; 0: none."""
    global _fault_at
    _fault_at = _calls + k if k else 0


def calls() -> int:
    """Number of driver calls so far, launches included."""
    return _calls


def leaks() -> dict[str, int]:
    """How many contexts, allocations, mappings, ... the library has taken and not given back; {} is none."""
    return {kind: count for kind, count in _alive.items() if count}


def _api(name: str) -> Callable[[_F], _F]:
    """A driver call: counted, made to fail by :func:`fault_at`, its failures raised as CudaError."""

    def wrap(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            global _calls
            if not machine.gpus():
                raise UnsupportedError("the NVIDIA driver does not start (cuInit gave 100): is a GPU visible?")
            streams.collect()
            _calls += 1
            try:
                if _calls == _fault_at:
                    failed.append(name)
                    raise Fault(999)
                return function(*args, **kwargs)
            except Fault as fault:
                raise CudaError(name, fault.code, ERRORS[fault.code]) from None

        return call  # type: ignore[return-value]

    return wrap


# ---- devices and contexts
@_api("cuDriverGetVersion")
def driver_version() -> tuple[int, int]:
    return 13, 0


@_api("cuDeviceGetCount")
def device_count() -> int:
    return len(machine.gpus())


@_api("cuDeviceGet")
def device_info(ordinal: int) -> DeviceInfo:
    gpu = machine.gpu(ordinal)
    return DeviceInfo(ordinal, gpu.uuid, "Simulated GPU", machine.CAPABILITY, machine.memory_bytes())


@_api("cuDeviceCanAccessPeer")
def can_access_peer(ordinal: int, peer: int) -> bool:
    """False for a GPU and itself, as the driver says."""
    a, b = machine.gpu(ordinal).index, machine.gpu(peer).index
    return a != b and not machine.listed("SIM_NO_P2P", a, b)


@_api("cuDevicePrimaryCtxRetain")
def retain_context(ordinal: int) -> int:
    context = machine.retain(ordinal)
    machine.make_current(context.handle)
    _alive["contexts"] += 1
    return context.handle


@_api("cuDevicePrimaryCtxRelease")
def release_context(ordinal: int) -> None:
    machine.release(ordinal)
    _alive["contexts"] -= 1


@_api("cuCtxGetCurrent")
def current_context() -> int:
    context = machine.current()
    return context.handle if context is not None else 0


@_api("cuCtxSetCurrent")
def set_context(context: int) -> None:
    machine.make_current(context)


@_api("cuCtxSynchronize")
def synchronize() -> None:
    streams.synchronize_context()


# ---- memory
@_api("cuMemAlloc")
def allocate(nbytes: int) -> int:
    streams.refuse_while_capturing()
    address = machine.allocate(nbytes)
    _alive["allocations"] += 1
    return address


@_api("cuMemFree")
def free(address: int) -> None:
    """Waits for everything in the context, as the driver does."""
    streams.synchronize_context()
    machine.free(address)
    _alive["allocations"] -= 1


@_api("cuMemsetD8Async")
def fill(address: int, byte: int, nbytes: int) -> None:
    machine.block_at(address, nbytes)
    stream = streams.create(blocking=False)
    streams.submit(stream, lambda: ctypes.memset(address, byte, nbytes))
    streams.synchronize(stream)
    streams.destroy(stream)


@_api("cuMemcpyHtoD")
def copy_to_device(address: int, data: np.ndarray) -> None:
    machine.block_at(address, data.nbytes)
    streams.submit(0, lambda: ctypes.memmove(address, data.ctypes.data, data.nbytes))
    streams.synchronize(0)


@_api("cuMemcpyDtoH")
def copy_to_host(data: np.ndarray, address: int) -> None:
    machine.block_at(address, data.nbytes)
    streams.submit(0, lambda: ctypes.memmove(data.ctypes.data, address, data.nbytes))
    streams.synchronize(0)


@_api("cuIpcGetMemHandle")
def export_memory(address: int) -> bytes:
    return machine.export(address)


@_api("cuIpcOpenMemHandle")
def open_memory(handle: bytes) -> int:
    address = machine.open_handle(handle)
    _alive["mappings"] += 1
    return address


@_api("cuIpcCloseMemHandle")
def close_memory(address: int) -> None:
    machine.close_handle(address)
    _alive["mappings"] -= 1


_registered: dict[int, int] = {}


@_api("cuMemHostRegister")
def register_host(address: int, nbytes: int) -> int:
    machine.require()
    if address % machine.PAGE or nbytes % machine.PAGE or nbytes <= 0:
        raise Fault(1)
    if any(address < start + length and start < address + nbytes for start, length in _registered.items()):
        raise Fault(712)
    _registered[address] = nbytes
    _alive["registered host ranges"] += 1
    return address


@_api("cuMemHostUnregister")
def unregister_host(address: int) -> None:
    machine.require()
    if _registered.pop(address, None) is None:
        raise Fault(713)
    _alive["registered host ranges"] -= 1


# ---- kernels
@dataclass(frozen=True)
class _Kernel:
    context: machine.Context
    entry: int
    most_threads: int
    argument_bytes: int
    rank: int
    ranks: int


_next_handle = itertools.count(0x77000000, 0x40)
_modules: dict[int, tuple[machine.Context, dict[str, Any]]] = {}
_kernels: dict[int, _Kernel] = {}


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Global, since kernels take its functions from wherever they are."""
    runtime = ctypes.CDLL(str(compiler.build_runtime()), mode=ctypes.RTLD_GLOBAL)
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    runtime.sim_run.argtypes = [pointer, pointer, u32, u32, ctypes.c_int, ctypes.c_int, ctypes.c_bool]
    runtime.sim_run.restype = None
    return runtime


@_api("cuModuleLoadData")
def load_module(cubin: bytes) -> int:
    context = machine.require()
    try:
        content = json.loads(cubin)
    except ValueError:
        raise Fault(200) from None
    module = next(_next_handle)
    _modules[module] = context, content
    _alive["modules"] += 1
    return module


@_api("cuModuleUnload")
def unload_module(module: int) -> None:
    machine.require()
    if _modules.pop(module, None) is None:
        raise Fault(400)
    _alive["modules"] -= 1


@_api("cuModuleGetFunction")
def get_function(module: int, name: str) -> int:
    machine.require()
    if module not in _modules:
        raise Fault(400)
    context, content = _modules[module]
    _runtime()
    library = ctypes.CDLL(content["path"])
    try:
        entry = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        threads, argument_bytes = (ctypes.c_uint32 * 2).in_dll(library, f"{name}_limits")
    except (AttributeError, ValueError):
        raise Fault(500) from None
    assert entry is not None
    function = next(_next_handle)
    _kernels[function] = _Kernel(context, entry, threads, argument_bytes, content["rank"], content["ranks"])
    return function


class Launch:
    """As in the real driver. The size of ``args`` is checked, which the real one cannot."""

    __slots__ = ("_block", "_grid", "_kernel", "_programmatic", "args")

    def __init__(self, function: int, grid: int, block: int, args: np.ndarray, *, programmatic: bool = False) -> None:
        self._kernel, self._grid, self._block, self._programmatic = _kernels[function], grid, block, programmatic
        self.args = args

    @_api("cuLaunchKernelEx")
    def run(self, stream: int) -> None:
        kernel = self._kernel
        if kernel.context is not streams.find(stream).context:
            raise Fault(400)
        streams.submit(stream, self.work())

    def work(self) -> Callable[[], None]:
        """What a stream has to do, with the present arguments."""
        kernel = self._kernel
        fits = self._grid >= 1 and 1 <= self._block <= kernel.most_threads
        if not fits or self.args.nbytes != kernel.argument_bytes:
            raise Fault(1)
        args = self.args.tobytes()  # read now
        run, rank, ranks = _runtime().sim_run, kernel.rank, kernel.ranks
        grid, block, programmatic = self._grid, self._block, self._programmatic
        return lambda: run(kernel.entry, args, grid, block, rank, ranks, programmatic)


# ---- streams, events, capture
@_api("cuEventCreate")
def create_event() -> int:
    event = streams.create_event()
    _alive["events"] += 1
    return event


@_api("cuEventDestroy")
def destroy_event(event: int) -> None:
    streams.destroy_event(event)
    _alive["events"] -= 1


@_api("cuEventRecord")
def record_event(event: int, stream: int) -> None:
    streams.record_event(event, stream)


@_api("cuStreamWaitEvent")
def wait_event(stream: int, event: int) -> None:
    streams.wait_event(stream, event)


@_api("cuStreamSynchronize")
def synchronize_stream(stream: int) -> None:
    streams.synchronize(stream)


@_api("cuStreamQuery")
def is_idle(stream: int) -> bool:
    return streams.is_idle(stream)


@_api("cuEventSynchronize")
def synchronize_event(event: int) -> None:
    streams.synchronize_event(event)


@_api("cuStreamGetCaptureInfo")
def capture_id(stream: int) -> int:
    return streams.capture_id(stream)
