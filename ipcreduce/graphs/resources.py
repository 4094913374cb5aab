"""What a graph holds of the driver, and how it is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from ..cuda.graph import Executable
from ..errors import CudaError
from ..ipc.deferred_free import give_back
from ..ipc.engine import Engine
from .direct.mappings import Key, Mappings
from .pool import GraphPool
from .recording import Segment


class Resources:
    """What a graph holds of the driver. Released at close(), or when the graph is collected, whichever is first."""

    def __init__(self, pool: GraphPool, engine: Engine, segments: list[Segment]) -> None:
        self._pool, self._engine, self._segments = pool, engine, segments
        self._mapped: tuple[Mappings, int, frozenset[Key]] | None = None
        self._released = False
        pool.retain()

    def register(
        self, executables: dict[Segment, Executable], mappings: Mappings, keys: frozenset[Key], pools: list[GraphPool]
    ) -> None:
        """Takes executables with direct kernels, and keeps ``pools`` while peers map them."""
        for pool in pools:
            pool.retain()

        def unpin() -> None:
            for pool in pools:
                pool.release()

        self._mapped = (mappings, mappings.use(keys, unpin), keys)
        for segment, executable in executables.items():
            old, segment.executable = segment.executable, executable
            with suppress(CudaError):  # every rank has agreed to go on
                if old is not None:
                    old.destroy()  # once it has run

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            give_back(self._engine.context, *self._steps(), self._pool.release)

    def _steps(self) -> Iterator[Callable[[], None]]:
        if self._mapped is not None:
            mappings, serial, keys = self._mapped
            yield lambda: mappings.drop(serial, keys)
        for segment in self._segments:
            yield from segment.steps()
