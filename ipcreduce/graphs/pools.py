"""The pools of a communicator's graphs, which are given back together: see :mod:`ipcreduce.suspension`."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from ..cuda import virtual_memory
from ..cuda.contexts import using_relaxed
from ..device.deferred_free import attempt
from ..interrupts import uninterrupted
from ..ranks.exchange import Channel
from .pool import UNIT, GraphPool


class Elsewhere(Protocol):
    """Memory of the peers' pools that is mapped here. Its class is in direct/, which imports this module."""

    def suspend(self) -> None: ...
    def hand_over(self, ranks: Channel, deadline: float) -> None: ...
    def resume(self) -> None: ...
    def drop_prepared(self) -> None: ...


class Pools:
    """The pools that one communicator has made, but for that of ``empty()``.

    :param virtual: their memory is virtual memory, and can be given back: see :class:`GraphPool`.
    :ivar elsewhere: the memory of peers that graphs use; None if they use none.
    """

    def __init__(self, context: int, device: int, virtual: bool) -> None:
        self._context, self._device, self.are_virtual = context, device, virtual
        self._all: WeakSet[GraphPool] = WeakSet()
        self.elsewhere: Elsewhere | None = None
        self._is_suspended = False
        self._piece = 0  # the handle of memory that is to cover the addresses

    def new(self, unit: int = UNIT) -> GraphPool:
        """A new pool. :param unit: see :class:`GraphPool`."""
        pool = GraphPool(self._context, self._device, unit, self.are_virtual)
        self._all.add(pool)
        return pool

    # ---- Each of these may raise CudaError. Nothing runs on the GPU.
    def prepare_suspension(self) -> None:
        """Create what :meth:`suspend` needs."""
        with using_relaxed(self._context), uninterrupted():
            piece = virtual_memory.rounded(self._device, 1)
            self._piece = virtual_memory.create(self._device, piece, exportable=False)

    def suspend(self) -> None:
        """Give the memory back of all pools that no graph of another communicator uses."""
        self._is_suspended = True
        with using_relaxed(self._context), uninterrupted():
            if self.elsewhere is not None:
                self.elsewhere.suspend()
            for pool in self._all:
                if len(pool.sessions) < 2:
                    pool.suspend(self._piece, virtual_memory.rounded(self._device, 1))
        self.drop_prepared()  # it lives as long as it is mapped

    def prepare_resumption(self) -> None:
        """Create the memory for :meth:`resume`."""
        with using_relaxed(self._context), uninterrupted():
            for pool in self._all:
                pool.prepare()

    def hand_over(self, ranks: Channel, deadline: float) -> None:
        """Exchange the new memory that peers map, if graphs are direct, for :meth:`resume`. Collective."""
        if self._is_suspended and self.elsewhere is not None:
            with using_relaxed(self._context):
                self.elsewhere.hand_over(ranks, deadline)

    def resume(self) -> None:
        """Map the memory in place of the old one, if that was given back."""
        if not self._is_suspended:
            return
        self._is_suspended = False
        with using_relaxed(self._context), uninterrupted():
            for pool in self._all:
                pool.resume()
            if self.elsewhere is not None:
                self.elsewhere.resume()

    def drop_prepared(self) -> None:
        """Give back what was prepared and not used. Idempotent."""
        with uninterrupted(), using_relaxed(self._context):
            piece, self._piece = self._piece, 0
            try:
                if piece:
                    virtual_memory.release(piece)
            finally:
                elsewhere = () if self.elsewhere is None else (self.elsewhere.drop_prepared,)
                attempt(self._context, *[pool.drop_prepared for pool in self._all], *elsewhere)
