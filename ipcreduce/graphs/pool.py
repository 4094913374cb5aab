"""The memory of graphs: slabs of ours under a CuPy pool, so that what captured nodes point to stays allocated.

CuPy's pool alone does not give this: when memory is short, and at ``free_all_blocks()``, it frees blocks that the nodes
of a graph still use. Here its ``free`` only marks a block, which may serve a later request of a recording in this pool;
the driver gets it back when every graph of the pool is closed and CuPy has freed it, whichever comes last.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import arrays
from ..cuda import driver
from ..ipc.release import attempt, give_back

_numbers = itertools.count()
_lock = threading.RLock()  # one for all: arrays of any pool are collected in any thread, also while another allocates
_UNIT = 2 << 20  # bytes: smaller allocations share a block of the driver's, which IPC would export whole


@dataclass
class Slab:
    """An allocation, cut into blocks from its beginning. ``number`` tells it from a later one at its address."""

    address: int
    nbytes: int
    number: int
    used: int = 0  # bytes that have been cut off
    blocks: int = 0  # that CuPy has not given back


class Slabs:
    """Allocations of one device, with the two functions of a CuPy allocator. ``users`` graphs keep them alive."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._slabs: list[Slab] = []
        self._blocks: dict[int, tuple[int, Slab]] = {}  # by address: bytes, and where they lie
        self._marked: set[int] = set()
        self.users = 0

    @property
    def nbytes(self) -> int:
        """Bytes held from the driver."""
        return sum(slab.nbytes for slab in self._slabs)

    def __len__(self) -> int:
        return len(self._slabs)

    def allocate(self, nbytes: int, device: int) -> int:
        """The address of ``nbytes`` bytes: the smallest marked block that fits and is half used, or a new one."""
        with _lock:
            fitting = [a for a in self._marked if nbytes <= self._blocks[a][0] <= 2 * nbytes]
            if fitting:
                address = min(fitting, key=lambda a: self._blocks[a][0])
                self._marked.remove(address)
                self._blocks[address][1].blocks += 1
                return address
            slab = next((slab for slab in self._slabs if nbytes <= slab.nbytes - slab.used), None)
            if slab is None:
                size = -(-nbytes // _UNIT) * _UNIT
                slab = Slab(driver.allocate(size), size, next(_numbers))
                self._slabs.append(slab)
            address = slab.address + slab.used
            slab.used += -(-nbytes // 512) * 512
            slab.blocks += 1
            self._blocks[address] = nbytes, slab
            return address

    def find(self, address: int, nbytes: int) -> Slab | None:
        """The slab that holds these bytes, if one does."""
        with _lock:
            for slab in self._slabs:
                if slab.address <= address and address + nbytes <= slab.address + slab.nbytes:
                    return slab
        return None

    def free(self, address: int, device: int) -> None:
        """CuPy has no more use for a block; captured nodes may have."""
        with _lock:
            self._marked.add(address)
            self._blocks[address][1].blocks -= 1
        if not self.users:
            give_back(self._context, self._give_back)

    def release(self) -> None:
        """One graph less uses the slabs."""
        with _lock:
            self.users -= 1
        if not self.users:
            give_back(self._context, self._give_back)

    def _give_back(self) -> None:
        """Gives unused slabs back to the driver, if no graph is left that may use them."""
        with _lock:
            unused = [slab for slab in self._slabs if not slab.blocks and not self.users]
            for slab in unused:
                self._slabs.remove(slab)
                for address in [a for a, (_, where) in self._blocks.items() if where is slab]:
                    del self._blocks[address]
                    self._marked.discard(address)
        # Outside the lock, since cuMemFree waits for a last replay.
        attempt(self._context, *(partial(driver.free, slab.address) for slab in unused))


class GraphPool:
    """Memory that one or several graphs allocate from while they are recorded. ``graph.pool`` is one.

    Graphs that share a pool reuse each other's memory: an output is then valid until the next replay of any of them.
    """

    def __init__(self, context: int) -> None:
        self._slabs = Slabs(context)
        self._pool: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the pool holds."""
        return self._slabs.nbytes

    @property
    def slabs(self) -> int:
        """Number of allocations that make up the pool."""
        return len(self._slabs)

    @property
    def allocator(self) -> Any:
        """What CuPy calls for memory."""
        return self._pool.malloc

    def find(self, address: int, nbytes: int) -> Slab | None:
        """The slab that holds these bytes, if one does."""
        return self._slabs.find(address, nbytes)

    def retain(self) -> None:
        """One graph more uses the pool, or peers that have it mapped."""
        if self._pool is None:
            self._pool = arrays.make_pool(self._slabs.allocate, self._slabs.free)
        self._slabs.users += 1

    def release(self) -> None:
        """One graph less uses it. With the last, memory goes back to the driver as soon as no array is in it."""
        if self._slabs.users == 1:
            self._pool = None  # blocks that arrays still use then go back one by one, past CuPy's free lists
        self._slabs.release()
