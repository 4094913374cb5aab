"""Stands for ``ipcreduce.cuda.driver``, over the simulated machine.

The calls for virtual memory are simulated one level lower, behind :func:`call`: see virtual_memory.py.

For tests: :func:`fault_at`, :func:`fault_in`, :func:`calls`, :func:`leaks`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ipcreduce.errors import CudaError, UnsupportedError
from tests.simulated import compiler, machine, machine_streams, virtual_memory
from tests.simulated.machine import ERRORS, Fault

IPC_HANDLE_BYTES = machine.HANDLE_BYTES
OUT_OF_MEMORY = 2
INVALID_CONTEXT = (201, 400, 709)

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class DeviceInfo:
    """As in the real driver."""

    ordinal: int
    uuid: bytes
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_bytes: int


# ---- for tests
_calls = 0
_fault_at = 0
_fault_in = ""
failed: list[str] = []  # the names of the calls that fault_at() and fault_in() made fail
alive: Counter[str] = Counter()  # what this module has handed out and not got back, by kind


def fault_at(k: int) -> None:
    """The ``k``-th driver call from now, counted from 1, raises CudaError instead of doing anything; 0: none."""
    global _fault_at
    _fault_at = _calls + k if k else 0


def fault_in(name: str) -> None:
    """The next driver call of this name raises CudaError instead of doing anything; "": none."""
    global _fault_in
    _fault_in = name


def calls() -> int:
    """Number of driver calls so far, launches included."""
    return _calls


def leaks() -> dict[str, int]:
    """How many contexts, allocations, mappings, ... the library has taken and not given back; {} is none."""
    return {kind: count for kind, count in alive.items() if count} | virtual_memory.held()


def api(name: str) -> Callable[[_F], _F]:
    """A driver call: counted, made to fail by :func:`fault_at`, its failures raised as CudaError."""

    def wrap(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            global _calls, _fault_in
            if not machine.gpus():
                raise UnsupportedError("the NVIDIA driver does not start (cuInit gave 100): is a GPU visible?")
            machine_streams.collect()
            _calls += 1
            try:
                if _calls == _fault_at or name == _fault_in:
                    _fault_in = "" if name == _fault_in else _fault_in
                    failed.append(name)
                    raise Fault(999)
                return function(*args, **kwargs)
            except Fault as fault:
                raise CudaError(name, fault.code, ERRORS[fault.code]) from None

        return call  # type: ignore[return-value]

    return wrap


# ---- calls as cuda.bindings has them
def load() -> Any:
    """The types of the bindings."""
    return virtual_memory


def call(name: str, *arguments: Any) -> Any:
    return api(name)(virtual_memory.CALLS[name])(*arguments)


# ---- devices and contexts
@api("cuDriverGetVersion")
def driver_version() -> tuple[int, int]:
    return 13, 0


@api("cuDeviceGetCount")
def device_count() -> int:
    return len(machine.gpus())


@api("cuDeviceGet")
def device_info(ordinal: int) -> DeviceInfo:
    gpu = machine.gpu(ordinal)
    return DeviceInfo(
        ordinal, gpu.uuid, "Simulated GPU", machine.CAPABILITY, machine.multiprocessors(), machine.memory_bytes(),
        machine.shared_bytes(),
    )  # fmt: skip


@api("cuDeviceCanAccessPeer")
def can_access_peer(ordinal: int, peer: int) -> bool:
    """False for a GPU and itself, as the driver says."""
    a, b = machine.gpu(ordinal).index, machine.gpu(peer).index
    return a != b and not machine.listed("SIM_NO_P2P", a, b)


@api("cuDeviceGetP2PAttribute")
def native_atomics(ordinal: int, peer: int) -> bool:
    """Of a GPU and itself the driver says nothing."""
    a, b = machine.gpu(ordinal).index, machine.gpu(peer).index
    if a == b:
        raise Fault(101)
    return not machine.listed("SIM_PCIE", a, b)


@api("cuDevicePrimaryCtxRetain")
def retain_context(ordinal: int) -> int:
    context = machine.retain(ordinal)
    machine.make_current(context.handle)
    alive["contexts"] += 1
    return context.handle


@api("cuDevicePrimaryCtxRelease")
def release_context(ordinal: int) -> None:
    machine.release(ordinal)
    alive["contexts"] -= 1


@api("cuCtxGetCurrent")
def current_context() -> int:
    context = machine.current()
    return context.handle if context is not None else 0


@api("cuCtxSetCurrent")
def set_context(context: int) -> None:
    machine.make_current(context)


def synchronize() -> None:
    with relaxed():
        free(allocate(1))


@contextmanager
def relaxed() -> Iterator[None]:
    """cuThreadExchangeStreamCaptureMode, which cannot fail."""
    with machine_streams.relaxed():
        yield


# ---- memory
@api("cuMemAlloc")
def allocate(nbytes: int) -> int:
    machine_streams.refuse_while_capturing()
    address = machine.allocate(nbytes)
    alive["allocations"] += 1
    return address


@api("cuMemFree")
def free(address: int) -> None:
    """Waits for everything in the context, as the driver does."""
    machine_streams.refuse_while_capturing()
    machine_streams.wait_for_all()
    machine.free(address)
    alive["allocations"] -= 1


@api("cuMemsetD8Async")
def fill(address: int, byte: int, nbytes: int) -> None:
    machine.block_at(address, nbytes)
    stream = machine_streams.create(blocking=False)
    machine_streams.submit(stream, lambda: ctypes.memset(address, byte, nbytes))
    machine_streams.synchronize(stream)
    machine_streams.destroy(stream)


@api("cuMemcpyDtoH")
def copy_to_host(data: np.ndarray, address: int) -> None:
    machine.block_at(address, data.nbytes)
    machine_streams.submit(0, lambda: ctypes.memmove(data.ctypes.data, address, data.nbytes))
    machine_streams.synchronize(0)


@api("cuIpcGetMemHandle")
def export_memory(address: int) -> bytes:
    return machine.export(address)


@api("cuIpcOpenMemHandle")
def open_memory(handle: bytes) -> int:
    address = machine.open_handle(handle)
    alive["mappings"] += 1
    return address


@api("cuIpcCloseMemHandle")
def close_memory(address: int) -> None:
    """Waits for everything in the context, as the driver does."""
    machine_streams.wait_for_all()
    machine.close_handle(address)
    alive["mappings"] -= 1


_registered: dict[int, int] = {}


@api("cuMemHostRegister")
def register_host(address: int, nbytes: int) -> int:
    machine.require()
    if address % machine.PAGE or nbytes % machine.PAGE or nbytes <= 0:
        raise Fault(1)
    if any(address < start + length and start < address + nbytes for start, length in _registered.items()):
        raise Fault(712)
    _registered[address] = nbytes
    alive["registered host ranges"] += 1
    return address


@api("cuMemHostUnregister")
def unregister_host(address: int) -> None:
    machine_streams.refuse_while_capturing()
    machine_streams.wait_for_all()
    if _registered.pop(address, None) is None:
        raise Fault(713)
    alive["registered host ranges"] -= 1


# ---- kernels
@dataclass(frozen=True)
class _Kernel:
    context: machine.Context
    content: dict[str, str]  # of the module

    @functools.cached_property
    def limits(self) -> tuple[int, int, int]:
        """(entry, most threads a block, bytes of arguments). Built when it is first asked for."""
        _runtime()
        library, name = ctypes.CDLL(str(compiler.build_compiled(self.content))), self.content["kernel"]
        entry = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        threads, argument_bytes = (ctypes.c_uint32 * 2).in_dll(library, f"{name}_limits")
        assert entry is not None
        return entry, threads, argument_bytes


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
    runtime.sim_move_timer.argtypes = [ctypes.c_uint64]
    runtime.sim_move_timer.restype = None
    runtime.sim_share_bell(os.fsencode(Path(os.environ.get("SIM_SHARED") or compiler.builds_directory(), "bell")))
    return runtime


def splits_packets() -> bool:
    """True if packets arrive in two halves, now: a test may ask for that in a part of it."""
    return ctypes.c_bool.in_dll(_runtime(), "sim_split_packets").value


def move_timer(seconds: float) -> None:
    """Move the timer that this process's kernels read: a test's part, which no driver has."""
    _runtime().sim_move_timer(int(seconds * 1e9))


@api("cuModuleLoadData")
def load_module(cubin: bytes) -> int:
    context = machine.require()
    try:
        content = json.loads(cubin)
    except ValueError:
        raise Fault(200) from None
    module = next(_next_handle)
    _modules[module] = context, content
    alive["modules"] += 1
    return module


@api("cuModuleUnload")
def close_module(module: int) -> None:
    machine_streams.refuse_while_capturing()
    if _modules.pop(module, None) is None:
        raise Fault(400)
    alive["modules"] -= 1


@api("cuModuleGetFunction")
def get_function(module: int, name: str) -> int:
    machine.require()
    if module not in _modules:
        raise Fault(400)
    context, content = _modules[module]
    if name != content["kernel"]:
        raise Fault(500)
    function = next(_next_handle)
    _kernels[function] = _Kernel(context, content)
    return function


class Launch:
    """As in the real driver. The size of ``args`` is checked, which the real one cannot."""

    __slots__ = ("_block", "_grid", "_kernel", "_programmatic", "args")

    def __init__(
        self, function: int, grid: int, block: int, args: np.ndarray, *, programmatic: bool = False, shared: int = 0
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._block, self._programmatic = _kernels[function], grid, block, programmatic
        assert self._kernel.limits  # it is built here, and not while a peer waits
        if shared > machine.shared_bytes():
            raise CudaError("cuFuncSetAttribute", 1, ERRORS[1])
        self.args = args

    @api("cuLaunchKernelEx")
    def run(self, stream: int) -> None:
        kernel = self._kernel
        if kernel.context is not machine_streams.find(stream).context:
            raise Fault(400)
        machine_streams.submit(stream, self.work())

    def work(self) -> Callable[[], None]:
        """What a stream has to do, with the present arguments."""
        kernel = self._kernel
        entry, most_threads, argument_bytes = kernel.limits
        fits = self._grid >= 1 and 1 <= self._block <= most_threads
        if not fits or self.args.nbytes != argument_bytes:
            raise Fault(1)
        args = self.args.tobytes()  # read now
        run, rank, ranks = _runtime().sim_run, int(kernel.content["RANK"]), int(kernel.content["RANKS"])
        grid, block, programmatic = self._grid, self._block, self._programmatic
        return lambda: run(entry, args, grid, block, rank, ranks, programmatic)
