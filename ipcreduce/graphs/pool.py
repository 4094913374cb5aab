"""The memory of graphs: slabs of ours under a CuPy pool, so that what captured nodes point to stays allocated.

CuPy's pool alone does not give this: when memory is short, and at ``free_all_blocks()``, it frees blocks that the nodes
of a graph still use. Here its ``free`` only marks a slab, which may serve a later request of a recording in this pool;
the driver gets it back when every graph of the pool is closed and CuPy has freed it, whichever comes last.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import arrays
from ..cuda import driver
from ..errors import CudaError

_numbers = itertools.count()


@dataclass(frozen=True)
class Slab:
    """An allocation. ``number`` tells it from one that comes to lie at its address later."""

    address: int
    nbytes: int
    number: int


class Slabs:
    """Allocations of one device, with the two functions of a CuPy allocator. ``users`` graphs keep them alive."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._lock = threading.Lock()  # arrays are collected in any thread
        self._slabs: dict[int, Slab] = {}
        self._marked: set[int] = set()
        self.users = 0

    @property
    def nbytes(self) -> int:
        """Bytes held from the driver."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def __len__(self) -> int:
        return len(self._slabs)

    def allocate(self, nbytes: int, device: int) -> int:
        """The address of ``nbytes`` bytes: the smallest marked slab that fits and is half used, or a new one."""
        with self._lock:
            fitting = [self._slabs[a] for a in self._marked if nbytes <= self._slabs[a].nbytes <= 2 * nbytes]
            if fitting:
                slab = min(fitting, key=lambda slab: slab.nbytes)
                self._marked.remove(slab.address)
            else:
                slab = Slab(driver.allocate(nbytes), nbytes, next(_numbers))
                self._slabs[slab.address] = slab
            return slab.address

    def find(self, address: int, nbytes: int) -> Slab | None:
        """The slab that holds these bytes, if one does."""
        with self._lock:
            for slab in self._slabs.values():
                if slab.address <= address and address + nbytes <= slab.address + slab.nbytes:
                    return slab
        return None

    def free(self, address: int, device: int) -> None:
        """CuPy has no more use for a slab; captured nodes may have."""
        with self._lock:
            self._marked.add(address)
            if not self.users:
                self._give_back()

    def release(self) -> None:
        """One graph less uses the slabs."""
        with self._lock:
            self.users -= 1
            if not self.users:
                self._give_back()

    def _give_back(self) -> None:
        with suppress(CudaError):  # at interpreter exit the context may be gone, and the memory with it
            previous = driver.current_context()
            driver.set_context(self._context)
            try:
                driver.synchronize()  # a last replay may be running
                while self._marked:
                    driver.free(address := self._marked.pop())
                    del self._slabs[address]
            finally:
                driver.set_context(previous)


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
