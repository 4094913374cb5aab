"""Registration: once, after recording, all-reduces whose outputs lie in memory of ours become direct on all ranks.

Where the communicator asks for that (plan.direct says why not by default). Until then, and wherever a rank's output
cannot be mapped, they stay staged, which is right too. So nothing here can make a graph wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...coordination import exchange
from ...cuda import driver
from ...cuda import graph as cuda_graph
from ...errors import CudaError, IpcReduceError, RankMismatchError, UnsupportedError
from ...ipc import plan
from ...ipc.engine import Engine
from ..recording import Launched, Segment
from .mappings import Key

if TYPE_CHECKING:
    from ..graph import Graph

_SLAB = np.dtype([("number", "<i8"), ("nbytes", "<u8"), ("handle", "V64")])
_SPAN = np.dtype([("slab", "<i8"), ("offset", "<u8")])  # slab -1: this all-reduce cannot be direct


@dataclass(frozen=True)
class _Candidate:
    graph: Graph
    segment: Segment
    launched: Launched
    step: plan.Step  # the direct one


def register(mpi: Any, engine: Engine, graphs: Sequence[Graph], seconds: float) -> None:
    """Switches what is to be direct, in graphs that every rank has recorded alike. Collective.

    :raises PeerTimeoutError: if a rank does not come; other trouble leaves the graphs staged, on all ranks.
    """
    deadline = time.monotonic() + seconds
    candidates = [
        _Candidate(graph, segment, launched, step)
        for graph in graphs
        for segment in graph.segments
        for call in segment.calls
        for launched in call.launches
        if (step := engine.launches.planned_direct(launched.step)) is not None
    ]
    if not candidates:  # the same on every rank, since the recordings are
        return
    with suppress(UnsupportedError):  # a vote: on every rank alike
        chosen = _map(mpi, engine, candidates, deadline)
        _switch(mpi, engine, chosen, deadline)


def _map(
    mpi: Any, engine: Engine, candidates: list[_Candidate], deadline: float
) -> list[tuple[_Candidate, list[int], list[Key]]]:
    """The candidates that direct.cu can take on all ranks, with each rank's address here and its slab.

    :raises UnsupportedError: if mapping fails on a rank.
    """
    error: IpcReduceError | None = None
    slabs: dict[int, np.ndarray[Any, Any]] = {}
    spans = np.zeros(len(candidates), _SPAN)
    spans["slab"] = -1
    try:
        if not engine.mappings.room():
            raise UnsupportedError("too many registered graphs have not been closed on every rank")
        for index, candidate in enumerate(candidates):
            launched, step = candidate.launched, candidate.step
            target = launched.target + step.offset
            slab = candidate.graph.find_slab(target, step.nbytes)
            if slab is not None and (launched.source | launched.target | step.nbytes) % plan.PACKET_BYTES == 0:
                handle = np.void(driver.export_memory(slab.address))
                slabs[slab.number] = np.array((slab.number, slab.nbytes, handle), _SLAB)
                spans[index] = slab.number, target - slab.address
    except (CudaError, UnsupportedError) as caught:
        error = caught
    record = exchange.message(exchange.REGISTRATION, error, slabs=len(slabs), spans=len(spans))
    everyone = exchange.allgather(mpi, record, deadline, "a registration")
    exchange.check(mpi, everyone, "exporting memory of graphs")
    if (everyone["spans"] != len(spans)).any():
        raise UnsupportedError("the ranks have different all-reduces to register")
    own = np.zeros(max(1, int(everyone["slabs"].max())), _SLAB)
    own[: len(slabs)] = list(slabs.values())
    all_slabs = exchange.allgather_rows(mpi, own, deadline, "a registration")
    all_spans = exchange.allgather_rows(mpi, spans, deadline, "a registration")

    known = [
        {int(slab["number"]): slab for slab in slabs[: int(count)]}
        for slabs, count in zip(all_slabs, everyone["slabs"], strict=True)
    ]
    _check_spans(engine.rank, known, all_spans, [candidate.step.nbytes for candidate in candidates])
    chosen = []
    try:
        for index, candidate in enumerate(candidates):
            if (all_spans["slab"][:, index] < 0).any():
                continue
            addresses, keys = [], []
            for i in range(engine.n):
                rank = (engine.rank + i) % engine.n
                number, offset = int(all_spans["slab"][rank, index]), int(all_spans["offset"][rank, index])
                if i == 0:
                    addresses.append(candidate.launched.target + candidate.step.offset)
                else:
                    slab = known[rank][number]
                    mapped = engine.mappings.open((rank, number), slab["handle"].tobytes(), int(slab["nbytes"]))
                    addresses.append(mapped + offset)
                    keys.append((rank, number))
            chosen.append((candidate, addresses, keys))
    except (CudaError, UnsupportedError) as caught:
        error = caught
    try:
        exchange.vote(mpi, error, deadline, "mapping memory of graphs")
    except UnsupportedError:
        with suppress(CudaError):
            engine.mappings.unmap_unused()  # what was mapped just now
        raise
    return chosen


def _check_spans(own_rank: int, known: list[dict[int, Any]], spans: np.ndarray[Any, Any], nbytes: list[int]) -> None:
    """:raises RankMismatchError: on every rank, if one names an allocation that it has not sent, or bytes outside."""
    for rank, slabs in enumerate(known):
        for (number, offset), size in zip(spans[rank].tolist(), nbytes, strict=True):
            held = int(slabs[number]["nbytes"]) if number in slabs else 0
            if number >= 0 and offset + size > held:
                raise RankMismatchError(
                    f"rank {own_rank}, registration of graphs: expected outputs of rank {rank} within its allocations; "
                    f"found bytes {offset} to {offset + size} of number {number}, which has {held}. "
                    "Run the same version of ipcreduce on every rank."
                )


def _switch(mpi: Any, engine: Engine, chosen: list[tuple[_Candidate, list[int], list[Key]]], deadline: float) -> None:
    """Makes the nodes direct and their segments executable again. :raises UnsupportedError: if that fails on a rank."""
    error: IpcReduceError | None = None
    executables: dict[Segment, cuda_graph.Executable] = {}
    try:
        for candidate, addresses, _ in chosen:
            launched = candidate.launched
            launch = engine.launches.direct(
                candidate.step, launched.dtype, launched.op, launched.source + candidate.step.offset, addresses
            )
            cuda_graph.set_kernel(launched.node, launch)
        for segment in dict.fromkeys(candidate.segment for candidate, _, _ in chosen):
            executables[segment] = cuda_graph.Executable(segment.graph)
    except IpcReduceError as caught:
        error = caught
    try:
        exchange.vote(mpi, error, deadline, "switching graphs to the direct kernel")
    except UnsupportedError:
        for executable in executables.values():
            with suppress(CudaError):
                executable.destroy()
        with suppress(CudaError):
            engine.mappings.unmap_unused()
        raise
    for graph in dict.fromkeys(candidate.graph for candidate, _, _ in chosen):
        own = [(candidate, keys) for candidate, _, keys in chosen if candidate.graph is graph]
        for candidate, _ in own:
            candidate.launched.direct = True
        replaced = {candidate.segment: executables[candidate.segment] for candidate, _ in own}
        graph.registered(replaced, engine.mappings, frozenset(key for _, keys in own for key in keys))
