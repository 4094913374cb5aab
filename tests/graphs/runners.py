"""Runners: a recording for each batch descriptor, the forward context, and the check of addresses."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy
import numpy as np

from ipcreduce import (
    FP8,
    AddressChangedError,
    ArgumentError,
    Graph,
    GraphRunner,
    Map,
    PeerFailedError,
    RankMismatchError,
    eager_break,
    forward_context,
    get_forward_context,
)
from tests.graphs.common import LAST, RANK, SIZE, TOTAL, given_back, held_by_library, mine, raises, right, works


@dataclass(frozen=True)
class Batch:
    """As backends describe one."""

    tokens: int


@dataclass
class Metadata:
    """What attention reads."""

    bias: Any
    lengths: list[Any]


class Net:
    """A model with attention as its break, which reads the forward context. Static inputs for each batch size."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.runs = comm, 0
        self.inputs = {tokens: mine(16 * tokens) for tokens in (8, 6, 4, 3, 2, 1)}

    def __call__(self, x: Any) -> Any:
        self.runs += 1
        total = self.comm.allreduce(x)
        attended = cupy.zeros(total.shape, total.dtype)
        attend(total, out=attended)
        return {"out": self.comm.allreduce(attended + x, "max"), "total": total}

    def check(self, found: Any, x: Any, bias: float) -> None:
        """Bit for bit what an eager run gives."""
        with forward_context(None, "none", Metadata(bias, [])):
            expected = self(x)
        for name, array in expected.items():
            assert cupy.asnumpy(found[name]).tobytes() == cupy.asnumpy(array).tobytes(), name


@eager_break
def attend(array: Any, *, out: Any) -> None:
    context = get_forward_context()
    assert context is not None, "a break has the context of its call"
    out[...] = array
    out += context.attn_metadata.bias


def one_for_each_batch(comm: Any) -> None:
    """Six batch sizes, 0, 1 or 3 passes of warm-up, in and out of capture(): the results of an eager run."""
    for passes in (0, 1, 3):
        for captured in (False, True):
            net = Net(comm)
            with GraphRunner(net, comm) as runner:

                def call(tokens: int, bias: float, runner: Any = runner, net: Any = net) -> None:
                    with forward_context(Batch(tokens), "piecewise", Metadata(bias, [])):
                        found = runner(net.inputs[tokens])
                    net.check(found, net.inputs[tokens], bias)

                def record(net: Any = net, passes: int = passes, call: Any = call) -> None:
                    for tokens in net.inputs:
                        for turn in range(1 + passes):
                            call(tokens, turn)

                if captured:
                    with comm.capture():
                        record()
                else:
                    record()
                assert list(runner.recordings) == [Batch(tokens) for tokens in net.inputs]
                assert len({id(graph.pool) for graph in runner.recordings.values()}) == 1
                eager, order = net.runs, random.Random(3)
                for turn in range(12):
                    tokens = order.choice(list(net.inputs))
                    net.inputs[tokens].fill((RANK + 1) * turn)
                    call(tokens, turn)
                assert net.runs == eager + 12, "the function ran for a replay"
            assert not runner.recordings
    works(comm)


def which_calls_replay(comm: Any) -> None:
    """No context, mode "none", another mode, a new descriptor with record_new=False: the function runs."""
    net = Net(comm)
    x = net.inputs[2]
    with forward_context("inner", "none", Metadata(1, [])), GraphRunner(net, comm) as runner:
        for context in (None, ("a", "none"), ("a", "full")):
            if context is None:
                runner(x)
            else:
                with forward_context(*context, Metadata(1, [])):
                    runner(x)
        assert (net.runs, len(runner.recordings)) == (3, 0)
        with forward_context("a", "piecewise", Metadata(1, [])):
            runner(x)
            runner(x)
        assert (net.runs, list(runner.recordings)) == (4, ["a"])
    with GraphRunner(net, comm, record_new=False) as runner, forward_context("a", attn_metadata=Metadata(1, [])):
        runner(x)
        runner(x)
        assert (net.runs, len(runner.recordings)) == (6, 0)
    assert get_forward_context() is None
    for wrong in (lambda: forward_context("a", "fast").__enter__(), lambda: GraphRunner(net, comm, mode="none")):
        with raises(ArgumentError, "mode must be"):
            wrong()
    with raises(ArgumentError, "check must be"):
        GraphRunner(net, comm, check="sometimes")
    with raises(ArgumentError, "hashable"):
        forward_context([1]).__enter__()
    works(comm)


def full_around_piecewise(comm: Any) -> None:
    """A runner for the whole model around those of its layers: the mode of the call says which records."""
    layer = GraphRunner(lambda x: comm.allreduce(x) + 1, comm)
    model = GraphRunner(lambda x: layer(layer(x)), comm, mode="full")
    source = mine(60)
    for mode, recorded in (("piecewise", (1, 0)), ("full", (1, 1)), ("none", (1, 1))):
        for turn in range(3):
            source.fill((RANK + 1) * (turn + 1))
            with forward_context("only", mode):
                if mode == "piecewise":  # one recording has one input
                    found = layer(source)
                    right(found, TOTAL * (turn + 1) + 1)
                else:
                    right(model(source), (TOTAL * (turn + 1) + 1) * SIZE + 1)
        assert (len(layer.recordings), len(model.recordings)) == recorded
    text = model.recordings["only"].describe()
    assert "graph only: " in text, text
    assert text.count("segment:") == 1
    model.close()
    layer.close()
    works(comm)


def contexts(comm: Any) -> None:
    """One a thread; nested ones; a break sees that of its own call."""
    seen: list[Any] = []
    source = mine(30)

    @eager_break
    def look() -> None:
        seen.append(get_forward_context())

    def body() -> Any:
        total = comm.allreduce(source)
        look()
        return total + 1

    runner = GraphRunner(body, comm)
    for number in range(3):
        with forward_context("a", "piecewise", number) as context:
            runner()
            assert seen.pop() is context
            with forward_context("b", "none", number) as inner:
                assert get_forward_context() is inner
            assert get_forward_context() is context
            thread = threading.Thread(target=lambda: seen.append(get_forward_context()))
            thread.start()
            thread.join()
            assert seen.pop() is None
    runner.close()
    works(comm)


def addresses(comm: Any) -> None:
    """Arrays that are elsewhere at a replay: named, before anything is launched; "first", "always" and "never"."""
    net = Net(comm)
    for mode in ("piecewise", "full"):
        for check in ("first", "always", "never"):
            data = {"x": mine(40), "more": [mine(8)]}
            metadata = Metadata(cupy.zeros(40, np.float32), [mine(4), mine(5)])

            def body(data: Any, *, scale: Any) -> Any:
                total = comm.allreduce(data["x"]) + scale
                out = cupy.zeros(40, np.float32)
                attend(total, out=out)
                return out

            scale = mine(1)
            with GraphRunner(body, comm, mode=mode, check=check) as runner:

                def call(data: Any = data, scale: Any = scale, metadata: Any = metadata, **how: Any) -> Any:
                    with forward_context("a", how["mode"], metadata):
                        return how["runner"](data, scale=scale)

                how = {"mode": mode, "runner": runner}
                first = call(**how)
                moved = {"x": mine(40), "more": [mine(8), mine(9)]}
                if check == "never":
                    assert call(moved, **how) is first
                    continue
                launched = comm._state.calls.number
                with raises(AddressChangedError, 'args[0]["x"]: 0x', 'args[0]["more"][1]') as caught:
                    call(moved, **how)
                error = caught.error
                assert set(error.changed) == {'args[0]["x"]', 'args[0]["more"][0]'}, error.changed
                assert set(error.added) == {'args[0]["more"][1]'}
                assert comm._state.calls.number <= launched + 1, "something was launched"
                works(comm)
                with raises(AddressChangedError, 'kwargs["scale"]'):
                    call(scale=mine(1), **how)
                works(comm)
                other = Metadata(metadata.bias, [metadata.lengths[0], mine(6)])
                if mode == "full":
                    with raises(AddressChangedError, "attn_metadata.lengths[1]", "shape"):
                        call(metadata=other, **how)
                    works(comm)
                else:  # attention runs in the break, and reads what is there
                    call(metadata=other, **how)
                assert call(**how) is first
                if check == "first":
                    assert call(moved, **how) is first
                else:
                    with raises(AddressChangedError, 'args[0]["x"]'):
                        call(moved, **how)
                    works(comm)
    source, named = mine(30), {"a": mine(10)}
    with Graph(comm, check="always") as graph:
        with graph.record(named):
            total = comm.allreduce(source)
        graph.replay(named)
        graph.replay()
        with raises(AddressChangedError, 'inputs["a"]'):
            graph.replay({"a": mine(10)})
        works(comm)
        right(total)
    del net
    works(comm)


def elsewhere_on_one_rank(comm: Any) -> None:
    """The others hear of it, and do not wait."""
    source = mine(30)
    with Graph(comm) as graph:
        with graph.record([source]):
            total = comm.allreduce(source)
        error = AddressChangedError if RANK == LAST else PeerFailedError
        with raises(error, "inputs[0]"):
            graph.replay([mine(30) if RANK == LAST else source])
            comm.synchronize()
        works(comm)
        graph.replay([source])
        right(total)
    works(comm)


def copied_inputs(comm: Any) -> None:
    """copy_inputs=True: new arrays are copied into the recorded ones; shapes and dtypes must stay."""
    add = lambda x, more, mask: comm.allreduce(x + more["y"][0]) + 1  # noqa: E731
    before = held_by_library(comm)
    with GraphRunner(add, comm, copy_inputs=True) as runner:
        for turn in range(1, 5):
            with forward_context("a"):
                result = runner(mine(50) * turn, {"y": (mine(50),)}, None)
            right(result, TOTAL * (turn + 1) + 1)
        for args, words in (
            ((mine(51), {"y": (mine(50),)}, None), ["args[0]", "float32 (50,)", "float32 (51,)"]),
            ((mine(50), {"y": (mine(50, np.int32),)}, None), ['args[1]["y"][0]', "float32", "int32"]),
            ((mine(50), {"y": (7,)}, None), ['args[1]["y"][0]', "a device array", "int"]),
            ((mine(50), {"z": (mine(50),)}, None), ["args[1]", "1 entries"]),
            ((mine(50), {"y": (mine(50),)}, mine(50)), ["args[2]", "a device array now", "NoneType"]),
        ):
            with raises(ArgumentError, *words), forward_context("a"):
                runner(*args)
            works(comm)
        nest = {"y": [mine(50)]}
        for turn in range(1, 4):
            with forward_context("b"):
                result = runner(mine(50), nest, None)
            right(result, TOTAL * (turn + 1) + 1)
            nest["y"][0] = mine(50) * (turn + 1)  # in the very list of the recording
        del args, result, nest
    given_back(comm, before)


class Pair(NamedTuple):
    """A user's own, in which nothing is copied."""

    x: Any
    scale: int


def inputs_that_are_not_copied(comm: Any) -> None:
    """copy_inputs=True compares the addresses of arrays in objects of other classes, and nothing else in these."""
    first, second = Pair(mine(50), 1), Pair(mine(50), 2)
    for check, made in itertools.product(("first", "never"), (lambda one: one, lambda one: {"of": [one]})):
        total = lambda one, y: comm.allreduce((one["of"][0] if isinstance(one, dict) else one).x + y)  # noqa: E731
        with GraphRunner(total, comm, copy_inputs=True, check=check) as runner, forward_context("a"):
            right(runner(made(first), mine(50)), 2 * TOTAL)
            if check == "first":
                where = 'args[0]["of"][0].x' if type(made(first)) is dict else "args[0].x"
                with raises(AddressChangedError, f"changed {where}: 0x"):
                    runner(made(second), mine(50))
            right(runner(made(first._replace(scale=2)), mine(50) * 2), 3 * TOTAL)
            right(runner(made(second), mine(50)), 2 * TOTAL)
        works(comm)


def inputs_that_the_function_replaces(comm: Any) -> None:
    """Replays copy into the arrays that the function got, and not into those that it puts in their places."""

    def double(given: dict[str, Any]) -> Any:
        given["x"] = given["x"] * 2
        return comm.allreduce(given["x"])

    with GraphRunner(double, comm, copy_inputs=True) as runner:
        for turn in range(1, 4):
            with forward_context("a"):
                right(runner({"x": mine(50) * turn}), TOTAL * turn * 2)
    works(comm)


def results_that_change(comm: Any) -> None:
    """A caller may change the list and the dict that it gets: the next call has others, with the recording's arrays."""
    source = mine(50)
    with GraphRunner(lambda x: {"all": [comm.allreduce(x)], "own": x}, comm) as runner:
        for turn in range(1, 4):
            source.fill((RANK + 1) * turn)
            with forward_context("a"):
                result = runner(source)
            right(result["all"].pop() * 2, TOTAL * turn * 2)
            assert result.pop("own") is source, turn
    works(comm)


def deep_and_cyclic_nests(comm: Any) -> None:
    """Whatever the address check walks through, runners and breaks take: as arguments, copied ones, and results."""

    def cyclic(x: Any) -> Any:
        return (one := [x, {"x": (x,)}]).append(one) or one

    def deep(x: Any) -> Any:
        for _ in range(3000):
            x = [(x,), {}]
        return x

    def inner(nest: Any) -> Any:
        while type(nest) in (list, tuple):
            nest = nest[0]
        return nest

    @eager_break
    def add(nest: Any) -> Any:
        inner(nest)[:] += 1
        return inner(nest)

    for make, copied in itertools.product((cyclic, deep), (False, True)):
        call = lambda nest, make=make: make(add(make(comm.allreduce(inner(nest)))))  # noqa: E731
        with GraphRunner(call, comm, copy_inputs=copied) as runner:
            nest = make(mine(50))
            for turn in range(1, 4):
                with forward_context("a"):
                    result = runner(nest)
                right(inner(result), TOTAL * turn + 1)
                if copied:
                    nest = make(mine(50) * (turn + 1))
                else:
                    inner(nest)[:] += RANK + 1
            if copied:
                with raises(ArgumentError, "[0][0]", "float32 (50,)", "float32 (51,)"), forward_context("a"):
                    runner(make(mine(51)))
                works(comm)


class Scaled(FP8):
    """A user's own."""


def number(value: float) -> Any:
    return cupy.full((1,), value, np.float32)


def arrays_of_our_own_arguments(comm: Any) -> None:
    """Those of FP8 and Map are compared and copied, also of a subclass; all else has to be as at the recording."""
    x, weight = cupy.ones((2, 128), np.float32), cupy.full((128,), RANK + 1, np.float32)
    quantized = lambda one: comm.allreduce_rmsnorm(x, weight, quantize=one["q"][0])[0]  # noqa: E731
    mapped = lambda one: comm.allreduce(x, then=one)  # noqa: E731
    scaled = "v * s + a"
    for function, make, path, others in (
        (quantized, lambda value: {"q": (FP8(number(value)),)}, '["q"][0].scale', [{"q": (FP8(per="token"),)}]),
        (quantized, lambda value: {"q": (Scaled(number(value)),)}, '["q"][0].scale', [{"q": (FP8(number(4)),)}]),
        (quantized, lambda value: {"q": (FP8(per="token"),)}, "", [{"q": (FP8(per=128),)}, {"q": (number(4),)}]),
        (
            mapped,
            lambda value: Map(scaled, s=2, a=cupy.full((128,), value, np.float32)),
            '.operands["a"]',
            [
                Map(scaled, s=3, a=weight), Map(scaled, s=2.0, a=weight), Map(scaled, s=weight, a=weight),
                Map("v + s * a", s=2, a=weight), Map(scaled, s=2, a=2), weight,
            ],
        ),
    ):  # fmt: skip
        first, second = make(1), make(0.25)
        due = cupy.asnumpy(function(second)).tobytes()
        with GraphRunner(function, comm, mode="full", check="always") as runner, forward_context("a", "full"):
            runner(first)
            runner(first)
            if path:
                with raises(AddressChangedError, f"changed args[0]{path}"):
                    runner(second)
        works(comm)
        with GraphRunner(function, comm, mode="full", copy_inputs=True) as runner:
            for one in (first, second):
                with forward_context("a", "full"):
                    result = runner(one)
            assert cupy.asnumpy(result).tobytes() == due, path
            for other in others:
                with raises(ArgumentError, "args[0]", "the recording"), forward_context("a", "full"):
                    runner(other)
                works(comm)


def rows(first: int, count: int = 16) -> Any:
    """Four rows of numbers, other ones on each rank, whose sum is :func:`sums`."""
    return cupy.asarray((np.arange(first, first + count, dtype=np.float32) * (RANK + 1)).reshape(4, -1))


def sums(first: int, count: int = 16) -> Any:
    return (np.arange(first, first + count, dtype=np.float32) * TOTAL).reshape(4, -1)


def called_with(runner: GraphRunner, *args: Any) -> Any:
    with forward_context("a"):
        return [cupy.asnumpy(result) for result in runner(*args)]


def inputs_at_the_same_place(comm: Any) -> None:
    """copy_inputs=True with views of the recorded arrays: other strides, other ends, changed places, a part shared."""
    with GraphRunner(lambda *given: [comm.allreduce(one * 1) for one in given], comm, copy_inputs=True) as runner:
        x = rows(1)
        for array, due in ((x, sums(1)), (x.T, sums(1).T), (x, sums(1).T), (x[::-1], sums(1).T[::-1])):
            assert (called_with(runner, array)[0] == due).all()
    for count in (16, 16384):
        for by in (1, count // 4):
            for forward in (True, False):
                line = cupy.asarray(np.arange(2 * count, dtype=np.float32) * (RANK + 1))
                due = np.arange(2 * count, dtype=np.float32) * TOTAL
                at, other = (0, by) if forward else (by, 0)
                with GraphRunner(lambda one: [comm.allreduce(one * 1)], comm, copy_inputs=True) as runner:
                    assert (called_with(runner, line[at : at + count])[0] == due[at : at + count]).all()
                    assert (called_with(runner, line[other : other + count])[0] == due[other : other + count]).all()
    with GraphRunner(lambda *given: [comm.allreduce(one * 1) for one in given], comm, copy_inputs=True) as runner:
        x, y, z = rows(1), rows(101), rows(201)
        called_with(runner, x, y, z)
        found = called_with(runner, y, z, x)
        assert all((one == sums(due)).all() for one, due in zip(found, (101, 201, 1), strict=True)), found


def inputs_that_share_memory(comm: Any) -> None:
    """copy_inputs=True where arguments of the recording share memory: alike it is right; else it is refused."""
    add = lambda one, other: [comm.allreduce(one * 1), comm.allreduce(other * 1)]  # noqa: E731
    x, y = rows(1), rows(51)
    with GraphRunner(add, comm, copy_inputs=True) as runner:
        called_with(runner, x, x)
        assert all((one == sums(51)).all() for one in called_with(runner, y, y))
        assert all((one == sums(51).T).all() for one in called_with(runner, y.T, y.T))
        with raises(ArgumentError, "args[0] and args[1] shared memory at the recording", "for each"):
            called_with(runner, rows(1), y)
        works(comm)
    with GraphRunner(add, comm, copy_inputs=True) as runner:  # beside each other in the same rows
        called_with(runner, x[:, :2], x[:, 2:])
        found = called_with(runner, y[:, 2:], y[:, :2])
        assert (found[0] == sums(51)[:, 2:]).all()
        assert (found[1] == sums(51)[:, :2]).all()
    with GraphRunner(lambda one: [comm.allreduce(one * 1)], comm, copy_inputs=True) as runner:
        called_with(runner, every_row(x[0]))
        assert (called_with(runner, every_row(y[0]))[0] == sums(51)[0]).all()
        with raises(ArgumentError, "args[0] has strides", "had (0, 4)", "elements share memory"):
            called_with(runner, y)
        works(comm)


def every_row(row: Any) -> Any:
    """Four times the same memory."""
    return cupy.ndarray((4, row.size), row.dtype, row.data, strides=(0, row.itemsize))


def inputs_of_a_replay_that_runs(comm: Any) -> None:
    """copy_inputs=True: a call on another stream copies once the replay before it has read what it is to read."""
    streams, seen = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)], cupy.zeros(3000, np.float32)
    given = [mine(3000) * factor for factor in range(1, 8)]

    def add(x: Any) -> None:
        seen[...] = seen + comm.allreduce(x * 1)

    with GraphRunner(add, comm, copy_inputs=True) as runner:
        for turn, array in enumerate(given):
            with streams[turn % 2] as stream, forward_context("a"):
                if turn % 2:
                    stream.launch_host_func(time.sleep, 0.1)
                runner(array)
            if not turn:
                cupy.cuda.Device().synchronize()
        cupy.cuda.Device().synchronize()
    right(seen, TOTAL * sum(range(1, 8)))


def descriptors_differ(comm: Any) -> None:
    """Ranks with different descriptors: an error that names both, at recording and at replay."""
    net = Net(comm)
    with GraphRunner(net, comm) as runner:

        def call(tokens: int) -> None:
            with forward_context(Batch(tokens), "piecewise", Metadata(0, [])):
                runner(net.inputs[tokens])
            comm.synchronize()

        with raises(RankMismatchError, "Batch(tokens=2)", "Batch(tokens=4)"):
            call(4 if RANK == LAST else 2)
        assert not runner.recordings
        works(comm)
        call(4)
        call(2)
        with raises(RankMismatchError, "Batch(tokens=2)", "Batch(tokens=4)"):
            call(4 if RANK == LAST else 2)
        works(comm)
        with raises(RankMismatchError, "Batch(tokens=1)", "Batch(tokens=4)"):  # one records, the others replay
            call(1 if RANK == LAST else 4)
        works(comm)
        assert list(runner.recordings) == [Batch(4), Batch(2)]
        call(2)
    works(comm)


def fails_while_recording(comm: Any) -> None:
    """An exception leaves no recording behind; the next call records."""
    fail = [True]

    def body() -> Any:
        total = comm.allreduce(source)
        if fail[0] and RANK == LAST:
            raise LookupError("lost it")
        return total

    source = mine(20)
    with GraphRunner(body, comm) as runner, forward_context("a"):
        with raises(LookupError if RANK == LAST else PeerFailedError, "lost it"):
            runner()
        assert not runner.recordings
        works(comm)
        fail[0] = False
        right(runner())
        right(runner())
        assert list(runner.recordings) == ["a"]
    works(comm)


SCENARIOS = [
    one_for_each_batch, which_calls_replay, full_around_piecewise, contexts, addresses, elsewhere_on_one_rank,
    copied_inputs, inputs_that_are_not_copied, inputs_that_the_function_replaces, results_that_change,
    deep_and_cyclic_nests, arrays_of_our_own_arguments, inputs_at_the_same_place,
    inputs_that_share_memory, inputs_of_a_replay_that_runs, descriptors_differ, fails_while_recording,
]  # fmt: skip
