"""A recording in progress: its segments, and in each the calls, their launches and arrays."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..arrays import views
from ..cuda import cupy_runtime, streams
from ..cuda import graph as cuda_graph
from ..device.backend import Validity
from ..device.deferred_free import free_later
from ..device.prepared import BoundLaunch
from ..errors import CaptureError, CudaError, IpcReduceError
from ..interrupts import uninterrupted
from ..page.fingerprint import Fingerprint
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
    905: "Wait for work outside of the recording before the recording, or in a break (eager_break outermost).",
    904: "Join the other streams before a break, and before the end of the block: record an event on the other stream, "
    "and let the recording's stream wait for it.",
    907: "An event recorded before a break belongs to the segment that has ended, and the work after the break is in "
    "another one. Join side streams before a break, and fork them again by an event recorded after it.",
}  # fmt: skip


_NONE, _BEGUN = -1, -2  # in place of a capture's id: no capture; a capture whose id is not known yet


@dataclass(eq=False)
class RecordedCall:
    """A recorded call, and the names of the kernels or the library that run it."""

    fingerprint: Fingerprint
    kernels: str

    def __str__(self) -> str:
        return f"{self.fingerprint} by {self.kernels}"


class Segment:
    """A part of a recording without breaks: one CUDA graph, which can be launched until ``validity`` ends."""

    def __init__(self, graph: int, calls: list[RecordedCall], name: str, validity: Validity) -> None:
        self.graph, self.calls, self.validity = graph, calls, validity
        self.executable: cuda_graph.Executable | None = None  # None: nothing was captured
        self.nodes = cuda_graph.Nodes(0, 0, ())
        text = f"replay of {name}: {len(calls)} calls"
        every = [call.fingerprint for call in calls]
        checksums = " ".join(
            str(one.crc) for one in every
        )  # no repr(): Ctrl-C in that of a dataclass spoils it for good
        fingerprint = Fingerprint.of(f"{text}, first {every[0]}" if every else text, f"{name} {checksums}")
        self.fingerprint = fingerprint.made_by(sum(one.operations for one in every))
        self.bound = BoundLaunch(self.fingerprint, cupy_runtime.launch_graph, 0)

    def make_executable(self) -> None:
        """Make the captured graph executable. :raises CaptureError: if that fails."""
        try:
            self.nodes = cuda_graph.inspect_graph(self.graph)
            if self.nodes.kernels + self.nodes.others:
                self.use(cuda_graph.Executable(self.graph))
        except CudaError as error:
            raise cannot_be_captured(error) from error

    def use(self, executable: cuda_graph.Executable | None) -> None:
        """Launch this executable from now on, or none; the one before is closed, and freed once it has run."""
        old, self.executable = self.executable, executable  # first: no other thread may launch it from now on
        self.bound.argument = 0 if executable is None else executable.handle
        if old is not None:
            with suppress(CudaError):
                old.close()

    def close_actions(self) -> list[Callable[[], None]]:
        """The actions that close the segment."""
        return [partial(self.use, None), partial(cuda_graph.close_graph, self.graph)]


class Recording:
    """A graph's recording in progress.

    :param name: the graph's; "" for none.
    :param callers: the streams that were current.
    """

    def __init__(self, name: str, callers: list[Stream]) -> None:
        self.name = f"graph {name}" if name else "a graph"
        self.callers = callers
        self.number = 0  # of the call that the recording is
        self.validity = Validity()  # of the backend, when the recording began
        self.error: BaseException | None = None  # of something in the body that the body may have caught
        self.segments: list[Segment] = []
        self.held: list[Any] = []
        self.stream = DEFAULT_STREAM
        self.pool: GraphPool | None = None
        self._memory: AbstractContextManager[None] | None = None
        self._thread, self._task = threading.get_ident(), _task()
        self._capture = _NONE
        self._calls: list[RecordedCall] = []

    @property
    def in_this_thread(self) -> bool:
        """True if it is this thread that records."""
        return self._thread == threading.get_ident()

    @property
    def is_own(self) -> bool:
        """True if it is this thread that records, and this asyncio task, if one does."""
        return self.in_this_thread and self._task in (None, _task())

    # ---- segments
    def begin_segment(self) -> None:
        """Begin to capture on the stream, make it current, and allocate from the pool."""
        assert self.pool is not None
        self._memory = self.pool.allocating(self.stream)
        self._memory.__enter__()
        self._capture, self._calls = _BEGUN, []
        streams.begin_capture(self.stream)
        self._capture = streams.capture_id(self.stream)

    def end_segment(self) -> Segment:
        """End the capture. Returns its segment. :raises CaptureError: if the work cannot be made into a graph."""
        self._leave_memory()
        with uninterrupted():
            try:
                captured = streams.end_capture(self.stream)
            except CudaError as error:
                self._capture = _NONE
                raise cannot_be_captured(error, _ADVICE.get(error.code, "")) from error
            self._capture = _NONE
            segment = Segment(captured, self._calls, f"{self.name}, segment {len(self.segments) + 1}", self.validity)
            self.segments.append(segment)
            segment.make_executable()
        return segment

    def _leave_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.__exit__(None, None, None)

    def abandon(self) -> None:
        """End a capture that an exception has left open."""
        self._leave_memory()
        if self._capture != _NONE:
            with uninterrupted(), suppress(CudaError):
                self._capture = _NONE
                cuda_graph.close_graph(streams.end_capture(self.stream))

    # ---- calls
    def captures(self, stream: Stream) -> bool:
        """Return True if ``stream`` is part of the capture. :raises CudaError: if that cannot be known."""
        try:
            return self._capture != _NONE and streams.capture_id(stream) == self._capture
        except CudaError:
            if self.in_this_thread:
                raise
            return False  # a thread without a context, which does not record

    def note(self, call: RecordedCall, *used: Any) -> None:
        """Note a call that follows, and hold the arrays that it uses. Memory of the pool may be used again."""
        self._calls.append(call)
        assert self.pool is not None
        apart = {id(array): array for array in used}.values()
        self.held += [array for array in apart if not in_pool(array, self.pool)]


def _task() -> Any:
    """The asyncio task that runs in this thread, or None."""
    with suppress(KeyError, AttributeError, RuntimeError):  # asyncio is not imported, or not wholly; no event loop runs
        return sys.modules["asyncio"].current_task()
    return None


class Resources:
    """The driver's resources of a graph. Released at close(), or when the graph is collected, whichever is first.

    :ivar state: of the graph, as long as it can be replayed; then "closed".
    :ivar held: not empty while a registration needs them.
    """

    def __init__(self, pool: GraphPool, context: int, segments: list[Segment]) -> None:
        self.pool, self._context, self.segments = pool, context, segments
        self.state = "staged"
        self._first: list[Callable[[], None]] = []  # to be done before the segments are closed
        self.held: set[int] = set()
        self._released = False
        pool.retain()

    def use(self, state: str, executables: dict[Segment, cuda_graph.Executable], release: Callable[[], None]) -> None:
        """Launch other executables from now on. ``release()`` gives back what these need."""
        self.state = self.state if self.state == "closed" else state
        self._first.append(release)
        for segment, executable in executables.items():
            segment.use(executable)

    def release(self) -> None:
        """Give everything back, unless a registration needs it, which calls this once more. Idempotent."""
        with uninterrupted():
            self.state = "closed"
            if not self.held and not self._released:
                self._released = True
                actions = [action for segment in self.segments for action in segment.close_actions()]
                free_later(self._context, *self._first, *actions, self.pool.release)
                self._first = []


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
        warnings.warn("the recording has put no work on its stream: was the work on another stream?", stacklevel=4)


def cannot_be_captured(cause: BaseException, advice: str = "") -> CaptureError:
    """The error for work that cannot be captured. It begins with the cause's own words, which people look up."""
    return CaptureError(
        f"{text_of(cause).rstrip('.')}. So the recording cannot be made into a graph. {advice}".rstrip()
    )


def explained(error: BaseException, behind_a_break: bool = False) -> BaseException:
    """Return a CaptureError for an exception of CuPy or PyTorch that a capture has caused, else the exception itself.

    :param behind_a_break: True if a break has ended before. The driver then says 907, or only 1, of an older event.
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
