"""The memory of graphs: slabs cut into blocks, which stay allocated as long as captured nodes point into them.

CuPy's pool does not guarantee this: when memory is short, and at ``free_all_blocks()``, it frees blocks that a graph's
nodes still use. Here a block that CuPy frees may serve a later request of a recording in this pool. A slab goes back to
the driver when every graph of the pool is closed, CuPy has freed all blocks in the slab, and no view holds it. (A CuPy
pool over these slabs would not work. If an array outlives that pool, its chunks refer to each other and are never
collected: CuPy 14.2.)
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakSet

from ..cuda import cupy_runtime, driver, streams, torch_runtime, virtual_memory
from ..cuda.contexts import using, using_relaxed
from ..cuda.virtual_memory import Range
from ..device.deferred_free import attempt, free_later, reclaim
from ..originals import RLock
from ..process import refuse_copies
from ..types import Stream

UNIT = 2 << 20  # bytes; smaller allocations share a block of the driver's, which IPC exports as a whole
_ALIGNMENT = 512  # bytes, as in CuPy's pool


@dataclass(eq=False)
class Slab:
    """An allocation of the driver's, of ``nbytes`` bytes.

    ``stream`` is the stream that its blocks serve, as in CuPy's pool: a block that is free for the next work on this
    stream may still be in use for another stream. ``free`` lists the (address, bytes) of the free ranges, in order of
    address.
    """

    address: int
    nbytes: int
    stream: Stream
    free: list[tuple[int, int]]
    place: Range | None = None  # the addresses, if the memory is virtual memory

    @classmethod
    def new(cls, nbytes: int, stream: Stream, device: int, virtual: bool) -> Slab:
        """A new slab on the current device, of ``nbytes`` bytes or more. :raises CudaError: if memory is short.

        :param virtual: use virtual memory, unless the slab is so small that most of a piece would be unused.
        """
        if not virtual or nbytes < UNIT:
            address = driver.allocate(nbytes)
            return cls(address, nbytes, stream, [(address, nbytes)])
        nbytes = virtual_memory.rounded(device, nbytes)
        place = Range.over(device, nbytes, lambda: virtual_memory.create(device, nbytes))
        return cls(place.address, nbytes, stream, [(place.address, nbytes)], place)

    def release(self) -> None:
        """Give the memory back to the driver, with its addresses."""
        if self.place is None:
            driver.free(self.address)
        else:
            self.place.close()

    def take(self, address: int, nbytes: int) -> None:
        """Cut ``nbytes`` off the free range at ``address``."""
        index = bisect(self.free, (address, 0))
        size = self.free[index][1] - nbytes
        self.free[index : index + 1] = [(address + nbytes, size)] if size else []

    def put(self, address: int, nbytes: int) -> None:
        """Free a block, and merge it with adjacent free ranges."""
        index = bisect(self.free, (address, 0))
        first = last = index
        if index and sum(self.free[index - 1]) == address:
            first -= 1
            address, nbytes = self.free[first][0], self.free[first][1] + nbytes
        if last < len(self.free) and self.free[last][0] == address + nbytes:
            nbytes += self.free[last][1]
            last += 1
        self.free[first:last] = [(address, nbytes)]


class _Hold:
    """An object that keeps memory of a pool allocated as long as it lives: :meth:`GraphPool.hold` makes it."""


class GraphPool:
    """The memory from which one or several graphs allocate while they are recorded; see ``graph.pool``.

    Graphs that share a pool reuse each other's memory: an output is then valid until the next replay of any of them.

    :param unit: slab sizes are multiples of this many bytes.
    :param virtual: slabs of :data:`UNIT` and more are virtual memory, which can be given back while the addresses stay.
    :ivar sessions: of the communicators whose graphs use the pool.
    """

    def __init__(self, context: int, device: int, unit: int = UNIT, virtual: bool = False) -> None:
        self._context, self.device, self._unit, self._virtual = context, device, unit, virtual
        self.sessions: WeakSet[Any] = WeakSet()
        self.is_suspended = False
        self._of_torch: Any = None
        self._users = 0  # graphs, and registrations while peers have the memory mapped
        self._slabs: list[Slab] = []
        self._blocks: dict[int, tuple[int, Slab]] = {}  # by address: bytes and slab; holds, of 0 bytes, by -1, -2, ...
        self._holds = count(-1, -1)
        self._freed: deque[int] = deque()  # freed by arrays in any thread, perhaps while the lock is held
        self._lock = RLock()

    __reduce__ = refuse_copies

    def __repr__(self) -> str:
        slabs = list(vars(self).get("_slabs", ()))  # without the lock, which an allocation may hold
        return f"<GraphPool: {sum(slab.nbytes for slab in slabs)} bytes in {len(slabs)} slabs>"

    @property
    def nbytes(self) -> int:
        """The bytes of device memory that the pool holds."""
        with self._lock:
            return sum(slab.nbytes for slab in self._slabs)

    @property
    def slabs(self) -> int:
        """The number of allocations that make up the pool."""
        return len(self._slabs)

    @property
    def allocator(self) -> Callable[[int], Any]:
        """The allocator function to set in CuPy."""
        return cupy_runtime.make_allocator(self.device, self._allocate, self._free, lambda: self.nbytes, reclaim)

    @contextmanager
    def allocating(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` current, and let this thread allocate from the pool, in the block. PyTorch gets its own pool.

        PyTorch's pool lives as long as this pool has a user. Memory that PyTorch frees meanwhile serves only recordings
        in this pool.
        """
        with self._lock:
            if self._of_torch is None:
                self._of_torch = torch_runtime.make_pool()
        with (
            cupy_runtime.allocating(self.allocator, stream),
            torch_runtime.allocating(self._of_torch, stream, self.device),
        ):
            yield

    def find(self, address: int, nbytes: int) -> Slab | None:
        """The slab that contains the ``nbytes`` bytes at ``address``, or None."""
        with self._lock:
            for slab in self._slabs:
                if slab.address <= address and address + nbytes <= slab.address + slab.nbytes:
                    return slab
        return None

    def hold(self, address: int, nbytes: int) -> Any:
        """An object that keeps the slab of this memory allocated as long as it lives; None outside of the pool.

        Unlike an array of CuPy's, it keeps no block: later requests may get the same memory.
        """
        with self._lock:
            slab = self.find(address, nbytes)
            if slab is None:
                return None
            hold, number = _Hold(), next(self._holds)
            self._blocks[number] = 0, slab
            weakref.finalize(hold, self._free, number).atexit = False  # then the process gives everything back
            return hold

    def retain(self) -> None:
        """Add a user: a graph, or a registration with peers that map the pool."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Remove a user. After the last, a slab goes back to the driver as soon as no array is in it."""
        with self._lock:
            self._users -= 1
        self._give_back()

    # ---- memory that is given back: see Pools
    @contextmanager
    def _places(self) -> Iterator[list[Range]]:
        """The addresses of the slabs, which stay in the block even if Python collects the last graph of the pool."""
        self.retain()
        try:
            with self._lock:
                yield [slab.place for slab in self._slabs if slab.place is not None]
        finally:
            self.release()

    def suspend(self, piece: int, nbytes: int) -> None:
        """Give the memory of the slabs back, and cover their addresses: what still writes there ends no program.

        :param piece: the handle of ``nbytes`` bytes for this.
        """
        with self._places() as places:
            self.is_suspended = True
            for place in places:
                place.detach()
                place.cover(piece, nbytes)

    def prepare(self) -> None:
        """Create memory for the slabs, if it was given back."""
        with self._places() as places:
            for place in places if self.is_suspended else ():
                place.prepare(virtual_memory.create(self.device, place.nbytes))

    def drop_prepared(self) -> None:
        """Release what :meth:`prepare` has created, unless it is mapped. Idempotent."""
        with self._places() as places:
            for place in places:
                place.drop_prepared()

    def resume(self) -> None:
        """Map the new memory. What was in the old one is lost."""
        with self._places() as places:
            for place in places:
                place.swap()
            self.is_suspended = False

    # ---- blocks
    def _allocate(self, nbytes: int, stream: Stream) -> int:
        """Take a block from the smallest free range that fits, or from a new slab. Returns its address.

        :raises CudaError: if memory is short.
        """
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
                with using_relaxed(self._context):
                    slab = Slab.new(size, stream, self.device, self._virtual)
                address = slab.address
                self._slabs.append(slab)
            slab.take(address, nbytes)
            self._blocks[address] = nbytes, slab
            return address

    def _free(self, address: int) -> None:
        """Note a block that CuPy has freed, or a hold that has ended. Captured nodes may still use the memory."""
        self._freed.append(address)
        self._give_back()

    def _take_back(self) -> None:
        while self._freed:
            address = self._freed.popleft()
            nbytes, slab = self._blocks.pop(address)
            if nbytes:
                slab.put(address, nbytes)

    def _give_back(self) -> None:
        if not self._users:
            free_later(self._context, self._shrink)

    def _shrink(self) -> None:
        """Free unused slabs, if the pool has no user left."""
        with self._lock:
            if self._users:  # this may be within the steps of _allocate() or _take_back() of the same thread
                return
            self._take_back()
            used = {slab for _, slab in self._blocks.values()}
            unused = [slab for slab in self._slabs if slab not in used]
            of_torch, self._of_torch = self._of_torch, None
            self._slabs = [slab for slab in self._slabs if slab in used]
        # Outside the lock, since cuMemFree waits until the last replay has ended.
        attempt(self._context, *(slab.release for slab in unused))
        del of_torch


class CapturedMemory:
    """The memory of calls in captures by other libraries: a pool for each capture, kept until :meth:`release`.

    CuPy's own pool would reuse a call's temporary memory at once, while replays still write to it.
    """

    def __init__(self, context: int, new: Callable[[int], GraphPool]) -> None:
        """:param new: makes a pool of this unit."""
        self._context, self._new = context, new
        self._pools: dict[int, GraphPool] = {}  # by capture id

    def allocating(self, stream: Stream) -> AbstractContextManager[None]:
        """Make this thread's CuPy allocate from the capture's pool for a block, if ``stream`` is being captured."""
        with using(self._context):
            capture = streams.capture_id(stream)
        if not capture:
            return nullcontext()
        pool = self._pools.get(capture)
        if pool is None:
            pool = self._pools[capture] = self._new(_ALIGNMENT)
            pool.retain()
        return cupy_runtime.allocating(pool.allocator, stream)

    def release(self) -> None:
        """Release all pools, once no graph is launched any more. Arrays that are still alive stay valid."""
        while self._pools:
            self._pools.popitem()[1].release()
