"""Graphs that others capture our calls into: CuPy's ``begin_capture``, ``torch.cuda.graph``, another library.

Nobody tells us when such a graph is launched, only when it has been destroyed. Until then calls are ordered against its
launches (order.py), and the memory that its nodes use stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ..cuda import graph as cuda_graph
from ..semaphores import Semaphore

_LOOK_SECONDS = 1.0  # between looks at which graphs have gone: one costs 0.3 us a graph
_watched: set[Semaphore] = set()  # the driver posts to these as long as the process lives, whoever has forgotten them


class Memory(Protocol):
    """Memory that the calls in a graph use. ``allocator`` is for CuPy."""

    @property
    def allocator(self) -> Callable[[int], Any]: ...

    def release(self) -> None: ...


class ForeignGraph:
    """A graph of others with calls of one communicator in it.

    ``memory`` is released once the graph and all executables made of it have been destroyed.
    """

    def __init__(self, graph: int) -> None:
        """:param graph: the handle, while the graph is being captured. :raises CudaError: if it cannot be watched."""
        self.graph = graph
        self.memory: Memory | None = None
        self._end = Semaphore()
        _watched.add(self._end)
        cuda_graph.notify_destroyed(graph, self._end.post_function, self._end.address)

    @property
    def is_gone(self) -> bool:
        """Whether nobody can launch it any more."""
        gone = self._end.value > 0
        if gone:
            _watched.discard(self._end)
        return gone


class ForeignGraphs:
    """Those of one communicator, by the id of their capture. Its lock is held around every method."""

    def __init__(self) -> None:
        self._by_capture: dict[int, ForeignGraph] = {}
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._by_capture)

    def of(self, capture: int, graph: int) -> ForeignGraph:
        """The graph of a capture in progress, watched from its first call on."""
        found = self._by_capture.get(capture)
        if found is None:
            self.collect(now=True)
            found = self._by_capture[capture] = ForeignGraph(graph)
        return found

    def collect(self, now: bool = False) -> None:
        """Forgets the graphs that have gone, and releases their memory; looks once a second, or ``now``."""
        if not self._by_capture or (not now and time.monotonic() < self._next_look):
            return
        for capture in [capture for capture, graph in self._by_capture.items() if graph.is_gone]:
            memory = self._by_capture.pop(capture).memory
            if memory is not None:
                memory.release()
        self._next_look = time.monotonic() + _LOOK_SECONDS
