"""CUDA graphs, through the driver. Handles are plain ints."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..types import Event
from .driver import Launch, call, fail, load, newest

_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def add_event_wait(graph: int, event: Event) -> int:
    """Add and return a node that waits, at each launch, for the last record of ``event`` before that launch."""
    return int(call("cuGraphAddEventWaitNode", graph, None, 0, event))


def add_event_record(graph: int, event: Event) -> int:
    """Add and return a node that records ``event`` at each launch, for streams and other graphs to wait for."""
    return int(call("cuGraphAddEventRecordNode", graph, None, 0, event))


def move_edges(graph: int, old: tuple[int, ...], new: tuple[int, ...], node: int) -> None:
    """Replace the dependencies of ``node`` on the nodes ``old`` by ``new``. Also works during a capture."""
    handle = load().CUgraphNode
    added = [handle(one) for one in new if one not in old]
    removed = [handle(one) for one in old if one not in new]
    if added:
        call(newest("cuGraphAddDependencies"), graph, added, [handle(node)] * len(added), None, len(added))
    if removed:
        call(newest("cuGraphRemoveDependencies"), graph, removed, [handle(node)] * len(removed), None, len(removed))


def lets_start_early(node: int) -> bool:
    """True if a node after this one is a kernel that was launched programmatically, to start before this one ends."""
    count = call(newest("cuGraphNodeGetDependentNodes"), load().CUgraphNode(node))[-1]
    # Bindings 12.9.1 to 12.9.6, 13.0 and 13.1 give edges in memory that they have freed already.
    nodes, edges = np.empty(count, np.uint64), np.empty((count, 8), np.uint8)  # two ports, the type
    pointers = (ctypes.c_void_p(address) for address in (node, nodes.ctypes.data, edges.ctypes.data))
    if code := _dependent_nodes()(*pointers, ctypes.byref(ctypes.c_size_t(count))):
        fail("cuGraphNodeGetDependentNodes_v2", load().CUresult(code))
    return _PROGRAMMATIC in edges[:, 2]


@cache
def _dependent_nodes() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuGraphNodeGetDependentNodes_v2


class Executable:
    """An instantiated graph, launched by :func:`cupy_runtime.launch`. ``handle`` is 0 once it is closed."""

    __slots__ = ("handle",)

    def __init__(self, graph: int) -> None:
        """Instantiate ``graph``, which is not changed. :raises CudaError: if that fails."""
        self.handle = int(call("cuGraphInstantiate", graph, 0))

    def close(self) -> None:
        """Free the executable, whose last launch must have ended. Any later launch is an error."""
        handle, self.handle = self.handle, 0
        call("cuGraphExecDestroy", handle)


def executable_of(launch: Launch) -> Executable:
    """Instantiate a graph of this launch alone, with its present arguments. :raises CudaError: if that fails.

    The arguments never change: cuGraphExecKernelNodeSetParams, which could change them, crashes in a thread without a
    context (seen with the driver of CUDA 13).
    """
    graph = call("cuGraphCreate", 0)
    try:
        call("cuGraphAddKernelNode", graph, None, 0, launch.node_params())
        return Executable(graph)
    finally:
        close_graph(graph)


def close_graph(graph: int) -> None:
    """Free a graph. Executables instantiated from it stay valid."""
    call("cuGraphDestroy", graph)


@dataclass(frozen=True)
class Nodes:
    """The numbers of a graph's nodes. ``host_copies`` has the size in bytes of each copy from or to host memory."""

    kernels: int
    others: int
    host_copies: tuple[int, ...]


def inspect_graph(graph: int) -> Nodes:
    """Count a graph's nodes, and find the copies that have a fixed address of host memory."""
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
