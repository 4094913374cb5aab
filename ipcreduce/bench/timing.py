"""The time of a call: in a CUDA graph of many calls, eagerly, or on the host. Each result is the slowest rank's."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..cuda import cupy_runtime

_WARM = 3  # untimed replays or rounds
_ROUND_SECONDS, _MAX_CALLS = 5e-3, 100  # a round on the host has as many calls as fit


@dataclass(frozen=True)
class Times:
    """Microseconds for a call: minimum, median and 99th percentile over graph replays or rounds of calls."""

    least: float
    median: float
    p99: float

    @classmethod
    def of(cls, samples: list[float], mpi: Any) -> Times:
        """The statistics of samples, in seconds for a call. Each statistic is the largest of all ranks. Collective."""
        found = sorted(sample * 1e6 for sample in samples)
        own = (found[0], statistics.median(found), found[min(len(found) - 1, int(0.99 * len(found)))])
        return cls(*(max(one) for one in zip(*mpi.allgather(own), strict=True)))


def captured(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """Capture ``calls`` calls on CuPy's current stream, and return a function that launches the graph there."""
    stream = cupy_runtime.load().cuda.get_current_stream()
    stream.begin_capture()
    for _ in range(calls):
        call()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def in_graph(launch: Callable[[], None], calls: int, replays: int, mpi: Any) -> Times:
    """The time of a call in a graph of ``calls`` calls, by events around each of ``replays`` launches. Collective."""
    cuda = cupy_runtime.load().cuda
    stream = cuda.get_current_stream()
    events = [cuda.Event() for _ in range(replays + 1)]
    for _ in range(_WARM):
        launch()
    stream.synchronize()
    mpi.Barrier()
    launch()  # untimed, because the ranks do not leave the barrier at the same moment
    events[0].record(stream)
    for event in events[1:]:
        launch()
        event.record(stream)
    stream.synchronize()
    pairs = itertools.pairwise(events)
    return Times.of([cuda.get_elapsed_time(a, b) / 1e3 / calls for a, b in pairs], mpi)


def eagerly(call: Callable[[], Any], calls: int, rounds: int, mpi: Any) -> tuple[Times, Times]:
    """The time of one of ``calls`` calls in a row: from end to end, and on the host alone. Collective."""
    stream = cupy_runtime.load().cuda.get_current_stream()
    ends, hosts = [], []
    for turn in range(_WARM + rounds):
        stream.synchronize()
        mpi.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter()
        stream.synchronize()
        if turn >= _WARM:
            hosts.append((host - begin) / calls)
            ends.append((time.perf_counter() - begin) / calls)
    return Times.of(ends, mpi), Times.of(hosts, mpi)


def on_host(call: Callable[[], Any], rounds: int, mpi: Any) -> Times:
    """The time of a blocking call, measured in ``rounds`` rounds of many calls in a row. Collective."""
    calls, found = 1, []
    for turn in range(_WARM + rounds):
        mpi.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - begin) / calls
        if turn < _WARM:
            slowest = max(*mpi.allgather(seconds), 1e-9)
            calls = max(1, min(_MAX_CALLS, int(_ROUND_SECONDS / slowest)))
        else:
            found.append(seconds)
    return Times.of(found, mpi)
