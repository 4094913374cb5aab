"""The memory into which peers push: one allocation a rank, mapped by every peer when the communicator is made."""

from __future__ import annotations

from ..cuda import driver
from ..errors import CudaError
from . import plan

_EPOCHS_BYTES = 8192  # plan.EPOCH_SLOTS pairs of 32-bit words, and padding up to the next page
EMPTY = 0xFF  # the sentinel: every byte of an empty slot


class Workspace:
    """This rank's workspace and its mappings of the peers': epochs, then two halves of slots.

    ``peers[i]`` is the address, as mapped here, at which the slots of rank (rank + i) % n begin.
    """

    def __init__(self, rank: int, n: int, nbytes: int) -> None:
        """Allocate ``nbytes`` bytes on the current device, all slots empty. :raises CudaError: if memory is short."""
        self.rank, self.n, self.nbytes = rank, n, nbytes
        self.half_bytes = half_bytes(nbytes)
        self.address = driver.allocate(nbytes)
        self._mapped: list[int] = []
        self.peers = [self.address + _EPOCHS_BYTES]
        try:
            self.reset()
        except CudaError:
            self.free()
            raise

    @property
    def epochs(self) -> int:
        return self.address

    def export(self) -> bytes:
        """The IPC handle by which peers map this workspace."""
        return driver.export_memory(self.address)

    def map_peers(self, handles: list[bytes]) -> None:
        """Map every peer's workspace.

        :param handles: IPC handles, by rank.
        :raises CudaError: naming the call that failed.
        """
        for i in range(1, self.n):
            mapped = driver.open_memory(handles[(self.rank + i) % self.n])
            self._mapped.append(mapped)
            self.peers.append(mapped + _EPOCHS_BYTES)

    def reset(self) -> None:
        """Empty every slot and reset the epochs. No kernel may be running, here or on a peer."""
        driver.fill(self.address, 0, _EPOCHS_BYTES)
        driver.fill(self.address + _EPOCHS_BYTES, EMPTY, 2 * self.half_bytes)

    def unmap_peers(self) -> None:
        """Unmap the peers' workspaces. No kernel of this rank may be running. Idempotent."""
        while self._mapped:
            try:
                driver.close_memory(self._mapped.pop())
            finally:
                self.unmap_peers()  # the remaining ones, even if this one fails

    def free(self) -> None:
        """Free the memory. Every peer must have unmapped it. Idempotent."""
        if self.address:
            driver.free(self.address)
            self.address = 0


def half_bytes(nbytes: int) -> int:
    """The bytes of each half of a workspace of ``nbytes`` bytes."""
    return (nbytes - _EPOCHS_BYTES) // 2 // plan.CODE_BYTES * plan.CODE_BYTES


def bytes_for(nbytes: int) -> int:
    """The bytes of a workspace through which a message of ``nbytes`` goes in one launch, whatever number the ranks are.

    Messages of more than 1 GB take several launches, as with every workspace.
    """
    size = plan.MB
    for n in range(2, plan.MAX_RANKS + 1):
        fewest = len(plan.make_plan(nbytes, n, 4 * nbytes + 64 * plan.MB))
        while len(plan.make_plan(nbytes, n, half_bytes(size))) > fewest:
            size += plan.MB
    return size
