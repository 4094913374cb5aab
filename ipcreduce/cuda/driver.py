"""The part of the CUDA driver API that ipcreduce uses. Only this module imports ``cuda.bindings``.

Handles and addresses are plain ints. Each function raises a :class:`CudaError` that names its driver call if the call
fails. The tests replace this module by a simulated device (tests/simulated), so no other module may call the driver.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..errors import INSTALL, CudaError, UnsupportedError, first_line
from ..interrupts import uninterrupted
from ..types import Stream

IPC_HANDLE_BYTES = 64
OUT_OF_MEMORY = 2
INVALID_CONTEXT = (201, 400, 709)  # CUDA_ERROR_INVALID_CONTEXT, _INVALID_HANDLE, _CONTEXT_IS_DESTROYED

_NO_DRIVER = "no NVIDIA driver on this machine"
_bindings: Any = None


@dataclass(frozen=True)
class DeviceInfo:
    """A visible GPU. ``uuid`` identifies it in every process, ``ordinal`` only in this one."""

    ordinal: int
    uuid: bytes
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_bytes: int  # the most of a block


def load() -> Any:
    """Import and initialise the bindings, once. :raises UnsupportedError: if they, the driver or a GPU are missing."""
    global _bindings
    if _bindings is None:
        try:
            from cuda.bindings import driver as bindings
        except ImportError as error:
            try:
                ctypes.CDLL("libcuda.so.1")
            except OSError:  # without a driver, the bindings would be of no use
                raise UnsupportedError(_NO_DRIVER) from None
            raise UnsupportedError(f"cuda-python is not installed ({error}): {INSTALL}") from None
        try:
            code = int(bindings.cuInit(0)[0])
        except Exception as error:  # without libcuda.so the bindings raise various types
            raise UnsupportedError(f"{_NO_DRIVER} ({first_line(error)})") from None
        if code:
            raise UnsupportedError(f"the NVIDIA driver does not start (cuInit gave {code}): is a GPU visible?")
        _bindings = bindings
    return _bindings


def call(name: str, *arguments: Any) -> Any:
    """Call the driver function ``name`` and return its results. :raises CudaError: if it fails."""
    bindings = _bindings or load()
    result = getattr(bindings, name)(*arguments)
    if result[0]:
        fail(name, result[0])
    return result[1] if len(result) == 2 else result[1:]


def newest(name: str, version: int = 2) -> str:
    """The name of a driver function's newest form. CUDA 12's bindings call it ``name_v2``, say, and 13's ``name``."""
    versioned = f"{name}_v{version}"
    return versioned if hasattr(load(), versioned) else name


def fail(name: str, code: Any) -> None:
    """Raise the error of the function ``name``, which returned ``code``. :raises CudaError: always."""
    text = _bindings.cuGetErrorString(code)[1]
    raise CudaError(name, int(code), f"{getattr(code, 'name', code)}, {text.decode() if text else 'unknown error'}")


# ---- devices and contexts
def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, as (major, minor)."""
    version = int(call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def device_count() -> int:
    """The number of visible GPUs."""
    return int(call("cuDeviceGetCount"))


def device_info(ordinal: int) -> DeviceInfo:
    """The driver's description of the visible GPU ``ordinal``."""
    device = call("cuDeviceGet", ordinal)
    attribute = load().CUdevice_attribute
    major = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    multiprocessors = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
    name = call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
    uuid = bytes(call(newest("cuDeviceGetUuid"), device).bytes)  # the older form: one for all instances of a MIG device
    memory_bytes = int(call("cuDeviceTotalMem", device))
    shared_bytes = int(
        call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
    )
    return DeviceInfo(ordinal, uuid, name, (int(major), int(minor)), int(multiprocessors), memory_bytes, shared_bytes)


def can_access_peer(ordinal: int, peer: int) -> bool:
    """True if the driver reports P2P access between two visible GPUs. The access may still fail: see verify.cu."""
    return bool(call("cuDeviceCanAccessPeer", call("cuDeviceGet", ordinal), call("cuDeviceGet", peer)))


def native_atomics(ordinal: int, peer: int) -> bool:
    """True if the link between two visible GPUs has native atomics: NVLink has them, and PCIe has not.

    (Measured on H200, driver 580: 1 over NVLink, in both directions.)
    """
    attribute = load().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    a, b = call("cuDeviceGet", ordinal), call("cuDeviceGet", peer)
    return bool(call("cuDeviceGetP2PAttribute", attribute, a, b))


def retain_context(ordinal: int) -> int:
    """Retain the device's primary context, which CuPy and PyTorch share, and make it current."""
    context = int(call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal)))
    set_context(context)
    return context


def release_context(ordinal: int) -> None:
    """Release a context that :func:`retain_context` retained."""
    call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", ordinal))


def current_context() -> int:
    """This thread's current context; 0 for none."""
    return int(call("cuCtxGetCurrent"))


def set_context(context: int) -> None:
    """Make ``context`` this thread's current one."""
    call("cuCtxSetCurrent", context)


def synchronize() -> None:
    """Wait for all work in the current context, and leave captures intact.

    The wait is that of cuMemFree: cuCtxSynchronize would end every capture in the context (both seen on H100, CUDA 13).
    """
    with uninterrupted(), relaxed():
        try:
            address = allocate(1)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            call("cuCtxSynchronize")
        else:
            free(address)


class relaxed:
    """A context manager for relaxed capture mode in this thread: waits and allocations then invalidate no capture."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        try:
            self._mode = call("cuThreadExchangeStreamCaptureMode", _relaxed_mode())
        except CudaError:
            self._mode = None

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            try:
                call("cuThreadExchangeStreamCaptureMode", self._mode)
            except CudaError:
                return


@cache
def _relaxed_mode() -> Any:
    return load().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


# ---- memory
def allocate(nbytes: int) -> int:
    """Allocate device memory that can be exported to other processes (cuMemAlloc), and return its address."""
    return int(call("cuMemAlloc", nbytes))


def free(address: int) -> None:
    """Wait for all work in the context, then free an allocation. Peers must have unmapped it."""
    call("cuMemFree", address)


def fill(address: int, byte: int, nbytes: int) -> None:
    """Set ``nbytes`` bytes of device memory to ``byte``, and wait until that is done.

    It makes a stream for this: the default stream is unusable while a stream that synchronises with it captures.
    """
    with uninterrupted():
        stream = call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
        try:
            call("cuMemsetD8Async", address, byte, nbytes, stream)
            call("cuStreamSynchronize", stream)
        finally:
            call("cuStreamDestroy", stream)


def copy_to_host(data: np.ndarray, address: int) -> None:
    """Copy device memory into a contiguous host array, and wait until that is done."""
    call("cuMemcpyDtoH", data.ctypes.data, address, data.nbytes)


def export_memory(address: int) -> bytes:
    """The IPC handle (64 bytes) of an allocation."""
    handle = call("cuIpcGetMemHandle", address)  # in a variable, so that it lives while its memory is read
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def open_memory(handle: bytes) -> int:
    """Map another process's allocation with peer access, and return its address in this process."""
    ipc = load().CUipcMemHandle()  # filled by getPtr(): bindings 12.9.10 and 13.4.4 have no field for the bytes
    ctypes.memmove(ipc.getPtr(), handle, IPC_HANDLE_BYTES)
    return int(call("cuIpcOpenMemHandle", ipc, 1))  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def close_memory(address: int) -> None:
    """Unmap what :func:`open_memory` has mapped. This waits for all work in the context (measured on H100)."""
    call("cuIpcCloseMemHandle", address)


def register_host(address: int, nbytes: int) -> int:
    """Make whole pages of host memory accessible to the GPU, and return their device address."""
    call("cuMemHostRegister", address, nbytes, 1 | 2)  # PORTABLE | DEVICEMAP
    return int(call("cuMemHostGetDevicePointer", address, 0))


def unregister_host(address: int) -> None:
    """Undo :func:`register_host`. ``address`` is that on the host."""
    call("cuMemHostUnregister", address)


# ---- kernels
def load_module(cubin: bytes) -> int:
    """Load a cubin into the current context, and return the module."""
    return int(call("cuModuleLoadData", cubin))


def close_module(module: int) -> None:
    """Close a module, which unloads its kernels. None of them may be running."""
    call("cuModuleUnload", module)


def get_function(module: int, name: str) -> int:
    """A module's kernel, fully loaded.

    If the driver loaded it at the first launch, that could wait for a kernel which waits for this rank.
    """
    function = int(call("cuModuleGetFunction", module, name.encode()))
    call("cuFuncLoad", function)
    return function


class Launch:
    """A prepared kernel launch. ``args``, uint64 words that are passed by value, may change between runs.

    ``programmatic`` lets the kernel start before the one before it ends (sm_90). The kernel itself then waits for that.
    ``shared``: bytes of shared memory beside what the kernel declares.
    """

    __slots__ = ("_config", "_function", "_launch", "_params", "_pointer", "_stream", "args")

    def __init__(
        self, function: int, grid: int, block: int, args: np.ndarray, *, programmatic: bool = False, shared: int = 0
    ) -> None:  # fmt: skip
        bindings = load()
        config = bindings.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        if shared:
            most = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", bindings.CUfunction(function), most, shared)
        if programmatic:
            attribute = bindings.CUlaunchAttribute()
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
        config.numAttrs = int(programmatic)
        self.args = args
        self._pointer = np.array([args.ctypes.data], np.uint64)  # kernelParams: pointers to the arguments
        self._params = int(self._pointer.ctypes.data)
        self._config = config
        self._function = bindings.CUfunction(function)
        self._launch = bindings.cuLaunchKernelEx
        self._stream = -1

    def node_params(self) -> Any:
        """The parameters of a graph node for this launch. The driver call that takes them copies the arguments."""
        params, config = _bindings.CUDA_KERNEL_NODE_PARAMS(), self._config
        params.func = self._function
        params.gridDimX, params.gridDimY, params.gridDimZ = config.gridDimX, 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = config.blockDimX, 1, 1
        params.sharedMemBytes = config.sharedMemBytes
        params.kernelParams = self._params
        params.extra = 0
        return params

    def run(self, stream: Stream) -> None:
        """Launch on ``stream``. The arguments are copied before this returns."""
        if stream != self._stream:
            self._config.hStream = _bindings.CUstream(stream)
            self._stream = stream
        (code,) = self._launch(self._config, self._function, self._params, 0)
        if code:
            fail("cuLaunchKernelEx", code)
