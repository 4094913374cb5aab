"""What ranks do with NumPy arrays: ``mpirun -n 4 python tests/mpi/host_worker.py memory|page|apart scenario ...``.

The first argument says what the ranks share: memory for the data, a control page alone, or (apart) no memory.

Each function among the scenarios runs on every rank, and asserts.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import (
    ArgumentError,
    Communicator,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    UnsupportedError,
    options,
    startup,
)
from ipcreduce import clock as library_clock
from ipcreduce.arrays.host_splits import HostSplit
from ipcreduce.host import over_mpi, shared
from ipcreduce.page import watchdog
from ipcreduce.page.control_page import Page
from ipcreduce.ranks import connections, exchange
from tests.shared import (
    alarm,
    bad_call_table,
    bad_splits,
    bounds,
    clock,
    float_states,
    reference,
    split_rules,
    start_up_faults,
    sweep,
    worker,
    written_calls,
)
from tests.shared.bounds import no_hang
from tests.shared.cases import Limits
from tests.shared.world import WORLD

RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1


class HostModule:
    """NumPy as tests/shared/sweep.py and tests/shared/bad_call_table.py want it."""

    @staticmethod
    def buffer(raw: np.ndarray) -> np.ndarray:
        return raw.copy()

    @staticmethod
    def view(
        buffer: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None
    ) -> np.ndarray:
        return np.ndarray(shape, dtype, buffer.data, offset, strides)

    @staticmethod
    def read(array: np.ndarray) -> np.ndarray:
        return array


def right(comm: Communicator) -> None:
    """An all-reduce gives what it should."""
    total = comm.size * (comm.size + 1) / 2
    assert comm.allreduce(np.full(10, comm.rank + 1.0)).tolist() == [total] * 10


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """The call must raise this, with these words in the message."""
    error = error_of(call)
    assert type(error) is kind, f"rank {RANK}: {error!r} where {kind.__name__} was due"
    assert words in str(error), f"rank {RANK}: {words!r} is not in {str(error)!r}"


# ---- results
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda a: a.copy(),
    "fortran": lambda a: np.array(a, order="F"),
    "every second, backwards": lambda a: np.repeat(a, 2, axis=-1)[..., ::-2][..., ::-1] if a.ndim else a.copy(),
    "within a larger one": lambda a: np.pad(a, 3)[(..., *(slice(3, 3 + length) for length in a.shape))],
    "unaligned": lambda a: np.ndarray(a.shape, a.dtype, b"\0" + a.tobytes() + b"\0", 1),
}
OUTPUTS = ("new", "out", "strided out", "in place")
SHAPES = [(), (0,), (3, 0, 2), (7,), (5, 3), (701,)]
# Bytes up to which one shot is made, and of a chunk: each case goes as it is, and one of the other ways.
WAYS = {"two shots": (16, 1 << 20), "chunks of two shots": (16, 960), "chunks of one shot": (1 << 20, 48)}


def go(comm: Communicator, one_shot: int, chunk: int) -> None:
    """Let messages go this way. Through shared memory only two shots have chunks."""
    over_mpi._ONE_SHOT_BYTES, over_mpi._SEGMENT_BYTES = one_shot, chunk
    through = comm._state.host._shared
    if through is not None:
        segment = through._segment
        segment.small_bytes = min(one_shot, segment.small[0][0].nbytes) if chunk >= one_shot else 16
        segment.area_bytes = min(chunk, segment.areas[0].nbytes)


def every_kind(comm: Communicator) -> None:
    """dtype x op x shape x layout x output: right, with the same bits every way, on every rank."""
    as_it_is = over_mpi._ONE_SHOT_BYTES, over_mpi._SEGMENT_BYTES
    cases = list(itertools.product(reference.DTYPES, reference.OPS, SHAPES))
    cases += [(dtype, "sum", (70_001,)) for dtype in reference.DTYPES]  # two shots as it is, the last chunk shorter
    checksums = []
    for number, (dtype, op, shape) in enumerate(cases):
        special = number % 2 == 1
        values = [
            reference.random_array(np.random.default_rng([number, rank]), shape, dtype, special) for rank in range(SIZE)
        ]
        found = {}
        with np.errstate(invalid="ignore"):  # as signalling NaN are widened to be compared
            expected = reference.reduce(values, op)
            for turn, name in enumerate(["as it is", list(WAYS)[number % 3]]):
                go(comm, *WAYS.get(name, as_it_is))
                layout, output = list(LAYOUTS)[(number + turn + RANK) % 5], OUTPUTS[(number + number // 4 + turn) % 4]
                found[name] = reduce_one(comm, values[RANK], op, layout, output)
                where = f"rank {RANK}: {op} of {dtype} {shape}, {layout}, {output}, {name}"
                assert reference.same(found[name], expected), f"{where}\nfound {found[name]}\nexpected {expected}"
                assert special or reference.close(found[name], values, op), where
        bits = {name: zlib.crc32(array.tobytes()) for name, array in found.items()}
        assert len(set(bits.values())) == 1, f"{op} of {dtype} {shape}: the bits differ, by their checksums {bits}"
        checksums.append(bits["as it is"])
    go(comm, *as_it_is)
    for case, of_ranks in zip(cases, zip(*WORLD.allgather(checksums), strict=True), strict=True):
        assert len(set(of_ranks)) == 1, f"{case}: the bits differ between ranks, by their checksums {of_ranks}"


def reduce_one(comm: Communicator, value: np.ndarray, op: str, layout: str, output: str) -> np.ndarray:
    source = LAYOUTS[layout](value)
    assert source.shape == value.shape
    if output == "new":
        result = comm.allreduce(source, op)
        assert result.flags.c_contiguous
        assert result.flags.owndata or result.base is not source
    elif output == "in place" and source.flags.writeable:
        result = comm.allreduce(source, op, out=source)
        assert result is source
        return result
    else:
        out = np.empty_like(value) if output == "out" else np.full((*value.shape, 2), 7, value.dtype)[..., 0]
        result = comm.allreduce(source, op, out=out)
        assert result is out
        assert output == "out" or out.base is None or (out.base[..., 1] == 7).all(), "wrote beside the output"
    assert source.tobytes() == value.tobytes(), "changed its input"
    return result


def random_calls(comm: Communicator) -> None:
    """tests/shared/cases.py's, alignments and late ranks among them."""
    limits = Limits(largest=100_000, members=300)
    sweep.run(HostModule, {"host": comm}, ["plain", "list"], 3, 110, limits, late_seconds=0.01)


def lists(comm: Communicator) -> None:
    """Truth values, complex numbers, tensors and arrays of any layout in one list; and lists that are no call alike."""
    total = SIZE * (SIZE + 1) // 2
    wide = np.zeros((4, 6), "F")
    arrays = [
        np.full((2, 3), RANK + 1, "f4").T, np.full(3, (RANK + 1) * 1j), np.full((), RANK + 1, "i8"), np.zeros((0, 2)),
        np.full((3, 4), RANK + 1, "f4")[::-1, ::2], np.full((4, 3), RANK + 1, "F"), np.full(30_000, RANK + 1, "u1"),
    ]  # fmt: skip
    due = [total * np.ones(one.shape, one.dtype) * (1j if one.dtype == "D" else 1) for one in arrays]
    for form in (list, tuple):
        found = comm.allreduce(form(arrays))
        assert type(found) is list
        for one, wanted in zip(found, due, strict=True):
            assert (one.shape, one.dtype) == (wanted.shape, wanted.dtype)
            assert (one == wanted.astype(one.dtype)).all()
        out = form([*(np.zeros_like(one) for one in arrays[:5]), wide[:, ::2], arrays[6]])
        before = arrays[6].copy()
        assert comm.allreduce(form(arrays), out=out) is out
        assert all((one == wanted.astype(one.dtype)).all() for one, wanted in zip(out, due, strict=True))
        assert not wide[:, 1::2].any(), "wrote beside the output"
        arrays[6][...] = before
    own = [one.copy() for one in arrays]
    assert comm.allreduce(own, out=own) is own
    assert all((one == wanted.astype(one.dtype)).all() for one, wanted in zip(own, due, strict=True))
    flags = [np.array([RANK == 0, False, True]), np.array(RANK != LAST)]
    assert [one.tolist() for one in comm.allreduce(flags, "any")] == [[True, False, True], SIZE > 1]
    assert [one.tolist() for one in comm.allreduce(flags, "all")] == [[SIZE == 1, False, True], False]
    tensor = bad_call_table.HostTensor(np.full(5, RANK + 1.0))
    mixed = [tensor, np.full(2, RANK + 1.0)]
    assert comm.allreduce(mixed, out=mixed) is mixed
    assert mixed[0] is tensor
    assert (tensor.array == total).all()
    assert comm.allreduce([]) == comm.allreduce(()) == []
    right(comm)


def splits(comm: Communicator) -> None:
    for rule in split_rules.RULES:
        rule(HostModule, comm)
    lengths = (37, 3_000, 200_000)  # small messages, those of one chunk, and those of several
    split_rules.parts_have_the_bits_of_allreduce(HostModule, comm, lengths)
    for dtype in map(np.dtype, ("V0", [], "V3", ">f4", "M8[s]", [("a", "i1"), ("b", "f8")])):  # some without a byte
        ranks = [np.ndarray((2, 3), dtype, bytes(range(rank, rank + 6 * dtype.itemsize))) for rank in range(SIZE)]
        for axis in (0, 1, 0):
            found, due = comm.allgather(ranks[RANK], axis=axis), np.concatenate(ranks, axis, dtype=dtype)
            assert (found.dtype, found.shape, found.tobytes()) == (dtype, due.shape, due.tobytes()), (dtype, axis)


def known_splits(comm: Communicator) -> None:
    """Again and again, with other values, into new arrays and given ones; and what is wrong is refused each time."""
    for turn in range(4):
        unchecked = mock.patch.object(HostSplit, "__init__", side_effect=AssertionError("checked again"))
        with unchecked if turn else contextlib.nullcontext():
            for value in (turn, turn + 10):
                x, ranks = np.full((2, 3), RANK + value, "f4"), np.repeat(np.arange(SIZE), 2)[:, None] + value
                whole, own = np.zeros((2 * SIZE, 3), "f4"), np.zeros((2, 3), "f4")
                assert comm.allgather(x, out=whole) is whole
                for found in (whole, comm.allgather(x)):
                    assert (found == ranks).all(), found
                assert comm.reduce_scatter(whole, out=own) is own
                for found in (own, comm.reduce_scatter(whole)):
                    assert (found == SIZE * (RANK + value)).all(), found
                sent = np.full(5, RANK + value)
                assert comm.broadcast(sent, LAST) is sent
                assert (sent == LAST + value).all()
        for wrong in (False, 0.0, "0"):
            error = error_of(lambda wrong=wrong: comm.allgather(np.ones((2, 3), "f4"), axis=wrong))
            assert type(error) is ArgumentError, f"rank {RANK}: {error!r}"


def lists_that_differ(comm: Communicator) -> None:
    """The ranks' lists are named by both sides; a member that one rank refuses leaves all outputs alone."""
    own = [np.ones(3), np.ones((2, 2), "f4")]
    for other, words in (
        (own[:1], "sum of 1 arrays on the host: float64 (3,)"), ([], "sum of 0 arrays on the host"),
        (own[::-1], "float32 (2, 2), float64 (3,)"), ([own[0], np.ones(4, "f4")], "float32 (4,)"),
        (own[0], "sum of float64 (3,) on the host"),
    ):  # fmt: skip
        given = other if RANK == LAST else own
        error = error_of(lambda given=given: comm.allreduce(given))
        assert type(error) is RankMismatchError, f"rank {RANK}: {error!r}"
        for part in (words, "sum of 2 arrays on the host: float64 (3,), float32 (2, 2)", f"on rank {LAST}"):
            assert part in str(error), f"rank {RANK}: {part!r} is not in {str(error)!r}"
        right(comm)
    for wrong, words in (
        (None, "member 1 of the list: it is None"),
        (np.ones(2, "M8[s]"), "member 1 of the list: dtype"),
    ):
        out = [np.full(3, 7.0), np.full((2, 2), 7.0, "f4")]
        if RANK == LAST:
            raises(ArgumentError, words, lambda wrong=wrong, out=out: comm.allreduce([own[0], wrong], out=out))
        else:
            raises(PeerFailedError, words, lambda out=out: comm.allreduce(own, out=out))
        assert all((one == 7).all() for one in out), "written"
        right(comm)


def as_people_write(comm: Communicator) -> None:
    """tests/shared/written_calls.py's, also by the default communicator and on tensors of the host."""
    assert written_calls.run(HostModule, comm) > 80
    assert ipcreduce.allreduce(RANK + 1.0, "mean") == (SIZE + 1) / 2
    right(comm)
    tensor = bad_call_table.HostTensor(np.full(30_000, RANK + 1, np.complex128))
    found = comm.allreduce(tensor)
    assert type(found) is np.ndarray
    assert comm.allreduce(tensor, MPI.SUM, out=tensor) is tensor
    assert (tensor.array == found).all()
    assert (found == SIZE * (SIZE + 1) / 2).all()


class Odd(np.ndarray):
    """A subclass with a shape, an indexing and a copy of its own."""

    shape = property(lambda self: "round")

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("indexed")

    __setitem__ = reshape = copy = astype = view = __getitem__  # type: ignore[assignment]


def subclasses(comm: Communicator) -> None:
    """Plain arrays to us: matrices, which have no other shape than two axes, and what overrides more."""
    layouts = (lambda a: a.copy(), lambda a: np.repeat(a, 2, axis=1)[:, ::2])
    for kind, dtype, layout in itertools.product((np.matrix, Odd, np.memmap), ("f8", "F", "?"), layouts):
        for shape in ((2, 2), (1, 2000), (300, 100)):
            base = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
            mine, due, op = base * (RANK + 1), base * (SIZE * (SIZE + 1) // 2), "sum"
            if dtype == "?":
                mine, due, op = base, base, "max"
            array, out = (np.ndarray.view(layout(one), kind) for one in (mine, np.zeros_like(mine)))
            found = comm.allreduce(array, op)
            assert type(found) is np.ndarray
            assert comm.allreduce(np.asarray(array), op, out=out) is out
            assert comm.allreduce(array, op, out=array) is array
            assert type(array) is type(out) is kind
            for one in (found, np.asarray(out), np.asarray(array)):
                assert (one.shape, one.dtype) == (shape, due.dtype)
                assert np.array_equal(one, due), (kind, dtype, shape)


def a_float_sum_starts_at_rank_0(comm: Communicator) -> None:
    minus = comm.allreduce(np.array([-0.0]))
    assert np.signbit(minus[0])
    values = [1e16, 1.0, -1e16, 1.0][:SIZE]  # whose sum depends on the order
    expected = 0.0
    for value in values:
        expected += value
    assert comm.allreduce(np.array([values[RANK]])).tolist() == [expected]


def a_float_state_of_one_rank(comm: Communicator) -> None:
    """Every rank has the bits of the standard state, by every way: the sum of denormals, and 1 plus a little."""
    for name, length in itertools.product(float_states.NAMES, (4, 70_000)):
        x = np.full(length, 2.0**-140, np.float32)
        x[1::2] = 2.0**-27 if RANK else 1.0
        due = np.full(length, SIZE * 2.0**-140, np.float32)
        due[1::2] = 1.0
        with float_states.state(name if RANK == LAST else None):
            found = comm.allreduce(x)
            (listed,) = comm.allreduce([x])
            doubled = comm.allreduce(x, then=ipcreduce.Map("v + v", host=lambda v: v + v))
            y, added = comm.allreduce_rmsnorm(x, np.ones(length, np.float32), 0.0)
        for result in (found, listed, added, doubled / 2):
            assert result.tobytes() == due.tobytes(), (name, length, result[:2])
        assert len({*WORLD.allgather(y.tobytes())}) == 1, (name, length, y[:2])


# ---- errors
def wrong_calls(comm: Communicator) -> None:
    count = bad_call_table.run(HostModule, comm)
    print(f"{count} wrong calls")
    assert bad_call_table.run_constructors(device=False) >= 15
    right(comm)


def wrong_splits(comm: Communicator) -> None:
    assert bad_call_table.run(HostModule, comm, bad_splits.rows()) >= 100


def late(comm: Communicator) -> None:
    """A rank that is later than the timeout: an error on every rank, naming it. Then all goes on."""
    with Communicator() as brief:
        right(brief)
        WORLD.Barrier()
        worker.await_others(WORLD)
        words = f"rank {LAST} did not call within 120 s (its last call was 1: sum of float64 (10,) on the host"
        if RANK == LAST:
            raises(PeerTimeoutError, f"{words}; it is this rank)", lambda: right(brief))
        else:
            page, others = brief._state.calls.page, range(LAST)
            come = lambda: all(page.calls.call_of(rank) > 1 for rank in others)  # noqa: E731
            begun = clock.now()
            with clock.passing(20.0, come):
                raises(PeerTimeoutError, words, lambda: right(brief))
            assert clock.now() - begun > 120 or page.missed()  # another rank's time was up first
        worker.let_last_go(WORLD)
        for _ in range(3):
            right(brief)
        big = brief.allreduce(np.full(300_000, RANK))
        assert (big == SIZE * LAST // 2).all()
    right(comm)


def memory_outlives_a_wait(comm: Communicator) -> None:
    """MPI writes to the buffers of an exchange that was given up when the late rank comes: they must not be freed."""
    buffers = []

    def zeros(*args: Any) -> np.ndarray:
        array = np.zeros(*args)
        buffers.append(weakref.ref(array))
        return array

    def take_part() -> None:
        record = exchange.message(exchange.CONFIRMATION)
        exchange.allgather(comm._state.ranks, record, library_clock.now() + 120, "a test")

    worker.await_others(WORLD)
    if RANK == LAST:
        take_part()
    else:
        watched = types.SimpleNamespace(**{**vars(np), "zeros": zeros})
        with mock.patch.object(exchange, "np", watched), clock.passing(121.0):
            raises(PeerTimeoutError, "in time", take_part)
        (received,) = buffers
        gc.collect()
        assert received() is not None, f"rank {RANK}: freed"
    worker.let_last_go(WORLD)
    WORLD.Barrier()
    right(comm)


def without_tcp(comm: Communicator) -> None:
    """Ranks that neither share memory nor reach each other have no communicator; a world of one needs neither."""
    words = "neither share memory (the ranks are on 2 hosts) nor reach each other over TCP (listening for the other"
    with mock.patch.object(connections.Socket, "listen", no_room):
        for text in (words, "No space left on device). Let the ranks share /dev/shm"):
            with no_hang("start-up"):
                raises(UnsupportedError, text, Communicator)
        with mock.patch.object(startup.Page, "create", no_room), Communicator(MPI.COMM_SELF) as alone:
            assert alone.allreduce(np.ones(3)).tolist() == [1.0] * 3
            raises(ArgumentError, "there is no op", lambda: alone.allreduce(np.ones(3), "mode"))
            assert alone.allreduce(2.0) == 2.0
    with Communicator() as again:
        right(again)
    right(comm)


def refused_while_another_is_late(comm: Communicator) -> None:
    """The rank that refuses gets its own error at once; the others get it whenever they come."""
    with Communicator() as brief:
        right(brief)
        WORLD.Barrier()
        if RANK == 0:
            with no_hang("the refusal"):
                raises(ArgumentError, "there is no op", lambda: brief.allreduce(np.ones(3), "mode"))
            for rank in range(1, SIZE):
                WORLD.send(None, rank)
        else:
            WORLD.recv(source=0)
            raises(
                PeerFailedError,
                "rank 0 raised an error (ArgumentError: rank 0, call 2: there is no op",
                lambda: right(brief),
            )
        right(brief)
    right(comm)


def recovered(comm: Communicator) -> None:
    """The loop of docs/errors.md: a call fails on one rank where it is complete on the others, or the program does."""
    for failure in ("of the function", "of the program"):
        turn, began, sums, failures = 0, list[int](), dict[int, np.ndarray](), [ValueError(failure)] * (RANK == LAST)

        def check(v: np.ndarray, failure: str = failure, failures: list[ValueError] = failures) -> np.ndarray:
            if failure == "of the function" and v[0] == 3 * SIZE and failures:
                raise failures.pop()
            return v

        while turn <= 6:
            try:
                began[turn:] = [comm.calls]
                if failure == "of the program" and turn == 3 and failures:
                    raise failures.pop()
                if turn < 6:
                    sums[turn] = comm.allreduce(np.full(3, float(turn)), then=ipcreduce.Map("v", host=check))
                else:
                    comm.allreduce(0)
                turn += 1
            except (ValueError, PeerFailedError):
                expected = began[0] + 3
                assert comm.recover() == expected
                mine = max(one for one, calls in enumerate(began) if calls <= expected)
                turn = comm.allreduce(mine, "min")
                assert turn == 3
        assert not failures
        assert all((sums[one] == SIZE * one).all() for one in range(6))


def failed_behind_the_data(comm: Communicator) -> None:
    """The last rank fails as soon as it has all data. Rank 0 sees the fault before its own data, and waits for them."""
    page, complete, polls = comm._state.calls.page, exchange.complete, iter(range(3))

    def fail(v: np.ndarray) -> np.ndarray:
        raise ValueError("of the function")

    def late(request: Any, *given: Any, **named: Any) -> None:
        test = request.Test
        later = types.SimpleNamespace(Test=lambda: page.aborted and next(polls, None) is None and test())
        complete(later, *given, **named)

    right(comm)
    known = comm.calls
    then = ipcreduce.Map("v", host=fail if RANK == LAST else np.copy)
    with mock.patch.object(exchange, "complete", late if RANK == 0 else complete):
        error = error_of(lambda: comm.allreduce(np.ones(3), then=then))
    possible = {0: [PeerFailedError], LAST: [ValueError]}
    assert type(error) in possible.get(RANK, [PeerFailedError, type(None)]), repr(error)
    assert comm.recover() == known
    right(comm)


def interrupted(comm: Communicator) -> None:
    """An exception out of a wait (Ctrl-C, an alarm) comes at once; no rank ever takes part of it for data."""

    class Alarm(BaseException):
        pass

    for count in (6, 30_000):
        with Communicator() as brief:
            right(brief)
            WORLD.Barrier()
            if RANK == 0:

                def ring(brief: Communicator = brief) -> None:
                    if brief._state.calls.page.calls.call_of(0) > 1:
                        raise Alarm
                    alarm.call_later(0.1, ring)  # it is not in its call yet

                try:
                    with no_hang("the alarm"):
                        alarm.call_later(0.2, ring)
                        brief.allreduce(np.ones(count))
                except Alarm:
                    pass
                else:
                    raise AssertionError("no alarm")
                for rank in range(1, SIZE):
                    WORLD.send(None, rank)
            else:
                WORLD.recv(source=0)
                error = error_of(lambda count=count, brief=brief: brief.allreduce(np.ones(count)))
                assert isinstance(error, IpcReduceError), f"rank {RANK} got {error!r}, with rank 0 gone from the call"
                assert "raised an error (Alarm" in str(error), error
            WORLD.Barrier()
            if HOW == "memory":
                right(brief)
    right(comm)


def left_before_the_data(comm: Communicator) -> None:
    """Rank 0 is interrupted once all others exchange data over MPI. Nobody says that all goes on."""
    with Communicator() as brief:
        right(brief)
        host = brief._state.host

        def interrupted(*_: object) -> None:
            for _ in range(LAST):
                WORLD.recv()
            raise KeyboardInterrupt

        def begun(*given: Any) -> Any:
            WORLD.send(None, 0)
            return exchange(*given)

        exchange = host._over_mpi
        with mock.patch.object(host, "_over_mpi", begun if RANK else interrupted):
            if RANK == 0:
                with contextlib.suppress(KeyboardInterrupt):
                    right(brief)
            else:
                error = error_of(lambda: right(brief))
                assert type(error) is PeerLostError, repr(error)
                assert "KeyboardInterrupt" in str(error), error
                assert str(error).endswith("The communicator can only be closed."), error
                assert "used again" not in str(error), error
        WORLD.Barrier()
        raises(PeerLostError, "can only be closed", lambda: right(brief))
    right(comm)


def out_of_memory(comm: Communicator) -> None:
    """A rank that fails after the ranks have agreed: nobody is told that the ranks' programs differ."""
    with Communicator() as brief:
        right(brief)
        module = shared if HOW == "memory" else over_mpi
        reduce = module.reduce
        if RANK == LAST:

            def fail(*_: object) -> None:
                raise MemoryError("no room")

            module.reduce = fail
            raises(MemoryError, "no room", lambda: right(brief))
            module.reduce = reduce
        else:
            error = error_of(lambda: right(brief))  # it may have all the data already
            if HOW == "memory" and error is None:
                error = error_of(lambda: right(brief))
            assert HOW != "memory" or "raised an error (MemoryError: no room)" in str(error), error
        if HOW == "memory":
            right(brief)
        else:
            for _ in range(2):
                error = error_of(lambda: right(brief))
                assert error is None or isinstance(error, IpcReduceError), f"rank {RANK}: {error!r}"
                assert not isinstance(error, RankMismatchError), f"rank {RANK}: {error!r}"
                WORLD.Barrier()
    right(comm)


def arguments_differ(comm: Communicator) -> None:
    """What has to be the same on every rank is compared, and named on every rank."""
    for arguments, words in (
        ({"timeout": 100.0 + RANK}, "timeout must be the same on every rank, but is 1"),
        ({"timeout": 100.0 + (RANK == LAST)}, "timeout must be the same on every rank, but is 1"),
        ({"algorithm": "two_shot" if RANK else None}, "algorithm must be the same on every rank"),
        ({"algorithm": "two_shot" if RANK else "one_shot"}, "algorithm must be the same on every rank"),
    ):
        raises(ArgumentError, words, lambda arguments=arguments: Communicator(**arguments))
    for text, words in (
        (str(64 + RANK), "workspace must be the same"),
        ("1" * 5000 if RANK == LAST else "64", "IPCREDUCE_WORKSPACE_MB is '11111"),
        ("x", "IPCREDUCE_WORKSPACE_MB is 'x'"),
        ("0", "IPCREDUCE_WORKSPACE_MB is '0'"),
    ):
        os.environ["IPCREDUCE_WORKSPACE_MB"] = text
        raises(ArgumentError, words, Communicator)
    os.environ["IPCREDUCE_WORKSPACE_MB"] = "64"
    with Communicator(algorithm="two_shot") as other:
        right(other)
    del os.environ["IPCREDUCE_WORKSPACE_MB"]
    right(comm)


class Incomparable(float):
    """Cannot be compared."""

    def __gt__(self, other: object) -> bool:
        raise LookupError("an odd number")


def errors_before_the_first_exchange(comm: Communicator) -> None:
    """On the last rank: in an option, and for want of memory. The others hear of both at once."""
    words = "options cannot be read: LookupError: an odd number"
    raises(ArgumentError, words, lambda: Communicator(timeout=Incomparable(3600) if RANK == LAST else 3600))
    with mock.patch.object(Page, "alone", side_effect=MemoryError("none left")):
        error = error_of(lambda: Communicator(timeout=3600)) if RANK == LAST else None
    if RANK != LAST:
        raises(PeerFailedError, f"rank {LAST} has left start-up (MemoryError", lambda: Communicator(timeout=3600))
    assert RANK != LAST or type(error) is MemoryError, repr(error)
    right(comm)


def other_builds(comm: Communicator) -> None:
    """Every rank hears which ranks have the same one, and where its own is."""
    mine = startup._build()
    with mock.patch.object(startup, "_build", return_value="0.1.0, code 1234" if RANK == LAST else mine):
        words = f"but {mine} on ranks {[*range(LAST)]} and 0.1.0, code 1234 on ranks {[LAST]}. Install the same one"
        raises(RankMismatchError, words, lambda: Communicator(timeout=3600))
        raises(RankMismatchError, str(startup._FOLDER), lambda: Communicator(timeout=3600))
    right(comm)


def late_at_start_up(comm: Communicator) -> None:
    """After a start-up that failed for one rank, however far the others came in it, the next one works."""
    meet, joined = startup._meet, threading.Event()

    def come_late(*given: Any) -> Any:  # the others have duplicated the communicator with this rank, and wait in vain
        worker.await_others(WORLD)
        on_host = library_clock.on_host  # by which their time is up
        with mock.patch.object(library_clock, "on_host", lambda deadline: on_host(deadline) + 121):
            return meet(*given)

    def come(*given: Any) -> Any:
        joined.set()
        return meet(*given)

    words = f"not all {SIZE} ranks came to start-up"
    if RANK == LAST:
        worker.await_others(WORLD)
    else:
        with clock.passing(121.0):
            raises(PeerTimeoutError, words, Communicator)
        worker.let_last_go(WORLD)
    with Communicator() as second:  # of the last rank the first
        right(second)
    startup._meet = come_late if RANK == LAST else come
    with clock.passing(121.0, joined.is_set):
        raises(PeerTimeoutError, "Look for a rank that has not made its Communicator, then make it again", Communicator)
    startup._meet = meet
    worker.let_last_go(WORLD)
    with Communicator() as third:
        right(third)
    raises(ArgumentError, "timeout is -1", lambda: Communicator(timeout=-1 if RANK == 0 else 20))
    with Communicator() as fourth:
        right(fourth)


def exceptions_at_start_up(comm: Communicator) -> None:
    """On the last rank, before and behind every exchange; nobody waits for a timeout of years.

    Once it has left, time passes for the connections for which the others wait.
    """

    def make() -> Communicator:
        passing = clock.passing(bounds.LONG + 1, start_up_faults.has_left)
        with contextlib.nullcontext() if RANK == LAST else passing:
            return Communicator(timeout=1e8)

    folder = WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else "")
    places = start_up_faults.everywhere(make, right, RANK == LAST, SIZE, folder)
    WORLD.Barrier()
    if RANK == 0:
        shutil.rmtree(folder)
    assert places >= {"memory": 13, "page": 11, "apart": 9}[HOW], places
    right(comm)


def warnings_at_start_up(comm: Communicator) -> None:
    """Where one is an error, no rank has a communicator, and none waits. Else each rank has it once."""
    os.environ["IPCREDUCE_TIMEOUT"] = "9"
    words = "ipcreduce does not know the environment variable IPCREDUCE_TIMEOUT"
    for strict in ({LAST}, set(range(SIZE))):
        options._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error" if RANK in strict else "always")
            error = error_of(lambda: Communicator(timeout=3600))
        assert type(error) is (RuntimeWarning if RANK in strict else PeerFailedError), repr(error)
        assert words in str(error), error
        assert len(caught) == (RANK not in strict)
    options._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Communicator(timeout=3600) as made:
            right(made)
        with Communicator(timeout=3600) as again:
            right(again)
    assert [str(one.message).startswith(words) for one in caught] == [True]
    assert "Communicator(timeout=3600)" in linecache.getline(caught[0].filename, caught[0].lineno)
    del os.environ["IPCREDUCE_TIMEOUT"]


def no_descriptors(comm: Communicator) -> None:
    """On the last rank, from none on: every rank hears of the limit, or all is well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(200):
        if RANK == LAST:
            free = os.open(os.devnull, os.O_RDONLY)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
        made: list[Communicator] = []
        error = error_of(lambda made=made: made.append(Communicator(timeout=3600)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if error is None:
            right(made[0])
            made[0].close()
        else:
            assert type(error) is UnsupportedError, repr(error)
            assert f"rank {LAST}" in str(error), error
            assert "[Errno 24] Too many open files" in str(error), error
            assert ": this process may have" in str(error), error
        outcomes = WORLD.allgather(error is None)
        assert len(set(outcomes)) == 1, outcomes
        if error is None:
            break
    assert spare, "with none it does not work"
    assert error is None, "with enough of them it works"
    right(comm)


def closed_by_the_program(comm: Communicator) -> None:
    """Rank 0 has closed descriptors of a communicator, and a file of its own has their numbers by then."""
    one = Communicator(timeout=bounds.LONG)
    right(one)
    WORLD.Barrier()  # else a rank may be in this call as its connection ends
    with tempfile.TemporaryFile() as file:
        numbers: list[int] = []
        if RANK == 0 and one._state.watch is not None:
            dog = watchdog._watchdog
            with dog._lock:
                ours = [*(dog._pipe or ()), *(process.pidfd for process in dog._processes.values())]
                numbers = [known.number for known in ours] + one._state.watch.mirror.descriptors()
                for number in numbers:
                    os.dup2(file.fileno(), number)
        with no_hang():
            if HOW == "apart" and SIZE > 1:
                raises(PeerLostError, "is gone: ", lambda: right(one))
            else:
                right(one)
            one.close()
        right(comm)
        assert os.fstat(file.fileno()).st_size == 0
        for number in numbers:
            assert os.path.samestat(os.fstat(number), os.fstat(file.fileno()))
            os.close(number)


def names_of_hosts(comm: Communicator) -> None:
    """IPCREDUCE_HOSTID of any script and length tells hosts apart."""
    before = os.environ.get("IPCREDUCE_HOSTID")
    for own, same in (
        ("hôte", False),
        ("a name that is too long for a field " * 9, False),
        ("\udcff", False),
        ("é", True),
    ):
        os.environ["IPCREDUCE_HOSTID"] = own if same else f"{own}{RANK}"
        with Communicator() as made:
            assert (f"the ranks are on {SIZE} hosts" in made.describe()) == (not same), made.describe()
            right(made)
    os.environ.pop("IPCREDUCE_HOSTID")
    if before is not None:
        os.environ["IPCREDUCE_HOSTID"] = before


def every_rank_is_watched(comm: Communicator) -> None:
    """However late one of them writes its identity to the control page."""
    join = Page.join

    def join_late(self: Page, *identity: int) -> None:
        bounds.late(0.3 * (RANK == LAST))
        join(self, *identity)

    Page.join = join_late
    try:
        with Communicator() as watched:
            assert watched._state.watch is not None
            processes = watchdog._watchdog._processes.values()
            ranks = {rank for process in processes for watch, rank in process.ranks if watch is watched._state.watch}
            assert ranks == set(range(SIZE)) - {RANK}, ranks
    finally:
        Page.join = join


def take_mpis_communicators(but: int) -> list[MPI.Comm]:
    """Duplicates of the world, until MPI, which has some thousand communicators, has only ``but`` more."""
    taken: list[MPI.Comm] = []
    with contextlib.suppress(MPI.Exception):
        while True:
            taken.append(WORLD.Dup())
    while but:
        taken.pop().Free()
        but -= 1
    return taken


def nothing_is_used_up(comm: Communicator) -> None:
    """Communicators that were closed, and those that failed, give back what MPI has few of."""
    taken = take_mpis_communicators(but=50)
    for _ in range(150):
        Communicator().close()
    for _ in range(150):
        Communicator().allreduce(np.ones(3))  # dropped: closed before the next one is made
    for _ in range(150):
        assert isinstance(error_of(lambda: Communicator(timeout=100.0 + RANK)), ArgumentError)
    right(comm)
    for one in taken:
        one.Free()


def too_many(comm: Communicator) -> None:
    """Communicators that the program keeps: a named error before MPI gives up."""
    taken, kept = take_mpis_communicators(but=100), []

    def fill() -> None:
        for _ in range(1000):
            kept.append(Communicator())

    raises(UnsupportedError, "MPI can make no further communicator", fill)
    assert len(kept) > 10
    right(kept[-1])
    kept.clear()
    gc.collect()
    right(Communicator())
    right(comm)
    for one in taken:
        one.Free()


def a_graph_keeps_its_communicator(comm: Communicator) -> None:
    graph = ipcreduce.Graph(Communicator())
    gc.collect()
    right(Communicator())
    right(graph._comm)


def runners(comm: Communicator) -> None:
    """Without GPUs a runner calls its function, whatever the context; breaks are plain calls."""
    seen = []

    @ipcreduce.eager_break
    def look() -> None:
        seen.append(ipcreduce.get_forward_context())

    def body(array: np.ndarray) -> np.ndarray:
        look()
        return comm.allreduce(array) + 1

    with ipcreduce.GraphRunner(body, comm) as runner:
        for mode in ("piecewise", "full", "none"):
            with ipcreduce.forward_context("a", mode, 7) as context:
                assert runner(np.full(3, RANK)).tolist() == [SIZE * LAST / 2 + 1] * 3
                assert seen.pop() is context
        assert not runner.recordings
    assert ipcreduce.get_forward_context() is None
    assert ipcreduce.collect_addresses({"a": np.ones(3), "b": [comm]}) == {}


# ---- several communicators, and their ends
def sub_communicators(comm: Communicator) -> None:
    """Parts of the world, in another order, one rank alone; calls of different parts do not wait for each other."""
    members = [rank for rank in range(LAST, -1, -1) if rank % 2 == RANK % 2]  # from the last to the first
    part = Communicator(WORLD.Split(RANK % 2, -RANK))
    alone = Communicator(MPI.COMM_SELF)
    assert (part.rank, part.size) == (members.index(RANK), len(members))
    assert (alone.rank, alone.size) == (0, 1)
    values = [np.float32(1e8 if rank == members[0] else 3 + rank) for rank in range(SIZE)]
    for _ in range(5 + 5 * (RANK % 2)):  # the parts make different numbers of calls
        found = part.allreduce(np.array([values[RANK]]))
        assert found == reference.reduce([np.array([values[rank]]) for rank in members], "sum")
        assert alone.allreduce(np.array([RANK])) == RANK
    right(comm)
    part.close()
    alone.close()
    right(comm)


def side_by_side(comm: Communicator) -> None:
    """Two over the same ranks; and messages of the program's own on the same MPI communicator in between."""
    other = Communicator(WORLD)
    request = WORLD.Iallreduce(np.full(3, RANK), sums := np.empty(3, int))
    for turn in range(20):
        a, b = comm.allreduce(np.full(turn, 1.0)), other.allreduce(np.full(30, RANK), "max")
        assert (a == SIZE).all()
        assert (b == LAST).all()
        assert WORLD.allreduce(1) == SIZE
    request.Wait()
    assert (sums == SIZE * LAST // 2).all()
    other.close()
    right(comm)


def threads(comm: Communicator) -> None:
    """Calls from several threads on one communicator, and from one thread on each of two."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return
    others = [Communicator() for _ in range(2)]
    failed: list[BaseException] = []

    def work(on: Communicator) -> None:
        try:
            for _ in range(20):
                right(on)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(on,), daemon=True) for on in (comm, comm, *others)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert not failed, failed
    for other in others:
        other.close()


def closing(comm: Communicator) -> None:
    """close() waits for nobody, can be repeated, and ends every use; ``with`` closes."""
    with Communicator() as inner:
        assert inner.backend == "host"
        right(inner)
        array = inner.allreduce(np.full(3, 1.0))
    raises(ArgumentError, "the communicator is closed: make a new one", lambda: inner.allreduce(np.ones(3)))
    raises(ArgumentError, "the communicator is closed: make a new one", inner.synchronize)
    assert f"rank {RANK} of {SIZE}: backend host" in inner.describe()
    inner.close()
    inner.close()
    assert (array == SIZE).all()

    try:
        with Communicator() as failed:
            raise KeyError("of the program")
    except KeyError:
        raises(ArgumentError, "closed", lambda: failed.allreduce(np.ones(3)))

    early = Communicator()
    WORLD.Barrier()
    if RANK == 0:
        with no_hang("close()"):
            early.close()
    WORLD.Barrier()
    early.close()
    right(comm)


def a_call_after_another_rank_has_closed(comm: Communicator) -> None:
    brief = Communicator()
    right(brief)
    if RANK == 0:
        brief.close()
    else:
        with no_hang():
            raises(PeerLostError, "closed the communicator, after its call 1", lambda: right(brief))
        brief.close()
    WORLD.Barrier()
    right(comm)


def a_block_that_raises(comm: Communicator) -> None:
    """The others hear by what: not only that the rank has closed the communicator."""
    with contextlib.suppress(KeyError), Communicator(timeout=60) as brief:
        right(brief)
        if RANK == LAST:
            raise KeyError("weights")
        words = "its program left the communicator's block by KeyError: 'weights', after its call 1"
        raises(PeerLostError, words, lambda: right(brief))
    WORLD.Barrier()
    right(comm)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


class Raising:
    """An array whose place cannot be read."""

    @property
    def __dlpack_device__(self) -> Any:
        raise LookupError("no place")

    __dlpack__ = None


class Refused:
    """An array that refuses to be one."""

    __dlpack__ = None

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __dlpack_device__(self) -> tuple[int, int]:
        raise self.error


def texts_of_any_kind(comm: Communicator) -> None:
    """An exception of a foreign object whose text cannot be encoded, or that has none: told at once, as any other."""
    with Communicator(timeout=3600) as brief:
        for error in (ValueError("/data/\udcff"), Mute(), MemoryError("é" * 2000)):
            array: Any = Refused(error) if RANK == LAST else np.ones(3)
            found = error_of(lambda array=array: brief.allreduce(array))
            if RANK == LAST:
                assert "does not give its memory" in str(found), repr(found)
                assert found.__cause__ is error
            else:
                assert type(found) is PeerFailedError, repr(found)
                assert f"rank {LAST} raised an error" in str(found), found
            right(brief)
    right(comm)


def nested(comm: Communicator) -> None:
    """A signal's handler makes calls while its thread waits in one: of that communicator, and of another one."""
    other, brief = Communicator(timeout=60), Communicator(timeout=60)
    for count in (4, 300_000):
        got: list[Any] = []

        def handler(*_: Any, got: list[Any] = got) -> None:
            if watchdog._watchdog._lock._is_owned():  # type: ignore[attr-defined]
                threading.Thread(target=ring).start()  # the thread that would carry the call waits for this one
                return
            got.append(error_of(lambda: brief.allreduce(np.full(4, 100.0))))
            got.append(error_of(brief.close))
            got.append(other.allreduce(np.full(4, RANK + 1.0))[0])  # for which the others wait

        def ring(main: int = threading.get_ident()) -> None:
            time.sleep(1e-3)
            while not brief._state.calls.within:
                time.sleep(1e-3)
            signal.pthread_kill(main, signal.SIGUSR1)

        due = SIZE * (SIZE + 1) / 2
        if RANK == 0:
            before = signal.signal(signal.SIGUSR1, handler)
            thread = threading.Thread(target=ring)
            thread.start()
        else:
            assert other.allreduce(np.full(4, RANK + 1.0))[0] == due
        assert (brief.allreduce(np.full(count, RANK + 1.0)) == due).all(), "the call around it"
        if RANK == 0:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
            error, closed, value = got
            assert type(error) is UnsupportedError, repr(error)
            assert "this call was made within call" in str(error), error
            assert type(closed) is UnsupportedError, repr(closed)
            assert value == due
        else:
            words = "rank 0 raised an error (UnsupportedError: rank 0, call"
            raises(PeerFailedError, words, lambda: brief.allreduce(np.full(4, 100.0)))
        right(brief)
    brief.close()
    other.close()
    right(comm)


def default(comm: Communicator) -> None:
    """The default communicator: one, made at first use, and anew once closed."""
    first = ipcreduce.get_communicator()
    assert ipcreduce.get_communicator() is first
    assert (first.rank, first.size, first.backend) == (RANK, SIZE, "host")
    assert ipcreduce.allreduce(np.full(3, 2)).tolist() == [2 * SIZE] * 3
    assert first._state.calls.number == 1, "not on the default communicator"
    alone = Communicator(MPI.COMM_SELF)
    assert ipcreduce.allreduce(np.full(3, 2), comm=alone).tolist() == [2] * 3
    assert ipcreduce.allreduce(array := np.full(3, RANK), "max", out=array) is array
    assert array.tolist() == [LAST] * 3
    first.close()
    assert ipcreduce.allreduce(np.ones(2)).tolist() == [SIZE] * 2
    assert ipcreduce.get_communicator() is not first
    if SIZE > 1:  # an array that raises, before there is a communicator by which the others can hear of it
        ipcreduce.get_communicator().close()
        array: Any = Raising() if RANK == LAST else np.ones(2)
        error = error_of(lambda: ipcreduce.allreduce(array))
        assert type(error) is (ArgumentError if RANK == LAST else PeerFailedError), repr(error)


def forked(comm: Communicator) -> None:
    """In a forked child everything says what to do instead, and nothing of the parent's is touched."""
    ipcreduce.get_communicator()

    def check() -> None:
        for call in (
            lambda: comm.allreduce(np.ones(3)),
            comm.synchronize,
            lambda: ipcreduce.allreduce(np.ones(3)),
            ipcreduce.get_communicator,
            Communicator,
        ):
            raises(UnsupportedError, "Start processes by spawn", call)
        comm.close()

    worker.in_a_fork(check)
    right(comm)
    assert ipcreduce.allreduce(np.ones(2)).tolist() == [SIZE] * 2


def no_room(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


SCENARIOS = [
    every_kind, as_people_write, subclasses, random_calls, lists, splits, known_splits, lists_that_differ,
    a_float_sum_starts_at_rank_0, a_float_state_of_one_rank, wrong_calls, wrong_splits, late,
    memory_outlives_a_wait, without_tcp, refused_while_another_is_late, interrupted, recovered,
    failed_behind_the_data, out_of_memory, arguments_differ, errors_before_the_first_exchange, other_builds,
    left_before_the_data, late_at_start_up, exceptions_at_start_up, warnings_at_start_up,
    no_descriptors, closed_by_the_program, names_of_hosts,
    a_block_that_raises, texts_of_any_kind, nested, every_rank_is_watched,
    nothing_is_used_up, too_many, a_graph_keeps_its_communicator, runners, sub_communicators, side_by_side,
    threads, closing,
    a_call_after_another_rank_has_closed, default, forked,
]  # fmt: skip


HOW = sys.argv[1]


def main() -> None:
    bounds.patient()
    if HOW == "apart":
        os.environ["IPCREDUCE_HOSTID"] = f"host {RANK // 2 if SIZE > 2 else RANK}"
    if HOW == "page":
        startup.Segment = types.SimpleNamespace(create=no_room, open=no_room)
    with Communicator() as comm:
        assert comm.backend == "host", comm.describe()
        way = {"memory": "MB of shared memory", "page": "No space left on device"}
        assert way.get(HOW, "ranks are on 2 hosts") in comm.describe(), comm.describe()
        assert (comm._state.host._shared is not None) == (HOW == "memory")
        worker.play(SCENARIOS, sys.argv[2:], comm)


if __name__ == "__main__":
    worker.run(main)
