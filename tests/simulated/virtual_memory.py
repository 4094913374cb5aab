"""CUDA's virtual memory API on the simulated machine. Structs, names and arguments are those of ``cuda.bindings``.

Physical memory is a memfd, a reserved range is a mapping without access, and a map puts the memfd into that range. A
descriptor that is exported is one more of the memfd, so it is valid in any process that gets it. Memory lives as long
as a handle, a mapping or a descriptor of it does. Access to addresses where nothing may be touched ends the process.

Environment: SIM_NO_VMM=1: no virtual memory; SIM_NO_VMM=descriptors: none that other processes can get.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tests.simulated import machine
from tests.simulated.machine import Block, Fault

GRANULARITY = 2 << 20
_NAME = re.compile(r"ipcreduce-sim-physical-(\d+)-(\d+)-(\d+)-[0-9a-f]+")  # GPU, bytes, the process that made it


# ---- the bindings' types, as far as the library uses them
class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


@dataclass(slots=True)
class CUmemLocation:
    type: CUmemLocationType = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
    id: int = 0


@dataclass(slots=True)
class CUmemAllocationProp:
    type: CUmemAllocationType = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
    requestedHandleTypes: CUmemAllocationHandleType = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    location: CUmemLocation = field(default_factory=CUmemLocation)


@dataclass(slots=True)
class CUmemAccessDesc:
    location: CUmemLocation = field(default_factory=CUmemLocation)
    flags: CUmemAccess_flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


_DESCRIPTOR = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


# ---- what this process has
@dataclass(eq=False)
class _Physical:
    """Memory behind one handle of this process. ``uses`` counts the handle and its mappings."""

    fd: int
    nbytes: int
    gpu: int  # index
    exportable: bool
    name: str  # "" for another process's
    uses: int = 1

    def __post_init__(self) -> None:
        if self.name:
            machine.physical.setdefault(self.name, [self.gpu, self.nbytes, 0])[2] += 1

    def drop(self) -> None:
        self.uses -= 1
        if not self.uses:
            os.close(self.fd)
            if self.name:
                machine.physical[self.name][2] -= 1


@dataclass(frozen=True)
class _Mapping:
    nbytes: int
    memory: _Physical
    offset: int


_handles: dict[int, _Physical] = {}
_ranges: dict[int, int] = {}  # bytes by address
_mappings: dict[int, _Mapping] = {}  # by address
_next_handle = itertools.count(0x51000000, 0x40)


def held() -> dict[str, int]:
    """How many handles, reserved ranges and mappings there are, by kind."""
    counts = {"physical": len(_handles), "reserved ranges": len(_ranges), "virtual mappings": len(_mappings)}
    return {kind: count for kind, count in counts.items() if count}


def _whole(*numbers: int) -> None:
    if any(number < 0 or number % GRANULARITY for number in numbers):
        raise Fault(1)


def _memory(handle: int) -> _Physical:
    if handle not in _handles:
        raise Fault(1)
    return _handles[handle]


def _supported() -> None:
    machine.require()
    if os.environ.get("SIM_NO_VMM", "") not in ("", "descriptors"):
        raise Fault(801)


# ---- the calls
def device(ordinal: int) -> int:
    return machine.gpu(ordinal).ordinal


def attribute(which: int, ordinal: int) -> int:
    machine.gpu(ordinal)
    lacks = os.environ.get("SIM_NO_VMM", "")
    if CUdevice_attribute(which).name.endswith("DESCRIPTOR_SUPPORTED"):
        return int(not lacks)
    return int(lacks in ("", "descriptors"))


def granularity(prop: CUmemAllocationProp, option: int) -> int:
    _supported()
    _check(prop)
    CUmemAllocationGranularity_flags(option)
    return GRANULARITY


def _check(prop: CUmemAllocationProp) -> int:
    """The index of the GPU. :raises Fault: for other memory than a GPU's."""
    if prop.type != CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED or prop.location.type != 1:
        raise Fault(1)
    return machine.gpu(prop.location.id).index


def reserve(size: int, alignment: int, addr: int, flags: int) -> int:
    """At addresses of its own, which nothing else gets: a hint is not taken."""
    _supported()
    _whole(size, alignment)
    if not size or addr or flags:
        raise Fault(1)
    with machine.lock:
        address = machine.reserve(size, GRANULARITY)
        _ranges[address] = size
        return address


def free_range(ptr: int, size: int) -> None:
    with machine.lock:
        if _ranges.get(ptr) != size or _mapped_in(ptr, size):
            raise Fault(1)
        del _ranges[ptr]
        machine.unreserve(ptr, size)


def create(size: int, prop: CUmemAllocationProp, flags: int) -> int:
    _supported()
    index = _check(prop)
    _whole(size)
    if not size or flags:
        raise Fault(1)
    wanted = prop.requestedHandleTypes
    if wanted == _DESCRIPTOR and os.environ.get("SIM_NO_VMM"):
        raise Fault(801)
    with machine.lock:
        if size > machine.free_bytes(index):
            raise Fault(2)
        name = f"ipcreduce-sim-physical-{index}-{size}-{os.getpid()}-{secrets.token_hex(8)}"
        fd = -1
        try:
            fd = os.memfd_create(name)
            os.ftruncate(fd, size)
            with mmap.mmap(fd, size) as content:
                content[:] = bytes([machine.NEW]) * size
        except OSError:  # the process can open no file
            if fd >= 0:
                os.close(fd)
            raise Fault(2) from None
        return _added(_Physical(fd, size, index, wanted == _DESCRIPTOR, name))


def _added(memory: _Physical) -> int:
    handle = next(_next_handle)
    _handles[handle] = memory
    return handle


def release(handle: int) -> None:
    """The memory stays while it is mapped."""
    with machine.lock:
        _memory(handle)
        _handles.pop(handle).drop()


def map_memory(ptr: int, size: int, offset: int, handle: int, flags: int) -> None:
    """Nothing may be touched there before :func:`set_access`."""
    _supported()
    with machine.lock:
        memory = _memory(handle)
        _whole(ptr, size, offset)
        inside = any(start <= ptr and ptr + size <= start + length for start, length in _ranges.items())
        if not size or not inside or flags or offset + size > memory.nbytes or _mapped_in(ptr, size):
            raise Fault(1)
        _mappings[ptr] = _Mapping(size, memory, offset)
        memory.uses += 1


def _mapped_in(ptr: int, size: int) -> list[int]:
    return [start for start, one in _mappings.items() if start < ptr + size and ptr < start + one.nbytes]


def _exactly(ptr: int, size: int) -> list[int]:
    """The mappings that fill this range. :raises Fault: if it has gaps, or a part of a mapping."""
    found = sorted(_mapped_in(ptr, size))
    inside = all(ptr <= start and start + _mappings[start].nbytes <= ptr + size for start in found)
    if not found or not inside or sum(_mappings[start].nbytes for start in found) != size:
        raise Fault(1)
    return found


def unmap(ptr: int, size: int) -> None:
    """Waits for nothing: whoever unmaps has to. The range is one that was mapped at once: no more is documented."""
    with machine.lock:
        if _exactly(ptr, size) != [ptr] or _mappings[ptr].nbytes != size:
            raise Fault(1)
        mapping = _mappings.pop(ptr)
        machine.close_access(ptr, size)
        mapping.memory.drop()


def set_access(ptr: int, size: int, desc: Sequence[CUmemAccessDesc], count: int) -> None:
    here = machine.require().gpu
    with machine.lock:
        if len(desc) != count or not count:
            raise Fault(1)
        found = _exactly(ptr, size)
        for one in desc:
            if one.location.type != 1 or one.flags != CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
                raise Fault(1)
            index = machine.gpu(one.location.id).index
            for start in found:
                mapping = _mappings[start]
                if index != mapping.memory.gpu and machine.listed("SIM_NO_P2P", index, mapping.memory.gpu):
                    raise Fault(101)
                if index == here.index:  # the kernels of this process run on this GPU
                    _open_access(start, mapping, index)


def _open_access(start: int, mapping: _Mapping, index: int) -> None:
    memory = mapping.memory
    shared = not machine.listed("SIM_BROKEN_P2P", memory.gpu, index)
    block = Block(start, mapping.nbytes, memory.gpu, b"", opened=1)
    machine.open_access(block, memory.fd, mapping.offset, shared)


def export(handle: int, handle_type: int, flags: int) -> int:
    memory = _memory(handle)
    if handle_type != _DESCRIPTOR or flags or not memory.exportable:
        raise Fault(1)
    return os.dup(memory.fd)


def import_descriptor(descriptor: int, handle_type: int) -> int:
    """The caller keeps its descriptor, and may close it."""
    _supported()
    try:
        found = _NAME.search(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        found = None
    if handle_type != _DESCRIPTOR or found is None:
        raise Fault(1)
    gpu, nbytes, pid = map(int, found.groups())
    with machine.lock:
        name = found[0] if pid == os.getpid() else ""
        return _added(_Physical(os.dup(descriptor), nbytes, gpu, exportable=False, name=name))


CALLS: dict[str, Callable[..., Any]] = {
    "cuDeviceGet": device,
    "cuDeviceGetAttribute": attribute,
    "cuMemGetAllocationGranularity": granularity,
    "cuMemAddressReserve": reserve,
    "cuMemAddressFree": free_range,
    "cuMemCreate": create,
    "cuMemRelease": release,
    "cuMemMap": map_memory,
    "cuMemUnmap": unmap,
    "cuMemSetAccess": set_access,
    "cuMemExportToShareableHandle": export,
    "cuMemImportFromShareableHandle": import_descriptor,
}
