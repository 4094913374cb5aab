"""Captures, recordings and others', and what happens beside them: faults, graphs that are collected, eager calls."""

from __future__ import annotations

import gc
import threading
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, Graph, errors
from ipcreduce.cuda import graph as driver_graph
from tests.shared.bounds import HANG
from tests.sim.scenarios.common import LAST, RANK, SIZE, WORLD, error_of, fault, mine, raises, right, works
from tests.simulated import driver, driver_streams, machine_streams


def captured_after_a_fault() -> None:
    """A foreign capture begins with a fault to settle: refused, and whole; one call later it works."""
    comm, stream = Communicator(), cupy.cuda.Stream(non_blocking=True)
    source, target, other = mine(), cupy.zeros(1000, np.float32), cupy.zeros(1000, np.float32)
    for heard in (True, False):
        for mode in ("relaxed", "thread_local", "global"):
            works(comm, 1000)
            cupy.cuda.Device().synchronize()
            if not heard and RANK != 0:
                comm.allreduce(source, out=target)  # ends without the data of rank 0
            WORLD.Barrier()
            if heard or RANK == 0:
                fault(comm)
            WORLD.Barrier()
            stream.begin_capture(mode)
            if not heard and RANK != 0:
                with raises(errors.PeerFailedError, "rank 0 raised an error"):
                    comm.allreduce(source, out=target, stream=stream)
            with raises(errors.CaptureError, f"rank {RANK}, call", "not captured on every rank, then capture again"):
                comm.allreduce(source, out=target, stream=stream)
            with stream:
                other += source
            graph = stream.end_capture()
            other.fill(0)
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert (cupy.asnumpy(other) == RANK + 1).all(), "what else was captured"
            works(comm)
            stream.begin_capture(mode)
            comm.allreduce(source, out=target, stream=stream)
            graph = stream.end_capture()
            for factor in (1, 2, 3):
                source.fill((RANK + 1) * factor)
                cupy.cuda.Device().synchronize()
                graph.launch(stream)
                stream.synchronize()
                right(target, factor)
            source.fill(RANK + 1)
    comm.close()


def one_edge_is_enough() -> None:
    """All-reduces in a row on one stream, however it is given, follow each other by one edge: a second is ordinary."""
    stream, source, target = cupy.cuda.Stream(non_blocking=True), mine(), cupy.zeros(1000, np.float32)

    def body(comm: Communicator, given: object) -> None:
        for _ in range(4):
            comm.allreduce(source, out=target, stream=given)

    with Communicator() as comm, Graph(comm) as graph:
        cupy.cuda.Device().synchronize()
        body(comm, stream)
        with graph.record():
            body(comm, None)
        captured = [driver_streams.graphs[graph.segments[0].graph]]
        for given in (stream, stream.ptr):
            stream.begin_capture()
            body(comm, given)
            captured.append(stream.end_capture().nodes)
        for nodes in captured:
            assert [(len(node.after), node.waits) for node in nodes] == [(0, 0), (1, 0), (1, 0), (1, 0)]
        works(comm)


def behind_a_kernel_that_starts_early() -> None:
    """On one stream a kernel between two all-reduces keeps its early start: no second edge. Else there is one."""
    first, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source, target, between = mine(), cupy.zeros(1000, np.float32), cupy.zeros(10)
    with Communicator() as comm:
        cupy.cuda.Device().synchronize()
        for early in (False, True):
            with mock.patch.object(driver_graph, "lets_start_early", lambda node, early=early: early):
                first.begin_capture()
                for _ in range(2):
                    comm.allreduce(source, out=target, stream=first)
                    with first:
                        between += 1
                other.wait_event(first.record())
                comm.allreduce(source, out=target, stream=other)
                first.wait_event(other.record())
                nodes = first.end_capture().nodes
            assert [node.after for node in nodes] == [set(), {0}, {1} if early else {0, 1}, {2}, {2, 3}]
        works(comm)


def order_of_a_graph_of_others() -> None:
    """Its first call waits for the last call before each launch, and its end is recorded behind its last call."""
    stream, source, target = cupy.cuda.Stream(non_blocking=True), mine(), cupy.zeros(1000, np.float32)
    with Communicator() as comm:
        comm.allreduce(source, out=target)
        cupy.cuda.Device().synchronize()
        stream.begin_capture()
        for _ in range(2):
            comm.allreduce(source, out=target, stream=stream)
        nodes = stream.end_capture().all_nodes
        calls = [index for index, node in enumerate(nodes) if node.work is not None]
        (wait,) = (index for index, node in enumerate(nodes) if node.waits_for is not None)
        (end,) = (index for index, node in enumerate(nodes) if node.records is not None)
        assert wait in nodes[calls[0]].after
        assert nodes[end].after == {calls[-1]}
        works(comm)


def captured_on_a_blocking_stream() -> None:
    """As CuPy's streams are by default, after an eager call on the default stream: that cannot be asked meanwhile."""
    stream, source, target = cupy.cuda.Stream(), mine(), cupy.zeros(1000, np.float32)
    with Communicator() as comm:
        comm.allreduce(source, out=target)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            comm.allreduce(source, out=target)
            comm.allreduce(target, out=target)
            graph = stream.end_capture()
        graph.launch(stream)
        right(target, SIZE)
        works(comm)


def joined_within_a_recording() -> None:
    """As joins_an_open_capture, in a recording's body."""
    other = cupy.cuda.Stream(non_blocking=True)
    with Communicator() as comm, Graph(comm) as graph:
        source, outs = mine(), [cupy.zeros(1000, np.float32) for _ in range(3)]
        cupy.cuda.Device().synchronize()
        with graph.record():
            here = cupy.cuda.get_current_stream()
            fork = here.record()
            comm.allreduce(source, out=outs[0])
            with other:
                for _ in range(2):
                    comm.allreduce(source, out=outs[1])
                other.wait_event(fork)
                comm.allreduce(source, out=outs[1])
            comm.allreduce(source, out=outs[2])
            here.wait_event(other.record())
        nodes = driver_streams.graphs[graph.segments[0].graph]
        assert nodes[1].after >= {0}
        assert nodes[2].after >= {1}
        works(comm)


def joins_an_open_capture() -> None:
    """A stream whose eager calls took the quick way joins a capture that has calls: edges to them and from them."""
    first, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with Communicator() as comm:
        source, larger, outs = mine(), mine() * 10, [cupy.zeros(1000, np.float32) for _ in range(3)]
        cupy.cuda.Device().synchronize()
        for late in (False, True):
            first.begin_capture()
            fork = first.record()
            comm.allreduce(source, out=outs[0], stream=first)
            with other:
                for _ in range(3):
                    comm.allreduce(source, out=outs[1])
            other.wait_event(first.record() if late else fork)
            with other:
                comm.allreduce(larger, out=outs[1])
            comm.allreduce(source, out=outs[2], stream=first)
            first.wait_event(other.record())
            nodes = first.end_capture().nodes
            assert nodes[1].after >= {0}, "from the capture's call to that of the stream that has joined"
            assert nodes[2].after >= {1}, "and back"
            comm.synchronize()
        works(comm)


def fault_within_a_recording() -> None:
    """A call beside the recording is refused, which the body catches: later calls in the body work, the recording not.

    The fault is settled while the recording's stream captures.
    """
    stream, source = cupy.cuda.Stream(non_blocking=True), mine()

    def body(comm: Communicator) -> None:
        comm.allreduce(source)
        if RANK == LAST:
            with raises(errors.ArgumentError, "there is no op"):
                comm.allreduce(source, "mode", stream=stream)
        else:
            with raises(errors.PeerFailedError, f"rank {LAST} raised an error"):
                comm.allreduce(source, stream=stream)
                comm.synchronize(stream)
        for _ in range(2):
            with stream:
                result = comm.allreduce(mine())
                comm.synchronize(stream)
                right(result)

    with Communicator() as comm:
        works(comm)
        kind = errors.ArgumentError if RANK == LAST else errors.PeerFailedError
        with Graph(comm) as graph:
            with raises(kind, "there is no op"), graph.record():
                body(comm)
            assert graph.state == "failed", graph.state
        works(comm)


def fault_beside_a_recording() -> None:
    """A fault of one thread's call is settled while another thread records: the recording becomes a graph."""
    in_body, settled, found = threading.Event(), threading.Event(), []
    with Communicator() as comm:
        works(comm)
        source = mine()

        def record() -> None:
            with cupy.cuda.Device(RANK), Graph(comm) as graph:
                with graph.record():
                    result = comm.allreduce(source)
                    in_body.set()
                    settled.wait(HANG)
                right(result)
                graph.replay()
                right(result)

        thread = threading.Thread(target=lambda: found.append(error_of(record)), daemon=True)
        thread.start()
        in_body.wait(HANG)
        try:
            fault(comm)
            works(comm)
        finally:
            settled.set()
            thread.join(HANG)
        assert found == [""], f"rank {RANK}: {found}"
        works(comm)


def graph_dropped_within_a_capture() -> None:
    """A graph is collected while a foreign stream captures, in the mode that spares no other call: it stays whole."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    with Communicator() as comm:
        works(comm)
        for calls_before in (0, 1, 2):
            stream = cupy.cuda.Stream(non_blocking=True)
            graphs = [Graph(comm)]
            with graphs[0].record():
                comm.allreduce(source)
            comm.synchronize()
            with stream:
                for _ in range(calls_before):
                    comm.allreduce(source, out=out)
                stream.begin_capture("global")
                comm.allreduce(source, out=out)
                graphs.clear()
                gc.collect()
                captured = stream.end_capture()
                for factor in (2, 3):
                    source.fill((RANK + 1) * factor)
                    captured.launch(stream)
                    right(out, factor)
                source.fill(RANK + 1)
                comm.synchronize(stream)
            works(comm)


def eager_call_behind_a_capture() -> None:
    """An eager call that has to follow one on a stream that captures now is refused, and the others hear of it."""
    stream, other, source = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True), mine()
    with Communicator() as comm:
        for _ in range(2):
            comm.allreduce(source, stream=stream)
            WORLD.Barrier()
            if RANK == LAST:
                stream.begin_capture()
                with raises(errors.CaptureError, "is now being captured", "Call synchronize() before"):
                    comm.allreduce(source, stream=other)
                stream.end_capture()
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "is now being captured"):
                    comm.allreduce(source, stream=other)
                    comm.synchronize()
            works(comm)


def first_use_while_a_call_runs() -> None:
    """Rank 0 makes a call, then one of another op and size, and only then lets the others come to the first.

    Loading a kernel waits for the device, as it does on real ones.
    """
    load = driver.load_module

    def load_and_wait(cubin: bytes) -> int:
        machine_streams.wait_for_all()
        return load(cubin)

    for algorithm in (None, "direct"):
        with (
            mock.patch.object(driver, "load_module", load_and_wait),
            Communicator(algorithm=algorithm) as comm,
        ):
            small, large, longer = mine(), mine(3000), mine(900_000)
            works(comm)
            cupy.cuda.Device().synchronize()
            WORLD.Barrier()
            if RANK != 0:
                WORLD.recv(source=0)
            first = comm.allreduce(small)
            results = [comm.allreduce(large, "max"), comm.allreduce(longer, "min")]
            if RANK == 0:
                for rank in range(1, SIZE):
                    WORLD.send(None, rank)
            comm.synchronize()
            right(first)
            for result, due in zip(results, (SIZE, 1), strict=True):
                assert (cupy.asnumpy(result) == due).all()
            never = mock.patch.object(driver, "load_module", side_effect=AssertionError("loaded once more"))
            with never, Communicator(algorithm=algorithm) as another:
                works(another)


SCENARIOS = [
    captured_after_a_fault, fault_within_a_recording, fault_beside_a_recording, graph_dropped_within_a_capture,
    eager_call_behind_a_capture, one_edge_is_enough, behind_a_kernel_that_starts_early, joins_an_open_capture,
    joined_within_a_recording, captured_on_a_blocking_stream, order_of_a_graph_of_others, first_use_while_a_call_runs,
]  # fmt: skip
