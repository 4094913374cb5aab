"""Graphs that others capture, beside eager calls and our replays: ``mpirun -n 2 python tests/gpu/captures.py``.

Each function of SCENARIOS is one, to be named behind; it runs on every rank and asserts. The ranks may share a GPU.
Every turn has new inputs, poisoned outputs and a rank that comes late at random; all ranks launch in one order, on
several streams. TURNS in the environment: how many.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import cupy
import numpy as np

import ipcreduce
from tests.gpu import scenarios
from tests.gpu.scenarios import BRIEF, SIMULATED
from tests.shared import clock, worker
from tests.shared.bounds import until
from tests.shared.world import WORLD

RANK, SIZE = WORLD.rank, WORLD.size
SHARED = cupy.cuda.runtime.getDeviceCount() < SIZE
TURNS = int(os.environ.get("TURNS", "40" if SIMULATED or SHARED else "1000"))
POISON = -7.0
late = random.Random(RANK)  # its own on each rank


def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


class Work:
    """An all-reduce of an array of this rank's into another one, and how to tell that it ran."""

    def __init__(self, comm: Any, count: int, op: str = "sum", step: int = 1) -> None:
        self.comm, self.op = comm, op
        self.array, self.out = cupy.zeros(count * step, np.float32)[::step], cupy.zeros(count, np.float32)
        cupy.cuda.Device().synchronize()

    def call(self, on: Any = None) -> None:
        self.comm.allreduce(self.array, self.op, out=self.out, stream=on)

    def prepare(self, turn: int) -> None:
        """New input, and no result."""
        self.array.fill(self._mine(turn, RANK))
        self.out.fill(POISON)

    def check(self, turn: int, what: str) -> None:
        values = [self._mine(turn, rank) for rank in range(SIZE)]
        due = sum(values) if self.op == "sum" else max(values)
        found = cupy.asnumpy(self.out)
        assert (found == due).all(), f"rank {RANK}, turn {turn}, {what}: {found[found != due][:4]} where {due} was due"

    def _mine(self, turn: int, rank: int) -> int:
        return (turn % 97 + 1) * (rank + 1) + len(self.array) % 7


def captured(on: Any, *works: Work) -> Any:
    """A graph that others have captured with these calls."""
    with on:
        on.begin_capture()
        for work in works:
            work.call()
        return on.end_capture()


def in_turns(*steps: tuple[str, Callable[[], None], list[Work]], turns: int = TURNS) -> None:
    """Starts the steps, in an order that changes from turn to turn and is the same on every rank, and checks them."""
    order, works = random.Random(1), [work for _, _, used in steps for work in used]
    for turn in range(turns):
        for work in works:
            work.prepare(turn)
        cupy.cuda.Device().synchronize()
        if late.random() < 0.1:
            time.sleep(late.random() * 0.003)
        for _, start, _ in order.sample(steps, len(steps)):
            start()
        cupy.cuda.Device().synchronize()
        for what, _, used in steps:
            for work in used:
                work.check(turn, what)


def warm(comm: Any, *works: Work) -> None:
    """Every kernel has been used, and nothing runs."""
    for work in works:
        work.call()
    comm.synchronize()
    cupy.cuda.Device().synchronize()


def two_graphs(comm: Any) -> None:
    """Two graphs of one and of three calls, on two streams."""
    first, second, more = Work(comm, 1000), Work(comm, 5000), [Work(comm, 100), Work(comm, 30_000, "max")]
    warm(comm, first, second, *more)
    one, other = stream(), stream()
    graphs = captured(one, first), captured(other, second, *more)
    in_turns(
        ("the first graph", lambda: graphs[0].launch(one), [first]),
        ("the second graph", lambda: graphs[1].launch(other), [second, *more]),
    )


def graphs_eager_calls_and_replays(comm: Any) -> None:
    """A graph of others, our own, and eager calls: made again, on a raw handle, on the default stream, with a copy."""
    works = [Work(comm, count) for count in (1000, 2000, 3000, 4000, 300_000 if not SIMULATED else 500)]
    works.append(Work(comm, 1500, step=2))
    warm(comm, *works)
    streams = [stream() for _ in works]
    theirs = captured(streams[0], works[0])
    with ipcreduce.Graph(comm) as ours:
        with ours.record():
            works[1].call()

        def replay() -> None:
            with streams[1]:
                ours.replay()

        def eager(number: int) -> None:
            with streams[number]:
                works[number].call()

        in_turns(
            ("their graph", lambda: theirs.launch(streams[0]), [works[0]]),
            ("our replay", replay, [works[1]]),
            ("an eager call", partial(eager, 2), [works[2]]),
            ("of a strided array", partial(eager, 5), [works[5]]),
            ("on a raw handle", lambda: works[3].call(streams[3].ptr), [works[3]]),
            ("on the default stream", works[4].call, [works[4]]),
        )


def calls_and_replays_on_several_streams(comm: Any) -> None:
    """No graph of others: eager calls, cached and new ones, and our replays, each on its own stream."""
    with ipcreduce.Communicator(timeout=30) as fresh:
        works = [Work(fresh, count) for count in (1000, 2000, 3000, 200_000 if not SIMULATED else 5000)]
        works.append(Work(fresh, 1500, step=2))
        streams = [stream() for _ in works]
        with ipcreduce.Graph(fresh) as ours:
            with ours.record():
                works[0].call()
            warm(fresh, *works)

            def start(number: int) -> None:
                with streams[number]:
                    if number:
                        works[number].call()
                    else:
                        ours.replay()

            names = "our replay", "an eager call", "another one", "a large one", "of a strided array"
            in_turns(*((name, partial(start, number), [works[number]]) for number, name in enumerate(names)))


def captured_behind_an_eager_call(comm: Any) -> None:
    """The stream that is captured runs the last eager call, and cannot be asked for it; the graph runs elsewhere."""
    for turn in range(2 * SIZE):
        with ipcreduce.Communicator() as fresh:  # it knows of no graph
            first, second = Work(fresh, 1000), Work(fresh, 200_000 if not SIMULATED else 3000)
            warm(fresh, first, second)
            one, other = stream(), stream()
            for work in (first, second):
                work.prepare(turn)
            cupy.cuda.Device().synchronize()
            with one:
                if turn % SIZE == RANK:
                    one.launch_host_func(lambda _: time.sleep(0.2), None)
                second.call()
            graph = captured(one, first)
            graph.launch(other)
            cupy.cuda.Device().synchronize()
            first.check(turn, "the graph")
            second.check(turn, "the eager call before")


def behind_late_work(comm: Any) -> None:
    """An eager call behind a graph, and a graph behind an eager call, where what comes first is late on one rank."""
    first, second = Work(comm, 1000), Work(comm, 3000)
    warm(comm, first, second)
    one, other = stream(), stream()
    graph = captured(one, first)
    both = [(one, lambda: graph.launch(one)), (other, lambda: second.call(other))]
    for turn in range(2 * SIZE):
        for work in (first, second):
            work.prepare(turn)
        cupy.cuda.Device().synchronize()
        if turn % SIZE == RANK:
            both[0][0].launch_host_func(lambda _: time.sleep(0.1), None)
        for _, start in both:
            start()
        cupy.cuda.Device().synchronize()
        first.check(turn, "the graph")
        second.check(turn, "the eager call")
        if turn == SIZE - 1:
            both.reverse()


def forked_streams(comm: Any) -> None:
    """A capture that forks; a second capture is open meanwhile, and has calls between those of the first."""
    works = [Work(comm, count) for count in (1000, 2000, 3000, 4000)]
    warm(comm, *works)
    one, fork, other = stream(), stream(), stream()
    for _ in range(8):  # without an edge nodes may come in their order by chance
        split, joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        one.begin_capture()
        other.begin_capture()
        split.record(one)
        fork.wait_event(split)
        works[0].call(one)
        works[3].call(other)
        works[1].call(fork)
        works[3].call(other)
        works[2].call(one)
        joined.record(fork)
        one.wait_event(joined)
        graphs = one.end_capture(), other.end_capture()
        in_turns(
            ("the forked graph", partial(graphs[0].launch, one), works[:3]),
            ("the one beside it", partial(graphs[1].launch, fork), works[3:]),
            turns=TURNS // 8,
        )


def temporaries(comm: Any) -> None:
    """What calls in a capture allocate stays the graph's: strided arrays, overlaps, results that are dropped."""
    base, wide = cupy.zeros((50, 20), np.float32), cupy.zeros((40, 60), np.float32)
    line, out = cupy.zeros(3000, np.float32), cupy.zeros((20, 50), np.float32)
    kept: list[Any] = []

    def calls(keep: bool) -> None:
        comm.allreduce(base.T, out=out)  # a copy of the input
        comm.allreduce(out, out=wide[::2, 5:55])  # and of the output
        comm.allreduce(line[:2000], out=line[1000:])  # an overlap in part
        result = comm.allreduce(out, "max")  # which the next line lets go of, but for one
        if keep:
            kept.append(result)

    calls(False)
    comm.synchronize()
    on = stream()
    cupy.cuda.Device().synchronize()
    with on:
        on.begin_capture()
        calls(False)
        calls(True)
        graph = on.end_capture()
    for turn in range(1, 6):
        cupy.get_default_memory_pool().free_all_blocks()
        others = [cupy.full(size, 777.0, np.float32) for size in (1000, 2000, 3000, 1000, 1000)]
        base.fill(turn * (RANK + 1))
        for array in (wide, out):
            array.fill(POISON)
        line.fill(RANK + 1)
        cupy.cuda.Device().synchronize()
        graph.launch(on)
        on.synchronize()
        total = SIZE * (SIZE + 1) // 2
        assert (cupy.asnumpy(out) == turn * total).all()
        expected = np.full((40, 60), POISON, np.float32)
        expected[::2, 5:55] = turn * total * SIZE
        assert (cupy.asnumpy(wide) == expected).all()
        # twice: 1000 times the input, then 1000 sums, then sums of these
        shifted = np.concatenate([np.full(1000, RANK + 1), np.full(1000, total), np.full(1000, SIZE * total)])
        assert (cupy.asnumpy(line) == shifted).all(), cupy.asnumpy(line)[::500]
        assert (cupy.asnumpy(kept[0]) == turn * total).all()
        for array in others:
            assert (cupy.asnumpy(array) == 777).all(), "an array of somebody else's has been written"


def after_a_fault(comm: Any) -> None:
    """Replays of theirs after a fault end without data: synchronize() says so each time, until all have gone on."""
    with ipcreduce.Communicator(**BRIEF) as hurried:
        work, on = Work(hurried, 1000), stream()
        warm(hurried, work)
        graph = captured(on, work)
        for turn in range(5):
            work.prepare(turn)
            cupy.cuda.Device().synchronize()
            WORLD.Barrier()
            late = turn == 1 and RANK == SIZE - 1
            if late:
                until(lambda: hurried._state.calls.page.aborted, "the others' deadline")
            graph.launch(on)
            with clock.passing(121.0) if SIMULATED and turn == 1 and not late else nullcontext():
                error = error_of(hurried.synchronize)
            if turn == 0:
                assert error is None, error
                work.check(turn, "before the fault")
            else:
                assert isinstance(error, ipcreduce.PeerTimeoutError), f"turn {turn}: {error!r}"
            if turn > 1:
                assert "work again once every rank has made a call that is not captured" in str(error), error
                assert cupy.asnumpy(work.out).view(np.uint32).min() == 0xFFFFFFFF
            WORLD.Barrier()
        work.prepare(9)
        work.call()
        hurried.synchronize()
        work.check(9, "an eager call")
        work.prepare(10)
        cupy.cuda.Device().synchronize()
        WORLD.Barrier()
        graph.launch(on)
        hurried.synchronize()
        work.check(10, "a replay after it")
        WORLD.Barrier()


def refused_on_one_rank(comm: Any) -> None:
    """Rank 0 alone is refused and catches it: replays of theirs on the others end without data, which they hear.

    The fault is their next call's: that raises too, so that call numbers stay matched.
    """
    work, on = Work(comm, 1000), stream()
    warm(comm, work)
    graph = captured(on, work)
    WORLD.Barrier()
    if RANK == 0:
        with suppress(ipcreduce.ArgumentError):
            comm.allreduce(work.array, "mode")
    WORLD.Barrier()
    heard = False
    for turn in range(4):
        work.prepare(turn)
        cupy.cuda.Device().synchronize()
        WORLD.Barrier()
        if RANK > 0:  # the one before has gone by then: kernels bear the abort word for 0.1 s
            WORLD.recv(source=RANK - 1)
        graph.launch(on)
        error = error_of(comm.synchronize)
        if RANK < SIZE - 1:
            WORLD.send(None, RANK + 1)
        heard = heard or error is not None
        assert error is None or isinstance(error, ipcreduce.PeerFailedError), error
        if error is None:
            work.check(turn, "a replay of which nobody was told anything")
    assert heard, f"rank {RANK}"
    WORLD.Barrier()
    if RANK:
        error = error_of(lambda: (work.call(), comm.synchronize()))
        assert isinstance(error, ipcreduce.PeerFailedError), error
        assert "rank 0 raised an error" in str(error), error
    work.prepare(5)
    work.call()
    comm.synchronize()
    work.check(5, "an eager call")
    WORLD.Barrier()
    work.prepare(6)
    cupy.cuda.Device().synchronize()
    WORLD.Barrier()
    graph.launch(on)
    comm.synchronize()
    work.check(6, "a replay after it")


def copies_of_a_graph(comm: Any) -> None:
    """A graph instantiated twice, a clone of it, and one that has it as a child are ordered as it is."""
    if SIMULATED:
        return
    from cuda.bindings import driver

    def checked(result: Any) -> Any:
        assert not int(result[0]), result
        return result[1]

    work, other = Work(comm, 1000), Work(comm, 2000)
    warm(comm, work, other)
    one, two = stream(), stream()
    graph, beside = captured(one, work), captured(two, other)
    raw = driver.CUgraph(graph.graph)
    parent = checked(driver.cuGraphCreate(0))
    checked(driver.cuGraphAddChildGraphNode(parent, None, 0, raw))
    for what, source in (("twice", raw), ("a clone", checked(driver.cuGraphClone(raw))), ("as a child", parent)):
        executable = checked(driver.cuGraphInstantiate(source, 0))

        def start(executable: Any = executable) -> None:
            assert not int(driver.cuGraphLaunch(executable, one.ptr)[0])

        in_turns((what, start, [work]), ("the one beside", lambda: beside.launch(two), [other]), turns=TURNS // 3)


def torch_graphs(comm: Any) -> None:
    """PyTorch's capture, in the mode that spares nobody, beside CuPy's and eager calls; side streams of both."""
    torch = scenarios.pytorch()
    if torch is None:
        return
    works = [Work(comm, count) for count in (1000, 2000, 3000)]
    warm(comm, *works)
    torch.cuda.set_device(cupy.cuda.runtime.getDevice())
    theirs, on = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(theirs):
        works[0].call(torch.cuda.current_stream())
    other = stream()
    graph = captured(other, works[1])

    def replay() -> None:
        with torch.cuda.stream(on):
            theirs.replay()

    in_turns(
        ("torch's graph", replay, [works[0]]),
        ("CuPy's graph", lambda: graph.launch(other), [works[1]]),
        ("an eager call", works[2].call, [works[2]]),
    )


def error_of(call: Callable[[], Any]) -> ipcreduce.IpcReduceError | None:
    try:
        call()
    except ipcreduce.IpcReduceError as error:
        return error
    return None


SCENARIOS = [
    two_graphs, graphs_eager_calls_and_replays, calls_and_replays_on_several_streams, captured_behind_an_eager_call,
    behind_late_work, forked_streams,
    temporaries, after_a_fault, refused_on_one_rank, copies_of_a_graph, torch_graphs,
]  # fmt: skip
# Over NCCL a late rank is waited for without a deadline, and a graph is of no use after an error.
OUR_KERNELS_ONLY = {after_a_fault, refused_on_one_rank}


if __name__ == "__main__":
    worker.run(lambda: scenarios.main(SCENARIOS, OUR_KERNELS_ONLY))
