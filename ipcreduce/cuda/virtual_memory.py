"""CUDA's virtual memory: addresses are reserved, and memory is created, mapped there and taken away again.

Memory travels to other processes as a file descriptor. It lives as long as a handle, a mapping or a descriptor of it
does, in any process. Handles and addresses are plain ints. Every call goes through :func:`ipcreduce.cuda.driver.call`.

The virtual memory calls wait for nothing, unlike cuMemFree and cuIpcCloseMemHandle. So the class here waits itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import CudaError
from . import driver
from .driver import call, load


def missing(ordinal: int) -> str | None:
    """The reason why virtual memory of a GPU cannot be had, or not by other processes; None if it can."""
    attribute = load().CUdevice_attribute
    device = call("cuDeviceGet", ordinal)
    supported = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not call("cuDeviceGetAttribute", supported, device):
        return f"the driver has no virtual memory for GPU {ordinal}"
    supported = attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    if not call("cuDeviceGetAttribute", supported, device):
        return f"the driver exports no memory of GPU {ordinal} as file descriptors"
    return None


def rounded(ordinal: int, nbytes: int) -> int:
    """``nbytes`` rounded up to whole pieces of memory, which the driver maps: 2 MB on the GPUs that are known."""
    option = load().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    piece = int(call("cuMemGetAllocationGranularity", _properties(ordinal), option))
    return -(-nbytes // piece) * piece


def create(ordinal: int, nbytes: int, exportable: bool = True) -> int:
    """Create memory of a GPU, and return its handle.

    :param nbytes: as :func:`rounded` gives.
    :param exportable: :func:`export` can be called for it.
    """
    return int(call("cuMemCreate", nbytes, _properties(ordinal, exportable), 0))


def release(handle: int) -> None:
    """Give a handle back. Its memory stays while it is mapped, or while a descriptor of it is open."""
    call("cuMemRelease", handle)


def export(handle: int) -> int:
    """A new file descriptor of memory, which the caller closes. Programs that this process starts do not get it."""
    descriptor = int(call("cuMemExportToShareableHandle", handle, _descriptor(), 0))
    os.set_inheritable(descriptor, False)
    return descriptor


def import_descriptor(descriptor: int) -> int:
    """The handle of another process's memory. The descriptor stays the caller's, who may close it."""
    return int(call("cuMemImportFromShareableHandle", descriptor, _descriptor()))


class Range:
    """Reserved addresses of this process, at which kernels of one GPU reach memory while some is mapped there.

    Every method tries all of its steps, and raises the last error.
    """

    def __init__(self, ordinal: int, nbytes: int) -> None:
        """Reserve addresses. :param nbytes: as :func:`rounded` gives. :raises CudaError: if that fails."""
        self._ordinal, self.nbytes = ordinal, nbytes
        self._handle = self._mapped = 0
        self._piece = nbytes  # bytes of each mapping
        self._next = 0  # the handle of memory that is to be mapped next
        self.address = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))

    @classmethod
    def over(cls, ordinal: int, nbytes: int, make: Callable[[], int]) -> Range:
        """New addresses, at which the memory is mapped whose handle ``make()`` returns."""
        made = cls(ordinal, nbytes)
        try:
            made.attach(make())
        except BaseException:
            made.close()
            raise
        return made

    def attach(self, handle: int, nbytes: int | None = None) -> None:
        """Map memory here, from the first address on. Its handle is this object's from now on.

        :param nbytes: the size of the memory. None: it fills the addresses.
        :raises CudaError: if that fails. Then nothing is mapped, and the handle is released.
        """
        self._handle, nbytes = handle, nbytes or self.nbytes
        self._map(handle, nbytes, nbytes)

    def cover(self, handle: int, nbytes: int) -> None:
        """Map one piece of memory again and again, over all addresses. Its handle stays the caller's.

        :param nbytes: the size of the memory. :raises CudaError: if that fails. Then nothing is mapped.
        """
        self._map(handle, nbytes, self.nbytes)

    def _map(self, handle: int, piece: int, nbytes: int) -> None:
        self._piece = piece
        try:
            while self._mapped < nbytes:
                call("cuMemMap", self.address + self._mapped, piece, 0, handle, 0)
                self._mapped += piece
            call("cuMemSetAccess", self.address, nbytes, [_access(self._ordinal)], 1)
        except BaseException:
            self._detach()
            raise

    def export(self) -> int:
        """A new file descriptor of the memory, or of what is prepared. The caller closes it."""
        return export(self._next or self._handle)

    def prepare(self, handle: int) -> None:
        """Take over the handle of memory for :meth:`swap`."""
        self._next = handle

    def drop_prepared(self) -> None:
        """Release what was prepared and is not mapped. Idempotent."""
        if self._next:
            release(self._take_prepared())

    def _take_prepared(self) -> int:
        handle, self._next = self._next, 0
        return handle

    def swap(self, nbytes: int | None = None) -> None:
        """Map the prepared memory in place of what is mapped here. If none is prepared, nothing changes.

        :param nbytes: see :meth:`attach`.
        """
        if self._next:
            self.detach()  # if that fails, drop_prepared() has still to release the handle
            self.attach(self._take_prepared(), nbytes)

    def detach(self) -> None:
        """Wait for all work in the context, then unmap the memory. The addresses stay reserved. Idempotent."""
        if self._handle or self._mapped:
            try:
                driver.synchronize()
            finally:
                self._detach()

    def _detach(self) -> None:
        errors = []
        try:
            while self._mapped:  # the driver promises to unmap what was mapped at once, not several of these
                self._mapped -= self._piece
                try:
                    call("cuMemUnmap", self.address + self._mapped, self._piece)
                except CudaError as error:
                    errors.append(error)
        finally:
            if self._handle:
                handle, self._handle = self._handle, 0
                release(handle)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for all work in the context, unmap the memory, and give the addresses back. Idempotent."""
        try:
            self.detach()
        finally:
            try:
                self.drop_prepared()
            finally:
                if self.address:
                    address, self.address = self.address, 0
                    call("cuMemAddressFree", address, self.nbytes)


def _properties(ordinal: int, exportable: bool = True) -> Any:
    bindings = load()
    properties = bindings.CUmemAllocationProp()
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    if exportable:
        properties.requestedHandleTypes = _descriptor()
    properties.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _access(ordinal: int) -> Any:
    bindings = load()
    access = bindings.CUmemAccessDesc()
    access.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _descriptor() -> Any:
    return load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
