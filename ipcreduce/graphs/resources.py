"""What a graph holds of the driver, and how it is given back."""

from __future__ import annotations

from contextlib import suppress

from ..cuda import driver
from ..cuda import graph as cuda_graph
from ..errors import CudaError
from ..ipc.mappings import Key, Mappings
from .pool import GraphPool


class Resources:
    """What a graph holds of the driver. Released at close(), or when the graph is collected, whichever is first."""

    def __init__(self, pool: GraphPool, context: int) -> None:
        self._pool, self._context = pool, context
        self.graph = self.executable = 0
        self._mapped: tuple[Mappings, int, frozenset[Key]] | None = None
        self._released = False
        pool.retain()

    def register(self, executable: int, mappings: Mappings, keys: frozenset[Key], pools: list[GraphPool]) -> None:
        """Replaces the executable (the old one is freed once it has run), and keeps ``pools`` while peers map them."""
        cuda_graph.destroy_executable(self.executable)
        self.executable = executable
        for pool in pools:
            pool.retain()

        def unpin() -> None:
            for pool in pools:
                pool.release()

        self._mapped = (mappings, mappings.use(keys, unpin), keys)

    def release(self) -> None:
        """Idempotent. Of the direct kernels, a last replay is waited for: it writes to what is unmapped here."""
        if self._released:
            return
        self._released = True
        with suppress(CudaError):  # at interpreter exit the context may be gone
            previous = driver.current_context()
            driver.set_context(self._context)
            try:
                if self._mapped is not None:
                    mappings, serial, keys = self._mapped
                    driver.synchronize()
                    mappings.drop(serial, keys)
                if self.executable:
                    cuda_graph.destroy_executable(self.executable)
                if self.graph:
                    cuda_graph.destroy_graph(self.graph)
            finally:
                driver.set_context(previous)
        self._pool.release()
