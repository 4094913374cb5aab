"""Launches that are ready for the fast path. For addresses that are used again, a launch is a graph of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..calls.norm_shape import NormAddresses
from ..cuda import cupy_runtime, driver, graph
from ..cuda.contexts import using_relaxed
from ..device.known_calls import Ready
from ..device.known_lists import Places
from ..device.maps import PreparedMap
from ..device.norms import PreparedNorm
from ..errors import CudaError
from ..types import Stream
from . import plan
from .launches import IN, OUT, PreparedCall
from .lists import ListLaunch, PreparedLaunches

_MOST_GRAPHS = 256  # of 0.1 MB each. The first graphs are kept, and no more are made


class ReadyLaunches:
    """The ready launches of one backend. A short message is a graph from the second time on (plan.eager_as_graph)."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._graphs: dict[tuple[Any, ...], graph.Executable] = {}  # by launch, source, target, and operands if any
        self._more: list[graph.Executable] = []  # of lists and norms

    def make(self, prepared: PreparedCall, source: int, target: int, again: bool) -> Ready:
        """The ready call from address ``source`` to ``target``. With one rank it is a copy.

        :param again: the addresses have come before.
        """
        if not prepared.launches:
            return Ready(prepared.what, _copy, (target, source, prepared.nbytes))
        if len(prepared.launches) > 1:
            return Ready(prepared.what, _launch_all, (prepared, source, target))
        ((launch, words, part),) = prepared.launches
        place = launch, source, target
        executable = self._graphs.get(place)
        if executable is None and again and plan.eager_as_graph(part) and self._has_room:
            with using_relaxed(self._context), suppress(CudaError):  # without a graph, the launch below still works
                words[IN], words[OUT] = source, target
                executable = self._graphs[place] = graph.executable_of(launch)
        if executable is not None:
            return Ready(prepared.what, cupy_runtime.launch_graph, executable.handle)
        return Ready(prepared.what, _launch_kernel, (launch, words, source, target))

    def make_list(self, prepared: PreparedLaunches, places: Places) -> Ready:
        """The ready call on a list of arrays at places that have come before."""
        parts = [(launch, launch.parts(places)) for launch in prepared.launches]
        if len(parts) == 1 and plan.eager_as_graph(parts[0][0].plan.step) and self._has_room:
            ((launch, there),) = parts
            with using_relaxed(self._context), suppress(CudaError):
                launch.set(there)
                executable = graph.executable_of(launch.launch)
                self._more.append(executable)
                return Ready(prepared.what, cupy_runtime.launch_graph, executable.handle)
        return Ready(prepared.what, _launch_parts, parts)

    def make_norm(self, prepared: PreparedNorm, addresses: NormAddresses) -> Ready | None:
        """The ready call with RMSNorm as a graph. None if it is no short message, or several launches."""
        norm = prepared.norm
        if norm is None or prepared.plain is not None or not plan.is_short(prepared.shape.nbytes):
            return None
        if self._has_room:
            with using_relaxed(self._context), suppress(CudaError):
                norm.set(addresses)
                executable = graph.executable_of(norm.launch)
                self._more.append(executable)
                return Ready(prepared.what, cupy_runtime.launch_graph, executable.handle)
        return None

    def make_map(self, prepared: PreparedMap, source: int, target: int, operands: Sequence[int]) -> Ready | None:
        """The ready call with an expression as a graph. None if it is no short message, or several launches."""
        if len(prepared.launches) != 1 or prepared.first is not None or not plan.is_short(prepared.nbytes):
            return None
        (one,) = prepared.launches
        place = one.launch, source, target, operands
        executable = self._graphs.get(place)
        if executable is None and self._has_room:
            with using_relaxed(self._context), suppress(CudaError):
                one.set(source, target, operands)
                executable = self._graphs[place] = graph.executable_of(one.launch)
        return None if executable is None else Ready(prepared.what, cupy_runtime.launch_graph, executable.handle)

    @property
    def _has_room(self) -> bool:
        return len(self._graphs) + len(self._more) < _MOST_GRAPHS

    def close_actions(self) -> list[Callable[[], None]]:
        """Actions that close the graphs. Their kernels must have run, and must not be unloaded yet."""
        graphs = [*self._graphs.values(), *self._more]
        self._graphs, self._more = {}, []
        return [executable.close for executable in graphs]


def _launch_kernel(argument: tuple[driver.Launch, memoryview, int, int], stream: Stream) -> None:
    launch, words, source, target = argument
    words[IN], words[OUT] = source, target
    launch.run(stream)


def _launch_all(argument: tuple[PreparedCall, int, int], stream: Stream) -> None:
    prepared, source, target = argument
    prepared.run(source, target, stream)


def _launch_parts(parts: list[tuple[ListLaunch, Places]], stream: Stream) -> None:
    for launch, there in parts:
        launch.run(there, stream)


def _copy(argument: tuple[int, int, int], stream: Stream) -> None:
    target, source, nbytes = argument
    if target != source:
        cupy_runtime.copy(target, source, nbytes, stream)
