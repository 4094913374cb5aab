"""Repeated calls and replays take a quicker way: it refuses, notices and orders what the long one does."""

from __future__ import annotations

import functools
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import (
    ArgumentError,
    CaptureError,
    Communicator,
    CudaError,
    Graph,
    GraphStateError,
    PeerFailedError,
    RankMismatchError,
)
from ipcreduce.calls import request
from ipcreduce.cuda import cupy_runtime
from ipcreduce.device import launch_cache
from ipcreduce.ipc import kernel_graphs
from tests.graphs.common import (
    GPUS,
    LAST,
    RANK,
    SIZE,
    TOTAL,
    WORLD,
    given_back,
    held_by_library,
    keep_busy,
    kept_graphs,
    mine,
    raises,
    right,
    works,
)
from tests.shared.bounds import HANG, late, no_hang, until

OTHER_THREAD = ThreadPoolExecutor(1)


def wrong_outputs(comm: Any) -> None:
    """Right behind a call that is right, the same with an ``out`` that is not."""
    memory = cupy.zeros(4004, np.uint8)
    array, misaligned, wide = mine(), memory[1:4001].view(np.float32), cupy.zeros(1500, np.float32)
    wrong = [
        (cupy.zeros(999, np.float32), "shape"),
        (cupy.zeros((10, 100), np.float32), "shape"),
        (cupy.zeros(1000, np.int32), "dtype"),
        (misaligned, "no multiple of the itemsize"),
        (np.zeros(1000, np.float32), "out is an ndarray"),
    ]
    if GPUS > 1:
        with cupy.cuda.Device((cupy.cuda.Device().id + 1) % GPUS):
            wrong.append((cupy.zeros(1000, np.float32), "GPU"))
    for out, words in wrong:
        for _ in range(2):
            right(comm.allreduce(array, out=wide[:1000]))
        with raises(ArgumentError, words):
            comm.allreduce(array, out=out)
    wide[:1000] = array
    for _ in range(2):
        right(comm.allreduce(array))
    right(comm.allreduce(wide[:1000], out=wide[500:]))  # which overlap
    with raises(ArgumentError, "there is no op"):
        comm.allreduce(array, ["sum"])
    works(comm)


def the_same_arrays(comm: Any) -> None:
    """Again and again: new contents, in place, another shape, arrays that take the place of others, many of them."""
    source, out = cupy.zeros((10, 100), np.float32), cupy.zeros((10, 100), np.float32)
    for turn in range(6):
        source.fill(RANK + turn)
        out.fill(-1)
        assert comm.allreduce(source, out=out) is out
        right(out, TOTAL - SIZE + SIZE * turn)
        comm.allreduce(source, "max", out=source)
        right(source, LAST + turn)
    source.fill(RANK + 1)
    for shape in ((1000,), (100, 10)):
        source.shape = out.shape = shape
        for _ in range(3):
            out.fill(-1)
            right(comm.allreduce(source, out=out))
    source.shape = (5, 200) if RANK == LAST else (200, 5)
    out.shape = source.shape
    for result in (out, source):
        with raises(RankMismatchError, "(5, 200)", "(200, 5)"):
            comm.allreduce(source, out=result)
            comm.synchronize()
        for _ in range(3):  # cached in place too, as it was
            source.shape = (20, 50)
            comm.allreduce(source, out=source)
        source.shape = (5, 200) if RANK == LAST else (200, 5)
    works(comm)


def arrays_in_the_place_of_others(comm: Any) -> None:
    """New arrays with the ids of old ones, which a call then must not be taken for."""
    total = cupy.zeros(300, np.int32)
    cached = comm._state.backend.launch_cache.objects
    array = cupy.full((300,), RANK + 1, np.int32)
    for _ in range(5):
        right(comm.allreduce(array, out=total), TOTAL)
    key = id(array), id(total), "sum"
    assert key in cached
    del array
    assert key not in cached
    for held in ([], None):  # ids come again, with other addresses and with the same
        for turn in range(20):
            array = cupy.full((300,), turn * (RANK + 1), np.int32)
            for _ in range(turn % 4):
                right(comm.allreduce(array, out=total), turn * TOTAL)
            comm.allreduce(array, out=array)
            right(array, turn * TOTAL)
            if held is not None:
                held.append(array[:])
            del array
    array = cupy.full((300,), RANK + 1, np.int32)
    for _ in range(5):
        comm.allreduce(array, "max", out=total)
    key = id(array), id(total), "max"
    assert key in cached
    del total
    assert key not in cached
    for _ in range(5):
        total = cupy.zeros(300, np.int32)
        comm.allreduce(array, "max", out=total)
        right(total, SIZE)


def full_tables(comm: Any) -> None:
    """More calls than the tables of cached ones, and than there may be graphs."""
    most = len(kept_graphs(comm)) + 2
    for module, name, limit in ((kernel_graphs, "_MAX_GRAPHS", most), (launch_cache, "_MAX", 6)):
        with mock.patch.object(module, name, limit):
            pairs = [(cupy.full((64,), RANK + i, np.float32), cupy.zeros(64, np.float32)) for i in range(5)]
            for _ in range(4):
                for i, (array, result) in enumerate(pairs):
                    result.fill(-1)
                    comm.allreduce(array, out=result)
                    right(result, TOTAL - SIZE + SIZE * i)
        if module is kernel_graphs and comm.backend == "ipc":
            assert len(kept_graphs(comm)) == most
    cached = comm._state.backend.launch_cache
    assert max(len(cached.objects), len(cached.places)) <= 6


def other_arrays_at_the_same_places(comm: Any) -> None:
    """New objects each time, over memory that was used before, by another op, in another shape and dtype."""
    source, *outs = (cupy.zeros(64, np.int32) for _ in range(3))
    draws = np.random.default_rng(5).integers(0, 1 << 30, (SIZE, 64)).astype(np.int32)
    source[...] = cupy.asarray(draws[RANK])
    placed = comm._state.backend.launch_cache.places
    before = {*placed}  # by scenarios that had this memory
    for turn in range(6):
        out = outs[turn % 2]
        calls = (62, np.int32, "sum"), (62, np.int32, "max"), (58, np.int32, "sum"), (31, np.int64, "sum")
        for count, dtype, op in (*calls, (62, np.uint32, "max")):
            parts = draws.view(dtype)[:, :count]
            expected = parts.max(0) if op == "max" else parts.sum(0, dtype=dtype)
            out.fill(-1)
            comm.allreduce(source.view(dtype)[:count], op, out=out.view(dtype)[:count])
            assert (cupy.asnumpy(out).view(dtype)[:count] == expected).all(), (count, dtype, op)
    added = {at: ready for at, ready in placed.items() if at not in before and at[1][0] == source.data.ptr}
    assert sum(ready is not None for ready in added.values()) == 10


def not_as_quick(comm: Any) -> None:
    """Arrays of a cached shape that need more than a launch: strided ones, and ones that overlap in part."""
    memory, wide = cupy.zeros(40000, np.float32), cupy.zeros(20008, np.float32)
    strided, plain, out = memory[::2], cupy.zeros(20000, np.float32), cupy.zeros(20000, np.float32)
    overlapping = wide[:20000], wide[8:]
    for _ in range(3):
        for array, result in ((plain, out), (strided, out), (plain, strided), overlapping):
            array.fill(RANK + 1)
            right(comm.allreduce(array, out=result))
        right(memory[1::2], 0)
    assert (id(overlapping[0]), id(overlapping[1]), "sum") not in comm._state.backend.launch_cache.objects
    works(comm)


def in_several_launches(comm: Any) -> None:
    """A message that is longer than the workspace: in place, into an output and into new arrays, in any order."""
    count = 200_003
    with Communicator(workspace=1 << 20) as small:
        arrays = [cupy.zeros(count, np.float32) for _ in range(2)]
        usual = mock.patch.object(small._state.device, "call", side_effect=small._state.device.call)
        with usual as calls:
            for turn in range(9):
                values = np.arange(count, dtype=np.float32) % 1000 * (turn + 1)
                arrays[0].set(values * (RANK + 1))
                arrays[1].fill(-1)
                out = (arrays[1], None, arrays[0])[turn % 3]
                result = small.allreduce(arrays[0], out=out)
                assert out is None or result is out
                assert (cupy.asnumpy(result) == values * TOTAL).all(), turn
                works(small)
        long = [one for one in calls.call_args_list if one.args[0].array.size == count]
        assert len(long) <= 3, "each of the three ways is quick by now"
        if SIZE > 1:
            _fails_in_the_middle(small, arrays[0])


def _fails_in_the_middle(small: Communicator, array: Any) -> None:
    """Of the launches of a quick call, the second one fails on a rank: the others hear of it, and the next is right."""
    last = small._state.backend.prepare(request.plain(array.shape, "float32", "sum")).steps[1].launch
    run = type(last).run

    def failing(launch: Any, stream: Any) -> None:
        if launch is last:
            raise CudaError("cuLaunchKernelEx", 999, "unknown")
        run(launch, stream)

    if RANK == LAST:
        with no_hang(), mock.patch.object(type(last), "run", failing), raises(CudaError, "cuLaunchKernelEx"):
            small.allreduce(array, out=array)
    else:
        with no_hang(), raises(PeerFailedError, f"rank {LAST}", "cuLaunchKernelEx"):
            small.allreduce(array, out=array)
            small.synchronize()
    array.fill(RANK + 1)
    right(small.allreduce(array, out=array))


def errors_are_told(comm: Any) -> None:
    """Memory that is short, and an interrupt, within a call that is quick by now: the others hear of it at once."""
    source, graph = mine(3000), Graph(comm)
    raised: dict[str, BaseException] = {}

    def raising(name: str) -> Any:
        before = getattr(cupy_runtime, name)

        def function(*arguments: Any) -> Any:
            if name in raised:
                raise raised[name]
            return before(*arguments)

        return mock.patch.object(cupy_runtime, name, function)

    with raising("launch_graph"), graph.record():
        total = comm.allreduce(source)
    eager = functools.partial(comm.allreduce, source)
    no_memory = mock.patch.object(cupy, "empty", side_effect=cupy.cuda.memory.OutOfMemoryError(1, 2))
    interrupt = mock.patch.object(cupy_runtime, "get_current_stream", side_effect=KeyboardInterrupt())
    interrupted_launch = mock.patch.dict(raised, launch_graph=KeyboardInterrupt())
    for call, fault, kind in (
        (eager, no_memory, MemoryError),
        (eager, interrupt, KeyboardInterrupt),
        (graph.replay, interrupt, KeyboardInterrupt),
        (graph.replay, interrupted_launch, KeyboardInterrupt),
    ):
        for _ in range(3):
            call()
        WORLD.Barrier()
        if RANK == LAST:
            with no_hang(), fault, raises(kind):
                call()
        else:
            with no_hang(), raises(PeerFailedError, f"rank {LAST}"):
                call()
                comm.synchronize()
        works(comm)
    graph.replay()
    silent = mock.patch.object(cupy_runtime, "current_context", side_effect=RuntimeError("the driver does not say"))
    with silent:
        graph.replay()  # on the usual path
    right(total)
    graph.close()


def interrupted_while_waiting(comm: Any) -> None:
    """For the lock, which another thread holds: the interrupt comes as itself, and nothing else is changed."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
        for call, result in ((graph.replay, total), (lambda: comm.allreduce(source, out=out), out)):
            for _ in range(3):
                call()
            locked, done = threading.Event(), threading.Event()

            def hold(locked: threading.Event = locked, done: threading.Event = done) -> None:
                with comm._state.calls.lock:
                    locked.set()
                    done.wait(HANG)

            holder = OTHER_THREAD.submit(hold)
            locked.wait(HANG)
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            with raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                call()
            signal.signal(signal.SIGALRM, before)
            done.set()
            holder.result()
            result.fill(-1)
            call()
            right(result)
    works(comm)


def not_counted(comm: Any) -> None:
    """What a rank cannot do at all, and no other waits for, is no call: the ranks' next ones meet."""
    stream, source, other = cupy.cuda.Stream(non_blocking=True), mine(), mine(2000)
    cupy.cuda.Device().synchronize()
    works(comm)
    comm.synchronize()
    if RANK == LAST:
        with stream:
            stream.begin_capture()
            with Graph(comm) as graph, raises(CaptureError, "being captured"):
                graph.record().__enter__()
            stream.end_capture()
    for array in (source, other, source):
        right(comm.allreduce(array))
    with Graph(comm) as graph, Graph(comm) as recorded:
        with recorded.record():
            comm.allreduce(source)
        for _ in range(2):
            recorded.replay()
        caller = cupy.cuda.get_current_stream()
        with graph.record():
            if RANK == LAST:
                with caller, raises(GraphStateError, "within a recording"):  # where a replay is quick by now
                    recorded.replay()
            total = comm.allreduce(source)
            if RANK == LAST:
                with raises(GraphStateError, "within a recording"):
                    recorded.replay()
            graph.add_eager(lambda: right(comm.allreduce(other)))
            last = comm.allreduce(total)
        right(last, TOTAL * SIZE)
        graph.replay()
        right(last, TOTAL * SIZE)
    works(comm)


def quick_on_two_streams(comm: Any) -> None:
    """A call on another stream than the last one still comes behind it."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    source, middle, out = mine(), cupy.zeros(1000, np.float32), cupy.zeros(1000, np.float32)
    cupy.cuda.Device().synchronize()
    with Graph(comm) as graph:
        with graph.record():
            comm.allreduce(middle, out=out)
        comm.synchronize()
        for last in (lambda: comm.allreduce(middle, out=out), graph.replay):
            for stream, call in zip(streams, (lambda: comm.allreduce(source, out=middle), last), strict=True):
                with stream:
                    for _ in range(4):
                        call()
                    stream.synchronize()
            with streams[0]:
                comm.allreduce(source, out=middle)
                middle.fill(-1)
                out.fill(-1)
                keep_busy(streams[0])
                comm.allreduce(source, out=middle)
            with streams[1]:
                last()
                right(out, TOTAL * SIZE)
    works(comm)


def outs_shape(comm: Any) -> None:
    """Assigned to once the arrays are cached: refused as at first."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    for _ in range(4):
        right(comm.allreduce(source, out=out))
    out.shape = (10, 100)
    with raises(ArgumentError, "shape"):
        comm.allreduce(source, out=out)
    works(comm)


def replaced_meanwhile(comm: Any) -> None:
    """Another thread's registration swaps what a replay is about to launch, which waits for the lock."""
    with Communicator(algorithm="direct") as direct:
        graph, stream = Graph(direct), cupy.cuda.Stream(non_blocking=True)
        source, total = mine(20000), direct.empty(20000)
        cupy.cuda.Device().synchronize()
        with stream, direct.capture():
            with graph.record():
                direct.allreduce(source, out=total)
            for _ in range(2):
                graph.replay()
            stream.synchronize()
            executable = graph.segments[0].executable
            direct._state.calls.lock.acquire()
            replay = OTHER_THREAD.submit(on(stream, graph.replay))
            late(0.2)  # it waits for the lock now
        assert graph.segments[0].executable is not executable
        WORLD.Barrier()
        direct._state.calls.lock.release()
        replay.result()
        with stream:  # which nothing else orders behind the default one
            total.fill(-1)
            graph.replay()
            right(total)
        graph.close()


def each_rank_its_own_way(comm: Any) -> None:
    """The same arrays on one rank, views of them, new results or another stream's handle on others."""
    source, out, draw = cupy.zeros(1000, np.float32), cupy.zeros(1000, np.float32), random.Random(RANK)
    ways = [
        lambda: comm.allreduce(source, out=out),
        lambda: comm.allreduce(source[:], out=out[:]),
        lambda: comm.allreduce(source),
        lambda: comm.allreduce(source, out=out, stream=cupy.cuda.get_current_stream()),
    ]
    for turn in range(40):
        source.fill(RANK + turn)
        results = [draw.choice(ways)() for _ in range(3)]
        for result in results:
            right(result, TOTAL - SIZE + SIZE * turn)
    works(comm)


def quick_in_a_thread_and_in_captures(comm: Any) -> None:
    """Calls that are quick by now: from a thread that has no context, and captured, by us and by others."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(4):
            right(comm.allreduce(source, out=out))
        out.fill(-1)
        stream.begin_capture()
        comm.allreduce(source, out=out)
        captured = stream.end_capture()
        right(out, -1)
        captured.launch(stream)
        right(out)
        with Graph(comm) as graph:
            with graph.record():
                comm.allreduce(source, out=out)
            assert "sum of float32 (1000,)" in graph.describe()
            for call in (graph.replay, lambda: comm.allreduce(source, out=out)):
                for _ in range(3):
                    call()
                out.fill(-1)
                stream.synchronize()
                OTHER_THREAD.submit(on(stream, call)).result()
                right(out)
    works(comm)


def on(stream: Any, call: Callable[[], Any]) -> Callable[[], None]:
    """The call with ``stream`` current."""

    device = cupy.cuda.Device().id

    def run() -> None:
        if device:
            cupy.cuda.Device(device).use()
        with stream:
            call()

    return run


def a_replay_is_not_captured(comm: Any) -> None:
    """On the stream of the last call and on another one: the driver has no such thing."""
    source, streams = mine(), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
        for captures in streams:
            with streams[0]:
                for _ in range(3):
                    graph.replay()
                streams[0].synchronize()
            with captures:
                captures.begin_capture()
                with raises((CaptureError, PeerFailedError), "part of another one"):  # its own, or one of another rank
                    graph.replay()
                with suppress(RuntimeError):  # the capture has ended, if this rank came so far
                    captures.end_capture()
            WORLD.Barrier()
            with streams[0]:
                works(comm)
                total.fill(-1)
                graph.replay()
                right(total)


def faults_are_noticed(comm: Any) -> None:
    """A rank's refusal, once it is known, ends the others' next call at once, and not only later ones."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
        for call, result in ((graph.replay, total), (lambda: comm.allreduce(source, out=out), out)):
            for _ in range(2):
                call()
            WORLD.Barrier()
            if RANK == LAST:
                with raises(ArgumentError, "there is no op"):
                    comm.allreduce(source, "mode")
            WORLD.Barrier()
            if RANK != LAST:
                with raises(PeerFailedError, f"rank {LAST}", "there is no op"):
                    call()
            WORLD.Barrier()  # a peer that went on would be seen to make another call
            result.fill(-1)
            call()
            right(result)
    works(comm)


def differences_are_noticed(comm: Any) -> None:
    """Other arrays, and other graphs, on one rank, behind calls that agree."""
    source, larger = mine(), mine(2000)
    with Graph(comm) as graph, Graph(comm) as other:
        with graph.record():
            total = comm.allreduce(source)
        with other.record():
            comm.allreduce(larger)
        outs = cupy.zeros(1000, np.float32), cupy.zeros(2000, np.float32)
        for _ in range(2):
            comm.allreduce(larger, out=outs[1])
            comm.allreduce(source, out=outs[0])
        with raises(RankMismatchError, "(1000,)", "(2000,)"):
            comm.allreduce(larger if RANK == LAST else source, out=outs[RANK == LAST])
            comm.synchronize()
        for _ in range(2):
            graph.replay()
        with raises(RankMismatchError, "(1000,)", "(2000,)"):
            (other if RANK == LAST else graph).replay()
            comm.synchronize()
        graph.replay()
        right(total)
        graph.replay()
        graph.close()
        with raises(GraphStateError, "replay()", "closed"):
            graph.replay()
    works(comm)


def differences_of_ranks_apart(comm: Any) -> None:
    """Of two that are no neighbours, while those between have not come: told by both, before any of these comes."""
    between = RANK % 2 == 1 or RANK > 2
    WORLD.Barrier()
    if SIZE > 3 and between:
        until(lambda: comm._state.backend.page.aborted, "a difference")
    if SIZE > 3:
        with raises(RankMismatchError, "(50,)", "(51,)"):
            comm.allreduce(mine(51 if RANK == 2 else 50))
            comm.synchronize()
    works(comm)


def nothing_waits_for_a_late_rank(comm: Any) -> None:
    """While a call waits for a rank: not a call, a replay, close(), or the end of an array. Memory goes back later."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
        closed = Graph(comm)
        with closed.record():
            last = comm.allreduce(source)
        for _ in range(2):
            graph.replay()
        comm.synchronize()
        WORLD.Barrier()
        if RANK == LAST:
            WORLD.Barrier()  # which the others come to when they have made all of these, or never
        comm.allreduce(source, out=out)
        comm.allreduce(out, out=out)
        graph.replay()
        closed.close()
        del last
        if RANK != LAST:
            WORLD.Barrier()
        right(out, TOTAL * SIZE)
        right(total)
        comm.synchronize()
        WORLD.Barrier()
        comm.synchronize()  # no peer has it mapped any more, if any had
        assert closed.pool.nbytes == 0, closed.describe()
    works(comm)


def not_within_a_recording(comm: Any) -> None:
    """A replay on the stream of the last call, within another graph's recording, is refused as any other there."""
    stream, source = cupy.cuda.Stream(non_blocking=True), mine()
    with Communicator() as another:
        for recorder in (comm, another):
            with Graph(comm) as graph, Graph(recorder) as outer:
                with graph.record():
                    comm.allreduce(source)
                with stream:
                    for _ in range(2):
                        graph.replay()
                with outer.record():
                    with stream, raises(GraphStateError, "within a recording"):
                        graph.replay()
                    total = recorder.allreduce(source)
                right(total)
    works(comm)


def closing_gives_back(comm: Any) -> None:
    """The graphs that calls made again have left."""
    source, out = mine(), cupy.zeros(1000, np.float32)
    before = held_by_library(comm)
    with Communicator() as brief:
        for _ in range(4):
            right(brief.allreduce(source, out=out))
        assert kept_graphs(brief) or comm.backend == "nccl"
    given_back(comm, before)


def closed_by_another_thread(comm: Any) -> None:
    """Just before the launch: nothing that is gone is launched."""
    source = mine()
    with Graph(comm) as graph:
        with graph.record():
            comm.allreduce(source)
        (segment,) = graph.segments
        graph.replay()
        comm.synchronize()
    comm.synchronize()
    assert segment.executable is None
    with raises(GraphStateError, "another thread"):
        comm._graph_session.launch(segment, 0, None)
    works(comm)


SCENARIOS = [
    wrong_outputs,
    the_same_arrays,
    arrays_in_the_place_of_others,
    full_tables,
    other_arrays_at_the_same_places,
    not_as_quick,
    in_several_launches,
    errors_are_told,
    interrupted_while_waiting,
    not_counted,
    quick_on_two_streams,
    outs_shape,
    replaced_meanwhile,
    each_rank_its_own_way,
    quick_in_a_thread_and_in_captures,
    a_replay_is_not_captured,
    faults_are_noticed,
    differences_are_noticed,
    differences_of_ranks_apart,
    nothing_waits_for_a_late_rank,
    not_within_a_recording,
    closing_gives_back,
    closed_by_another_thread,
]
