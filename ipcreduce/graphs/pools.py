"""The pools of a communicator's graphs, which are given back together: see :mod:`ipcreduce.suspension`."""

from __future__ import annotations

from weakref import WeakSet

from ..cuda import virtual_memory
from ..cuda.contexts import using_relaxed
from ..device.deferred_free import attempt
from .pool import UNIT, GraphPool


class Pools:
    """The pools that one communicator has made, but for that of ``empty()``.

    :param virtual: their memory is virtual memory, and can be given back.
    """

    def __init__(self, context: int, device: int, virtual: bool) -> None:
        self._context, self._device, self.are_virtual = context, device, virtual
        self._all: WeakSet[GraphPool] = WeakSet()
        self._piece = 0  # the handle of memory that is to cover the addresses

    def new(self, unit: int = UNIT) -> GraphPool:
        """A new pool. :param unit: see :class:`GraphPool`."""
        pool = GraphPool(self._context, self._device, unit, self.are_virtual)
        self._all.add(pool)
        return pool

    # ---- Each of these may raise CudaError. Nothing runs on the GPU.
    def prepare_suspension(self) -> None:
        """Create what :meth:`suspend` needs."""
        with using_relaxed(self._context):
            self._piece = virtual_memory.create(self._device, virtual_memory.rounded(self._device, 1))

    def suspend(self) -> None:
        """Give the memory back of all pools that no graph of another communicator uses."""
        with using_relaxed(self._context):
            for pool in self._all:
                if len(pool.sessions) < 2:
                    pool.suspend(self._piece, virtual_memory.rounded(self._device, 1))
        self.drop_prepared()  # it lives as long as it is mapped

    def prepare_resumption(self) -> None:
        """Create the memory for :meth:`resume`."""
        with using_relaxed(self._context):
            for pool in self._all:
                pool.prepare()

    def resume(self) -> None:
        """Map the memory in place of the old one."""
        with using_relaxed(self._context):
            for pool in self._all:
                pool.resume()

    def drop_prepared(self) -> None:
        """Give back what was prepared and not used. Idempotent."""
        piece, self._piece = self._piece, 0
        with using_relaxed(self._context):
            try:
                if piece:
                    virtual_memory.release(piece)
            finally:
                attempt(self._context, *[pool.drop_prepared for pool in self._all])
