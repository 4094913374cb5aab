"""Piecewise: several graphs with eager work between, and one registration for all of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

from ipcreduce import Communicator, Graph, PeerFailedError
from ipcreduce.calls.sequence import CallSequence
from tests.graphs import options
from tests.graphs.common import LAST, RANK, SIZE, TOTAL, WORLD, mine, raises, right, works
from tests.shared.bounds import until

READY = "registered" if options.algorithm == "direct" and SIZE > 1 else "staged"


class Layers:
    """A model in pieces: graph, eager step, graph, ... Batch sizes share a pool, the largest recorded first."""

    def __init__(self, comm: Any, batch: int, pool: Any = None) -> None:
        self.comm, self.input = comm, mine(64 * batch)
        self.outputs: list[Any] = []
        self.graphs: list[Graph] = []
        for _ in range(3):
            graph = Graph(comm, pool=pool)
            source = self.outputs[-1] if self.outputs else self.input
            with graph.record():
                first = comm.allreduce(source)
                self.outputs.append(comm.allreduce(first + 1, "max") + -TOTAL)
            pool = pool or graph.pool
            self.graphs.append(graph)
            self.between(len(self.outputs))
        self.pool = pool

    def between(self, layer: int) -> None:
        """Eager work, an all-reduce of another size among it."""
        self.comm.allreduce(self.outputs[layer - 1], "avg", out=self.outputs[layer - 1])
        self.outputs[layer - 1] += layer

    def replay(self) -> None:
        for layer, graph in enumerate(self.graphs, 1):
            graph.replay()
            self.between(layer)

    def expected(self, value: float) -> list[float]:
        """Of each layer, for inputs of (RANK + 1) * value. The layers' own inputs are alike on every rank."""
        results: list[float] = []
        for layer in range(1, 4):
            total = results[-1] * SIZE if results else value * TOTAL
            results.append(total + 1 - TOTAL + layer)
        return results

    def check(self, value: float) -> None:
        self.input.fill((RANK + 1) * value)
        self.replay()
        for output, expected in zip(self.outputs, self.expected(value), strict=True):
            right(output, expected)

    def states(self) -> set[str]:
        return {graph.state for graph in self.graphs}

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()


def warmed_up(comm: Any) -> None:
    """0, 1 or 3 passes inside capture(), staged; then the same results, registered."""
    for passes in (0, 1, 3):
        with comm.capture():
            layers = Layers(comm, 4)
            assert layers.states() == {"staged"}
            for turn in range(passes):
                layers.check(turn + 1)
        assert layers.states() == {READY}
        for turn in range(3):
            layers.check(turn + 2)
        layers.close()
    comm.synchronize()


def captured_again(comm: Any) -> None:
    """A second capture() for other sizes, in the pool of the first; all replayed in random order."""
    every = []
    for sizes in ((8, 4), (2, 1)):
        with comm.capture():
            for batch in sizes:
                every.append(Layers(comm, batch, every[0].pool if every else None))
    assert {state for layers in every for state in layers.states()} == {READY}
    order = random.Random(5)
    for turn in range(12):
        order.choice(every).check(turn + 1)
    for layers in every:
        layers.close()
    comm.synchronize()


def nested_captures(comm: Any) -> None:
    """Nested capture() is one; it may be empty, and opened again."""
    with comm.capture():
        with comm.capture():
            layers = Layers(comm, 2)
        assert layers.states() == {"staged"}
        layers.check(3)
    assert layers.states() == {READY}
    with comm.capture():
        pass
    layers.check(4)
    layers.close()
    works(comm)


def exception_in_capture(comm: Any) -> None:
    """On one rank or on all: unchanged there; graphs stay staged and can be replayed.

    The others get PeerFailedError: at the end of their blocks if graphs are registered there, else in the next call.
    """
    registers = comm._state.session.direct is not None
    for who in ([LAST], [0], range(SIZE)):
        for inner in (False, True):
            kept = []
            told = raises(PeerFailedError, "of the program")
            others = told if registers else contextlib.nullcontext()
            with raises(KeyError, "of the program") if RANK in who else others, comm.capture():
                kept.append(Layers(comm, 2))
                comm.synchronize()
                WORLD.Barrier()  # an exception while a rank still runs these calls ends NCCL's graphs
                if inner:
                    with comm.capture():
                        if RANK in who:
                            raise KeyError("of the program")
                if RANK in who:
                    raise KeyError("of the program")
            assert kept[0].states() == {"staged"}
            WORLD.Barrier()
            if RANK not in who and not registers:
                until(lambda: comm._state.calls.page.abort_word[0])  # between hosts the word takes a while
                with told:
                    comm.allreduce(mine())
            kept[0].check(2)
            kept[0].close()
            works(comm)


def one_vote(comm: Any) -> None:
    """One exchange a recording; at the end of capture() another one and a call only if graphs are registered there."""
    votes: list[int] = []
    gather = CallSequence.gather

    def count(calls: CallSequence, number: int, *given: Any) -> list[bytes]:
        votes.append(number)
        return gather(calls, number, *given)

    with mock.patch.object(CallSequence, "gather", count), contextlib.ExitStack() as graphs:
        with comm.capture():
            for recordings in (1, 2, 3):
                with graphs.enter_context(Graph(comm)).record():
                    comm.allreduce(mine())
                assert len(votes) == recordings
            number = comm._state.calls.number
        registers = comm._state.session.direct is not None
        assert (len(votes) > 3, comm._state.calls.number - number) == (registers, registers)


def one_registration(comm: Any) -> None:
    """However many graphs there are: the ranks meet once, and a slab that several of them use is mapped once."""
    with Communicator(algorithm="direct") as forced:
        mappings, opened = forced._state.session.direct.mappings, []  # type: ignore[union-attr]

        def counted(mapped: Callable[..., None]) -> Callable[..., None]:
            def count(key: Any, *given: Any) -> None:
                opened.append(key)
                mapped(key, *given)

            return count

        mappings.open, mappings.take = map(counted, (mappings.open, mappings.take))  # type: ignore[method-assign]
        with forced.capture():
            layers = Layers(forced, 2)
            assert not opened
        assert layers.states() == {"registered" if SIZE > 1 else "staged"}
        assert len(set(opened)) == SIZE - 1, "one slab on each other rank"
        assert len(mappings._mapped) == SIZE - 1
        layers.check(5)
        layers.close()


SCENARIOS = [warmed_up, captured_again, nested_captures, exception_in_capture, one_vote, one_registration]
