"""Breaks: functions that run eagerly between the segments of a graph."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from ipcreduce import ArgumentError, CaptureError, Communicator, Graph, GraphStateError, PeerFailedError, eager_break
from tests.graphs.common import (
    LAST,
    RANK,
    SIZE,
    TOTAL,
    WORLD,
    Canaries,
    given_back,
    held_by_library,
    mine,
    raises,
    right,
    works,
)
from tests.shared.bounds import HANG, late, no_hang


def real_data(comm: Any) -> None:
    """Breaks first, last, in a row, in a loop: each sees real data, at recording and at every replay."""
    source, seen = mine(100), []
    scratch = cupy.zeros(100, np.float32)

    @eager_break
    def look(array: Any, add: float, *, out: Any) -> None:
        seen.append(float(cupy.asnumpy(array)[0]))
        out[...] = array
        out += add

    with Graph(comm) as graph:
        with graph.record():
            look(source, 0.5, out=scratch)
            total = comm.allreduce(scratch)
            for turn in range(3):
                look(total, turn, out=scratch)
                total = comm.allreduce(scratch)
            look(total, 1, out=scratch)
            look(scratch, 1, out=scratch)
        text = graph.describe()
        assert text.count("segment:") == 4, text
        assert text.count("break: real_data.<locals>.look") == 6, text

        def expected(value: float) -> list[float]:
            values = [value, SIZE * (SIZE + 1) / 2 * value / (RANK + 1) + 0.5 * SIZE]
            for turn in range(3):
                values.append((values[-1] + turn) * SIZE)
            return [*values, values[-1] + 1]

        for turn in range(5):
            value = float((RANK + 1) * (turn or 1))
            if turn:
                source.fill(value)
                seen.clear()
                graph.replay()
            assert seen == expected(value), (seen, expected(value))
            right(scratch, expected(value)[-1] + 1)
    works(comm)


def add_eager(comm: Any) -> None:
    """The method: its result is the function's; refused where there is no recording; plain with breaks=False."""
    source, calls = mine(50), []
    graph = Graph(comm)
    with raises(GraphStateError, "add_eager() was called outside of this graph's recording", "empty"):
        graph.add_eager(lambda: None)
    with graph.record():
        total = comm.allreduce(source)
        assert graph.add_eager(lambda: calls.append(1)) is None
        assert graph.add_eager(lambda: 7.5) == 7.5
        assert graph.add_eager(lambda: total) is total
        total += 1
    graph.replay()
    graph.replay()
    assert len(calls) == 3
    right(total, TOTAL + 1)
    graph.close()
    with Graph(comm, breaks=False) as plain:
        with plain.record():
            total = comm.allreduce(source)
            plain.add_eager(lambda: calls.append(1))
            doubled = eager_break(lambda: total * 2)()
        plain.replay()
        right(doubled, TOTAL * 2)
        assert len(calls) == 4
        assert plain.describe().count("segment:") == 1
    works(comm)


def nested(comm: Any) -> None:
    """Decorated calls within a break, at recording and at replay, are part of it."""
    source, inner_calls = mine(50), []

    @eager_break
    def inner(array: Any) -> None:
        inner_calls.append(1)
        array += 1

    @eager_break
    def outer(array: Any) -> None:
        inner(array)
        inner(array)

    outer(source)
    source -= 2
    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
            outer(total)
            result = total * 1
        assert graph.describe().count("break:") == 1
        graph.replay()
        right(result, TOTAL + 2)
    assert len(inner_calls) == 6
    works(comm)


def reduces_inside(comm: Any) -> None:
    """An all-reduce inside a break is a real one; so is a replay of another graph."""
    source, other = mine(300), Graph(comm)
    with other.record():
        of_other = comm.allreduce(source, "max")
    found = []

    @eager_break
    def within(array: Any) -> None:
        found.append(float(cupy.asnumpy(comm.allreduce(array))[0]))
        other.replay()
        comm.allreduce(array, "max", out=array)

    with Graph(comm) as graph:
        with graph.record():
            part = source * 2
            within(part)
            total = comm.allreduce(part)
        for turn in range(4):
            if turn:
                source.fill((RANK + 1) * turn)
                graph.replay()
            right(total, 2 * SIZE * SIZE * (turn or 1))
            right(of_other, SIZE * (turn or 1))
            assert found.pop() == 2 * TOTAL * (turn or 1)
    other.close()
    works(comm)


def surroundings(comm: Any) -> None:
    """A break has the caller's allocator, and the stream of its run as the current one; both are put back."""
    source, seen, taken = mine(100), [], []
    side = cupy.cuda.Stream(non_blocking=True)

    @eager_break
    def look() -> None:
        seen.append(cupy.cuda.get_current_stream().ptr)
        taken.append(cupy.empty(3 << 20, np.uint8))

    caller = cupy.cuda.get_current_stream().ptr
    with Graph(comm) as graph:
        with graph.record():
            body = cupy.cuda.get_current_stream().ptr
            total = comm.allreduce(source)
            look()
            assert cupy.cuda.get_current_stream().ptr == body
            before = graph.pool.nbytes
            mark = cupy.empty(3 << 20, np.uint8)
            assert graph.pool.nbytes > before, "the pool's allocator is not back"
            del mark
            total += 1
        assert graph.pool.nbytes < 8 << 20, "the break allocated from the pool"
        graph.replay()
        graph.replay(stream=side)
        side.synchronize()
        assert cupy.cuda.get_current_stream().ptr == caller
        assert seen == [body, caller, side.ptr]
        right(total, TOTAL + 1)
    works(comm)


def returned(comm: Any) -> None:
    """A fresh device array is copied into a fixed one at each replay; shape and dtype must stay; others are refused."""
    source, length = mine(80), [80]

    @eager_break
    def fresh(array: Any) -> Any:
        return array[: length[0]] + 1

    @eager_break
    def same(array: Any) -> Any:
        array *= 2
        return array

    with Graph(comm) as graph:
        with graph.record():
            result = fresh(comm.allreduce(source))
            doubled = same(result * 1)
            total = comm.allreduce(doubled)
        for turn in range(1, 4):
            source.fill((RANK + 1) * turn)
            graph.replay()
            right(result, TOTAL * turn + 1)
            right(total, (TOTAL * turn + 1) * 2 * SIZE)
        length[0] = 79
        with raises(ArgumentError, "fresh", "float32 (80,)", "float32 (79,)"):
            graph.replay()
        length[0] = 80
        graph.replay()
        right(result, TOTAL * 3 + 1)
    kinds = "a list", "a dict", "a tuple", "an ndarray", "an object"
    for value, kind in zip(([1], {"a": 1}, (source,), np.ones(3), object()), kinds, strict=True):
        with raises(CaptureError, f"returned {kind}. ", "<lambda>"), Graph(comm).record():
            comm.allreduce(source)
            eager_break(lambda value=value: value)()
        works(comm)


def returned_view(comm: Any) -> None:
    """A break that returns another view of the same place, or one that overlaps it in part: the recording gets that."""
    source = cupy.asarray(np.zeros((4, 4), np.float32))
    views = [
        lambda array: array,
        lambda array: array.T,
        lambda array: array[::-1],
        lambda array: array[:, ::-1],
        lambda array: array + 1,
        lambda array: array,
    ]
    lines = [lambda line: line[:12], lambda line: line[1:13], lambda line: line[4:], lambda line: line[11::-1]]
    for shape, changes in (((4, 4), views), ((16,), lines)):
        chosen = [changes[0]]

        @eager_break
        def look(array: Any, chosen: Any = chosen) -> Any:
            return chosen[0](array)

        source = cupy.zeros(shape, np.float32)
        with Graph(comm) as graph:
            with graph.record():
                total = comm.allreduce(look(source) * 1)
            for turn, change in enumerate(changes):
                values = np.arange(16, dtype=np.float32).reshape(shape) + turn
                source[...] = cupy.asarray(values * (RANK + 1))
                chosen[0] = change
                graph.replay()
                due = sum(change(values * (rank + 1)) for rank in range(SIZE))
                assert (cupy.asnumpy(total) == due).all(), (turn, total, due)
    works(comm)


def the_break_at_the_end(comm: Any) -> None:
    """Its work belongs to the replay: one on another stream does not overwrite what it still reads."""
    streams, count = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)], cupy.zeros(1000, np.float32)
    late, seen = [False], cupy.zeros(1000, np.float32)

    def replays(own: Any, within: Callable[[], None], behind: Callable[[], None]) -> None:
        @eager_break
        def slow(array: Any) -> None:
            within()
            if late[0]:
                cupy.cuda.get_current_stream().launch_host_func(time.sleep, 0.1)
            seen[...] = seen + array

        count.fill(0)
        seen.fill(0)
        with Graph(own) as graph:
            with graph.record():
                count[...] = count + (RANK + 1)
                slow(own.allreduce(count))
            cupy.cuda.Device().synchronize()
            for turn in range(8):
                late[0] = turn % 2 == 0
                graph.replay(stream=streams[turn % 2])
                if turn % 2:
                    behind()
            cupy.cuda.Device().synchronize()
            right(seen, TOTAL * sum(range(1, 10)))

    replays(comm, lambda: None, comm.synchronize)
    replays(comm, lambda: None, lambda: None)
    with Communicator(timeout=60) as fresh:  # no call runs any more as the break's work is launched
        replays(fresh, fresh.synchronize, lambda: None)
    works(comm)


def views_of_arguments(comm: Any) -> None:
    """What a break gets from the pool does not keep its block: a loop needs no more memory than without breaks."""
    source, pools = mine(100), []

    @eager_break
    def touch(array: Any, more: dict[str, Any]) -> None:
        array += 1
        more["x"][0] += 1
        if broken:  # the simulator keeps arrays until the work is done
            cupy.cuda.get_current_stream().synchronize()

    for broken in (False, True):
        with Graph(comm, breaks=broken) as graph:
            with graph.record():
                total = comm.allreduce(source)
                for _ in range(8):
                    large = cupy.zeros(1 << 18, np.float32)
                    touch(total, {"x": [large]})
                    total = comm.allreduce(total + large[:100])
                    del large
            pools.append(graph.pool.nbytes)
            source.fill(0)
            graph.replay()
            value = 0
            for _ in range(8):
                value = (value + 2) * SIZE
            right(total, value)
            source.fill(RANK + 1)
    assert pools[1] <= pools[0], pools
    works(comm)


def containers_of_the_program(comm: Any) -> None:
    """Without arrays of the pool they are the same at each replay: the break reads what the program writes there."""
    source, steps, state = mine(100), [], {"bias": 1.0}

    @eager_break
    def add(given: dict[str, Any], *, state: dict[str, float]) -> None:
        given["steps"].append(state["bias"])
        state["seen"] = state.get("seen", 0) + 1
        given["x"][0][...] = given["x"][0] + state["bias"]

    with Graph(comm) as graph:
        with graph.record():
            total = comm.allreduce(source)
            add({"x": (total,), "steps": steps}, state=state)
        for turn in range(1, 4):
            state["bias"] = turn * 10.0
            graph.replay()
            right(total, TOTAL + turn * 10)
    assert (steps, state) == ([1, 10, 20, 30], {"bias": 30, "seen": 4}), (steps, state)
    works(comm)


def held_arguments(comm: Any) -> None:
    """What a break gets from elsewhere is kept by the graph, and goes with it."""
    before = held_by_library(comm)
    source, outside = mine(4000), cupy.full((4000,), 5, np.float32)

    @eager_break
    def add(array: Any, more: list[Any]) -> None:
        array += more[0]

    graph = Graph(comm)
    with graph.record():
        total = comm.allreduce(source)
        add(total, [outside])
    del outside
    canaries = Canaries(*[16_000] * 6)
    graph.replay()
    right(total, TOTAL + 5)
    canaries.intact()
    graph.close()
    del graph, total, source, canaries
    given_back(comm, before)


def side_streams(comm: Any) -> None:
    """Joined before a break they are fine; if not, the error says so, on every rank."""
    source, side = mine(200), cupy.cuda.Stream(non_blocking=True)

    def body(joined: bool) -> Any:
        here = cupy.cuda.get_current_stream()
        side.wait_event(here.record())
        with side:
            part = comm.allreduce(source)
        if joined:
            here.wait_event(side.record())
        look(part)
        if not joined:
            here.wait_event(side.record())
        return part + 1

    look = eager_break(lambda array: right(array, TOTAL))
    with Graph(comm) as graph:
        with graph.record():
            result = body(True)
        graph.replay()
        right(result, TOTAL + 1)
    words = ["UNJOINED"] if comm.backend == "ipc" else []  # NCCL's calls are joined; then the wait is refused
    with raises(CaptureError, *words, "a break"), Graph(comm).record():
        body(False)
    works(comm)


def exceptions_in_breaks(comm: Any) -> None:
    """At recording and at replay, on one rank or on all: unchanged there, named on the others within a second."""
    before = held_by_library(comm)
    source, ran = mine(100), []
    fail: list[bool] = [False]

    @eager_break
    def may_fail() -> None:
        if fail[0]:
            raise LookupError("lost it")

    @eager_break
    def later(array: Any) -> None:
        ran.append(1)
        cupy.asnumpy(array)  # waits on the host for the segment before

    def body(x: Any) -> Any:
        total = comm.allreduce(x)
        may_fail()
        total = comm.allreduce(total)
        later(total)
        return comm.allreduce(total)

    for who in ([LAST], [0], range(SIZE)):
        error, words = (LookupError, ["lost it"]) if RANK in who else (PeerFailedError, [f"rank {who[0]}", "lost it"])
        graph, caller = Graph(comm), cupy.cuda.get_current_stream().ptr
        fail[0] = RANK in who
        with no_hang(), raises(error, *words), graph.record():
            body(source)
        assert graph.state == "failed"
        assert cupy.cuda.get_current_stream().ptr == caller
        fail[0] = False
        works(comm)
        with Graph(comm) as graph:
            with graph.record():
                result = body(source)
            right(result, TOTAL * SIZE * SIZE)
            fail[0] = RANK in who
            ran.clear()
            with no_hang(), raises(error, *words):
                graph.replay()
                comm.synchronize()
            assert not (ran and RANK in who), "a later segment ran"
            fail[0] = False
            WORLD.Barrier()
            works(comm)
            graph.replay()
            right(result, TOTAL * SIZE * SIZE)
    works(comm)
    del graph, result, source
    given_back(comm, before)


def exception_between_breaks(comm: Any) -> None:
    """One rank's body raises while the others wait on the host, in a later break, for an all-reduce of its."""
    source = mine(100)

    @eager_break
    def total_of(array: Any) -> None:
        cupy.asnumpy(comm.allreduce(array))

    def body(who: Any) -> None:
        part = source * 2
        total_of(part)
        if RANK in who:
            late(0.05)  # the others wait
            raise LookupError("lost it")
        total_of(part)
        late(0.2)  # NCCL's communicator, which the graph would hold, is aborted

    for who in ([LAST], [0]):
        error, words = (LookupError, []) if RANK in who else (PeerFailedError, [f"rank {who[0]}"])
        with no_hang(), raises(error, "lost it", *words), Graph(comm).record():
            body(who)
        works(comm)


def caught_break(comm: Any) -> None:
    """A body that catches what a break raises: nothing is captured any more, so the recording fails, by that error."""
    source = mine(100)

    def fail() -> None:
        raise LookupError("lost it")

    graph = Graph(comm)
    with raises(LookupError, "lost it"), graph.record():
        comm.allreduce(source)
        with contextlib.suppress(LookupError):
            graph.add_eager(fail)
    assert graph.state == "failed"
    works(comm)


def caught_on_one_rank(comm: Any) -> None:
    """A break raises on one rank, whose body goes on: the others, who wait for it in theirs, hear of it at once."""

    def meet() -> None:
        if RANK == LAST:
            raise LookupError("lost it")
        comm.allreduce(mine(100))
        comm.synchronize()

    graph = Graph(comm)
    expected = (LookupError, "lost it") if RANK == LAST else (PeerFailedError, f"rank {LAST}", "lost it")
    with raises(*expected), graph.record():
        try:
            graph.add_eager(meet)
        except (LookupError, PeerFailedError) as error:
            WORLD.Barrier()
            if RANK != LAST:
                raise error
    assert graph.state == "failed"
    works(comm)


def broken_pieces(comm: Any) -> None:
    """Breaks inside capture(), in graphs that share a pool: one registration for all segments."""
    source = mine(400)

    @eager_break
    def step(array: Any) -> None:
        array += 1

    def record(pool: Any) -> tuple[Graph, Any]:
        graph = Graph(comm, pool=pool)
        with graph.record():
            total = comm.allreduce(source)
            step(total)
            total = comm.allreduce(total)
            step(total)
        return graph, total

    with comm.capture():
        first, one = record(None)
        second, two = record(first.pool)
        assert first.state == second.state == "staged"
        first.replay()
        right(one, (TOTAL + 1) * SIZE + 1)
    for turn in range(1, 5):
        source.fill((RANK + 1) * turn)
        for graph, total in ((first, one), (second, two)):
            graph.replay()
            right(total, (TOTAL * turn + 1) * SIZE + 1)
    first.close()
    second.close()
    works(comm)


def two_communicators(comm: Any) -> None:
    """Recordings in two threads, on two communicators, side by side."""
    others = [Communicator(), Communicator()]
    device, failed, barrier = cupy.cuda.Device(), [], threading.Barrier(2)
    warm = mine(200) * 2
    warm.fill(-1)  # CuPy loads these kernels now: doing so, it waits for the device and keeps other threads out

    def record(one: Communicator, factor: int) -> None:
        try:
            with device, cupy.cuda.Stream(non_blocking=True) as stream, Graph(one) as graph:
                source = mine(200) * factor
                for _ in range(3):
                    with Graph(one) as graph:
                        with graph.record():
                            barrier.wait(HANG)
                            total = one.allreduce(source)
                            graph.add_eager(lambda: barrier.wait(HANG) and None)
                            total = one.allreduce(total)
                            barrier.wait(HANG)
                        for _ in range(3):
                            total.fill(-1)
                            graph.replay()
                            stream.synchronize()
                            right(total, TOTAL * SIZE * factor)
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=record, args=(one, factor)) for factor, one in enumerate(others, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]
    for one in others:
        one.close()
    works(comm)


def unnoticed(comm: Any) -> None:
    """Outside of a recording the decorator is a plain call, and the function's name and documentation are kept."""

    @eager_break
    def documented(a: int, *, b: int = 2) -> int:
        """What it does."""
        return a + b

    function: Callable[..., int] = documented
    assert (function.__name__, function.__doc__, function(1), function(1, b=5)) == ("documented", "What it does.", 3, 6)
    works(comm)


def replayed_on_another_stream(comm: Any) -> None:
    """Segments and breaks go to ``stream=``, also where the last call ran on the current one, which is busy."""
    current, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    source, eager, streams = mine(), mine(), []
    with Graph(comm) as graph:
        with graph.record():
            first = comm.allreduce(source)
            graph.add_eager(lambda: streams.append(cupy.cuda.get_current_stream().ptr))
            second = comm.allreduce(first)
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            first.fill(-1)
            second.fill(-1)
            cupy.cuda.Device().synchronize()
            with current:
                comm.allreduce(source, out=eager)
                current.launch_host_func(time.sleep, 0.1)
                graph.replay(stream=other)
            other.synchronize()
            right(first)
            right(second, TOTAL * SIZE)
        assert streams[1:] == [other.ptr] * 3
    works(comm)


SCENARIOS = [
    real_data, add_eager, nested, reduces_inside, surroundings, returned, returned_view, the_break_at_the_end,
    views_of_arguments, containers_of_the_program, held_arguments,
    side_streams, exceptions_in_breaks, exception_between_breaks, caught_break, caught_on_one_rank, broken_pieces,
    two_communicators, unnoticed, replayed_on_another_stream,
]  # fmt: skip
