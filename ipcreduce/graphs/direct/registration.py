"""Registration: the switch from staged to direct kernels, made once after recording, on all ranks alike.

It concerns all-reduces whose outputs lie in the memory of graphs.

Only ``Communicator(algorithm="direct")`` asks for that (launches.py says why it is off by default). Until then, and
wherever a rank's output cannot be mapped, all-reduces stay staged, which gives the same results. So nothing in here can
make a graph wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from ... import clock
from ...calls import call_lock
from ...calls.page_channel import PageChannel
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
from ...interrupts import uninterrupted
from ...ipc import plan
from ...ipc.backend import IpcBackend
from ...page import records, shared_files
from ...page.fingerprint import Fingerprint
from ...ranks.exchange import Channel
from ...texts import decoded, described, encoded
from ...types import DEFAULT_STREAM
from ..pool import GraphPool, Slab
from ..recording import RecordedCall, Resources, Segment
from .driver_calls import set_kernel
from .handing_over import hand_over
from .launches import ALGORITHM, Launched, depth, direct, launch_to, noted
from .mappings import Key, Mappings, Marks, marks_bytes

# "virtual": it is in virtual memory, and has no IPC handle.
_SLAB = np.dtype([("number", "<i8"), ("nbytes", "<u8"), ("virtual", "<u1"), ("handle", "V64")])
_LEFT = "it left a registration of graphs"
_SPAN = np.dtype([("slab", "<i8"), ("offset", "<u8")])  # slab -1: this all-reduce cannot be direct
_KEY = np.dtype([("rank", "<i8"), ("slab", "<i8")])
_CAPTURE = Fingerprint.of("the end of capture()")

Agree = Callable[[int, list[Segment], "BaseException | None"], None]  # see GraphSession


@dataclass(frozen=True)
class _Candidate:
    resources: Resources
    segment: Segment
    call: RecordedCall
    launched: Launched
    direct: plan.LaunchPlan


_Chosen = tuple[_Candidate, list[int], list[Key]]  # with each rank's address here, and the peers' slabs


class DirectGraphs:
    """The direct graphs of one communicator.

    :param agree: votes on recordings.
    :param memory: the pool of ``comm.empty()``, in which outputs may lie.
    :ivar recorded: graphs with their resources, for the next registration.
    """

    def __init__(self, backend: IpcBackend, calls: CallSequence, agree: Agree, memory: GraphPool) -> None:
        self.mappings = Mappings()
        self.launched: WeakKeyDictionary[RecordedCall, list[Launched]] = WeakKeyDictionary()
        self._backend, self._calls, self._agree, self._memory = backend, calls, agree, memory
        self.recorded: list[tuple[Any, Resources]] = []
        self._numbers: WeakKeyDictionary[Slab, int] = WeakKeyDictionary()  # an address may come again
        self._slabs: WeakValueDictionary[int, Slab] = WeakValueDictionary()  # by number
        self._next_number = count()
        if backend.n > 1:
            backend.launches.further_kernels = {(ALGORITHM, depth(backend.n))}
        backend.shared.append((self.mappings.unmap_all, self.mappings.release_all))

    def noted(self, prepared: Any, call: RecordedCall) -> Any:
        """The prepared all-reduce, made to note its launches under ``call`` when they are captured."""
        return noted(prepared, self.launched.setdefault(call, []))

    def register(self, number: int | None = None) -> None:
        """Switch to direct kernels in the graphs of :attr:`recorded`, and empty it. Collective.

        :param number: the call to be part of; None for a call of its own, at the end of ``capture()``, at which the
            ranks compare the recordings once more.
        :raises PeerLostError: if a rank does not come. After any other error the graphs stay staged, on all ranks.
        :raises RankMismatchError: on every rank, if one describes its memory wrongly.
        """
        calls = self._calls
        with calls.lock:
            recorded, self.recorded = self.recorded, []
            if number is None:
                call_lock.make(calls, calls.enter, _CAPTURE, DEFAULT_STREAM)
                number = calls.number
                segments = [segment for _, resources in recorded for segment in resources.segments]
                call_lock.alone(calls, self._agree, number, segments, None)
            resources, held = [resources for _, resources in recorded], {number}
            try:
                for one in resources:  # a finaliser, or another thread, may close the graph meanwhile
                    one.held = held
                call_lock.alone(calls, self._register, number, resources)
            finally:
                held.clear()  # first, in one step: an interrupt behind it leaves the rest to the graph's finaliser
                for one in resources:
                    if one.state == "closed":
                        one.release()

    def _register(self, number: int, recorded: list[Resources]) -> None:
        launches = self._backend.launches
        candidates = [
            _Candidate(
                resources, segment, call, one,
                direct(one.part, launches.gpus),
            )
            for resources in recorded
            for segment in resources.segments
            for call in segment.calls
            for one in self.launched.get(call, ())
        ]  # fmt: skip
        if not candidates:  # the same on every rank, since the recordings are
            return
        # A vote: on every rank alike. Until the graphs count as users, nothing else keeps what is mapped for them.
        with suppress(UnsupportedError), self.mappings.holding():
            if self.mappings.marks is None:
                self.mappings.marks = self._share_marks(number)
            self._switch(number, self._map(number, candidates))

    def _share_marks(self, number: int) -> Marks:
        """The ranks' marks, in a file that rank 0 makes. :raises UnsupportedError: if a rank cannot open it."""
        page, path, error, shared = self._backend.page, "", None, None
        try:
            try:
                if page.rank == 0:
                    with uninterrupted():
                        descriptor, path = shared_files.create(marks_bytes(page.n))
                        shared = Marks(descriptor, page.rank, page.n)
            except OSError as caught:
                error = caught
            path = decoded(self._gather(number, encoded(path))[0])
            try:
                if page.rank and path:
                    shared = Marks(shared_files.open_existing(path), page.rank, page.n)
            except OSError as caught:
                error = caught
            self._confirm(number, error, "sharing the marks of graphs")
        finally:
            shared_files.remove(path)
        assert shared is not None
        return shared

    def _gather(self, number: int, payload: bytes) -> list[bytes]:
        try:
            return self._calls.gather(number, payload)
        except (PeerTimeoutError, PeerFailedError, RankMismatchError) as error:  # peers may have gone on
            raise self._calls.lose(_LEFT, error) from error

    def _confirm(self, number: int, error: Exception | None, what: str) -> None:
        """Go on if no rank has an error. :raises UnsupportedError: on every rank, if one has."""
        for rank, text in enumerate(self._gather(number, b"" if error is None else encoded(described(error)))):
            if text:
                raise UnsupportedError(f"{what} failed on rank {rank}: {decoded(text)}")

    def _map(self, number: int, candidates: list[_Candidate]) -> list[_Chosen]:
        """Map the outputs of the candidates that direct.cu can take on all ranks. Returns these.

        :raises UnsupportedError: if mapping fails on a rank.
        """
        backend = self._backend
        own, spans = self._export(number, candidates)
        known = [{int(slab["number"]): slab for slab in rows} for rows in self._gather_rows(number, own)]
        all_spans = self._gather_rows(number, spans)
        if any(len(one) != len(spans) for one in all_spans):
            raise UnsupportedError("the ranks have different all-reduces to register")
        check_spans(backend.rank, known, all_spans, [one.direct.nbytes for one in candidates])
        indices = [i for i in range(len(candidates)) if all(rows["slab"][i] >= 0 for rows in all_spans)]
        self._open(number, known, [sorted({int(rows["slab"][i]) for i in indices}) for rows in all_spans])
        chosen = []
        for index in indices:
            addresses, keys = [candidates[index].launched.target], []
            for i in range(1, backend.n):
                rank = (backend.rank + i) % backend.n
                keys.append((rank, int(all_spans[rank]["slab"][index])))
                addresses.append(self.mappings.address(keys[-1]) + int(all_spans[rank]["offset"][index]))
            chosen.append((candidates[index], addresses, keys))
        return chosen

    def _export(
        self, number: int, candidates: list[_Candidate]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:  # fmt: skip
        """The slabs in which this rank's outputs lie, and where in them. :raises UnsupportedError: if a rank cannot."""
        error: IpcReduceError | None = None
        slabs: dict[int, np.ndarray[Any, Any]] = {}
        spans = np.zeros(len(candidates), _SPAN)
        spans["slab"] = -1
        try:
            if not self.mappings.room():
                raise UnsupportedError("too many registered graphs have not been closed on every rank")
            for index, one in enumerate(candidates):
                source, target, nbytes = one.launched.source, one.launched.target, one.direct.nbytes
                found = (pool.find(target, nbytes) for pool in (one.resources.pool, self._memory))
                slab = next((slab for slab in found if slab is not None), None)
                is_open = one.resources.state != "closed"
                if slab is not None and is_open and (source | target | nbytes) % plan.PACKET_BYTES == 0:
                    handle = np.void(driver.export_memory(slab.address) if slab.place is None else bytes(64))
                    slab_number = self._numbers.setdefault(slab, next(self._next_number))
                    self._slabs[slab_number] = slab
                    row = slab_number, slab.nbytes, slab.place is not None, handle
                    slabs[slab_number] = np.array(row, _SLAB)
                    spans[index] = slab_number, target - slab.address
        except (CudaError, UnsupportedError) as caught:
            error = caught
        self._confirm(number, error, "exporting memory of graphs")
        return np.array(list(slabs.values()), _SLAB), spans

    def _open(self, number: int, known: list[dict[int, Any]], wanted: list[list[int]]) -> None:
        """Map the slabs that are ``wanted`` of each rank. :raises UnsupportedError: if a rank cannot. Then none has."""
        mappings, error = self.mappings, None
        ordinal = self._backend.device.ordinal

        def take(key: Key, descriptor: int) -> None:
            mappings.take(key, descriptor, ordinal, int(known[key[0]][key[1]]["nbytes"]))

        virtual = [[slab for slab in slabs if known[rank][slab]["virtual"]] for rank, slabs in enumerate(wanted)]
        ranks = PageChannel(self._backend.page, number, partial(self._gather, number))
        try:
            hand_over(ranks, virtual, self._descriptor, take, clock.now() + self._calls.timeout)
        except IpcReduceError as failed:
            if isinstance(failed, (PeerTimeoutError, PeerFailedError, RankMismatchError)):
                raise self._calls.lose(_LEFT, failed) from failed
            raise
        try:
            for rank, slabs in enumerate(wanted):
                for slab in slabs if rank != self._backend.rank else ():
                    row = known[rank][slab]
                    if not row["virtual"]:
                        mappings.open((rank, slab), row["handle"].tobytes(), int(row["nbytes"]))
        except (CudaError, UnsupportedError) as caught:
            error = caught
        self._confirm(number, error, "mapping memory of graphs")

    def _descriptor(self, number: int) -> int:
        """A new descriptor of one of this rank's slabs. :raises UnsupportedError: if there is no such slab."""
        slab = self._slabs.get(number)
        if slab is None or slab.place is None:
            raise UnsupportedError(f"there is no allocation {number} in virtual memory")
        return slab.place.export()

    # ---- memory that is given back: see graphs/pools.py
    def suspend(self) -> None:
        """Give up the peers' memory, and keep its addresses. :raises CudaError: if that fails."""
        self.mappings.suspend()

    def hand_over(self, ranks: Channel, deadline: float) -> None:
        """Exchange the new memory of the pools that peers have mapped, for :meth:`resume`. Collective."""
        calls = self._calls
        with self.mappings.holding():  # what this rank asks for, its owner keeps
            sent = np.array(self.mappings.kept(), _KEY).tobytes()
            asked = np.concatenate([records.rows(one, _KEY, "slabs") for one in calls.gather(calls.number, sent)])
            every = [{int(slab) for owner, slab in asked.tolist() if owner == rank} for rank in range(ranks.size)]
            hand_over(ranks, [*map(sorted, every)], self._descriptor, self.mappings.prepare, deadline)

    def resume(self) -> None:
        """Map the peers' new memory at these addresses. :raises CudaError: if that fails."""
        self.mappings.resume()

    def drop_prepared(self) -> None:
        """Release what was handed over and is not mapped. Idempotent."""
        self.mappings.drop_prepared()

    def _gather_rows(self, number: int, rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return [records.rows(data, rows.dtype, "memory of graphs") for data in self._gather(number, rows.tobytes())]

    def _switch(self, number: int, chosen: list[_Chosen]) -> None:
        """Make the nodes direct and instantiate their segments again. :raises UnsupportedError: if a rank cannot."""
        executables: dict[Segment, cuda_graph.Executable] = {}
        try:
            error = self._instantiate(chosen, executables)
            self._confirm(number, error, "switching graphs to the direct kernel")
            with uninterrupted():
                self._use(chosen, executables)
                executables.clear()  # they are the graphs' now
        except BaseException as left:
            with uninterrupted():
                # The peers may have switched, to kernels that do not work with others.
                if executables and not isinstance(left, IpcReduceError):
                    self._calls.lose(_LEFT, left)
                for executable in executables.values():
                    with suppress(CudaError):
                        executable.close()
            raise

    def _instantiate(
        self, chosen: list[_Chosen], executables: dict[Segment, cuda_graph.Executable]
    ) -> IpcReduceError | None:  # fmt: skip
        """Fill ``executables``. Returns the failure that ends this."""
        try:
            with uninterrupted():
                for one, addresses, _ in chosen:
                    launch = launch_to(self._backend.launches, one.launched, one.direct, addresses)
                    set_kernel(one.launched.node, launch)
                for segment in dict.fromkeys(one.segment for one, _, _ in chosen):
                    executables[segment] = cuda_graph.Executable(segment.graph)
        except IpcReduceError as caught:
            return caught
        return None

    def _use(self, chosen: list[_Chosen], executables: dict[Segment, cuda_graph.Executable]) -> None:
        for one, _, _ in chosen:
            one.launched.part = one.direct
            one.call.kernels = ", ".join(dict.fromkeys(each.part.algorithm for each in self.launched[one.call]))
        for resources in dict.fromkeys(one.resources for one, _, _ in chosen):
            own = [(one.segment, keys) for one, _, keys in chosen if one.resources is resources]
            keys = frozenset(key for _, used in own for key in used)
            used = {segment: executables[segment] for segment, _ in own}
            pools = resources.pool, self._memory  # peers may map both
            for pool in pools:
                pool.retain()
            serial = self.mappings.use(keys, *(pool.release for pool in pools))
            resources.use("registered", used, partial(self.mappings.drop, serial, keys))


def check_spans(
    own_rank: int, known: list[dict[int, Any]], spans: list[np.ndarray[Any, Any]], nbytes: list[int]
) -> None:
    """Check that each rank's outputs lie in allocations that it has sent.

    :raises RankMismatchError: on every rank, if one does not.
    """
    for rank, slabs in enumerate(known):
        for (number, offset), size in zip(spans[rank].tolist(), nbytes, strict=True):
            held = int(slabs[number]["nbytes"]) if number in slabs else 0
            if number >= 0 and offset + size > held:
                raise RankMismatchError(
                    f"rank {own_rank}, registration of graphs: rank {rank} names bytes {offset} to {offset + size} of "
                    f"its allocation {number}, which has {held} bytes. Run the same version of ipcreduce on every rank."
                )
