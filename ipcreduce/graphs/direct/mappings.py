"""Mappings of graphs' memory between ranks, beyond the workspaces: the direct kernel writes to it.

A slab is mapped once, however many graphs use it. Each registered graph has a serial number, the same on every rank; a
rank marks on the control page when it has unmapped the slabs of a graph, and a graph's own memory is kept until every
rank has marked it. So closing a graph waits for nobody.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from ...cuda import driver
from ...errors import CudaError, UnsupportedError
from ...page.control_page import Page
from ...page.layout import MARKS

Key = tuple[int, int]  # rank, and the number of the slab there


class Mappings:
    """The peers' slabs that one communicator has mapped, and the pins of our own."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._mapped: dict[Key, int] = {}
        self._uses: Counter[Key] = Counter()
        self._serial = 0
        self._lock = threading.RLock()  # graphs are collected in any thread
        self._pins: dict[int, Callable[[], None]] = {}  # by serial number: frees our memory

    def open(self, key: Key, handle: bytes, nbytes: int) -> int:
        """Map a peer's slab of ``nbytes`` bytes; its address here.

        :raises CudaError: if it cannot be mapped. :raises UnsupportedError: if it is smaller than that.
        """
        with self._lock:
            if key not in self._mapped:
                self._mapped[key] = driver.open_memory(handle)
            address = self._mapped[key]
        found = driver.allocation_bytes(address)
        if found < nbytes:
            raise UnsupportedError(f"rank {key[0]}'s allocation {key[1]} has {found} bytes here, not {nbytes}")
        return address

    def room(self) -> bool:
        """True if one graph more can be registered: the page has marks for the last :data:`MARKS`."""
        self.collect()
        return self._serial - min(self._pins, default=self._serial) < MARKS

    def use(self, keys: Iterable[Key], release: Callable[[], None]) -> int:
        """Count one graph more that writes to these slabs of peers, as theirs do to ours.

        :param release: called once no peer has our slabs mapped for this graph.
        :returns: the graph's serial number, for :meth:`drop`.
        """
        with self._lock:
            self._uses.update(keys)
            serial, self._serial = self._serial, self._serial + 1
            self._pins[serial] = release
            return serial

    def drop(self, serial: int, keys: Iterable[Key]) -> None:
        """Count one graph less. Slabs that no other graph uses are unmapped, once its last replay is over.

        :raises CudaError: if that fails: the peers then keep their memory.
        """
        with self._lock:
            self._uses.subtract(keys)
            self.unmap_unused()
        self._page.marks[self._page.rank, serial % MARKS] = serial + 1
        self.collect()

    def unmap_unused(self) -> None:
        """Unmap the slabs that no graph uses. :raises CudaError: the last failure, once the others are unmapped."""
        failed = None
        with self._lock:
            for key in [key for key in list(self._mapped) if self._uses[key] <= 0]:
                del self._uses[key]
                try:
                    driver.close_memory(self._mapped.pop(key))
                except CudaError as error:
                    failed = error
        if failed is not None:
            raise failed

    def collect(self) -> None:
        """Free the memory of graphs that every rank has dropped."""
        with self._lock:
            over = [serial for serial in list(self._pins) if self._dropped_by_all(serial)]
            free = [self._pins.pop(serial, None) for serial in over]  # a finaliser may have come in between
        for release in free:
            if release is not None:
                release()

    def _dropped_by_all(self, serial: int) -> bool:
        return bool((self._page.marks[:, serial % MARKS] == serial + 1).all())

    def unmap_all(self) -> None:
        """Unmap everything of the peers. Idempotent."""
        self._uses.clear()
        self.unmap_unused()

    def release_all(self) -> None:
        """Free all memory of ours: every peer has unmapped it."""
        while self._pins:
            self._pins.popitem()[1]()
