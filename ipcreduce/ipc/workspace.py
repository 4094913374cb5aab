"""The memory into which the peers write packets: an allocation of each rank, which every peer maps at start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..cuda import driver
from . import plan

EPOCHS_BYTES = 8192  # plan.EPOCH_SLOTS pairs of 32-bit words, and padding up to the next page
EMPTY = 0xFF  # every byte of an empty slot, whose words are then the sentinel


class Workspace:
    """This rank's workspace, and its mappings of the peers' ones.

    It consists of epochs, two halves of slots, and the area in which bulk.cu and tiles.cuh work.

    ``address`` is that of the epochs. ``peers[i]`` is the address in this process at which the slots of rank
    (rank + i) % n begin, and ``area`` is from there to the area.
    """

    where = ""  # what :meth:`IpcBackend.describe` says of the kind of memory

    def __init__(self, rank: int, n: int, nbytes: int, area_bytes: int = 0) -> None:
        """Allocate the memory on the current device, and empty the slots.

        :param nbytes: of epochs and slots.
        :raises CudaError: if that fails.
        """
        self.rank, self.n, self.nbytes, self.area_bytes = rank, n, nbytes, area_bytes
        self.area = 2 * half_bytes(nbytes)
        self.half_bytes = half_bytes(nbytes)
        self.address = self._allocate()
        self._mapped: list[Callable[[], None]] = []  # they unmap the peers' workspaces
        self.peers = [self.address + EPOCHS_BYTES]
        try:
            self.reset()
        except BaseException:
            self.free()
            raise

    def _allocate(self) -> int:
        return driver.allocate(self.nbytes + self.area_bytes)

    @property
    def areas(self) -> list[int]:
        """The address in this process of the area of rank (rank + i) % n, for each i."""
        return [peer + self.area for peer in self.peers]

    def export(self) -> bytes:
        """The IPC handle by which peers map this workspace."""
        return driver.export_memory(self.address)

    def map_peers(self, handles: Sequence[Any]) -> None:
        """Map every peer's workspace.

        :param handles: IPC handles, by rank.
        :raises CudaError: if that fails.
        """
        for i in range(1, self.n):
            mapped, unmap = self._map(handles[(self.rank + i) % self.n])
            self._mapped.append(unmap)
            self.peers.append(mapped + EPOCHS_BYTES)

    def _map(self, handle: Any) -> tuple[int, Callable[[], None]]:
        """Map one workspace. Returns its address here, and what unmaps it."""
        mapped = driver.open_memory(handle)
        return mapped, partial(driver.close_memory, mapped)

    def reset(self) -> None:
        """Empty every slot and reset the epochs. No kernel may be running on any rank."""
        driver.fill(self.address, 0, EPOCHS_BYTES)
        driver.fill(self.address + EPOCHS_BYTES, EMPTY, 2 * self.half_bytes)

    def unmap_peers(self) -> None:
        """Unmap the peers' workspaces. No kernel of this rank may be running. Idempotent."""
        while self._mapped:
            try:
                self._mapped.pop()()
            finally:
                self.unmap_peers()  # the other mappings, even if this one fails

    def free(self) -> None:
        """Free the memory. Every peer must have unmapped it. Idempotent."""
        if self.address:
            driver.free(self.address)
            self.address = 0


def half_bytes(nbytes: int) -> int:
    """The bytes of each half of a workspace of ``nbytes`` bytes."""
    return (nbytes - EPOCHS_BYTES) // 2 // plan.CODE_BYTES * plan.CODE_BYTES


def bytes_for(nbytes: int) -> int:
    """The bytes of a workspace that lets a message of ``nbytes`` pass in one launch, for every number of ranks.

    Messages of more than 1 GB take several launches with any workspace.
    """
    size = plan.MB
    for n in range(2, plan.MAX_RANKS + 1):
        fewest = len(plan.make_plan(nbytes, plan.Gpus(n, 4 * nbytes + 64 * plan.MB)))
        while len(plan.make_plan(nbytes, plan.Gpus(n, half_bytes(size)))) > fewest:
            size += plan.MB
    return size
