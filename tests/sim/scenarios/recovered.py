"""``recover()``: the last call that was right on every rank, where calls on GPUs have ended without data later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, Graph, GraphRunner, Map, errors, forward_context
from ipcreduce.device import deferred_free
from ipcreduce.graphs.direct.registration import DirectGraphs
from tests.shared import clock
from tests.shared.bounds import HANG, until
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    TOTAL,
    WORLD,
    environment,
    error_of,
    mine,
    raises,
    right,
    told,
    works,
)
from tests.simulated import machine_streams

BEHIND = 6  # calls that the other ranks put behind the one that fails


class Calls:
    """Calls of every kind in turn. Each has outputs of its own: a right call's stay as they are."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.outputs = comm, dict[int, list[Any]]()
        self.graph, self.replayed = Graph(comm), list[Any]()
        source = mine()
        with self.graph.record():
            self.replayed = [comm.allreduce(source), comm.allreduce(source)]
        kinds = [self.plain, self.list, self.mapped, self.norm, self.replay, self.new]
        if comm.backend == "nccl":  # whose graphs end with its communicator
            kinds.remove(self.replay)
        self.kinds: list[Callable[[], list[Any]]] = kinds
        for kind in self.kinds * 2:  # kernels load, which waits for calls that run
            kind()
        comm.synchronize()

    def plain(self) -> list[Any]:
        return [self.comm.allreduce(mine(), out=cupy.zeros(1000, np.float32))]

    def list(self) -> list[Any]:
        return self.comm.allreduce([mine(), cupy.full(99, RANK + 1, np.float16), mine(3)])

    def mapped(self) -> list[Any]:
        return [self.comm.allreduce(mine(), then=Map("v * s", s=1))]

    def norm(self) -> list[Any]:
        return [self.comm.allreduce_rmsnorm(mine(512).reshape(2, 256), cupy.ones(256, np.float32))[1]]

    def replay(self) -> list[Any]:
        self.graph.replay()
        return []

    def new(self) -> list[Any]:
        return [self.comm.allreduce(mine())]

    def make(self, count: int) -> None:
        for _ in range(count):
            kind = self.kinds[self.comm.calls % len(self.kinds)]
            self.outputs[self.comm.calls + 1] = kind()

    def queued(self, number: int, ranks: int = LAST) -> Callable[[], bool]:
        """A condition that holds once the first ``ranks`` ranks have made so many calls."""
        page = self.comm._state.calls.page
        return lambda: all(page.calls.call_of(rank) >= number for rank in range(ranks))

    def check(self, returned: int, due: int, least: int | None = None) -> None:
        assert WORLD.allgather(returned) == [returned] * SIZE
        assert (due if least is None else least) <= returned <= due, f"rank {RANK}: {returned}, not {due}"
        assert len({*WORLD.allgather(self.comm.calls)}) == 1
        for number, arrays in self.outputs.items():
            for array in arrays if number <= returned else ():
                assert (cupy.asnumpy(array) == TOTAL).all(), f"rank {RANK}, call {number} of {returned}"
        self.outputs.clear()


def communicators() -> list[Callable[[], Communicator]]:
    return [
        lambda: Communicator(algorithm="one_shot"),
        lambda: Communicator(algorithm="two_shot"),
        lambda: Communicator(backend="nccl"),
    ]


def refused_behind_queued_calls() -> None:
    """The last rank's call fails, or its program does. The others have queued calls, one of each kind, behind it."""
    for make in communicators():
        with make() as comm:
            calls = Calls(comm)
            for before in range(len(calls.kinds)):
                known = comm.calls
                comm.synchronize()
                calls.make(3 + before)
                last = comm.calls
                if RANK == LAST:
                    until(calls.queued(last + BEHIND), "the others' calls")
                    if before % 2:
                        with raises(errors.ArgumentError, "there is no op"):
                            comm.allreduce(mine(), "mode")
                else:
                    calls.make(BEHIND)
                    if before % 3:
                        assert "PeerFailedError" in error_of(lambda: until(lambda: comm.synchronize() or 0, "a fault"))
                calls.check(comm.recover(), last, known if comm.backend == "nccl" else None)
                works(comm)
            calls.graph.close()


def late_behind_queued_calls() -> None:
    """The last rank does not come in time; and each rank but the last is one call further than the next one."""
    for make in communicators():
        with make() as comm:
            calls = Calls(comm)
            calls.make(4)
            comm.synchronize()
            last = comm.calls
            WORLD.Barrier()
            if RANK == LAST:
                told(comm)
            else:
                with clock.passing(121.0, calls.queued(last + 1)):
                    calls.make(1 + LAST - RANK)
                    told(comm)
            calls.check(comm.recover(), last)
            works(comm)
            calls.graph.close()


def late_on_the_stream() -> None:
    """All ranks have made the call, and the last one's GPU comes to it late: there it is right, on the others not."""
    for make in communicators()[:2]:  # NCCL's calls that all have made end with their data
        with make() as comm:
            calls, released = Calls(comm), threading.Event()
            calls.make(4)
            comm.synchronize()
            last = comm.calls
            WORLD.Barrier()
            if RANK == LAST:
                machine_streams.submit(0, lambda released=released: released.wait(HANG))
                calls.make(4)
                told(comm)
                released.set()
            else:
                with clock.passing(121.0, calls.queued(last + 4, SIZE)):
                    calls.make(4)
                    told(comm)
            calls.check(comm.recover(), last)
            works(comm)
            calls.graph.close()


def recovered_synchronously() -> None:
    """With IPCREDUCE_SYNC each call is waited for, and raises its own error."""
    with environment(IPCREDUCE_SYNC="1"), Communicator() as comm:
        calls = Calls(comm)
        calls.make(5)
        last = comm.calls
        if RANK == LAST:
            until(calls.queued(last + 1), "the others' call")
            with raises(errors.ArgumentError, "there is no op"):
                comm.allreduce(mine(), "mode")
        else:
            with raises(errors.PeerFailedError, "there is no op"):
                calls.make(1)
        calls.check(comm.recover(), last)
        works(comm)
        calls.graph.close()


def recovered_with_graphs_of_others() -> None:
    """Their kernels are counted with no call: what a synchronize() has confirmed counts at least."""
    with Communicator() as comm:
        calls, stream, source = Calls(comm), cupy.cuda.Stream(non_blocking=True), mine()
        with stream:
            stream.begin_capture()
            result = comm.allreduce(source)
            graph = stream.end_capture()
            with raises(errors.CaptureError, "recover() was called while the current stream is being captured"):
                stream.begin_capture()
                comm.recover()
            stream.end_capture()
        for replays in (0, 5):
            calls.make(4)
            comm.synchronize()
            known = comm.calls
            for _ in range(replays):
                graph.launch(stream)
            calls.make(4)
            last = comm.calls
            if RANK == LAST:
                until(calls.queued(last + BEHIND), "the others' calls")
            else:
                calls.make(BEHIND)
            calls.check(comm.recover(), last, known)
            works(comm)
        del result
        calls.graph.close()


def recovered_recordings() -> None:
    """A recording that fails is no right call, whether one rank's body raises or the recordings differ."""
    with Communicator() as comm:
        works(comm)
        for differs in (False, True):
            last, graph = comm.calls, Graph(comm)
            try:
                with graph.record():
                    comm.allreduce(mine(10 + (differs and RANK == LAST)))
                    if RANK == LAST and not differs:
                        raise ValueError("bad batch")
            except (ValueError, errors.PeerFailedError, errors.RankMismatchError):
                recovered = comm.recover()
            assert recovered == last, f"rank {RANK}: {recovered}, not {last}"
            assert len({*WORLD.allgather(comm.calls)}) == 1
            works(comm)
        with raises(errors.GraphStateError, "recover() was called within a recording"), Graph(comm).record():
            comm.recover()
        works(comm)


def recordings_of_some_ranks() -> None:
    """A runner has no recording on the rank on which its launch has failed. After that all ranks record again."""
    for met, is_first_fault in itertools.product(("by one", "in the next turn"), (True, False)):
        with Communicator() as comm:
            source, runner, session = mine(), GraphRunner(comm.allreduce, comm), comm._state.session
            usual, ends = session.run_recording, KeyError if RANK == LAST else errors.PeerFailedError

            def failing(*given: Any) -> None:
                if RANK != LAST:
                    usual(*given)  # noqa: B023
                WORLD.Barrier()
                if RANK == LAST:
                    raise KeyError

            def meet() -> None:
                if met == "by one" and RANK == LAST:  # noqa: B023
                    comm.recover()

            def turn(descriptor: int) -> None:
                with forward_context(descriptor):
                    total = runner(source)  # noqa: B023
                comm.synchronize()
                right(total)

            if is_first_fault:
                turn(1)
            else:  # the runner is new on ranks that have met after a fault, and on others
                with raises(errors.ArgumentError if RANK == LAST else errors.PeerFailedError):
                    comm.allreduce(source, "median" if RANK == LAST else "sum")
                    comm.synchronize()
                meet()
            with mock.patch.object(session, "run_recording", failing), raises(ends):
                turn(2)
            assert len(runner.recordings) == is_first_fault + (RANK != LAST)
            meet()
            first = runner.recordings.get(1)
            for descriptor in (1, 2, 3, 2, 1, 3):
                turn(descriptor)
            assert len(runner.recordings) == 3
            assert first in (None, runner.recordings[1]), "a recording of every rank was made again"
            runner.close()


def registered_on_some_ranks() -> None:
    """Direct kernels and others do not work together: the communicator is lost."""
    with Communicator(algorithm="direct") as comm:
        usual, ends = DirectGraphs._confirm, KeyError if RANK == LAST else errors.PeerLostError

        def interrupted(self: Any, number: int, error: Any, what: str) -> None:
            usual(self, number, error, what)
            if what.startswith("switching"):
                WORLD.Barrier()
                if RANK == LAST:
                    raise KeyError

        with mock.patch.object(DirectGraphs, "_confirm", interrupted), raises(ends):
            with Graph(comm).record():
                comm.allreduce(mine())
            comm.synchronize()
        with raises(errors.PeerLostError):
            works(comm)
    WORLD.Barrier()
    deferred_free.flush()  # a peer may have had this rank's memory mapped as this rank closed


SCENARIOS = [
    refused_behind_queued_calls, late_behind_queued_calls, late_on_the_stream, recovered_synchronously,
    recovered_with_graphs_of_others, recovered_recordings, recordings_of_some_ranks, registered_on_some_ranks,
]  # fmt: skip
