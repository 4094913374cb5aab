"""Stands for ``ipcreduce.cuda.streams``: streams, events and captures of the simulated machine."""

from __future__ import annotations

import itertools
import weakref
from contextlib import suppress

from ipcreduce.errors import CudaError

from . import machine_streams
from .driver import alive, api
from .machine import Fault

graphs: dict[int, machine_streams.Nodes] = {}
# By the capture's id.
capturing: weakref.WeakValueDictionary[int, machine_streams.Nodes] = weakref.WeakValueDictionary()
captured_nodes: weakref.WeakValueDictionary[int, machine_streams.Node] = weakref.WeakValueDictionary()  # by handle
_handles = itertools.count(0x61000000, 0x40)


@api("cuStreamCreate")
def create_stream() -> int:
    stream = machine_streams.create(blocking=False)
    alive["streams"] += 1
    return stream


@api("cuStreamDestroy")
def close_stream(stream: int) -> None:
    machine_streams.destroy(stream)
    alive["streams"] -= 1


@api("cuStreamBeginCapture")
def begin_capture(stream: int) -> None:
    machine_streams.begin_capture(stream, "relaxed")


def end_capture(stream: int) -> int:
    """A call that fails ends the capture too."""
    try:
        return _end_capture(stream)
    except CudaError:
        with suppress(Fault):
            machine_streams.end_capture(stream)
        raise


@api("cuStreamEndCapture")
def _end_capture(stream: int) -> int:
    nodes = machine_streams.end_capture(stream)
    handle = next(_handles)
    graphs[handle] = nodes
    alive["graphs"] += 1
    return handle


@api("cuEventCreate")
def create_event() -> int:
    event = machine_streams.create_event()
    alive["events"] += 1
    return event


@api("cuEventDestroy")
def close_event(event: int) -> None:
    machine_streams.close_event(event)
    alive["events"] -= 1


record_event = api("cuEventRecord")(machine_streams.record_event)
wait_event = api("cuStreamWaitEvent")(machine_streams.wait_event)


def let_wait(stream: int, other: int) -> None:
    event = create_event()
    record_event(event, other)
    wait_event(stream, event)
    close_event(event)


synchronize_stream = api("cuStreamSynchronize")(machine_streams.synchronize)
is_idle = api("cuStreamQuery")(machine_streams.is_idle)
synchronize_event = api("cuEventSynchronize")(machine_streams.synchronize_event)
is_over = api("cuEventQuery")(machine_streams.is_over)


@api("cuStreamGetCaptureInfo")
def capture_nodes(stream: int) -> tuple[int, ...]:
    found = machine_streams.find(stream)
    nodes = [found.capture.nodes[index] for index in sorted(found.frontier)] if found.capture is not None else []
    captured_nodes.update((id(node), node) for node in nodes)
    return tuple(map(id, nodes))


@api("cuStreamGetCaptureInfo")
def capture_id(stream: int) -> int:
    return machine_streams.capture_id(stream)


@api("cuStreamGetCaptureInfo")
def captured_graph(stream: int) -> int:
    capture = machine_streams.find(stream).capture
    if capture is None:
        raise Fault(1)
    capturing[capture.identity] = capture.nodes
    return -capture.identity  # no graph's handle


@api("cuStreamUpdateCaptureDependencies")
def follow_nodes(stream: int, nodes: tuple[int, ...]) -> None:
    machine_streams.follow(stream, [captured_nodes[node] for node in nodes])


def nodes_of(graph: int) -> machine_streams.Nodes:
    """Those of a graph, or of one that is being captured."""
    return graphs[graph] if graph >= 0 else capturing[-graph]
