"""Streams, events and stream capture, through the driver. Handles are plain ints.

A handle that is not valid any more is no error of the driver's: it crashes, or takes the handle for another stream's.
"""

from __future__ import annotations

from typing import Any

from .driver import call, fail, load

_NOT_READY = 600


def create_stream() -> int:
    """A stream that does not synchronise with the legacy default stream."""
    return int(call("cuStreamCreate", 1))


def destroy_stream(stream: int) -> None:
    """Destroys it; its work is still done."""
    call("cuStreamDestroy", stream)


def begin_capture(stream: int) -> None:
    """Starts to capture, in relaxed mode: in the others, an allocation by anybody would end the capture."""
    call("cuStreamBeginCapture", stream, load().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def end_capture(stream: int) -> int:
    """Ends the capture; the graph. :raises CudaError: if something in it could not be captured."""
    return int(call("cuStreamEndCapture", stream))


def create_event() -> int:
    """An event without timing."""
    return int(call("cuEventCreate", 2))


def destroy_event(event: int) -> None:
    """Destroys it; work that waits for it is not disturbed."""
    call("cuEventDestroy", event)


def record_event(event: int, stream: int) -> None:
    """Records ``event`` on ``stream`` (in a capture: as a dependency, not a node)."""
    call("cuEventRecord", event, stream)


def wait_event(stream: int, event: int) -> None:
    """Makes ``stream`` wait for the last record of ``event``."""
    call("cuStreamWaitEvent", stream, event, 0)


def synchronize_stream(stream: int) -> None:
    """Waits for everything on ``stream``."""
    call("cuStreamSynchronize", stream)


def is_idle(stream: int) -> bool:
    """Whether everything on ``stream`` is done."""
    return _is_done("cuStreamQuery", stream)


def synchronize_event(event: int) -> None:
    """Waits for the last record of ``event``."""
    call("cuEventSynchronize", event)


def is_over(event: int) -> bool:
    """Whether what came before the last record of ``event`` is done."""
    return _is_done("cuEventQuery", event)


def _is_done(name: str, handle: int) -> bool:
    (code,) = getattr(load(), name)(handle)
    if code and int(code) != _NOT_READY:
        fail(name, code)
    return not code


def capture_id(stream: int) -> int:
    """The id of the capture that ``stream`` is part of, which is never 0; 0 if it captures nothing."""
    status, identity, *_ = _capture_info(stream)
    return int(identity) if int(status) == 1 else 0


def capture_nodes(stream: int) -> tuple[int, ...]:
    """The nodes that the next one captured on ``stream`` follows. They stay valid as long as their graph."""
    return tuple(int(node) for node in _capture_info(stream)[3] or ())


def captured_graph(stream: int) -> int:
    """The graph that ``stream`` captures into. It can be added to meanwhile."""
    return int(_capture_info(stream)[2])


def follow_nodes(stream: int, nodes: tuple[int, ...]) -> None:
    """The next node captured on ``stream`` follows these too."""
    handles = [load().CUgraphNode(node) for node in nodes]
    if hasattr(
        load(), "cuStreamUpdateCaptureDependencies_v2"
    ):  # in the bindings of 12 the plain one takes no edge data
        call("cuStreamUpdateCaptureDependencies_v2", stream, handles, None, len(handles), 0)  # ADD
    else:
        call("cuStreamUpdateCaptureDependencies", stream, handles, None, len(handles), 0)


def _capture_info(stream: int) -> Any:
    name = "cuStreamGetCaptureInfo_v3" if hasattr(load(), "cuStreamGetCaptureInfo_v3") else "cuStreamGetCaptureInfo"
    return call(name, stream)
