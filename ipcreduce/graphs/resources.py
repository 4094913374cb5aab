"""What a graph holds of the driver, and how it is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from ..cuda import graph as cuda_graph
from ..errors import CudaError
from ..ipc.engine import Engine
from ..ipc.mappings import Key, Mappings
from ..ipc.release import give_back
from .pool import GraphPool


class Resources:
    """What a graph holds of the driver. Released at close(), or when the graph is collected, whichever is first."""

    def __init__(self, pool: GraphPool, engine: Engine) -> None:
        self._pool, self._engine = pool, engine
        self.graph = self.executable = 0
        self._mapped: tuple[Mappings, int, frozenset[Key]] | None = None
        self._released = False
        pool.retain()

    def register(self, executable: int, mappings: Mappings, keys: frozenset[Key], pools: list[GraphPool]) -> None:
        """Replaces the executable (the old one is freed once it has run), and keeps ``pools`` while peers map them."""
        old, self.executable = self.executable, executable
        for pool in pools:
            pool.retain()

        def unpin() -> None:
            for pool in pools:
                pool.release()

        self._mapped = (mappings, mappings.use(keys, unpin), keys)
        with suppress(CudaError):  # every rank has agreed to go on
            cuda_graph.destroy_executable(old)

    def release(self) -> None:
        """Idempotent. Of the direct kernels, a last replay is waited for: it writes to what is unmapped here."""
        if not self._released:
            self._released = True
            if self._mapped is not None:
                self._engine.hold_last()
            give_back(self._engine.context, *self._steps(), self._pool.release)

    def _steps(self) -> Iterator[Callable[[], None]]:
        if self._mapped is not None:
            mappings, serial, keys = self._mapped
            yield self._engine.drain
            yield lambda: mappings.drop(serial, keys)
        if self.executable:
            yield lambda: cuda_graph.destroy_executable(self.executable)
        if self.graph:
            yield lambda: cuda_graph.destroy_graph(self.graph)
