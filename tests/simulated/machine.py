"""The simulated machine, as one process sees it: GPUs, primary contexts, memory that other processes can map.

Memory is a memfd for each allocation. An IPC handle says where its owner has it open (/proc/<pid>/fd/<n>), so nothing
is left behind when a process is killed. Allocations lie in a reserved range of addresses with gaps that no one may
touch; the lowest gap that is large enough is given out first, so freed addresses come back at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import secrets
import struct
import threading
from dataclasses import dataclass, field
from typing import Any

PAGE = mmap.PAGESIZE
HANDLE_BYTES = 64
NEW, FREED = 0xA5, 0xDB  # what memory holds before its first use, and after its last
CAPABILITY = (9, 0)

_HANDLE = struct.Struct("<4sIIIQQ")  # magic, pid, file descriptor, GPU, nonce, bytes

ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE, invalid argument",
    2: "CUDA_ERROR_OUT_OF_MEMORY, out of memory",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA-capable device(s) is/are busy or unavailable",
    101: "CUDA_ERROR_INVALID_DEVICE, invalid device ordinal",
    200: "CUDA_ERROR_INVALID_IMAGE, device kernel image is invalid",
    201: "CUDA_ERROR_INVALID_CONTEXT, invalid device context",
    205: "CUDA_ERROR_MAP_FAILED, mapping of buffer object failed",
    217: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, peer access is not supported between these two devices",
    400: "CUDA_ERROR_INVALID_HANDLE, invalid resource handle",
    401: "CUDA_ERROR_ILLEGAL_STATE, the operation cannot be performed in the present state",
    500: "CUDA_ERROR_NOT_FOUND, named symbol not found",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, part or all of the requested memory range is already mapped",
    713: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, pointer does not correspond to a registered memory region",
    719: "CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure",
    801: "CUDA_ERROR_NOT_SUPPORTED, operation not supported",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, operation not permitted when stream is capturing",
    901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, operation failed due to a previous error during capture",
    904: "CUDA_ERROR_STREAM_CAPTURE_UNJOINED, capturing stream has unjoined work",
    905: "CUDA_ERROR_STREAM_CAPTURE_ISOLATION, dependency created on uncaptured work in another stream",
    906: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, operation would make the legacy stream depend on a capturing stream",
    907: "CUDA_ERROR_CAPTURED_EVENT, operation not permitted on an event last recorded in a capturing stream",
    999: "CUDA_ERROR_UNKNOWN, unknown error",
}


class Fault(Exception):
    """A CUDA call that fails with a CUresult."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{ERRORS[code]} ({code})")
        self.code = code


# ---- GPUs
@dataclass(frozen=True)
class Gpu:
    """``index`` counts all GPUs of the machine, ``ordinal`` those that this process sees."""

    index: int
    ordinal: int

    @property
    def uuid(self) -> bytes:
        return hashlib.sha256(b"simulated GPU %d" % self.index).digest()[:16]

    @property
    def uuid_text(self) -> str:
        """As nvidia-smi shows it."""
        digits = self.uuid.hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@functools.cache
def gpus() -> list[Gpu]:
    """What this process sees: looked up once, as the driver does."""
    ranks = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or "1"
    every = [Gpu(index, index) for index in range(int(os.environ.get("SIM_DEVICES", ranks)))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return every
    visible: list[Gpu] = []
    for entry in filter(None, map(str.strip, chosen.split(","))):
        match = [gpu for gpu in every if entry == str(gpu.index) or (entry[4:] and gpu.uuid_text.startswith(entry))]
        if len(match) != 1:  # the first that is not there ends the list
            break
        visible.append(Gpu(match[0].index, len(visible)))
    return visible


def gpu(ordinal: int) -> Gpu:
    if not 0 <= ordinal < len(gpus()):
        raise Fault(101)
    return gpus()[ordinal]


def listed(variable: str, a: int, b: int) -> bool:
    """Whether an environment variable such as SIM_NO_P2P="0-2,1-3" has the pair."""
    return {a, b} in [set(map(int, pair.split("-"))) for pair in os.environ.get(variable, "").split(",") if pair]


def multiprocessors() -> int:
    """Of each GPU, for this process."""
    return int(os.environ.get("SIM_MULTIPROCESSORS", 132))


def shared_bytes() -> int:
    """Of a block on each GPU, for this process."""
    return int(os.environ.get("SIM_SHARED_BYTES", 227 << 10))


def memory_bytes() -> int:
    """Of each GPU, for this process."""
    return int(os.environ.get("SIM_MEMORY", 1 << 30))


# ---- contexts
@dataclass(eq=False)
class Context:
    gpu: Gpu
    handle: int
    retained: int = 0
    error: int = 0  # sticky: a kernel failed
    streams: dict[Any, Any] = field(default_factory=dict)  # of machine_streams.py


lock = threading.RLock()
_contexts: dict[int, Context] = {}
_thread = threading.local()


def retain(ordinal: int) -> Context:
    """The primary context of a GPU; not made current. With SIM_EXCLUSIVE another process has taken the GPU."""
    if os.environ.get("SIM_EXCLUSIVE"):
        raise Fault(46)
    with lock:
        context = _contexts.setdefault(gpu(ordinal).index, Context(gpu(ordinal), 0xC0000000 + 64 * ordinal))
        context.retained += 1
        return context


def release(ordinal: int) -> None:
    with lock:
        context = _contexts.get(gpu(ordinal).index)
        if context is None or not context.retained:
            raise Fault(201)
        context.retained -= 1


def current() -> Context | None:
    """This thread's context, even if it has been released since."""
    return getattr(_thread, "context", None)


def make_current(handle: int) -> None:
    found = [context for context in _contexts.values() if context.handle == handle and context.retained]
    if handle and not found:
        raise Fault(201)
    _thread.context = found[0] if handle else None


def require() -> Context:
    """This thread's context; nothing works without one."""
    context = current()
    if context is None or not context.retained:
        raise Fault(201)
    if context.error:
        raise Fault(context.error)
    return context


# ---- memory
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000
_RANGE_BYTES = 1 << 38


@dataclass
class Block:
    """Memory that this process has mapped: its own, or (``opened`` > 0) that of a peer."""

    address: int
    nbytes: int
    gpu: int  # index
    handle: bytes
    fd: int = -1
    opened: int = 0

    @property
    def past(self) -> int:
        return self.address + -(-self.nbytes // PAGE) * PAGE


_blocks: dict[int, Block] = {}  # by address
_virtual: dict[int, Block] = {}  # what virtual_memory.py has opened, by address
physical: dict[str, list[int]] = {}  # what it has created, by name: [GPU, bytes, how often this process holds it]


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if mapped == ctypes.c_size_t(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(mapped)


@functools.cache
def _range() -> int:
    return _map(0, _RANGE_BYTES, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def _lowest_gap(nbytes: int) -> int:
    address = _range()
    for block in sorted(_blocks.values(), key=lambda block: block.address):
        if address + nbytes + PAGE <= block.address:
            break
        address = block.past + PAGE  # a page between blocks that no one may touch
    if address + nbytes > _range() + _RANGE_BYTES:
        raise Fault(2)
    return address


def _withdraw(block: Block) -> None:
    del _blocks[block.address]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    _map(block.address, block.past - block.address, _NO_ACCESS, anonymous | _FIXED)


def allocate(nbytes: int) -> int:
    """New memory on the current context's GPU."""
    index = require().gpu.index
    with lock:
        if nbytes <= 0:
            raise Fault(1)
        if nbytes > memory_info()[0]:
            raise Fault(2)
        address, nonce = _lowest_gap(nbytes), secrets.randbits(64)
        fd = os.memfd_create(f"ipcreduce-sim-{nonce:x}")
        handle = _HANDLE.pack(b"SIM1", os.getpid(), fd, index, nonce, nbytes).ljust(HANDLE_BYTES, b"\0")
        block = Block(address, nbytes, index, handle, fd)
        os.ftruncate(fd, block.past - address)
        _map(address, block.past - address, _READ_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE | _FIXED, fd)
        ctypes.memset(address, NEW, nbytes)
        _blocks[address] = block
        return address


def free(address: int) -> None:
    """Peers that have it mapped still can read it, but what they find is FREED."""
    require()
    with lock:
        block = _blocks.get(address)
        if block is None or block.opened:
            raise Fault(1)
        ctypes.memset(address, FREED, block.nbytes)
        _withdraw(block)
        os.close(block.fd)


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current GPU."""
    return free_bytes(require().gpu.index), memory_bytes()


def free_bytes(index: int) -> int:
    """Of a GPU, as far as this process uses it."""
    used = sum(block.nbytes for block in _blocks.values() if block.gpu == index and not block.opened)
    used += sum(nbytes for gpu, nbytes, holders in physical.values() if gpu == index and holders)
    return memory_bytes() - used


def block_at(address: int, nbytes: int = 1) -> Block:
    """The block in which these bytes lie. :raises Fault: if they lie in none."""
    with lock:
        for block in (*_blocks.values(), *_virtual.values()):
            if block.address <= address and address + nbytes <= block.address + block.nbytes:
                return block
    raise Fault(1)


def export(address: int) -> bytes:
    """The handle of the whole allocation in which ``address`` lies."""
    require()
    block = block_at(address)
    if block.opened:
        raise Fault(1)
    return block.handle


def open_handle(handle: bytes) -> int:
    """Maps a peer's allocation, or counts once more if it is mapped already.

    :raises Fault: if its owner has freed it, or is gone, or is this process, or if its GPU cannot be reached.
    """
    here = require().gpu.index
    if len(handle) != HANDLE_BYTES or handle[:4] != b"SIM1":
        raise Fault(400)
    _, pid, fd, index, nonce, nbytes = _HANDLE.unpack_from(handle)
    if pid == os.getpid():
        raise Fault(201)
    if index != here and listed("SIM_NO_P2P", index, here):
        raise Fault(217)
    with lock:
        for block in _blocks.values():
            if block.handle == handle:
                block.opened += 1
                return block.address
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if f"ipcreduce-sim-{nonce:x} " not in os.readlink(path):
                raise Fault(205)  # freed, and the descriptor is now another's
            ours = os.open(path, os.O_RDWR)
        except OSError:
            raise Fault(205) from None
        block = Block(_lowest_gap(nbytes), nbytes, index, handle, opened=1)
        # A link that loses data: stores reach only a private copy.
        kind = mmap.MAP_PRIVATE if listed("SIM_BROKEN_P2P", index, here) else mmap.MAP_SHARED
        _map(block.address, block.past - block.address, _READ_WRITE, kind | _FIXED, ours)
        os.close(ours)
        _blocks[block.address] = block
        return block.address


def close_handle(address: int) -> None:
    require()
    with lock:
        block = _blocks.get(address)
        if block is None or not block.opened:
            raise Fault(1)
        block.opened -= 1
        if not block.opened:
            _withdraw(block)


# ---- addresses of virtual memory
def reserve(nbytes: int, alignment: int) -> int:
    """Addresses that nothing else gets and no one may touch."""
    found = _map(0, nbytes + alignment, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    address = -(-found // alignment) * alignment
    _libc.munmap(found, address - found)
    _libc.munmap(address + nbytes, found + alignment - address)
    return address


def unreserve(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def open_access(block: Block, fd: int, offset: int, shared: bool) -> None:
    """Let kernels and copies of this process reach memory at reserved addresses."""
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    _map(block.address, block.nbytes, _READ_WRITE, kind | _FIXED, fd, offset)
    _virtual[block.address] = block


def close_access(address: int, nbytes: int) -> None:
    """Undo :func:`open_access`; the addresses stay reserved."""
    _virtual.pop(address, None)
    _map(address, nbytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _FIXED)
