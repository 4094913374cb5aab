"""CUDA graphs, through the driver. Handles are plain ints."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Event
from .driver import Launch, call, load


def set_kernel(node: int, launch: Launch) -> None:
    """Replace the launch of a kernel node. Executables that were instantiated before are not affected."""
    call("cuGraphKernelNodeSetParams", node, launch.node_params())


def add_event_wait(graph: int, event: Event) -> int:
    """Add and return a node that waits, at each launch, for the last record of ``event`` before that launch."""
    return int(call("cuGraphAddEventWaitNode", graph, None, 0, event))


def add_event_record(graph: int, event: Event) -> int:
    """Add and return a node that records ``event`` at each launch, for streams and other graphs to wait for."""
    return int(call("cuGraphAddEventRecordNode", graph, None, 0, event))


def move_edges(graph: int, old: tuple[int, ...], new: tuple[int, ...], node: int) -> None:
    """Replace the dependencies of ``node`` on the nodes ``old`` by ``new``. Also works during a capture."""
    _change_edges(graph, [one for one in new if one not in old], node, add=True)
    _change_edges(graph, [one for one in old if one not in new], node, add=False)


def _change_edges(graph: int, before: list[int], node: int, *, add: bool) -> None:
    bindings, count = load(), len(before)
    if not count:
        return
    sources = [bindings.CUgraphNode(one) for one in before]
    targets = [bindings.CUgraphNode(node)] * count
    if hasattr(load(), "cuGraphAddDependencies_v2"):  # CUDA 12's plain names take no edge data
        if add:
            call("cuGraphAddDependencies_v2", graph, sources, targets, None, count)
        else:
            call("cuGraphRemoveDependencies_v2", graph, sources, targets, None, count)
    elif add:
        call("cuGraphAddDependencies", graph, sources, targets, None, count)
    else:
        call("cuGraphRemoveDependencies", graph, sources, targets, None, count)


class Executable:
    """An instantiated graph, launched by :func:`cupy_runtime.launch`. ``handle`` is 0 once it is destroyed."""

    __slots__ = ("handle",)

    def __init__(self, graph: int) -> None:
        """:raises CudaError: if ``graph``, which is left as it is, cannot be instantiated."""
        self.handle = int(call("cuGraphInstantiate", graph, 0))

    def destroy(self) -> None:
        """Destroy it, once its last launch has ended. Any later launch is an error."""
        handle, self.handle = self.handle, 0
        call("cuGraphExecDestroy", handle)


def executable_of(launch: Launch) -> Executable:
    """Instantiate a graph of this launch alone, with its present arguments. :raises CudaError: if that fails.

    The arguments stay: cuGraphExecKernelNodeSetParams, which could change them, crashes in a thread without a context
    (driver of CUDA 13).
    """
    graph = call("cuGraphCreate", 0)
    try:
        call("cuGraphAddKernelNode", graph, None, 0, launch.node_params())
        return Executable(graph)
    finally:
        destroy_graph(graph)


def destroy_graph(graph: int) -> None:
    """Destroy a graph. Executables instantiated from it stay valid."""
    call("cuGraphDestroy", graph)


@dataclass(frozen=True)
class Nodes:
    """Node counts of a graph. ``host_copies`` has the bytes of each copy from or to host memory."""

    kernels: int
    others: int
    host_copies: tuple[int, ...]


def inspect_graph(graph: int) -> Nodes:
    """Count a graph's nodes, and find the copies that bake in an address of host memory."""
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
