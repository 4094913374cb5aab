"""Graphs of one kernel, which launch short calls whose addresses come again: that takes the host 2 us less."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..cuda import cupy_runtime, graph
from ..cuda.contexts import using_relaxed
from ..device.prepared import BoundLaunch, KernelStep, Prepared
from ..errors import CudaError
from ..interrupts import uninterrupted
from . import plan
from .lists import ListStep

_MAX_GRAPHS = 256  # of 0.1 MB each. The first graphs are kept, and no more are made


class KernelGraphs:
    """The graphs of one backend."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._graphs: dict[tuple[KernelStep | ListStep, Any], graph.Executable] = {}  # by launch and addresses

    def make(self, prepared: Prepared, addresses: Any) -> BoundLaunch | None:
        """The launch of a call as a graph; None if it is several launches, or a long message, or there is no room."""
        if len(prepared.steps) != 1 or not plan.is_short(prepared.nbytes):
            return None
        (step,) = prepared.steps
        if not isinstance(step, (KernelStep, ListStep)):
            return None
        executable = self._graphs.get((step, addresses))
        if executable is None and len(self._graphs) < _MAX_GRAPHS:
            with (
                using_relaxed(self._context),
                uninterrupted(),
                suppress(CudaError),
            ):  # without a graph, the launch still works
                step.set(addresses)
                executable = self._graphs[step, addresses] = graph.executable_of(step.launch)
        if executable is None:
            return None
        return BoundLaunch(prepared.fingerprint, cupy_runtime.launch_graph, executable.handle)

    def close_actions(self) -> list[Callable[[], None]]:
        """Actions that close the graphs. Their kernels must have run, and must not be unloaded yet."""
        graphs, self._graphs = self._graphs, {}
        return [executable.close for executable in graphs.values()]
