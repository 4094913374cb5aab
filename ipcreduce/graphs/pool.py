"""The memory of graphs: slabs of ours, cut into blocks, so that what captured nodes point to stays allocated.

CuPy's pool does not give this: when memory is short, and at ``free_all_blocks()``, it frees blocks that the nodes of a
graph still use. Here a block that CuPy frees may serve a later request of a recording in this pool; the driver gets a
slab back when every graph of the pool is closed and CuPy has freed all in it, whichever comes last. (A CuPy pool over
our slabs never frees them if an array outlives it: its chunks refer to each other, and are not collected; CuPy 14.2.)
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..cuda import cupy_runtime, driver, streams
from ..cuda.contexts import using, within
from ..ipc.deferred_free import attempt, give_back, reclaim

_numbers = itertools.count()
_UNIT = 2 << 20  # bytes: smaller allocations share a block of the driver's, which IPC would export whole
_ALIGNMENT = 512  # bytes, as CuPy's pool


@dataclass(eq=False)
class Slab:
    """An allocation. ``number`` tells it from a later one at its address.

    ``stream`` is the one that its blocks are for, as in CuPy's pool: what is free for the next work there may still be
    in use on another. ``free`` are the (address, bytes) that are in no block, in their order.
    """

    address: int
    nbytes: int
    stream: int
    number: int
    free: list[tuple[int, int]]

    def take(self, address: int, nbytes: int) -> None:
        """Cuts ``nbytes`` off the free range at ``address``."""
        index = bisect(self.free, (address, 0))
        size = self.free[index][1] - nbytes
        self.free[index : index + 1] = [(address + nbytes, size)] if size else []

    def put(self, address: int, nbytes: int) -> None:
        """Makes a block free, one range with the free ones beside it."""
        index = bisect(self.free, (address, 0))
        first = last = index
        if index and sum(self.free[index - 1]) == address:
            first -= 1
            address, nbytes = self.free[first][0], self.free[first][1] + nbytes
        if last < len(self.free) and self.free[last][0] == address + nbytes:
            nbytes += self.free[last][1]
            last += 1
        self.free[first:last] = [(address, nbytes)]

    @property
    def unused(self) -> bool:
        """Whether there is no block in it."""
        return self.free == [(self.address, self.nbytes)]


class GraphPool:
    """Memory that one or several graphs allocate from while they are recorded. ``graph.pool`` is one.

    Graphs that share a pool reuse each other's memory: an output is then valid until the next replay of any of them.

    :param unit: bytes of which allocations are multiples.
    """

    def __init__(self, context: int, device: int, unit: int = _UNIT) -> None:
        self._context, self._device, self._unit = context, device, unit
        self._users = 0  # graphs, and registrations with peers that have it mapped
        self._slabs: list[Slab] = []
        self._blocks: dict[int, tuple[int, Slab]] = {}  # by address: bytes, and where they lie
        self._freed: deque[int] = deque()  # blocks that arrays left, in any thread, also within the lock
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the pool holds."""
        with self._lock:
            return sum(slab.nbytes for slab in self._slabs)

    @property
    def slabs(self) -> int:
        """Number of allocations that make up the pool."""
        return len(self._slabs)

    @property
    def allocator(self) -> Callable[[int], Any]:
        """What CuPy calls for memory."""
        return cupy_runtime.make_allocator(self._device, self._allocate, self._free, lambda: self.nbytes, reclaim)

    def find(self, address: int, nbytes: int) -> Slab | None:
        """The slab that holds these bytes, if one does."""
        with self._lock:
            for slab in self._slabs:
                if slab.address <= address and address + nbytes <= slab.address + slab.nbytes:
                    return slab
        return None

    def retain(self) -> None:
        """One graph more uses the pool, or peers that have it mapped."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """One graph less uses it. With the last, memory goes back to the driver as soon as no array is in it."""
        with self._lock:
            self._users -= 1
        self._give_back()

    # ---- blocks
    def _allocate(self, nbytes: int, stream: int) -> int:
        """The address of a block: in the smallest free range that fits. :raises CudaError: if there is no memory."""
        nbytes = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._take_back()
            fitting = [
                (size, address, slab)
                for slab in self._slabs
                if slab.stream == stream
                for address, size in slab.free
                if size >= nbytes
            ]
            if fitting:
                _, address, slab = min(fitting, key=lambda one: one[0])
            else:
                size = -(-nbytes // self._unit) * self._unit
                with within(self._context):
                    address = driver.allocate(size)
                slab = Slab(address, size, stream, next(_numbers), [(address, size)])
                self._slabs.append(slab)
            slab.take(address, nbytes)
            self._blocks[address] = nbytes, slab
            return address

    def _free(self, address: int) -> None:
        """CuPy has no more use for a block; captured nodes may have."""
        self._freed.append(address)
        self._give_back()

    def _take_back(self) -> None:
        while self._freed:
            address = self._freed.popleft()
            nbytes, slab = self._blocks.pop(address)
            slab.put(address, nbytes)

    def _give_back(self) -> None:
        if not self._users:
            give_back(self._context, self._shrink)

    def _shrink(self) -> None:
        """Gives unused slabs back to the driver, if no graph is left that may use them."""
        with self._lock:
            self._take_back()
            unused = [] if self._users else [slab for slab in self._slabs if slab.unused]
            self._slabs = [slab for slab in self._slabs if slab not in unused]
        # Outside the lock, since cuMemFree waits for a last replay.
        attempt(self._context, *(partial(driver.free, slab.address) for slab in unused))


class CapturedMemory:
    """Memory of calls in captures of others: for each capture its own, kept until :meth:`release`.

    CuPy's pool would give what a call lets go of to the next one who asks, while replays go on to use it.
    """

    def __init__(self, context: int, device: int) -> None:
        self._context, self._device = context, device
        self._pools: dict[int, GraphPool] = {}  # by the captures' ids

    def allocating(self, stream: int) -> AbstractContextManager[None]:
        """Within the block this thread's CuPy allocates so, if others capture ``stream``."""
        with using(self._context):
            capture = streams.capture_id(stream)
        if not capture:
            return nullcontext()
        pool = self._pools.get(capture)
        if pool is None:
            pool = self._pools[capture] = GraphPool(self._context, self._device, unit=_ALIGNMENT)
            pool.retain()
        return cupy_runtime.allocating(pool.allocator, stream)

    def release(self) -> None:
        """No graph is launched any more. Arrays that live on stay valid."""
        while self._pools:
            self._pools.popitem()[1].release()
