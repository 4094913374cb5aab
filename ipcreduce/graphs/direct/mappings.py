"""Mappings of the peers' graph memory, into which direct kernels write.

A slab is mapped once, however many graphs use it. Each registered graph has a serial number, the same on every rank. A
rank sets a mark when it has unmapped the slabs of a graph, and a rank keeps a graph's memory until every rank has set
the mark. So closing a graph waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ...cuda import driver, virtual_memory
from ...cuda.virtual_memory import Range
from ...errors import CudaError, UnsupportedError
from ...interrupts import uninterrupted
from ...originals import RLock
from ...page import shared_files
from . import driver_calls

Key = tuple[int, int]  # rank, and the number of the slab there
MARKS = 1024  # words for each rank


def marks_bytes(n: int) -> int:
    """The bytes of the marks of ``n`` ranks."""
    return n * MARKS * 8


class Marks:
    """The marks of ``n`` ranks, in memory that all of them see.

    A word holds the number, plus 1, of the last graph with this place that was dropped.
    """

    def __init__(self, descriptor: int, rank: int, n: int) -> None:
        self._words: np.ndarray[Any, Any] = np.frombuffer(shared_files.mapped(descriptor), "<u8").reshape(n, MARKS)
        self._rank = rank

    def set(self, serial: int) -> None:
        """Say that this rank has dropped graph number ``serial``."""
        self._words[self._rank, serial % MARKS] = serial + 1

    def all_set(self, serial: int) -> bool:
        """Return True if every rank has dropped graph number ``serial``."""
        return bool((self._words[:, serial % MARKS] == serial + 1).all())


class Mappings:
    """The peers' slabs that one communicator has mapped, and the pins of this rank's slabs.

    :ivar marks: the ranks' marks, from the first registration on.
    """

    def __init__(self) -> None:
        self.marks: Marks | None = None
        self._mapped: dict[Key, int] = {}
        self._places: dict[Key, Range] = {}  # of those in virtual memory
        self._uses: Counter[Key] = Counter()
        self._dropped: list[int] = []  # serial numbers of graphs whose slabs are still to be unmapped
        self._holds: set[object] = set()  # one for each block of holding()
        self._serial = 0
        self._lock = RLock()  # graphs are collected in any thread
        self._pins: dict[int, tuple[Callable[[], None], ...]] = {}  # by serial number: they free this rank's memory

    def open(self, key: Key, handle: bytes, nbytes: int) -> None:
        """Map a peer's slab of ``nbytes`` bytes behind an IPC handle, unless it is mapped.

        :raises CudaError: if the slab cannot be mapped. :raises UnsupportedError: if it is smaller than ``nbytes``.
        """
        with self._lock, uninterrupted():
            if key not in self._mapped:
                self._mapped[key] = driver.open_memory(handle)
            address = self._mapped[key]
        found = driver_calls.allocation_bytes(address)
        if found < nbytes:
            raise UnsupportedError(f"rank {key[0]}'s allocation {key[1]} has {found} bytes here, not {nbytes}")

    def take(self, key: Key, descriptor: int, ordinal: int, nbytes: int) -> None:
        """Map a peer's slab in virtual memory for GPU ``ordinal``, unless it is mapped.

        :param nbytes: its size. More than it has cannot be mapped. :raises CudaError: if the slab cannot be mapped.
        """
        with self._lock:
            if key in self._mapped:
                return
            place = Range.over(ordinal, nbytes, lambda: virtual_memory.import_descriptor(descriptor))
            self._places[key], self._mapped[key] = place, place.address

    def address(self, key: Key) -> int:
        """The address at which a slab is mapped."""
        return self._mapped[key]

    # ---- memory that is given back: see graphs/pools.py
    @contextmanager
    def holding(self) -> Iterator[None]:
        """Unmap nothing in the block, where Python may collect the last graph of a slab. Then unmap what is unused."""
        hold = object()
        try:
            with self._lock:
                self._holds.add(hold)
            yield
        finally:
            self._holds.discard(hold)
            with self._lock, uninterrupted(), suppress(CudaError):
                self._unmap_unused()

    def suspend(self) -> None:
        """Unmap the peers' virtual memory, and keep the addresses. :raises CudaError: if that fails."""
        with self.holding():
            for place in list(self._places.values()):
                place.detach()

    def kept(self) -> list[Key]:
        """The slabs for which there are addresses."""
        with self._lock:
            return list(self._places)

    def prepare(self, key: Key, descriptor: int) -> None:
        """Import a peer's new memory for :meth:`resume`, if its slab is in use here. :raises CudaError: if it fails."""
        with self.holding():
            if key in self._places:  # its last graph may have been closed meanwhile
                self._places[key].prepare(virtual_memory.import_descriptor(descriptor))

    def drop_prepared(self) -> None:
        """Release what was prepared and is not mapped. Idempotent."""
        with self.holding():
            for place in list(self._places.values()):
                place.drop_prepared()

    def resume(self) -> None:
        """Map the peers' new memory where their old one was. :raises CudaError: if that fails."""
        with self.holding():
            for place in list(self._places.values()):
                place.swap()

    def room(self) -> bool:
        """Return True if one more graph can be registered. There are marks for the last :data:`MARKS` graphs."""
        self.collect()
        return self._serial - min(self._pins, default=self._serial) < MARKS

    def use(self, keys: Iterable[Key], *releases: Callable[[], None]) -> int:
        """Count one more graph that writes to these slabs of peers, as the peers' graphs write to this rank's slabs.

        :param releases: called once no peer has this rank's slabs mapped for the graph.
        :returns: the graph's serial number, for :meth:`drop`.
        """
        with self._lock:
            self._uses.update(keys)
            serial, self._serial = self._serial, self._serial + 1
            self._pins[serial] = releases
            return serial

    def drop(self, serial: int, keys: Iterable[Key]) -> None:
        """Count one graph less. Slabs that no other graph uses are unmapped, once the graph's last replay is over.

        :raises CudaError: if unmapping fails. The peers then keep their memory.
        """
        with self._lock, uninterrupted():
            self._uses.subtract(keys)
            self._dropped.append(serial)
            self._unmap_unused()
        self.collect()

    def _unmap_unused(self) -> None:
        """Unmap the slabs that no graph uses, then mark the dropped graphs; but nothing in a block of :meth:`holding`.

        :raises CudaError: the last failure, once the others are unmapped. Then nothing is marked.
        """
        failed: CudaError | None = None
        turn = object()
        while not self._holds:
            unused = [key for key in list(self._mapped) if self._uses[key] <= 0]
            dropped, self._dropped = self._dropped, []
            if not unused and not dropped:
                break
            self._holds.add(turn)  # if Python collects a graph meanwhile, its slabs are for the next turn
            try:
                for key in unused:
                    failed = self._unmap(key) or failed
            finally:
                self._holds.discard(turn)
            if self.marks is not None and failed is None:
                for serial in dropped:
                    self.marks.set(serial)
        if failed is not None:
            raise failed

    def _unmap(self, key: Key) -> CudaError | None:
        """Unmap a slab, and return what has failed, unless its owner may free it all the same: virtual memory."""
        del self._uses[key]
        place, address = self._places.pop(key, None), self._mapped.pop(key)
        try:
            if place is None:
                driver.close_memory(address)
            else:
                place.close()
        except CudaError as error:
            return error if place is None else None
        return None

    def collect(self) -> None:
        """Free the memory of graphs that every rank has dropped."""
        with self._lock:
            over = [serial for serial in list(self._pins) if self.marks is not None and self.marks.all_set(serial)]
            free = [one for serial in over for one in self._pins.pop(serial, ())]  # a finaliser may have come between
        for release in free:
            release()

    def unmap_all(self) -> None:
        """Unmap all slabs of the peers. Idempotent."""
        with self._lock, uninterrupted():
            self._uses.clear()
            self._unmap_unused()

    def release_all(self) -> None:
        """Free all pinned memory of this rank. Every peer must have unmapped it."""
        while self._pins:
            for release in self._pins.popitem()[1]:
                release()
