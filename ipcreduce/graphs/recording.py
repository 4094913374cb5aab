"""A recording in progress: its segments, and in each the all-reduces, their launches and arrays."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..arrays import views
from ..calls.fingerprint import Fingerprint
from ..cuda import cupy_runtime, streams
from ..cuda import graph as cuda_graph
from ..device.backend import Recorder
from ..device.deferred_free import give_back
from ..device.fast_path import Ready
from ..errors import CaptureError, CudaError, IpcReduceError
from ..ipc.plan import LaunchPlan
from ..texts import text_of
from ..types import DEFAULT_STREAM, Stream
from .pool import GraphPool

_REFUSED = (
    "While a stream captures, nothing can be copied to the host (cupy.asnumpy(y), y.get(), y.item(), float(y), "
    "if y > 0) or from it (cupy.array(list)), and CuPy refuses cuBLAS (@, einsum). Read results behind the block, or "
    "in a break (eager_break outermost). Make arrays before the recording, and matrix products by "
    "nvmath.linalg.advanced.Matmul: plan() before, execute() in it."
)
_IN_OTHER_WORDS = "when stream is capturing"  # in the errors of PyTorch, for CUDA's error 900
_ADVICE = {  # by CUresult, which is also the cudaError_t
    900: _REFUSED, 901: _REFUSED,
    905: "A wait for work outside of the recording belongs before it, or into a break (eager_break outermost).",
    904: "Work on another stream has to be joined, before the block or a break: wait for its event on the recording's "
    "stream.",
    907: "An event recorded before a break belongs to the segment that has ended; the break and what follows it come "
    "behind that as they are. Join side streams before a break, and fork them again by an event recorded after it.",
}  # fmt: skip


_NONE, _BEGUN = -1, -2  # in the place of a capture's id: there is none; it begins, and its id is not known yet


@dataclass
class LaunchedKernel:
    """One launch of a recorded all-reduce: its node, and all that another kernel in its place would need."""

    node: int
    part: LaunchPlan
    dtype: str
    op: str
    source: int
    target: int
    algorithm: str


@dataclass
class RecordedCall:
    """A recorded all-reduce."""

    what: Fingerprint
    backend: str
    launches: list[LaunchedKernel] = field(default_factory=list)

    def __str__(self) -> str:
        kernels = ", ".join(dict.fromkeys(one.algorithm for one in self.launches))
        return f"{self.what} by {kernels or (self.backend if self.backend != 'ipc' else 'nothing')}"


class Segment:
    """A part of a recording without breaks: one CUDA graph."""

    def __init__(self, graph: int, calls: list[RecordedCall], name: str) -> None:
        self.graph, self.calls = graph, calls
        self.executable: cuda_graph.Executable | None = None  # None: nothing was captured
        self.nodes = cuda_graph.Nodes(0, 0, ())
        text = f"replay of {name}: {len(calls)} all-reduces"
        every = [call.what for call in calls]
        self.what = Fingerprint.of(f"{text}, first {every[0]}" if every else text, f"{name} {every}")
        self.ready = Ready(self.what, cupy_runtime.launch_graph, 0, False)

    def make_executable(self) -> None:
        """:raises CaptureError: if that fails."""
        try:
            self.nodes = cuda_graph.inspect_graph(self.graph)
            if self.nodes.kernels + self.nodes.others:
                self.use(cuda_graph.Executable(self.graph))
        except CudaError as error:
            raise cannot_be_captured(error) from error

    def use(self, executable: cuda_graph.Executable) -> None:
        """Launch this executable from now on; the one before is destroyed once it has run."""
        old, self.executable = self.executable, executable
        self.ready.argument = executable.handle
        if old is not None:
            with suppress(CudaError):
                old.close()

    def destroy_actions(self) -> Iterator[Callable[[], None]]:
        """Actions that give it back."""
        yield self._destroy
        yield lambda: cuda_graph.close_graph(self.graph)

    def _destroy(self) -> None:
        executable, self.executable = self.executable, None  # no other thread may launch it from now on
        self.ready.argument = 0
        if executable is not None:
            executable.close()


class Recording:
    """A graph's recording in progress.

    :param name: the graph's; "" for none.
    :param callers: the streams that were current.
    """

    def __init__(self, name: str, callers: list[Stream]) -> None:
        self.name = f"graph {name}" if name else "a graph"
        self.callers = callers
        self.number = 0  # of the call that the recording is
        self.generation = 0  # of the backend, when it began
        self.error: BaseException | None = None  # of something in the body that the body may have caught
        self.segments: list[Segment] = []
        self.held: list[Any] = []
        self.stream = DEFAULT_STREAM
        self.pool: GraphPool | None = None
        self._memory: AbstractContextManager[None] | None = None
        self._thread = threading.get_ident()
        self._capture = _NONE
        self._calls: list[RecordedCall] = []

    @property
    def in_this_thread(self) -> bool:
        """True if it is this thread that records."""
        return self._thread == threading.get_ident()

    # ---- segments
    def begin_segment(self) -> None:
        """The stream captures from now on. It is current, and memory comes from the pool."""
        assert self.pool is not None
        self._memory = self.pool.allocating(self.stream)
        self._memory.__enter__()
        self._capture, self._calls = _BEGUN, []
        streams.begin_capture(self.stream)
        self._capture = streams.capture_id(self.stream)

    def end_segment(self) -> Segment:
        """The segment captured since. :raises CaptureError: if that cannot be made into a graph."""
        self._leave_memory()
        try:
            captured = streams.end_capture(self.stream)
        except CudaError as error:
            self._capture = _NONE
            raise cannot_be_captured(error, _ADVICE.get(error.code, "")) from error
        self._capture = _NONE
        segment = Segment(captured, self._calls, f"{self.name}, segment {len(self.segments) + 1}")
        self.segments.append(segment)
        segment.make_executable()
        return segment

    def _leave_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.__exit__(None, None, None)

    def abandon(self) -> None:
        """Ends a capture that an exception has left open."""
        self._leave_memory()
        if self._capture != _NONE:
            self._capture = _NONE
            with suppress(CudaError):
                cuda_graph.close_graph(streams.end_capture(self.stream))

    # ---- all-reduces
    def recorder(self, stream: Stream) -> Recorder | None:
        """A function to call for every launch on ``stream``; None if that is not part of the capture.

        :raises CudaError: if that cannot be known.
        """
        try:
            if self._capture == _NONE or streams.capture_id(stream) != self._capture:
                return None
        except CudaError:
            if self.in_this_thread:
                raise
            return None  # a thread without a context, which does not record

        def note(call: Any, part: LaunchPlan, source: int, target: int) -> None:
            (node,) = streams.capture_nodes(stream)  # a launch leaves one node for the next to follow
            launched = LaunchedKernel(node, part, call.dtype, call.op, source, target, part.algorithm)
            self._calls[-1].launches.append(launched)

        return note

    def note(self, what: Fingerprint, backend: str, *used: Any) -> None:
        """Note an all-reduce that follows, and hold the arrays that it uses. Memory of the pool may be used again."""
        self._calls.append(RecordedCall(what, backend))
        assert self.pool is not None
        apart = {id(array): array for array in used}.values()
        self.held += [array for array in apart if not in_pool(array, self.pool)]


class Resources:
    """The driver's resources of a graph. Released at close(), or when the graph is collected, whichever is first."""

    def __init__(self, pool: GraphPool, context: int, segments: list[Segment]) -> None:
        self._pool, self._context, self._segments = pool, context, segments
        self._drop: Callable[[], None] | None = None  # of a registration
        self._released = False
        pool.retain()

    def register(self, executables: dict[Segment, cuda_graph.Executable], drop: Callable[[], None]) -> None:
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


def in_pool(array: Any, pool: GraphPool) -> bool:
    """True if a CuPy array lies in the pool's memory."""
    first, past = views.extent(array)
    return pool.find(first, past - first) is not None


def warn_about(segments: list[Segment]) -> None:
    """Warn about suspicious recordings (stacklevel: the user's with statement)."""
    copies = [nbytes for segment in segments for nbytes in segment.nodes.host_copies]
    if copies:
        warnings.warn(
            f"the graph has {len(copies)} copies from or to host memory ({sum(copies)} bytes): each replay uses the "
            "same host addresses, whatever is there by then",
            stacklevel=4,
        )
    if not any(segment.calls or segment.nodes.kernels for segment in segments):
        warnings.warn("the recording has no all-reduce and no kernel: was the work on another stream?", stacklevel=4)


def cannot_be_captured(cause: BaseException, advice: str = "") -> CaptureError:
    """The error for work that does not go into a graph. It begins with the cause's own words, which people look up."""
    return CaptureError(
        f"{text_of(cause).rstrip('.')}. So the recording cannot be made into a graph. {advice}".rstrip()
    )


def explained(error: BaseException, behind_a_break: bool = False) -> BaseException:
    """CaptureError for what CuPy and PyTorch raise where a stream captures; any other exception as it is.

    :param behind_a_break: whether it was raised there. For an event from before the driver then says 907 or only 1.
    """
    status = cupy_runtime.runtime_status(error)
    advice = _ADVICE.get(907 if status == 1 and behind_a_break else status, "")
    if not status and isinstance(error, RuntimeError) and not isinstance(error, IpcReduceError):
        text = text_of(error)
        if _IN_OTHER_WORDS in text or ("captur" in text and cupy_runtime.raised_by_cupy(error)):
            advice = _REFUSED
    if not advice:
        return error
    capture_error = cannot_be_captured(error, advice)
    capture_error.__cause__ = error
    return capture_error
