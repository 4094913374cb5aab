"""``Graph``: a function's GPU work, all-reduces included, recorded once and replayed by one launch.

A recording is a real run: what was captured is launched when the recording ends, so the outputs are filled as after an
eager run. The kernels in it push into the peers' workspaces, never into memory of the graph, so nothing has to be
exchanged before a replay and nothing can be missing. Registration (registration.py) may then make all-reduces direct.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import arrays
from ..cuda import driver
from ..cuda import graph as cuda_graph
from ..errors import ArgumentError, CaptureError, CudaError, GraphStateError
from ..ipc import release
from ..ipc.control import Signature
from ..ipc.engine import Engine, Prepared, Recorder
from ..ipc.mappings import Key, Mappings
from ..ipc.plan import Step
from .pool import GraphPool, Slab
from .registration import Launched
from .resources import Resources

if TYPE_CHECKING:
    from ..communicator import Communicator

_recording = threading.local()  # .graph: the one that this thread records

_REFUSED_BY_CUPY = (
    "While a stream captures, CuPy refuses cuBLAS (@, einsum) and copies from the host (cupy.array(list)). Make such "
    "arrays before the recording, and matrix products by nvmath.linalg.advanced.Matmul: plan() before, execute() in it."
)
_ADVICE = {  # by CUresult
    900: _REFUSED_BY_CUPY, 901: _REFUSED_BY_CUPY,
    904: "Work on another stream has to be joined: wait for its event on the recording's stream before the block ends.",
}  # fmt: skip


class Recording:
    """What the communicator notes while a graph is recorded: the all-reduces, their launches and their arrays.

    :param caller: the stream that was current, and ``owner``, which keeps it.
    """

    def __init__(self, caller: int, owner: Any) -> None:
        self.caller, self.owner = caller, owner
        self.number = 0  # of the call that the recording is
        self.error: BaseException | None = None  # of an all-reduce that was refused
        self.calls: list[Signature] = []
        self.launches: list[Launched] = []
        self.held: list[Any] = []
        self._thread = threading.get_ident()
        self._capture = -1

    @property
    def here(self) -> bool:
        """Whether it is this thread that records."""
        return self._thread == threading.get_ident()

    def begin(self, stream: int) -> None:
        """``stream`` captures from now on."""
        release.hold(stream)
        self._capture = driver.capture_id(stream)

    def recorder(self, stream: int) -> Recorder | None:
        """What to tell of every launch on ``stream``; None if that is not part of the capture."""
        if driver.capture_id(stream) != self._capture:
            return None

        def note(call: Prepared, step: Step, source: int, target: int) -> None:
            node = cuda_graph.last_node(stream)
            self.launches.append(Launched(node, step, call.dtype, call.op, source, target))

        return note

    def note(self, what: Signature, *used: Any) -> None:
        """One all-reduce, and the arrays that it uses."""
        self.calls.append(what)
        self.held += used


class Graph:
    """Records GPU work with all-reduces of one communicator, and replays it.

    :param comm: None for the default communicator. Every rank makes, records, replays and closes its graphs in the
        same order.
    :param pool: ``other.pool`` shares that graph's memory: an output is then valid until the next replay of any graph
        of that pool. None for memory of its own.

    ``state`` is "empty", "recording", "staged" (recorded, ready for replay), "registered" (the same, and its large
    all-reduces write straight into the peers' outputs), "failed" or "closed". Arrays that
    all-reduces read and write are kept alive; those that only other libraries' kernels touch are unknown here: name
    them in ``record(inputs=...)``.
    """

    def __init__(self, comm: Communicator | None = None, *, pool: GraphPool | None = None) -> None:
        if comm is None:
            from ..default import get_communicator

            comm = get_communicator()
        if pool is not None and not isinstance(pool, GraphPool):
            raise ArgumentError(f"pool must be another graph's .pool; found {type(pool).__qualname__}")
        self._comm, self._pool = comm, pool
        self._state = "empty"
        self._calls: list[Signature] = []
        self._nodes = cuda_graph.Nodes(0, 0, ())
        self.signature = _signature([])  # of a replay
        self.launches: list[Launched] = []  # of its all-reduces, for the registration
        self._held: list[Any] = []
        self._resources: Resources | None = None

    @property
    def state(self) -> str:
        """See the class."""
        return self._state

    @property
    def pool(self) -> GraphPool:
        """The memory of this graph, to be shared by others. :raises GraphStateError: before a recording."""
        if self._pool is None:
            raise GraphStateError("a graph has a pool from its recording on; this one is empty. Record first")
        return self._pool

    def describe(self) -> str:
        """State, nodes, all-reduces and memory, in several lines."""
        lines = [f"graph: {self._state}, {self._nodes.kernels} kernel nodes, {self._nodes.others} other nodes"]
        if self._pool is not None:
            lines.append(f"pool: {self._pool.nbytes} bytes in {self._pool.slabs} slabs")
        return "\n".join([*lines, *(f"all-reduce {i}: {call}" for i, call in enumerate(self._calls, 1))])

    # ---- recording
    @contextmanager
    def record(self, inputs: Any = None) -> Iterator[Graph]:
        """Captures what the block's body launches on the current stream, then runs it. Collective.

        Within the block CuPy works on a stream of the communicator and allocates from the graph's pool. At its end the
        ranks compare their all-reduces; the outputs are filled, in the caller's stream's order.

        :param inputs: any nest of arrays that the body reads and that must live as long as the graph.
        :raises GraphStateError: if the graph is not empty, or this thread is recording already.
        :raises UnsupportedError: on a communicator without GPUs.
        :raises CaptureError: if something in the body cannot be captured.
        :raises RankMismatchError: if the ranks' all-reduces differ: the first that does, on all ranks.
        :raises PeerFailedError: if another rank's body raised. An exception in the body passes unchanged.
        """
        comm = self._comm
        engine = comm.require_engine("a Graph")
        recording = Recording(*arrays.current_stream())
        comm.begin_recording(recording, lambda: self._check_record(engine, recording.caller))
        error: BaseException | None = None
        self._state, _recording.graph = "recording", self
        try:
            with self._captured(engine, recording):
                yield self
        except BaseException as caught:
            error = caught
        finally:
            _recording.graph = None
        if isinstance(error, NotImplementedError) and arrays.raised_by_cupy(error):
            error = _cannot_be_captured(error, _REFUSED_BY_CUPY)
        release.flush()
        try:
            comm.end_recording(recording, error)
        except BaseException:
            self._end("failed")
            raise
        self._calls, self.launches, self._held = recording.calls, recording.launches, [*recording.held, inputs]
        self.signature = _signature(self._calls)
        self._state = "staged"
        comm.recorded(self)
        stream = engine.recording_stream()
        comm.launch_graph(self, stream)
        engine.hand_over(stream, recording.caller, recording.owner)
        self._warn()

    def _check_record(self, engine: Engine, stream: int) -> None:
        engine.use_context()
        self._expect("record()", "empty", "make a new Graph for another recording")
        if getattr(_recording, "graph", None) is not None:
            raise GraphStateError("record() within a recording of the same thread: end that one first")
        if driver.capture_id(stream):
            raise CaptureError("record() while the current stream is being captured: end that capture first")

    @contextmanager
    def _captured(self, engine: Engine, recording: Recording) -> Iterator[None]:
        """Captures what the block launches, and makes it executable. :raises CaptureError: if that cannot be."""
        self._pool = self._pool or GraphPool(engine.context)
        resources = self._resources = Resources(self._pool, engine)
        weakref.finalize(self, resources.release)
        stream = engine.recording_stream()
        engine.order(recording.caller, stream)
        cuda_graph.begin_capture(stream)
        try:
            recording.begin(stream)
            with arrays.allocating(self._pool.allocator, stream):
                yield
        except BaseException:
            with suppress(CudaError):
                resources.graph = cuda_graph.end_capture(stream)
            raise
        try:
            resources.graph = cuda_graph.end_capture(stream)
        except CudaError as error:
            raise _cannot_be_captured(error, _ADVICE.get(error.code, "")) from error
        try:
            self._nodes = cuda_graph.inspect_graph(resources.graph)
            resources.executable = cuda_graph.instantiate(resources.graph)
        except CudaError as error:
            raise _cannot_be_captured(error) from error

    def _warn(self) -> None:
        copies = self._nodes.host_copies
        if copies:
            warnings.warn(
                f"the graph has {len(copies)} copies from or to host memory ({sum(copies)} bytes): each replay uses "
                "the same host addresses, whatever is there by then",
                stacklevel=4,
            )
        if not self._calls and not self._nodes.kernels:
            warnings.warn(
                "the recording has no all-reduce and no kernel: was the work on another stream?", stacklevel=4
            )

    # ---- replay
    def replay(self, *, stream: Any = None) -> None:
        """Launches the recorded work on CuPy's current stream, or on ``stream``. Every rank has to.

        Returns before the work is done. Replays and eager calls of a communicator run in the order in which they are
        made, on whatever streams.

        :raises GraphStateError: if the graph is not recorded, has failed or is closed, or within a recording.
        :raises IpcReduceError: for the ranks' other calls, see :meth:`Communicator.allreduce`.
        """
        self._comm.launch_graph(self, stream)

    def check_replay(self) -> int:
        """The executable. :raises GraphStateError: if there is none, or within a recording."""
        self._expect("replay()", "staged", "record it first, once, and do not close it", "registered")
        if getattr(_recording, "graph", None) is not None:
            raise GraphStateError("replay() within a recording: a graph cannot be part of another one")
        assert self._resources is not None
        return self._resources.executable

    # ---- registration
    @property
    def calls(self) -> list[Signature]:
        """The recorded all-reduces, in order."""
        return self._calls

    def find_slab(self, address: int, nbytes: int) -> Slab | None:
        """The allocation of this graph's pool, or of ``comm.empty``, that holds these bytes."""
        found = (pool.find(address, nbytes) for pool in self._pools())
        return next((slab for slab in found if slab is not None), None)

    def _pools(self) -> list[GraphPool]:
        return [pool for pool in (self._pool, self._comm.memory) if pool is not None]

    def instantiate(self) -> int:
        """Another executable, of the graph as its nodes now are."""
        assert self._resources is not None
        return cuda_graph.instantiate(self._resources.graph)

    def registered(self, executable: int, mappings: Mappings, keys: frozenset[Key]) -> None:
        """Takes the executable whose large all-reduces are direct. Peers have our pools mapped from now on."""
        assert self._resources is not None
        self._resources.register(executable, mappings, keys, self._pools())
        self._state = "registered"

    # ---- ends
    def close(self) -> None:
        """Gives the graph back. Idempotent; arrays from its recording stay valid as long as they live."""
        if self._state == "recording":
            raise GraphStateError("close() within the recording: leave the with block first")
        self._end("closed")

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _expect(self, what: str, state: str, advice: str, *others: str) -> None:
        if self._state not in (state, *others):
            raise GraphStateError(f"{what} needs a graph that is {state}; this one is {self._state}: {advice}")

    def _end(self, state: str) -> None:
        if self._resources is not None:
            self._resources.release()
        self.launches, self._held, self._state = [], [], state


def _signature(calls: list[Signature]) -> Signature:
    text = f"replay of a graph of {len(calls)} all-reduces" + (f", the first {calls[0]}" if calls else "")
    return Signature.of(text, repr(calls))


def _cannot_be_captured(cause: Exception, advice: str = "") -> CaptureError:
    return CaptureError(f"the recording cannot be made into a graph: {cause}. {advice}".rstrip())
