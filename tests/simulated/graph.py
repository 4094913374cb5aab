"""Stands for ipcreduce/cuda/graph.py: graphs of the simulated machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ipcreduce.errors import CudaError

from . import machine_streams, pools
from .driver import Launch, alive, api
from .driver_streams import captured_nodes, graphs, nodes_of
from .machine import Fault

_handles = itertools.count(1)
_executables: dict[int, machine_streams.Nodes] = {}


@api("cuGraphAddEventWaitNode")
def add_event_wait(graph: int, event: int) -> int:
    return _added(graph, machine_streams.event_node(waits_for=event))


@api("cuGraphAddEventRecordNode")
def add_event_record(graph: int, event: int) -> int:
    return _added(graph, machine_streams.event_node(records=event))


def _added(graph: int, node: machine_streams.Node) -> int:
    nodes_of(graph).append(node)
    captured_nodes[id(node)] = node
    return id(node)


@api("cuGraphAddDependencies")
def move_edges(graph: int, old: tuple[int, ...], new: tuple[int, ...], node: int) -> None:
    index, after = nodes_of(graph).index, captured_nodes[node].after
    leave, come = (frozenset(index(captured_nodes[one]) for one in nodes) for nodes in (old, new))
    if not leave <= after:
        raise Fault(1)
    captured_nodes[node].after = after - leave | come


@api("cuGraphNodeGetDependentNodes")
def lets_start_early(node: int) -> bool:
    return False  # on this machine each node ends before the next one starts


class Executable:
    """As in ipcreduce/cuda/graph.py."""

    @api("cuGraphInstantiate")
    def __init__(self, graph: int) -> None:
        nodes = machine_streams.in_some_order(graphs[graph])
        self.handle = next(_handles)
        _executables[self.handle] = nodes
        alive["executables"] += 1

    @api("cuGraphExecDestroy")
    def close(self) -> None:
        machine_streams.refuse_while_capturing()
        del _executables[self.handle]
        self.handle = 0
        alive["executables"] -= 1


@api("cuGraphLaunch")
def _launch(executable: int, stream: int) -> None:
    if executable not in _executables:
        raise Fault(1)
    machine_streams.launch(_executables[executable], stream)


def launch_through_the_runtime(executable: int, stream: int) -> None:
    """As CuPy does it, with its error."""
    try:
        _launch(executable, stream)
    except CudaError as error:
        raise pools.CUDARuntimeError(error.code) from None


@api("cuGraphAddKernelNode")
def executable_of(launch: Launch) -> Executable:
    graphs[0] = machine_streams.Nodes([machine_streams.Node(launch.work(), frozenset())])
    try:
        return Executable(0)
    finally:
        del graphs[0]


@api("cuGraphDestroy")
def close_graph(graph: int) -> None:
    for node in graphs.pop(graph):
        captured_nodes.pop(id(node), None)
    alive["graphs"] -= 1


@dataclass(frozen=True)
class Nodes:
    """See ipcreduce/cuda/graph.py. A node of this machine does not tell what it is: all count as kernels."""

    kernels: int
    others: int
    host_copies: tuple[int, ...]


@api("cuGraphGetNodes")
def inspect_graph(graph: int) -> Nodes:
    return Nodes(len(graphs[graph]), 0, ())
