"""The part of a communicator that graphs work with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays
from ..errors import GraphStateError, IpcReduceError, PeerLostError, PeerTimeoutError, UnsupportedError
from ..ipc.control import Signature
from ..ipc.engine import Engine
from ..ipc.faults import Faults
from .agreement import agree
from .pool import GraphPool
from .registration import register

if TYPE_CHECKING:
    from .graph import Graph, Recording


class GraphSupport:
    """Recordings, their registration, and memory that peers can map. A base of ``Communicator``, which has the rest."""

    recording: Recording | None  # of the graph that is being recorded
    memory: GraphPool | None  # of empty()
    _recorded: list[Graph]  # not registered yet
    _capturing: int  # depth of capture()
    _lock: threading.RLock
    _mpi: Any
    _engine: Engine | None
    _faults: Faults | None
    _reasons: dict[str, str]
    _timeout: float
    _call: int
    _unusable: IpcReduceError | None

    def _no_recording(self) -> None:
        self.recording, self.memory, self._recorded, self._capturing = None, None, [], 0

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise type(self._unusable)(str(self._unusable))

    def require_engine(self, what: str) -> Engine:
        """The engine. :raises UnsupportedError: with no GPUs: ``what`` needs them."""
        self._check_usable()
        if self._engine is None:
            raise UnsupportedError(f"{what} needs backend ipc: {self._reasons['ipc']}")
        return self._engine

    def end_recording(self, calls: list[Signature], error: BaseException | None) -> None:
        """The vote at the end of a recording. Collective.

        :raises BaseException: ``error``, or :class:`PeerFailedError` or :class:`RankMismatchError`: see agreement.py.
        """
        with self._lock:
            deadline = time.monotonic() + self._timeout
            try:
                self._call, theirs = agree(self._mpi, calls, error, self._call, deadline)
            except PeerTimeoutError as late:
                self._unusable = PeerLostError(f"{late} An MPI call is pending: the communicator can only be closed.")
                raise
            if error is not None:
                raise error
            if theirs is not None:
                if self._faults is not None:
                    self._faults.raise_pending(self._call)  # the same trouble, told more exactly
                raise theirs

    def recorded(self, graph: Graph) -> None:
        """A recording is complete: it is registered now, or at the end of :meth:`capture`. Collective."""
        self._recorded.append(graph)
        if not self._capturing:
            self._register()

    def _register(self) -> None:
        graphs, self._recorded = self._recorded, []
        with self._lock:
            if self._engine is not None:
                register(self._mpi, self._engine, graphs, self._timeout)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around several recordings: they are registered together, at the end of the outermost block. Collective.

        Within it, graphs are "staged" and can be replayed. If a rank's block raises, they stay so.

        :raises UnsupportedError: on a communicator without GPUs.
        :raises GraphStateError: within a recording.
        :raises PeerFailedError: if another rank's block raised. An exception in the block passes unchanged.
        """
        self.require_engine("capture()")
        if self.recording is not None:
            raise GraphStateError("capture() within a recording: record within capture(), not the other way round")
        self._capturing += 1
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
        self._capturing -= 1
        if self._capturing:
            if error is not None:
                raise error
            return
        try:
            self.end_recording([call for graph in self._recorded for call in graph.calls], error)
        except BaseException:
            self._recorded = []
            raise
        self._register()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """A new C-contiguous array in memory that peers can map: outputs of recorded all-reduces in it can be direct.

        CuPy, or NumPy with backend "mpi". Not collective. Valid as long as it lives, also after close().
        """
        with self._lock:
            self._check_usable()
            if self._engine is None:
                return np.empty(shape, dtype)
            if self.memory is None:
                self.memory = GraphPool(self._engine.context)
                self.memory.retain()
            stream = arrays.current_stream()[0]
            with arrays.allocating(self.memory.allocator, stream):
                return arrays.empty((shape,) if isinstance(shape, int) else shape, np.dtype(dtype), stream)
