"""Stands for ipcreduce/cuda/graph.py: captures and graphs of the simulated machine."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from dataclasses import dataclass

from ipcreduce.errors import CudaError

from . import streams
from .driver import Launch, _alive, _api
from .machine import Fault

_graphs: dict[int, list[streams.Node]] = {}
_handles = itertools.count(0x61000000, 0x40)


@_api("cuStreamCreate")
def create_stream() -> int:
    stream = streams.create(blocking=False)
    _alive["streams"] += 1
    return stream


@_api("cuStreamDestroy")
def destroy_stream(stream: int) -> None:
    streams.destroy(stream)
    _alive["streams"] -= 1


@_api("cuStreamBeginCapture")
def begin_capture(stream: int) -> None:
    streams.begin_capture(stream, "relaxed")


def end_capture(stream: int) -> int:
    """A call that fails ends the capture too."""
    try:
        return _end_capture(stream)
    except CudaError:
        with suppress(Fault):
            streams.end_capture(stream)
        raise


@_api("cuStreamEndCapture")
def _end_capture(stream: int) -> int:
    nodes = streams.end_capture(stream)
    handle = next(_handles)
    _graphs[handle] = nodes
    _alive["graphs"] += 1
    return handle


_nodes: dict[int, streams.Node] = {}


@_api("cuStreamGetCaptureInfo")
def last_node(stream: int) -> int:
    found = streams.find(stream)
    assert found.capture is not None
    assert len(found.frontier) == 1
    node = found.capture.nodes[next(iter(found.frontier))]
    _nodes[id(node)] = node
    return id(node)


@_api("cuGraphKernelNodeSetParams")
def set_kernel(node: int, launch: Launch) -> None:
    _nodes[node].work = launch.work()


class Executable:
    """As in ipcreduce/cuda/graph.py."""

    @_api("cuGraphInstantiate")
    def __init__(self, graph: int) -> None:
        self._nodes = _in_some_order(_graphs[graph])
        _alive["executables"] += 1

    @_api("cuGraphLaunch")
    def launch(self, stream: int) -> None:
        streams.launch(self._nodes, stream)

    @_api("cuGraphExecDestroy")
    def destroy(self) -> None:
        _alive["executables"] -= 1


def _in_some_order(nodes: list[streams.Node]) -> list[streams.Node]:
    """Any that the edges allow, so that one which is missing shows."""
    left, order = dict(enumerate(nodes)), []
    while left:
        index = random.choice([index for index, node in left.items() if not node.after & left.keys()])
        node = left.pop(index)
        order.append(streams.Node(node.work, node.after))
    return order


@_api("cuGraphDestroy")
def destroy_graph(graph: int) -> None:
    for node in _graphs.pop(graph):
        _nodes.pop(id(node), None)
    _alive["graphs"] -= 1


@dataclass(frozen=True)
class Nodes:
    """See ipcreduce/cuda/graph.py. A node of this machine does not tell what it is: all count as kernels."""

    kernels: int
    others: int
    host_copies: tuple[int, ...]


@_api("cuGraphGetNodes")
def inspect_graph(graph: int) -> Nodes:
    return Nodes(len(_graphs[graph]), 0, ())
