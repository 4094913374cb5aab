"""Registration: once, after recording, all-reduces whose outputs lie in memory of ours become direct on all ranks.

Only where the communicator asks for that (plan.direct says why it is off by default). Until then, and wherever a
rank's output cannot be mapped, they stay staged, which is right too. So nothing here can make a graph wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...calls.sequence import CallSequence
from ...cuda import driver
from ...cuda import graph as cuda_graph
from ...errors import (
    CudaError,
    IpcReduceError,
    PeerFailedError,
    PeerTimeoutError,
    RankMismatchError,
    UnsupportedError,
)
from ...ipc import plan
from ...ipc.backend import IpcBackend
from ...page import records
from ...texts import decoded, described, encoded
from ..pool import GraphPool
from ..recording import LaunchedKernel, Segment
from .mappings import Key, Mappings

_SLAB = np.dtype([("number", "<i8"), ("nbytes", "<u8"), ("handle", "V64")])
_SPAN = np.dtype([("slab", "<i8"), ("offset", "<u8")])  # slab -1: this all-reduce cannot be direct


class Registrable(Protocol):
    """A recorded graph."""

    @property
    def segments(self) -> list[Segment]: ...

    def pools(self) -> list[GraphPool]:
        """The memory in which outputs that peers may map can lie."""

    def registered(self, executables: dict[Segment, cuda_graph.Executable], drop: Callable[[], None]) -> None:
        """Take executables with direct kernels. ``drop()``: they will not be launched any more."""


@dataclass(frozen=True)
class _Candidate:
    graph: Registrable
    segment: Segment
    launched: LaunchedKernel
    direct: plan.LaunchPlan

    @property
    def target(self) -> int:
        return self.launched.target + self.direct.offset


_Chosen = tuple[_Candidate, list[int], list[Key]]  # with each rank's address here, and the peers' slabs


class DirectGraphs:
    """The registered graphs of one communicator."""

    def __init__(self, backend: IpcBackend, calls: CallSequence) -> None:
        self.mappings = Mappings(backend.page)
        self._backend, self._calls = backend, calls

    def register(self, number: int, graphs: Sequence[Registrable]) -> None:
        """Switch to direct kernels in graphs that every rank has recorded alike, within call ``number``. Collective.

        :raises PeerLostError: if a rank does not come. Other trouble leaves the graphs staged, on all ranks.
        :raises RankMismatchError: on every rank, if one describes its memory wrongly.
        """
        candidates = [
            _Candidate(graph, segment, launched, direct)
            for graph in graphs
            for segment in graph.segments
            for call in segment.calls
            for launched in call.launches
            if (direct := self._planned(launched.part)) is not None
        ]
        if not candidates:  # the same on every rank, since the recordings are
            return
        with suppress(UnsupportedError):  # a vote: on every rank alike
            self._switch(number, self._map(number, candidates))

    def collect(self) -> None:
        """Free the memory of graphs that every rank has dropped."""
        self.mappings.collect()

    def unmap_all(self) -> None:
        """Unmap everything of the peers. Idempotent."""
        self.mappings.unmap_all()

    def release_all(self) -> None:
        """Free all memory of ours: every peer has unmapped it."""
        self.mappings.release_all()

    def _planned(self, staged: plan.LaunchPlan) -> plan.LaunchPlan | None:
        launches = self._backend.launches
        return plan.direct(staged, self._backend.n, launches.resident, launches.sharing)

    def _gather(self, number: int, payload: bytes) -> list[bytes]:
        try:
            return self._calls.gather(number, payload)
        except (PeerTimeoutError, PeerFailedError, RankMismatchError) as error:  # peers may have gone on
            raise self._calls.lose("it left a registration of graphs", error) from error

    def _confirm(self, number: int, error: Exception | None, what: str) -> None:
        """:raises UnsupportedError: on every rank, if one has an error."""
        for rank, text in enumerate(self._gather(number, b"" if error is None else encoded(described(error)))):
            if text:
                raise UnsupportedError(f"{what} failed on rank {rank}: {decoded(text)}")

    def _map(self, number: int, candidates: list[_Candidate]) -> list[_Chosen]:
        """The candidates that direct.cu can take on all ranks, mapped.

        :raises UnsupportedError: if mapping fails on a rank.
        """
        backend, mappings = self._backend, self.mappings
        error: IpcReduceError | None = None
        slabs: dict[int, np.ndarray[Any, Any]] = {}
        spans = np.zeros(len(candidates), _SPAN)
        spans["slab"] = -1
        try:
            if not mappings.room():
                raise UnsupportedError("too many registered graphs have not been closed on every rank")
            for index, one in enumerate(candidates):
                found = (pool.find(one.target, one.direct.nbytes) for pool in one.graph.pools())
                slab = next((slab for slab in found if slab is not None), None)
                aligned = (one.launched.source | one.launched.target | one.direct.nbytes) % plan.PACKET_BYTES == 0
                if slab is not None and aligned:
                    handle = np.void(driver.export_memory(slab.address))
                    slabs[slab.number] = np.array((slab.number, slab.nbytes, handle), _SLAB)
                    spans[index] = slab.number, one.target - slab.address
        except (CudaError, UnsupportedError) as caught:
            error = caught
        self._confirm(number, error, "exporting memory of graphs")
        own = np.array(list(slabs.values()), _SLAB)
        known = [{int(slab["number"]): slab for slab in rows} for rows in self._gather_rows(number, own)]
        all_spans = self._gather_rows(number, spans)
        if any(len(one) != len(spans) for one in all_spans):
            raise UnsupportedError("the ranks have different all-reduces to register")
        check_spans(backend.rank, known, all_spans, [one.direct.nbytes for one in candidates])
        chosen = []
        try:
            for index, one in enumerate(candidates):
                if any(rows["slab"][index] < 0 for rows in all_spans):
                    continue
                addresses, keys = [one.target], []
                for i in range(1, backend.n):
                    rank = (backend.rank + i) % backend.n
                    key = rank, int(all_spans[rank]["slab"][index])
                    slab_row = known[rank][key[1]]
                    mapped = mappings.open(key, slab_row["handle"].tobytes(), int(slab_row["nbytes"]))
                    addresses.append(mapped + int(all_spans[rank]["offset"][index]))
                    keys.append(key)
                chosen.append((one, addresses, keys))
        except (CudaError, UnsupportedError) as caught:
            error = caught
        with self._undone():
            self._confirm(number, error, "mapping memory of graphs")
        return chosen

    def _gather_rows(self, number: int, rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return [records.rows(data, rows.dtype, "memory of graphs") for data in self._gather(number, rows.tobytes())]

    def _switch(self, number: int, chosen: list[_Chosen]) -> None:
        """Make the nodes direct and instantiate their segments again. :raises UnsupportedError: if a rank cannot."""
        error: IpcReduceError | None = None
        executables: dict[Segment, cuda_graph.Executable] = {}
        try:
            for one, addresses, _ in chosen:
                launched = one.launched
                source = launched.source + one.direct.offset
                launch = self._backend.launches.launch_to(one.direct, launched.dtype, launched.op, source, addresses)
                cuda_graph.set_kernel(launched.node, launch)
            for segment in dict.fromkeys(one.segment for one, _, _ in chosen):
                executables[segment] = cuda_graph.Executable(segment.graph)
        except IpcReduceError as caught:
            error = caught
        with self._undone(*(executable.close for executable in executables.values())):
            self._confirm(number, error, "switching graphs to the direct kernel")
        for graph in dict.fromkeys(one.graph for one, _, _ in chosen):
            own = [(one, keys) for one, _, keys in chosen if one.graph is graph]
            for one, _ in own:
                one.launched.algorithm = one.direct.algorithm
            keys = frozenset(key for _, keys in own for key in keys)
            graph.registered({one.segment: executables[one.segment] for one, _ in own}, self._use(graph.pools(), keys))

    def _use(self, pools: list[GraphPool], keys: frozenset[Key]) -> Callable[[], None]:
        """Keep ``pools`` while peers map them. The result: the graph is gone."""
        for pool in pools:
            pool.retain()

        def unpin() -> None:
            for pool in pools:
                pool.release()

        return partial(self.mappings.drop, self.mappings.use(keys, unpin), keys)

    @contextmanager
    def _undone(self, *actions: Callable[[], None]) -> Iterator[None]:
        """If the block fails, runs ``actions`` and unmaps the slabs that no graph uses."""
        try:
            yield
        except IpcReduceError:
            for action in (*actions, self.mappings.unmap_unused):
                with suppress(CudaError):
                    action()
            raise


def check_spans(
    own_rank: int, known: list[dict[int, Any]], spans: list[np.ndarray[Any, Any]], nbytes: list[int]
) -> None:
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
