"""Threads that share a communicator: one order of calls, whatever comes between, and what goes back to the driver."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, Graph, Map, errors
from ipcreduce.arrays import views
from ipcreduce.calls import request
from ipcreduce.cuda import cupy_runtime
from ipcreduce.device import deferred_free, stream_order
from ipcreduce.device.stream_order import StreamOrder
from ipcreduce.graphs.direct import registration
from ipcreduce.graphs.direct.registration import DirectGraphs
from tests.shared.bounds import HANG, until
from tests.sim.scenarios.common import (
    LAST,
    OWN,
    RANK,
    SIZE,
    TOTAL,
    WORLD,
    delay,
    error_of,
    fault,
    grown,
    held,
    in_threads,
    mine,
    raises,
    right,
    works,
)
from tests.simulated import driver, machine_streams


# ---- one order of calls
def threads_after_a_fault() -> None:
    """Two threads call after a fault; either may be the one that meets the other ranks."""
    with Communicator() as comm:
        for _ in range(5):
            fault(comm)
            in_threads(*[lambda: [works(comm) for _ in range(10)]] * 2)


def per_thread_default_streams() -> None:
    """The same handle is another stream in each thread: a call, or a recording, waits for the other thread's."""
    ptds = cupy.cuda.Stream.ptds
    with Communicator() as comm:
        works(comm)
        source, larger = mine(), mine() * 10
        for recorded in (False, True):
            results: list[Any] = []
            first, second = threading.Event(), threading.Event()

            def one(results: list[Any] = results, recorded: bool = recorded, first: Any = first, second: Any = second):
                try:
                    with ptds:
                        delay(ptds.ptr)
                        if recorded:
                            graph = Graph(comm)
                            with graph.record():
                                results.append(comm.allreduce(source))
                        else:
                            results.append(comm.allreduce(source))
                finally:
                    first.set()
                second.wait(HANG)  # the stream ends with its thread
                with ptds:
                    right(results[0])

            def other(results: list[Any] = results, first: Any = first, second: Any = second) -> None:
                first.wait(HANG)
                with ptds:
                    results.append(comm.allreduce(larger))
                    second.set()
                    right(results[1], 10)

            in_threads(one, other)
            comm.synchronize()
            results.clear()
            WORLD.Barrier()


def copied_out_on_a_raw_stream() -> None:
    """synchronize() waits for all of a call on a stream that nobody keeps: also for the copy into a strided ``out``."""
    stream, array, wide = cupy.cuda.Stream(non_blocking=True), mine(), cupy.zeros(2000, np.float32)
    copy_into = views.copy_into

    def late(target: Any, value: Any, handle: int) -> None:
        delay(handle)
        copy_into(target, value, handle)

    with Communicator() as comm:
        cupy.cuda.Device(OWN).synchronize()
        views.copy_into = late
        try:
            comm.allreduce(array, out=wide[::2], stream=stream.ptr)
        finally:
            views.copy_into = copy_into
        comm.synchronize()
        right(wide[::2])
        works(comm)


def called_as_a_recording_ends() -> None:
    """Another thread's call, just as the recorded work is handed over to the caller's stream, comes behind it."""
    caller, stream = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with Communicator() as comm:
        works(comm)
        source, larger, outs = mine(), mine() * 10, [cupy.zeros(1000, np.float32) for _ in range(2)]
        found: list[BaseException | None] = []
        chain = StreamOrder.chain

        def call() -> None:
            with cupy.cuda.Device(OWN):
                delay(stream.ptr)
                found.append(error_of(lambda: comm.allreduce(larger, out=outs[0], stream=stream)))

        thread = threading.Thread(target=call, daemon=True)

        def late(order: StreamOrder, before: int, after: int) -> None:
            if after == caller.ptr:
                thread.start()
                thread.join(0.2)
            chain(order, before, after)

        with Graph(comm) as graph:
            with mock.patch.object(StreamOrder, "chain", late), caller, graph.record():
                result = comm.allreduce(source)
            thread.join(HANG)
            with caller:
                comm.allreduce(source, out=outs[1])
            cupy.cuda.Device().synchronize()
            comm.synchronize()
            right(result)
            right(outs[0], 10)
            right(outs[1])
            assert found == [""], found


def called_during_a_recording() -> None:
    """Another thread's call on a stream that does not capture is made at once, and is no part of the graph."""
    stream, source = cupy.cuda.Stream(non_blocking=True), mine()
    with Communicator() as comm:
        out = cupy.zeros(1000, np.float32)
        works(comm)
        with Graph(comm) as graph:
            with graph.record():
                result = comm.allreduce(source)
                in_threads(lambda: comm.allreduce(source, out=out, stream=stream))
            stream.synchronize()
            right(out)
            out.fill(0)
            for _ in range(3):
                graph.replay()
            right(result)
            right(out, 0)
        works(comm)


def alone() -> None:
    """With one rank a call is a copy, for which synchronize() waits too."""
    stream, array = cupy.cuda.Stream(non_blocking=True), mine()
    with Communicator(WORLD.Split(RANK, 0)) as comm:
        cupy.cuda.Device(OWN).synchronize()
        for given in (stream, stream.ptr):
            machine_streams.submit(stream.ptr, lambda: time.sleep(0.2))
            comm.allreduce(array, out=array, stream=given)
            comm.synchronize()
            assert machine_streams.is_idle(stream.ptr)


def finaliser_within_a_call() -> None:
    """A graph with direct kernels is collected between a call's look at the last stream and its launch."""
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with Communicator(algorithm="direct") as comm:
        works(comm)
        source, fresh, larger, outs = mine(), mine(), mine() * 10, [cupy.zeros(1000, np.float32) for _ in range(2)]
        graphs = [Graph(comm)]
        with first, graphs[0].record():
            comm.allreduce(source)
        assert graphs[0].state == "registered", graphs[0].describe()
        comm.synchronize()
        WORLD.Barrier()
        comm.allreduce(source, out=outs[0], stream=first)
        with _before_the_next_launch(lambda stream: (graphs.clear(), gc.collect(), delay(stream))):
            comm.allreduce(fresh, out=outs[0], stream=first)  # not a graph: it has not come before
        assert not graphs, "the graph is there still"
        comm.allreduce(larger, out=outs[1], stream=second)
        second.synchronize()
        first.synchronize()
        right(outs[0])
        right(outs[1], 10)
        comm.synchronize()


def closed_within_its_registration() -> None:
    """One rank's finaliser closes a graph as it is made direct: it ends with that, and the others go on."""
    for place, step in (
        (DirectGraphs, "register"), (DirectGraphs, "_register"), (DirectGraphs, "_export"),
        (registration, "set_kernel"), (DirectGraphs, "_use"),
    ):  # fmt: skip
        with Communicator(algorithm="direct") as comm:
            works(comm)
            source, results = mine(), []
            with Graph(comm) as graph, graph.record():
                comm.allreduce(source)
            del graph
            comm.synchronize()
            WORLD.Barrier()
            comm.synchronize()
            run, before, graphs = getattr(place, step), held(), [Graph(comm), Graph(comm)]
            closed, other = graphs

            def closing(*given: Any, run: Any = run, closed: Graph = closed) -> Any:
                if RANK == LAST:
                    closed.close()
                return run(*given)

            with mock.patch.object(place, step, closing), comm.capture():
                for graph in graphs:
                    with graph.record():
                        results.append(comm.allreduce(source))
            usable = "registered" if step in ("set_kernel", "_use") else "staged"
            assert closed.state == ("closed" if RANK == LAST else usable), (step, closed.describe())
            assert other.state == "registered", (step, other.describe())
            other.replay()
            right(results[1])
            while graphs:
                graphs.pop().close()
            del closed, other, graph, closing
            results.clear()
            for _ in range(2):
                comm.synchronize()
                WORLD.Barrier()
            assert not (left := grown(before)), f"rank {RANK}: {step}: {left}"


@contextlib.contextmanager
def _before_the_next_launch(action: Callable[[int], Any]) -> Iterator[None]:
    """Runs ``action(stream)`` as the next kernel is about to be launched."""
    run = driver.Launch.run

    def acting(launch: Any, stream: int) -> None:
        driver.Launch.run = run  # type: ignore[method-assign]
        action(stream)
        run(launch, stream)

    driver.Launch.run = acting  # type: ignore[method-assign]
    try:
        yield
    finally:
        driver.Launch.run = run  # type: ignore[method-assign]


# ---- what goes back to the driver
def given_back_in_several_threads() -> None:
    """Every step runs, once, one at a time and each thread's in their order."""
    with Communicator() as comm:
        context, running, done = comm._state.backend.context, threading.Lock(), []

        def step(*which: int) -> None:
            assert running.acquire(blocking=False), "two steps at once"
            done.append(which)
            running.release()

        def give_back(thread: int) -> None:
            for turn in range(500):
                deferred_free.free_later(context, *(lambda t=turn, k=k: step(thread, t, k) for k in range(3)))

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            in_threads(*(lambda thread=thread: give_back(thread) for thread in range(3)))
        finally:
            sys.setswitchinterval(interval)
        deferred_free.flush()
        for thread in range(3):
            due = [(thread, turn, k) for turn in range(500) for k in range(3)]
            assert [which for which in done if which[0] == thread] == due, f"rank {RANK}: thread {thread}"


def given_back_while_a_step_waits() -> None:
    """What a graph unmaps is unmapped once its kernels have ended, though another thread gives back meanwhile."""
    with Communicator() as comm:
        context, done, begun, ended = comm._state.backend.context, [], threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            done.append(ended.wait(HANG))

        def meanwhile() -> None:
            begun.wait(HANG)
            deferred_free.free_later(context, lambda: done.append("of another"))
            deferred_free.flush()
            assert done == [], f"rank {RANK}: {done}"
            ended.set()

        in_threads(lambda: deferred_free.free_later(context, wait, lambda: done.append("unmapped")), meanwhile)
        deferred_free.flush()
        assert done == [True, "unmapped", "of another"], f"rank {RANK}: {done}"


def packets_under_way() -> None:
    """The abort word ends no wait for what comes within a moment: it may be about a later call than this one."""
    stream, array = cupy.cuda.Stream(non_blocking=True), mine()
    cupy.cuda.Device(OWN).synchronize()
    with Communicator() as comm:
        works(comm)
        backend = comm._state.backend
        WORLD.Barrier()
        if RANK == 0:
            machine_streams.submit(stream.ptr, lambda: time.sleep(0.03))
            backend.page.abort()
        with stream:
            result = cupy.zeros(1000, np.float32)
            prepared = backend.prepare(request.plain(array.shape, "float32", "sum"))
            backend.run(partial(prepared.start, (array.data.ptr, result.data.ptr)), stream.ptr, stream)
            right(result)
        WORLD.Barrier()
        backend.reset([])
        backend.page.clear()
        WORLD.Barrier()
        works(comm)


def launches_that_fail() -> None:
    """While one is made, and after it has failed, the calls before it count as running until they are over."""
    kept, raw = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with Communicator() as comm:
        works(comm)
        order = comm._state.backend.order
        machine_streams.submit(kept.ptr, lambda: time.sleep(0.2))
        comm.allreduce(mine(), stream=kept)

        def launch(stream: int, error: type[Exception] | None = None) -> None:
            assert not order.is_over()
            if error is not None:
                raise error

        with contextlib.suppress(KeyError):
            order.launch(functools.partial(launch, error=KeyError), raw.ptr, None)
        assert not order.is_over()
        comm.synchronize()
        order.launch(launch, raw.ptr, None)
        comm.synchronize()
        works(comm)


def memory_is_short() -> None:
    """Memory of a closed graph that was put off, since the stream was busy, is there for the next recording."""
    stream, source = cupy.cuda.Stream(non_blocking=True), mine()

    def recorded(comm: Any) -> Graph:
        graph = Graph(comm)
        with graph.record():
            cupy.zeros(10 << 20, np.float32)  # 40 of 64 MB
            comm.allreduce(source)
        return graph

    with Communicator() as comm:
        first = recorded(comm)
        with stream:
            first.replay()
            machine_streams.submit(stream.ptr, lambda: time.sleep(0.3))
        first.close()
        assert first.pool.nbytes, "nothing was put off"
        second = recorded(comm)
        assert not first.pool.nbytes
        second.close()
        works(comm)


def unknown_is_no_end() -> None:
    """A stream that captures by now, or that one which does would block, cannot be asked whether calls still run."""
    blocking, apart = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with Communicator() as comm:
        order = comm._state.backend.order
        for used, captured in ((cupy.cuda.Stream.null, blocking), (apart, apart)):
            array = mine()
            cupy.cuda.Device(OWN).synchronize()
            comm.allreduce(array, stream=used)
            machine_streams.submit(used.ptr, lambda: time.sleep(0.2))
            captured.begin_capture()
            assert (order.is_over(), order.is_over(unknown=True)) == (False, True)
            captured.end_capture()
            assert not order.is_over()
            comm.synchronize()
            assert order.is_over()
        works(comm)


def asked_for(call: Callable[[], Any]) -> tuple[list[str], int]:
    """What a call asks CuPy's runtime for, but for its launch; and the number of calls of the driver with that."""
    asked = mock.Mock()
    names = "record_event", "wait_event", "is_capturing"
    originals = {name: getattr(cupy_runtime, name) for name in names}
    with mock.patch.multiple(cupy_runtime, **{name: getattr(asked, name) for name in names}):
        for name, original in originals.items():
            getattr(asked, name).side_effect = original
        before = driver.calls()
        call()
        return [name for name, *_ in asked.method_calls], driver.calls() - before


def what_the_driver_is_asked() -> None:
    """A cached call or replay on one stream is a launch; on two streams, from their first change on, an event more."""
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with Communicator() as comm, Graph(comm) as graph:
        source, out = mine(), mine()
        with first:
            comm.allreduce(source, out=out)
            with graph.record():  # on a stream of its own, which is no change of streams
                comm.allreduce(source, out=out)
            comm.allreduce(source, out=out)
        calls = {
            "an out": (functools.partial(comm.allreduce, source, out=out), ["is_capturing"]),
            "a new result": (functools.partial(comm.allreduce, source), ["is_capturing"]),
            "a replay": (graph.replay, []),
        }
        for streams_used, events in (([first], False), ([first, second], True), ([first], True)):
            for _ in range(4):
                for call, _asked in calls.values():
                    for used in streams_used:
                        with used:
                            call()
            for what, (call, asked) in calls.items():
                for used in streams_used * 2:
                    with used:
                        found = asked_for(call)
                    due = [*asked, "wait_event", "record_event"] if events else asked
                    assert found == (due, 1), (what, events, found)
        cupy.cuda.Device(OWN).synchronize()
        right(out)


def overtakes_nothing() -> None:
    """A call on another stream follows the last one: on rank 0 that one begins only once the other waits, or is over.

    The first change of streams has an event of its own; from then on there is one behind each call. Contiguous arrays
    go by the fast path, others by the usual one.
    """
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for step in (1, 2):
        sources, results = [mine()[::step], (mine() * 10)[::step]], [mine()[::step], mine()[::step]]
        cupy.cuda.Device(OWN).synchronize()
        _overtake(one, two, sources, results)


def _overtake(one: Any, two: Any, sources: list[Any], results: list[Any]) -> None:
    with Communicator() as comm:
        with one:
            comm.allreduce(sources[0], out=results[0])  # loads the kernel
        comm.synchronize()
        for before, after in ((one, two), (two, one), (one, two)):
            if RANK:
                after = before  # so that here the calls come in their order, whatever orders them
            else:
                overtaking = machine_streams.find(after.ptr)
                machine_streams.submit(before.ptr, functools.partial(until, overtaking.waits_or_ends()))
            for stream, source, result in zip((before, after), sources, results, strict=True):
                with stream:
                    comm.allreduce(source, out=result)
            comm.synchronize()
            right(results[0])
            right(results[1], 10)


def copies_overtake_nothing() -> None:
    """What a call copies before its kernels, from an array with gaps, and after them, is in the order of calls, too."""
    for backend in ("ipc", "nccl"):
        with Communicator(backend=backend) as comm:
            _copies_before_kernels(comm)
            for recorded in (False, True):
                for before in (True, False):
                    _copies_in_a_capture(comm, recorded, before)
            _copies_behind_a_graph(comm)


def _copies_before_kernels(comm: Communicator) -> None:
    """The call before begins only once this one waits, or is over."""
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source, weight = mine(2000), cupy.ones(10, np.float32)
    for call, due in (
        (lambda x: comm.allreduce(x[:, 0]), TOTAL * SIZE),
        (lambda x: comm.allreduce([x[:, 0]])[0], TOTAL * SIZE),
        (lambda x: comm.allgather(x[:, 0]), TOTAL),
        (lambda x: comm.reduce_scatter(x[:, 0], sizes=[100, *[0] * (SIZE - 1)]), TOTAL * SIZE),
        (lambda x: comm.allreduce(source[:100], then=Map("v * 0 + a", a=x[:, 0])), TOTAL),
        (lambda x: comm.allreduce_rmsnorm(x[:, :10], weight)[1], TOTAL * SIZE),
    ):
        result = cupy.zeros((100, 20), np.float32)
        call(result)  # loads the kernels
        comm.synchronize()
        machine_streams.submit(one.ptr, partial(until, machine_streams.find(two.ptr).waits_or_ends()))
        with one:
            comm.allreduce(source, out=result.reshape(-1))
        with two:
            found = call(result)
        comm.synchronize()
        assert (cupy.asnumpy(found) == due).all(), cupy.asnumpy(found)


def _copies_in_a_capture(comm: Communicator, recorded: bool, before: bool) -> None:
    """Two calls on two streams of one graph, whose nodes run in any order that its edges allow."""
    main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source = mine()
    comm.allreduce(source)
    for _ in range(6):
        result = cupy.zeros(2000, np.float32)[::2]
        cupy.cuda.Device(OWN).synchronize()
        with Graph(comm) if recorded else main as graph:
            with graph.record() if recorded else contextlib.nullcontext():
                stream = cupy.cuda.get_current_stream()
                if not recorded:
                    main.begin_capture()
                side.wait_event(stream.record())
                first = comm.allreduce(source, out=None if before else result)
                with side:
                    found = comm.allreduce(first[::2] if before else result)
                stream.wait_event(side.record())
                if not recorded:
                    main.end_capture().launch(main)
            comm.synchronize()
            right(found, SIZE)


def _copies_behind_a_graph(comm: Communicator) -> None:
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    source, result = mine(2000), cupy.zeros(2000, np.float32)
    cupy.cuda.Device(OWN).synchronize()
    with one:
        one.begin_capture()
        comm.allreduce(source, out=result)
        graph = one.end_capture()
    machine_streams.submit(one.ptr, partial(until, machine_streams.find(two.ptr).waits_or_ends()))
    graph.launch(one)
    with two:
        found = comm.allreduce(result[::2])
    comm.synchronize()
    right(found, SIZE)


def called_within_synchronize() -> None:
    """By a signal handler: the call is not forgotten by that wait. Within a call, nobody may wait for calls."""
    with Communicator() as comm:
        source, made, wait = mine(), [], stream_order.streams.synchronize_stream
        comm.allreduce(source)

        def interrupted(stream: Any) -> None:
            wait(stream)
            made.append(comm.allreduce(source))

        with mock.patch.object(stream_order.streams, "synchronize_stream", interrupted):
            comm.synchronize()
        last = comm._state.backend.order.last
        assert last.in_event or last.busy is not None, "a call on another stream would not follow it"
        comm.synchronize()
        right(made[0])
        comm._state.calls.within = True
        try:
            with raises(errors.UnsupportedError, "synchronize() was called within call"):
                comm.synchronize()
        finally:
            comm._state.calls.within = False
        works(comm)


SCENARIOS = [
    called_within_synchronize, overtakes_nothing, copies_overtake_nothing,
    threads_after_a_fault, per_thread_default_streams, copied_out_on_a_raw_stream, called_as_a_recording_ends,
    called_during_a_recording, finaliser_within_a_call, closed_within_its_registration, given_back_in_several_threads,
    given_back_while_a_step_waits, alone, memory_is_short, unknown_is_no_end, what_the_driver_is_asked,
    packets_under_way, launches_that_fail,
]  # fmt: skip
