"""The ways of a call: each is a function over a cell, of any kind and backend, and is one of WAYS."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from ipcreduce import (
    ArgumentError,
    Communicator,
    Graph,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
)
from tests.matrix import gone
from tests.matrix.cell import FORMS, REAL_TIMEOUT, Call, Cell, error_of
from tests.shared.bounds import late, until

TURNS = 6  # in the last of them any call is cached


def repeat(call: Call, comm: Communicator, turns: int = TURNS) -> None:
    """Make a call until it is cached."""
    for turn in range(turns):
        call.make(comm, turn)


def first_call(cell: Cell) -> None:
    """The first of a communicator, and then all forms of it, of its variants and of the next kind."""
    with cell.make() as comm:
        for form in FORMS:
            for kind in (cell.kind, *(one for one, _ in cell.differing())):
                cell.call(form, kind=kind).make(comm, 1)


def cached_call(cell: Cell) -> None:
    """Again and again with the same arrays and other values, all forms in turns."""
    calls = [cell.call(form) for form in FORMS]
    for call in calls:
        repeat(call, cell.comm)
    for turn in range(TURNS):
        for call in calls:
            call.make(cell.comm, turn)


def other_addresses(cell: Cell) -> None:
    """A cached call with other arrays, in turns with its own: all or one of them, of any alignment, at every call."""
    for form in FORMS:
        calls = [cell.call(form, number, offset) for number, offset in enumerate((0, 0, 0, 1, 8))]
        repeat(calls[0], cell.comm)
        for turn in range(2, 2 + TURNS):
            for call in calls:
                call.fill(turn)
            for call in calls:
                call.start(cell.comm)
            for call in calls:
                call.check(turn)
        for turn in range(TURNS):  # dead arrays leave their memory, and the ids of their objects, to the next ones
            cell.call(form, turn % 2).make(cell.comm, turn)
        for name in (*calls[0].inputs, *calls[0].outs):
            other = calls[0].with_another(name)
            for turn in range(3):
                calls[0].make(cell.comm, turn)
                other.make(cell.comm, turn + 1)


def on_several_streams(cell: Cell) -> None:
    """On two streams in turns, whatever form a stream has, and behind work that takes a while on one rank."""
    streams = [cell.place.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for form in FORMS:
        calls = [cell.call(form) for _ in range(3)]
        for turn in range(TURNS):
            cell.place.synchronize()
            for number, call in enumerate(calls):
                stream = streams[(turn + number) % 2]
                if cell.rank == 0 and number == 0:
                    stream.launch_host_func(lambda _: time.sleep(0.01), None)
                with stream:
                    call.fill(turn)
                    if number < 2:
                        call.start(cell.comm, stream if number else None)
                if number == 2:
                    call.start(cell.comm, stream.ptr)
            for stream in streams:
                stream.synchronize()
            for call in calls:
                call.check(turn)


def captured_by_others(cell: Cell) -> None:
    """Captured by CuPy, as new calls and as cached ones, and launched with other values, beside eager calls."""
    stream = cell.place.cupy.cuda.Stream(non_blocking=True)
    calls, eager = [cell.call(form) for form in (*FORMS, *FORMS)], cell.call("own", 1)
    for call in calls[len(FORMS) :]:
        repeat(call, cell.comm)  # which compiles them
    with stream:
        cell.place.synchronize()
        stream.begin_capture()
        for call in calls:
            call.start(cell.comm)
        graph = stream.end_capture()
    for turn in range(3):
        for number, call in enumerate(calls):
            call.fill(turn + number)
        cell.place.synchronize()
        graph.launch(stream)
        eager.make(cell.comm, turn)
        stream.synchronize()
        for number, call in enumerate(calls):
            call.check(turn + number)


def recorded(cell: Cell) -> None:
    """Recorded in a graph, as new calls and as cached ones, and replayed with other values, beside eager calls.

    The graph holds arrays that the program drops.
    """
    calls, eager = [cell.call(form) for form in (*FORMS, *FORMS)], cell.call("own", 1)
    for call in calls[len(FORMS) :]:
        repeat(call, cell.comm)
    with Graph(cell.comm) as graph:
        with graph.record():
            for call in calls:
                call.start(cell.comm)
        for turn in range(3):
            for number, call in enumerate(calls):
                call.fill(turn + number)
            graph.replay()
            eager.make(cell.comm, turn)
            for number, call in enumerate(calls):
                call.check(turn + number)
    dropped = cell.call("own")
    dropped.fill(5)
    with Graph(cell.comm) as graph:
        with graph.record():
            dropped.start(cell.comm)
        dropped.inputs.clear()
        later = [cell.call("own") for _ in range(4)]  # in the memory that is free by now
        for call in later:
            call.fill(1)
        graph.replay()
        dropped.check(5)


def in_both_states(cell: Cell, check: Callable[[Communicator, Call], None], **options: Any) -> None:
    """``check`` of the first call of a communicator, and of one that is cached. Then all ranks go on."""
    with cell.make(**options) as comm:
        for cached in (False, True):
            call = cell.call("own")
            if cached:
                repeat(call, comm)
            comm.synchronize()
            call.fill(3)
            check(comm, call)
            for turn in range(2):
                call.make(comm, turn)


def has_heard(comm: Communicator) -> bool:
    """True once this rank can know that another one has given up. No public name says so."""
    return bool(comm._state.calls.page.aborted)


def late_rank(cell: Cell) -> None:
    """A rank that comes after the others' time is up: it is named on every rank, and the results say that data lack."""

    def check(comm: Communicator, call: Call) -> None:
        is_late = cell.rank == cell.last
        if is_late:
            until(lambda: has_heard(comm), "the end of the others' time")
        with contextlib.nullcontext() if is_late else cell.time_is_up():
            error = error_of(comm, lambda: call.start(comm))
        cell.expect(PeerTimeoutError, error, f"rank {cell.last} did not call within")
        assert is_late or cell.backend != "ipc" or call.lacks_data(), f"rank {cell.rank}: {call.found}"

    in_both_states(cell, check, **({} if cell.moves else {"timeout": REAL_TIMEOUT}))


def refused_on_one_rank(cell: Cell) -> None:
    """A wrong argument on one rank, where nothing is written: the others hear of it."""

    def check(comm: Communicator, call: Call) -> None:
        change, words = call.kind.wrong(call.inputs)
        wrong = cell.rank == cell.last
        error = error_of(comm, lambda: call.start(comm, **change if wrong else {}))
        if wrong:
            cell.expect(ArgumentError, error, f"rank {cell.rank}, call", words)
            assert call.is_untouched(3), f"rank {cell.rank}: {call.outs}"
        else:
            cell.expect(PeerFailedError, error, f"rank {cell.last} raised an error (ArgumentError", words)

    in_both_states(cell, check)


def ranks_that_differ(cell: Cell) -> None:
    """A rank makes a variant of the call, or one of another kind, and each is named, whether cached or not."""
    with cell.make() as comm:
        for cached in (False, True):
            call = cell.call("own")
            for other, words in cell.differing():
                another = cell.call("own", kind=other)
                for one in (call, another) if cached else ():
                    repeat(one, comm, 3)
                comm.synchronize()
                mine = another if cell.rank == cell.last else call
                mine.fill(3)
                error = error_of(comm, lambda mine=mine: mine.start(comm))
                cell.expect(RankMismatchError, error, f"on rank {cell.last}", words, call.kind.words)
                for one in (call, another):
                    one.make(comm, 1)


def rank_closes(cell: Cell) -> None:
    """A rank closes its communicator while the others wait for it in a call."""
    for cached in (False, True):
        with cell.make() as comm:
            call = cell.call("own")
            if cached:
                repeat(call, comm)
            call.fill(3)
            if cell.rank == cell.last:
                late(0.05)
                comm.close()
            else:
                error = error_of(comm, lambda call=call, comm=comm: call.start(comm))
                cell.expect(PeerLostError, error, f"rank {cell.last} is gone: it closed the communicator")


def rank_gone(cell: Cell) -> None:
    """A rank's process is killed while the others wait for it in a call: see gone.py."""
    gone.check(cell)


WAYS: dict[str, Callable[[Cell], Any]] = {
    "first call": first_call,
    "cached call": cached_call,
    "other addresses": other_addresses,
    "on several streams": on_several_streams,
    "captured by others": captured_by_others,
    "recorded and replayed": recorded,
    "late rank": late_rank,
    "refused on one rank": refused_on_one_rank,
    "ranks that differ": ranks_that_differ,
    "rank closes": rank_closes,
    "rank gone": rank_gone,
}
