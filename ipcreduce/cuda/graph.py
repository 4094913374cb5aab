"""Streams of our own, stream capture and CUDA graphs, through the driver. Handles are plain ints."""

from __future__ import annotations

from dataclasses import dataclass

from .driver import Launch, call, load


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


def last_node(stream: int) -> int:
    """The node that was captured last on ``stream``. It stays valid as long as its graph."""
    bindings = load()
    name = "cuStreamGetCaptureInfo_v3" if hasattr(bindings, "cuStreamGetCaptureInfo_v3") else "cuStreamGetCaptureInfo"
    nodes, count = call(name, stream)[3], call(name, stream)[-1]
    assert int(count) == 1, "a launch leaves one node for the next to follow"
    return int(nodes[0])


def set_kernel(node: int, launch: Launch) -> None:
    """Makes a kernel node another launch, for executables that are instantiated from now on."""
    launch.set_node(node)


def instantiate(graph: int) -> int:
    """An executable graph, which :func:`launch_graph` launches."""
    return int(call("cuGraphInstantiate", graph, 0))


def launch_graph(executable: int, stream: int) -> None:
    """Launches it on ``stream``."""
    call("cuGraphLaunch", executable, stream)


def destroy_executable(executable: int) -> None:
    """Destroys an executable graph, once it has run to its end."""
    call("cuGraphExecDestroy", executable)


def destroy_graph(graph: int) -> None:
    """Destroys a graph; executables made from it stay."""
    call("cuGraphDestroy", graph)


@dataclass(frozen=True)
class Nodes:
    """What a graph consists of. ``host_copies``: for each copy from or to host memory, its bytes."""

    kernels: int
    others: int
    host_copies: tuple[int, ...]


def inspect_graph(graph: int) -> Nodes:
    """Counts a graph's nodes and finds the copies that bake in an address of host memory."""
    bindings = load()
    kind, host = bindings.CUgraphNodeType, bindings.CUmemorytype.CU_MEMORYTYPE_HOST
    count = call("cuGraphGetNodes", graph, 0)[1]
    nodes = call("cuGraphGetNodes", graph, count)[0] if count else []
    kernels, copies = 0, []
    for node in nodes:
        which = call("cuGraphNodeGetType", node)
        if which == kind.CU_GRAPH_NODE_TYPE_KERNEL:
            kernels += 1
        elif which == kind.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = call("cuGraphMemcpyNodeGetParams", node)
            if host in (copy.srcMemoryType, copy.dstMemoryType):
                copies.append(int(copy.WidthInBytes * copy.Height * copy.Depth))
    return Nodes(kernels, len(nodes) - kernels, tuple(copies))
