"""The driver's resources that a graph holds, and their release."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..cuda.graph import Executable
from ..device.deferred_free import give_back
from .pool import GraphPool
from .recording import Segment


class Resources:
    """The driver's resources of a graph. Released at close(), or when the graph is collected, whichever is first."""

    def __init__(self, pool: GraphPool, context: int, segments: list[Segment]) -> None:
        self._pool, self._context, self._segments = pool, context, segments
        self._drop: Callable[[], None] | None = None  # of a registration
        self._released = False
        pool.retain()

    def register(self, executables: dict[Segment, Executable], drop: Callable[[], None]) -> None:
        """Take executables of a registration, which ``drop()`` ends."""
        self._drop = drop
        for segment, executable in executables.items():
            segment.use(executable)

    def release(self) -> None:
        """Give everything back. Idempotent."""
        if not self._released:
            self._released = True
            give_back(self._context, *self._actions(), self._pool.release)
            self._drop = None

    def _actions(self) -> Iterator[Callable[[], None]]:
        if self._drop is not None:
            yield self._drop
        for segment in self._segments:
            yield from segment.destroy_actions()
