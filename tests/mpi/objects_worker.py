"""How objects show themselves on ranks without GPUs, and the mistakes that these refuse as ranks with GPUs do.

``mpirun -n 2 python tests/mpi/objects_worker.py scenario ...``: each function among the scenarios runs on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import pydoc
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import (
    ArgumentError,
    CaptureError,
    Communicator,
    Graph,
    GraphRunner,
    GraphStateError,
    PeerLostError,
    UnsupportedError,
    texts,
)
from tests.shared import worker

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
PUBLIC = {
    "allgather", "allreduce", "allreduce_rmsnorm", "backend", "broadcast", "calls", "capture", "close", "describe",
    "empty", "rank", "recover", "reduce_scatter", "resume", "size", "suspend", "synchronize", "xp",
}  # fmt: skip


def raises(kind: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    found: BaseException | None = None
    try:
        call()
    except BaseException as error:
        found = error
    assert type(found) is kind, f"rank {RANK}: {found!r} where {kind.__name__} was due"
    assert words in str(found), f"rank {RANK}: {words!r} is not in {str(found)!r}"


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the package logs in the block, from INFO on."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("ipcreduce")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield records
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def enter(context: Any) -> None:
    with context:
        pass


def step(x: Any) -> Any:
    return x


# ---- how they show themselves
def reprs() -> None:
    with Communicator() as comm:
        assert repr(comm) == f"<Communicator: rank {RANK} of {SIZE}, backend host>"
        graph, runner = Graph(comm, name="two\nlines"), GraphRunner(step, comm, mode="full")
        assert repr(graph) == r"<Graph 'two\nlines': empty>"
        assert repr(Graph(comm)) == "<Graph: empty>"
        assert repr(runner) == "<GraphRunner of step: mode full, 0 recordings>"
        assert repr(GraphRunner(comm.allreduce, comm)).startswith("<GraphRunner of Communicator.allreduce: ")
        assert (
            repr(GraphRunner(sum, comm)) == "<GraphRunner of builtin_function_or_method: mode piecewise, 0 recordings>"
        )
        graph.close()
        assert repr(graph) == r"<Graph 'two\nlines': closed>"
    assert repr(comm) == f"<Communicator: rank {RANK} of {SIZE}, closed>"
    for kind in (Communicator, Graph, GraphRunner):  # as a debugger shows them while __init__ raises
        assert repr(kind.__new__(kind)) == f"<{kind.__name__}: not made>"
    lost = Communicator()
    lost._state.calls.lose("gone", KeyError("x"))
    assert repr(lost) == f"<Communicator: rank {RANK} of {SIZE}, lost: it can only be closed>"
    raises(PeerLostError, "can only be closed", lambda: enter(lost))
    lost.close()
    with Communicator() as parents:

        def in_the_child() -> None:
            assert repr(parents).endswith(", of the process that this one was forked from>"), repr(parents)
            raises(UnsupportedError, "Start processes by spawn", lambda: enter(parents))

        worker.in_a_fork(in_the_child)


def public_interface() -> None:
    with Communicator() as comm:
        assert {name for name in dir(comm) if name[0] != "_"} == PUBLIC
        shown = pydoc.render_doc(comm, renderer=pydoc.plaintext)
        members = set(re.findall(r"^ \|  (\w+)(?:\(|$)", shown, re.M))
        assert {name for name in members if name[0] != "_"} == {*PUBLIC, "Communicator"}, members
    whole = pydoc.render_doc(ipcreduce, renderer=pydoc.plaintext)
    assert not [name for name in ipcreduce.__all__ if not re.search(rf"^ +(?:class )?{name}\(", whole, re.M)]


def copies() -> None:
    with Communicator() as comm:
        for thing in (comm, Graph(comm), GraphRunner(step, comm)):
            words = f"a {type(thing).__name__} cannot be copied or pickled, because it stands for this process"
            for take in (copy.copy, copy.deepcopy, pickle.dumps):
                raises(TypeError, words, lambda take=take, thing=thing: take(thing))
            raises(TypeError, words, lambda thing=thing: copy.deepcopy({"of a model": [thing]}))
        assert comm.allreduce(np.ones(2)).tolist() == [SIZE] * 2


def closed() -> None:
    comm = Communicator()
    with comm as same:
        assert same is comm
    raises(ArgumentError, "the communicator is closed: make a new one", lambda: enter(comm))
    raises(ArgumentError, "the communicator is closed", lambda: enter(comm.capture()))
    raises(ArgumentError, "the communicator is closed", lambda: enter(Graph(comm).record()))


def log() -> None:
    with logged() as records:
        comm = Communicator()
        (made,) = records
        assert made.levelno == logging.INFO
        start = f"ipcreduce made a communicator: rank {RANK} of {SIZE}: backend host; host arrays: through "
        assert made.getMessage().startswith(start)
        assert "; not ipc: " in made.getMessage()
        assert "\n" not in made.getMessage()
        raises(ArgumentError, "there is no op", lambda: comm.allreduce(np.ones(2), "mode"))
        faults = records[1:]
        assert [one.levelno for one in faults] == [logging.WARNING], faults
        assert faults[0].getMessage().startswith(f"ArgumentError: rank {RANK}, call 1: there is no op ")
        comm.close()


# ---- mistakes that a GPU would show
def arguments() -> None:
    with Communicator() as comm:
        words = "which is no ipcreduce.Communicator. Make one"
        for wrong in (1, WORLD, Communicator, Graph(comm), "comm"):
            raises(ArgumentError, words, lambda wrong=wrong: Graph(wrong))
            raises(ArgumentError, words, lambda wrong=wrong: GraphRunner(step, wrong))
        for wrong in (3, None, "step"):
            raises(ArgumentError, "function must be callable, not ", lambda wrong=wrong: GraphRunner(wrong, comm))
        raises(ArgumentError, "mode must be", lambda: GraphRunner(step, comm, mode="partial"))
        for kind in (Graph, lambda comm, **options: GraphRunner(step, comm, **options)):
            raises(ArgumentError, "check must be", lambda kind=kind: kind(comm, check="sometimes"))
        raises(ArgumentError, "pool must be", lambda: Graph(comm, pool=3))
        raises(ArgumentError, "name must be a str, not an int", lambda: Graph(comm, name=3))
        for stream in ("x", -1, 1.5):
            words = f"stream is {texts.kind_of(stream)}, which is no stream"
            raises(ArgumentError, words, lambda stream=stream: comm.synchronize(stream))
            raises(ArgumentError, words, lambda stream=stream: Graph(comm).replay(stream=stream))
            raises(ArgumentError, words, lambda stream=stream: comm.allreduce(np.ones(2), stream=stream))
        assert comm.allreduce(np.ones(2), stream=0).tolist() == [SIZE] * 2
        raises(GraphStateError, "replay() needs a graph that is staged. This one is empty", Graph(comm).replay)
        over = Graph(comm)
        over.close()
        raises(
            GraphStateError, "record() needs a graph that is empty. This one is closed", lambda: enter(over.record())
        )
        with mock.patch("ipcreduce.graphs.graph.AddressCheck", side_effect=ArgumentError("hides its address")):
            raises(ArgumentError, "hides its address", lambda: enter(Graph(comm).record([1])))
    Communicator(device=SIZE + 90).close()  # of another machine, where it may exist


def nothing_is_recorded() -> None:
    """record() says so by its error; all else runs, and the log says so once."""
    with logged() as records, Communicator() as comm:
        del records[:]
        graph = Graph(comm)
        words = "Call the function itself, or a GraphRunner, which calls it here"
        raises(UnsupportedError, words, lambda: enter(graph.record()))
        raises(UnsupportedError, "a Graph needs backend ipc or nccl: ", lambda: enter(graph.record()))
        assert graph.state == "empty"
        assert not records
        for _ in range(2):
            with comm.capture():
                with comm.capture(), ipcreduce.forward_context("a"):
                    assert GraphRunner(lambda: comm.allreduce(np.ones(2)), comm)().tolist() == [SIZE] * 2
                raises(UnsupportedError, words, lambda: enter(graph.record()))
        raises(KeyError, "of the program", lambda: in_capture(comm))
        (record,) = records
        assert record.levelno == logging.INFO
        assert "a GraphRunner calls its function" in record.getMessage()
        assert "\n" not in record.getMessage()


def in_capture(comm: Communicator) -> None:
    with comm.capture():
        raise KeyError("of the program")


def results_of_breaks() -> None:
    """A recording takes arrays, scalars and None from a break; so does a runner that calls its function."""

    @ipcreduce.eager_break
    def give(value: Any) -> Any:
        return value

    @ipcreduce.eager_break
    def outer(value: Any) -> Any:
        return np.ones(len(give(value)))  # a call within a break is part of it

    with Communicator() as comm:
        runner, full = GraphRunner(give, comm), GraphRunner(give, comm, mode="full")
        within = GraphRunner(outer, comm)
        for wrong in ([np.ones(2)], (1, 2), {"x": 1}, object()):
            assert give(wrong) is wrong  # outside of a runner
            assert runner(wrong) is wrong  # without a context
            with ipcreduce.forward_context("a", "full"):
                assert full(wrong) is wrong  # a full graph has no breaks
            with ipcreduce.forward_context("a"):
                assert GraphRunner(give, comm, record_new=False)(wrong) is wrong
                words = f"returned {texts.kind_of(wrong)}. It may return an array, a scalar or None."
                raises(CaptureError, words, lambda wrong=wrong: runner(wrong))
        for fine in (np.ones(2), np.float32(1), None, True, 7, 1.5, "x"):
            with ipcreduce.forward_context("a"):
                assert runner(fine) is fine
        with ipcreduce.forward_context("a"):
            assert within([1, 2]).tolist() == [1, 1]
        assert give([1]) == [1]


SCENARIOS = [
    reprs, public_interface, copies, closed, log, arguments, nothing_is_recorded, results_of_breaks,
]  # fmt: skip


if __name__ == "__main__":
    worker.run(lambda: worker.play(SCENARIOS, sys.argv[1:]))
