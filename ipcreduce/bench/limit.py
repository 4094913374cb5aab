"""A lower bound on a collective's time on a machine: flag barrier + wire bytes / push bandwidth.

Wire bytes are the bytes that leave each rank at least (``Collective.wire``): of an all-reduce of S bytes the smaller of
(n-1) S, in one hop, and 2 (n-1)/n S, in two. For host arrays, and over NCCL, whose number of hops is unknown, the bound
is the time in which every rank copies as many bytes as it has to read and write, all at once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..cuda import cupy_runtime
from ..errors import UnsupportedError
from ..graphs.session import session_of
from ..ipc import plan
from ..ipc.backend import IpcBackend
from . import timing
from .collectives import ALLREDUCE, Collective

_PUSH_BYTES = 64 << 20  # to each peer, in the bandwidth measurement
_COPIES = 20  # in a graph
_BLOCKS, _THREADS = 132, 256  # at most one block a multiprocessor of an H200; at least 8 packets a thread


def our_backend(comm: Communicator, what: str) -> IpcBackend:
    """The backend of ipcreduce's kernels, which ``what`` measures. :raises UnsupportedError: on another backend."""
    backend = session_of(comm).require_backend(what)
    if not isinstance(backend, IpcBackend):
        raise UnsupportedError(f"{what} measures the kernels of backend ipc, but the ranks have backend {backend.name}")
    return backend


@dataclass(frozen=True)
class Limit:
    """The limit, as measured over the ranks of a run.

    ``push_gbps`` is the bandwidth out of one rank to all peers at once, in 1e9 bytes a second.
    """

    ranks: int
    barrier_us: float
    push_gbps: float

    def microseconds(self, nbytes: int, of: Collective = ALLREDUCE) -> float:
        """The limit for messages of ``nbytes`` bytes, in microseconds."""
        return self.barrier_us + of.wire(self.ranks) * nbytes / self.push_gbps / 1e3

    @classmethod
    def measure(cls, comm: Communicator, mpi: Any, replays: int, calls: int | None = None) -> Limit:
        """Measure barrier and push by kernels/limit.cu, in CUDA graphs. Collective.

        :param calls: of the barrier in a graph.
        """
        backend = our_backend(comm, "the limit line")
        room = backend.workspace.half_bytes - (comm.size - 1) * plan.row_bytes(1)
        nbytes = min(_PUSH_BYTES, room // plan.PACKET_BYTES * plan.PACKET_BYTES)

        def median(size: int, shape: tuple[int, int], calls: int) -> float:
            launch, (stream, owner) = backend.launches.limit(size, *shape), cupy_runtime.stream_of()
            backend.order.launch(lambda stream: None, stream, owner)  # orders the launches below after earlier calls
            graph = timing.captured(lambda: launch.run(stream), calls)
            return timing.in_graph(graph, calls, replays, mpi).median

        most = min(_BLOCKS, backend.launches.gpus.most_blocks)
        blocks = max(1, min(most, nbytes // plan.PACKET_BYTES // (8 * _THREADS)))
        median(nbytes, (blocks, _THREADS), 4)  # warm-up, so that clocks have risen
        barrier, push = median(0, (1, 32), calls or 200), median(nbytes, (blocks, _THREADS), 4)
        return cls(comm.size, barrier, (comm.size - 1) * nbytes / push / 1e3)


def copy_microseconds(comm: Communicator, mpi: Any, rounds: int, nbytes: int, of: Collective) -> float:
    """The limit of host arrays and of NCCL: the time in which all ranks copy what they have to. Collective."""
    on_host, copied = comm.backend == "host", int(of.copied(comm.size) * nbytes)
    library = np if on_host else cupy_runtime.load()
    source, target = library.zeros(copied, np.uint8), library.zeros(copied, np.uint8)
    if on_host:
        return timing.on_host(lambda: np.copyto(target, source), rounds, mpi).median
    graph = timing.captured(lambda: operator.setitem(target, ..., source), _COPIES)
    return timing.in_graph(graph, _COPIES, rounds, mpi).median
