"""Streams, events and stream capture, through the driver. Handles are plain ints.

The driver reports no error for a handle that is no longer valid: it crashes, or acts on another stream.
"""

from __future__ import annotations

from typing import Any

from ..types import Event, Stream
from .driver import call, fail, load, newest

_NOT_READY = 600


def create_stream() -> Stream:
    """Create a stream that does not synchronise with the legacy default stream."""
    return Stream(int(call("cuStreamCreate", 1)))


def close_stream(stream: Stream) -> None:
    """Free a stream. Work that is already on it still completes."""
    call("cuStreamDestroy", stream)


def begin_capture(stream: Stream) -> None:
    """Begin a capture in relaxed mode. In the other modes, an allocation in any thread would invalidate it."""
    call("cuStreamBeginCapture", stream, load().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def end_capture(stream: Stream) -> int:
    """End a capture and return its graph. :raises CudaError: if CUDA could not capture some of the work."""
    return int(call("cuStreamEndCapture", stream))


def create_event() -> Event:
    """Create an event without timing."""
    return Event(int(call("cuEventCreate", 2)))


def close_event(event: Event) -> None:
    """Free an event. Work that already waits for it still does."""
    call("cuEventDestroy", event)


def record_event(event: Event, stream: Stream) -> None:
    """Record ``event`` on ``stream``. In a capture this notes a dependency and adds no node."""
    call("cuEventRecord", event, stream)


def wait_event(stream: Stream, event: Event) -> None:
    """Make ``stream`` wait for the last record of ``event``."""
    call("cuStreamWaitEvent", stream, event, 0)


def let_wait(stream: Stream, other: Stream) -> None:
    """Let ``stream`` wait for the present work on another stream. Ctrl-C leaves no event, at any line."""
    cuda = load()
    made: list[Any] = []
    try:
        made += map(cuda.cuEventCreate, (2,))  # Python handles no signal between the two
        code, event = made[0]
        if code:
            fail("cuEventCreate", code)
        record_event(event, other)
        wait_event(stream, event)
    finally:
        for code, event in made:
            if not code:
                cuda.cuEventDestroy(event)


def synchronize_stream(stream: Stream) -> None:
    """Wait on the host for all work on ``stream``."""
    call("cuStreamSynchronize", stream)


def is_idle(stream: Stream) -> bool:
    """True if all work on ``stream`` is done."""
    return _is_done("cuStreamQuery", stream)


def synchronize_event(event: Event) -> None:
    """Wait on the host for the last record of ``event``."""
    call("cuEventSynchronize", event)


def is_over(event: Event) -> bool:
    """True if all work before the last record of ``event`` is done."""
    return _is_done("cuEventQuery", event)


def _is_done(name: str, handle: int) -> bool:
    (code,) = getattr(load(), name)(handle)
    if code and int(code) != _NOT_READY:
        fail(name, code)
    return not code


def capture_id(stream: Stream) -> int:
    """The id of the capture that ``stream`` takes part in; 0 if there is none."""
    status, identity, *_ = _capture_info(stream)
    return int(identity) if int(status) == 1 else 0


def capture_nodes(stream: Stream) -> tuple[int, ...]:
    """The nodes on which the next node captured on ``stream`` will depend. They are valid as long as their graph."""
    return tuple(int(node) for node in _capture_info(stream)[3] or ())


def captured_graph(stream: Stream) -> int:
    """The graph that ``stream`` captures into. Nodes may be added to it during the capture."""
    return int(_capture_info(stream)[2])


def follow_nodes(stream: Stream, nodes: tuple[int, ...]) -> None:
    """Make the next node captured on ``stream`` depend on ``nodes`` too."""
    handles = [load().CUgraphNode(node) for node in nodes]
    call(newest("cuStreamUpdateCaptureDependencies"), stream, handles, None, len(handles), 0)  # ADD


def _capture_info(stream: Stream) -> Any:
    return call(newest("cuStreamGetCaptureInfo", 3), stream)
