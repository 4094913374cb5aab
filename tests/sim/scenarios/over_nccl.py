"""The backend nccl, over the stand-in of its binding: choice, results, faults, ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import cupy
import ml_dtypes
import numpy as np

from ipcreduce import Communicator, Graph, Map, eager_break, errors
from ipcreduce.cuda import cupy_runtime, streams
from ipcreduce.device.background import Job
from ipcreduce.dtypes import DTYPES, OPS, reduce
from ipcreduce.nccl import backend as nccl_backend
from ipcreduce.nccl import guard, join, library
from ipcreduce.nccl.backend import NcclBackend
from ipcreduce.page.flight_recorder import FlightRecorder
from ipcreduce.ranks import connections
from tests.shared import clock
from tests.shared.bounds import LONG, late, no_hang, until
from tests.sim.scenarios import WORLD
from tests.sim.scenarios.common import LAST, RANK, SIZE, TOTAL, delay, in_threads, mine, others_wait, right, told, works
from tests.sim.scenarios.common import raises as raising
from tests.sim.scenarios.ends import closing_takes
from tests.simulated import machine_streams, nccl


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with raising(kind, words):
        call()


def error_of(call: Callable[[], Any]) -> errors.IpcReduceError | None:
    """The error of ours that a call raises."""
    try:
        call()
    except errors.IpcReduceError as error:
        return error.with_traceback(None)
    return None


@contextmanager
def pretended_hosts(hosts: int) -> Iterator[None]:
    """Within it, start-ups see so many hosts."""
    with mock.patch.dict(os.environ, IPCREDUCE_HOSTID=f"host {RANK * hosts // SIZE}"):
        yield


def too_late(comm: Communicator) -> AbstractContextManager[None]:
    """The last rank comes too late in the block, whose call is the others' next one: they wait for it together."""
    if RANK != LAST:
        return clock.passing(121.0, others_wait(comm))
    told(comm)
    return nullcontext()


def over_hosts(scenario: Callable[[Communicator], None]) -> None:
    """Run a scenario on one host, on two, and on as many as there are ranks."""
    for hosts in sorted({1, 2, SIZE}):
        with pretended_hosts(hosts), Communicator(backend="nccl") as comm:
            assert comm.backend == "nccl"
            scenario(comm)
            works(comm)
    assert not nccl.ghosts, "a communicator was used after its end"


def nccl_is_chosen() -> None:
    """By itself over several hosts, silently; where a pair has no P2P, with one warning; or by force."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pretended_hosts(2), Communicator() as comm:
            assert comm.backend == "nccl"
            assert "NCCL 2.32.3, because the ranks are on 2 hosts" in comm.describe()
            assert "not ipc: the ranks are on 2 hosts" in comm.describe()
            works(comm)
    assert not caught, [str(one.message) for one in caught]
    with pretended_hosts(2):
        raises(errors.UnsupportedError, "backend ipc was asked for, and cannot be: the ranks are on 2 hosts",
               lambda: Communicator(backend="ipc"))  # fmt: skip
        with mock.patch.dict(os.environ, IPCREDUCE_BACKEND="host"), Communicator() as comm:
            assert comm.backend == "host"
            raises(errors.UnsupportedError, "backend host was asked for", lambda: comm.allreduce(mine()))
    with mock.patch.dict(os.environ, IPCREDUCE_BACKEND="nccl"), Communicator() as comm:
        assert "because it was asked for" in comm.describe()
        works(comm)
    wrong = "gloo" if RANK == LAST else None
    raises(errors.ArgumentError, "backend is 'gloo', which is unknown. Choose ipc, nccl, host",
           lambda: Communicator(backend=wrong))  # fmt: skip
    raises(errors.ArgumentError, "backend must be the same on every rank",
           lambda: Communicator(backend="nccl" if RANK == LAST else "ipc"))  # fmt: skip


def without_p2p() -> None:
    """SIM_NO_P2P has a pair: each rank is told once that NCCL is slower."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Communicator() as comm:
            assert comm.backend == "nccl"
            works(comm)
    told = [str(one.message) for one in caught if "NCCL is used in place" in str(one.message)]
    assert len(told) == 1, told


def without_the_binding() -> None:
    """SIM_NO_NCCL hides it: host arrays go on, and device arrays are told what to install."""
    with pretended_hosts(2), Communicator() as comm:
        assert comm.backend == "host"
        right(comm.allreduce(np.full(5, RANK + 1.0)))
        raises(errors.UnsupportedError, "pip install '.[nccl-cuda13]'", lambda: comm.allreduce(mine()))
    raises(errors.UnsupportedError, "backend nccl was asked for, and cannot be", lambda: Communicator(backend="nccl"))


def nccl_results() -> None:
    """Every dtype and op, in place, into an out, strided, of no elements and of several chunks."""

    def check(comm: Communicator) -> None:
        random = np.random.default_rng(7)
        for dtype in DTYPES:
            for op in OPS:
                for count in (0, 1, 1000, 300_000):
                    if count == 300_000 and (op != "sum" or dtype.itemsize != 2):
                        continue
                    values = [random.integers(-3, 4, count).astype(dtype) for _ in range(SIZE)]
                    given = cupy.asarray(values[RANK])
                    if op == "avg" and dtype.kind in "iu":
                        with np.errstate(over="ignore"):
                            total = sum(values[1:], values[0].copy()).astype(np.int64)
                        if dtype.kind == "u":
                            total = total.astype(dtype).astype(np.float64)
                        expected = np.trunc(np.asarray(total, np.float64) / SIZE).astype(dtype)
                        if dtype.kind == "u":  # the wrapped sum is divided
                            continue
                    else:
                        expected = reduce(values, op)
                    for result in (comm.allreduce(given, op), comm.allreduce(given, op, out=given)):
                        found = cupy.asnumpy(result)
                        assert found.dtype == dtype
                        np.testing.assert_allclose(
                            found.astype(np.float64), expected.astype(np.float64), rtol=2e-2, err_msg=f"{dtype} {op}"
                        )
        strided = cupy.zeros(2000, np.int16)[::2]
        strided[...] = cupy.full((1000,), 30_000, np.int16)
        wrapped = np.full(1000, 30_000 * SIZE, np.int64).astype(np.int16)
        assert (cupy.asnumpy(comm.allreduce(strided)) == wrapped).all()
        out = cupy.zeros(2000, np.int16)
        comm.allreduce(strided, out=out[1::2])
        assert (cupy.asnumpy(out)[1::2] == wrapped).all()
        assert not cupy.asnumpy(out)[::2].any()
        for kind, value in ((np.complex64, 1 + 2j), (ml_dtypes.bfloat16, 1.5)):
            assert (cupy.asnumpy(comm.allreduce(cupy.full((9,), value, kind))) == np.asarray(value * SIZE, kind)).all()
        flags = cupy.asarray(np.array([RANK == 0, False, True]))
        assert cupy.asnumpy(comm.allreduce(flags, "max")).tolist() == [True, False, True]

    over_hosts(check)


def nccl_refusals() -> None:
    """A rank that refuses a call is named on the others, in time, and all go on."""

    def check(comm: Communicator) -> None:
        for _ in range(2):
            if RANK == LAST:
                raises(errors.ArgumentError, "there is no op", lambda: comm.allreduce(mine(), "mode"))
            else:
                with no_hang("a call"):
                    error = error_of(lambda: (comm.allreduce(mine()), comm.synchronize()))
                assert isinstance(error, errors.PeerFailedError), error
                assert f"rank {LAST} raised an error (ArgumentError" in str(error)
            works(comm)

    over_hosts(check)


def nccl_mismatches() -> None:
    """Calls that differ are named: before they start on one host, afterwards between hosts."""

    def check(comm: Communicator) -> None:
        for op, count in (("max", 1000), ("sum", 500)):  # NCCL gives wrong bits for the one, and hangs in the other
            works(comm)
            array = mine(count if RANK == LAST else 1000)
            error = fault_of(comm, array, op if RANK == LAST else "sum")
            assert isinstance(error, errors.RankMismatchError), error
            assert f"on rank {LAST}" in str(error)

    over_hosts(check)


def nccl_timeouts() -> None:
    """In a first call of every kind a late rank is named at the timeout, by the others and by itself, and all go on."""

    def check(comm: Communicator) -> None:
        rows, weight, graph = cupy.full((4, 256), 1, np.float16), cupy.full(256, 1, np.float16), Graph(comm)
        guard = comm._state.backend._guard
        with graph.record():
            comm.allreduce(mine())
        for name, call in {
            "a graph": graph.replay,  # first: after an abort it would have to be recorded again
            "an array": lambda: comm.allreduce(mine()),
            "a list": lambda: comm.allreduce([mine(), mine()]),
            "an expression": lambda: comm.allreduce(mine(), then=Map("v + 1")),
            "a norm": lambda: comm.allreduce_rmsnorm(rows, weight),
        }.items():
            comm.allreduce(mine())
            until(lambda: guard.ended == comm._state.calls.number, "the guard's look at its end")
            with too_late(comm):
                error = error_of(lambda call=call: (call(), comm.synchronize()))
            assert isinstance(error, errors.PeerTimeoutError), (name, error)
            assert f"rank {LAST} did not call within" in str(error), (name, error)

    over_hosts(check)


def nccl_mismatches_unseen_at_first() -> None:
    """Two ranks that enter a call at one moment may miss each other's: one host's are compared afterwards too."""
    with mock.patch.object(FlightRecorder, "differing", return_value=None):
        comm = Communicator(backend="nccl")
        array = mine()
        error = fault_of(comm, array, "max" if RANK == LAST else "sum")
    assert isinstance(error, errors.RankMismatchError), error
    WORLD.Barrier()
    comm.close()


def fault_of(comm: Communicator, array: Any, op: str, out: Any = None) -> errors.IpcReduceError | None:
    """The fault of one call, which is waited for: the error of the call itself, or of what comes behind it."""
    return error_of(lambda: comm.allreduce(array, op, out=out)) or until(lambda: error_of(comm.synchronize), "a fault")


def nccl_repeated_call_that_is_late() -> None:
    """The deadline holds for repeated calls too, which take a shorter way."""
    with pretended_hosts(2):
        comm = Communicator(backend="nccl")
    array, guard = mine(), comm._state.backend._guard
    for _ in range(4):
        comm.allreduce(array, out=array)
        until(lambda: guard.ended == comm._state.calls.number, "the guard's look at its end")
    comm.synchronize()
    with too_late(comm):
        error = fault_of(comm, array, "sum", array)
    assert isinstance(error, errors.PeerTimeoutError), error
    WORLD.Barrier()  # a rank that has closed would be the reason
    comm.close()


def nccl_calls_that_wait_on_the_host() -> None:
    """NCCL makes its links in the first calls, within which it waits for the other ranks: faults end that too."""
    with pretended_hosts(2):
        comm = Communicator(backend="nccl")
    works(comm)
    enqueue = nccl.all_reduce

    def waits(*arguments: Any) -> None:
        while not arguments[5].dead:
            time.sleep(1e-3)
        raise nccl.NCCLError(nccl.Result.InternalError)

    for kind, words in (
        (errors.PeerFailedError, f"rank {LAST} raised an error"),
        (errors.PeerTimeoutError, "did not call within"),
    ):
        if kind is errors.PeerFailedError and RANK == LAST:
            until(others_wait(comm), "the others")
            raises(errors.ArgumentError, "there is no op", lambda: comm.allreduce(mine(), "mode"))
            works(comm)
            continue
        comm._state.backend.nccl._all_reduce = waits
        with too_late(comm) if kind is errors.PeerTimeoutError else no_hang("a call"):
            error = error_of(lambda: comm.allreduce(mine()))
        assert isinstance(error, kind), error
        assert words in str(error), error
        comm._state.backend.nccl._all_reduce = enqueue
        works(comm)
    comm.close()


def nccl_start_up_that_hangs() -> None:
    """NCCL's communicator, or its first sum, does not come: all ranks say so in half of the time, and go on without."""
    hanging = {"library.join": "joining NCCL's communicator", "join._try": "trying NCCL's all-reduce"}
    half, waits = 59.0, []

    class Noted(Job):
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return super().wait(min(seconds, half))

    for place, words in hanging.items():
        over, hangs = threading.Event(), threading.Event()

        def hang(*_: Any, over: threading.Event = over, hangs: threading.Event = hangs) -> None:
            hangs.set()
            over.wait(LONG)
            raise errors.CudaError("ncclCommInitRank", 3, "simulated")

        with pretended_hosts(2), mock.patch(f"ipcreduce.nccl.{place}", hang), mock.patch.object(join, "Job", Noted):
            with clock.passing(half + 1, hangs.is_set, most=half + 1):
                made = Communicator(timeout=2 * half)
            with made as comm:
                assert comm.backend == "host"
                assert f"not nccl: {words} failed on {SIZE} of {SIZE} ranks" in comm.describe()
                right(comm.allreduce(np.full(5, RANK + 1.0)))
        over.set()
    assert len(waits) == 1, waits
    assert waits[0] <= half, "the first sum has no deadline of its own"
    with pretended_hosts(2), Communicator() as comm:
        works(comm)


def interrupted_start_up() -> None:
    """Ctrl-C ends at once a step of start-up in which a rank waits for the others, and they hear of it."""
    for owner, name in ((connections._Meeting, "hold"), (NcclBackend, "join"), (NcclBackend, "watch")):
        usual, went_on, said = getattr(owner, name), [], ""

        def interrupted(*given: Any, usual: Any = usual, went_on: list[str] = went_on) -> Any:
            result = usual(*given)
            signal.raise_signal(signal.SIGINT)
            went_on.append("to the end")
            return result

        with pretended_hosts(2), mock.patch.object(owner, name, interrupted) if RANK == LAST else nullcontext():
            try:
                Communicator()
            except (KeyboardInterrupt, errors.PeerFailedError) as error:
                said = repr(error)
        assert "KeyboardInterrupt" in said
        assert not went_on
    with pretended_hosts(2), Communicator() as comm:
        works(comm)


def dropped_with_a_call() -> None:
    """A communicator that the program drops ends no call that runs: the next one waits for it."""
    for backend in ("ipc", "nccl"):
        result = called_and_dropped(backend)
        gc.collect()
        Communicator(backend=backend).close()
        cupy.cuda.Device().synchronize()
        right(result)


def called_and_dropped(backend: str) -> Any:
    """The result of a call that waits for rank 0's work of a while."""
    comm = Communicator(backend=backend)
    works(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = mine()
        stream.synchronize()
        delay(stream.ptr)
        return comm.allreduce(array, out=array)


@eager_break
def pause() -> None:
    """A break."""


def nccl_graphs() -> None:
    """Recordings and breaks; a graph outlives a fault in which no call waited, and else says so."""

    def check(comm: Communicator) -> None:
        source, graph = mine(), Graph(comm)
        with graph.record():
            first = comm.allreduce(source)
            pause()
            second = comm.allreduce(first)
        for factor in (1, 3):
            source.fill((RANK + 1) * factor)
            graph.replay()
            right(second, factor * SIZE)
        brief = Graph(comm)
        error = error_of(lambda: recorded_by_some(comm, brief))
        assert isinstance(error, errors.ArgumentError if RANK == LAST else errors.PeerFailedError), error
        source.fill(RANK + 1)
        graph.replay()
        right(second, SIZE)
        if RANK == LAST:
            late(0.5)  # the others wait in their call by now, or have not begun it: then the graph is as it was
            raises(errors.ArgumentError, "there is no op", lambda: comm.allreduce(source, "mode"))
        else:
            error = error_of(lambda: (comm.allreduce(source), comm.synchronize()))
            assert isinstance(error, errors.PeerFailedError), error
        error = error_of(graph.replay)
        assert error is None or (
            isinstance(error, errors.GraphStateError) and "Record the graph again" in str(error)
        ), error
        assert len({*WORLD.allgather(type(error))}) == 1, "the ranks differ"
        source.fill(RANK + 1)
        works(comm)
        again = Graph(comm)
        with again.record():
            total = comm.allreduce(source)
        again.replay()
        right(total)
        for one in (graph, brief, again):
            one.close()

    over_hosts(check)


def nccl_exception_in_capture() -> None:
    """Graphs outlive an exception in a capture() block, unless another rank is in its next call, which is given up."""

    def check(comm: Communicator) -> None:
        source, graph = mine(), Graph(comm)
        with graph.record():
            total = comm.allreduce(source)
        comm.synchronize()
        WORLD.Barrier()  # no rank still runs that call when another one fails
        for waits in (False, True):
            if RANK == LAST:
                begun = others_wait(comm)
                with raising(KeyError, "of the program"), comm.capture():
                    if waits:
                        until(begun, "the others' next call")
                    raise KeyError("of the program")
            else:
                with comm.capture():
                    pass
                if not waits:
                    told(comm)
                error = error_of(lambda: (comm.allreduce(source), comm.synchronize()))
                assert isinstance(error, errors.PeerFailedError), error
                assert "of the program" in str(error), error
            works(comm)
            total.fill(0)
            if waits:
                raises(errors.GraphStateError, "Record the graph again", graph.replay)
            else:
                graph.replay()
                right(total)
        graph.close()

    over_hosts(check)


def recorded_by_some(comm: Communicator, graph: Graph) -> None:
    """A recording in which rank LAST refuses a call."""
    with graph.record():
        comm.allreduce(mine(), "mode" if RANK == LAST else "sum")


def nccl_replays_of_others() -> None:
    """NCCL orders what others capture: eager calls need no event for it. Waits and the guard know of replays."""
    comm, stream = Communicator(backend="nccl"), cupy.cuda.Stream(non_blocking=True)
    source, out, eager = mine(), mine(), mine()
    comm.allreduce(source, out=out)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        comm.allreduce(source, out=out)
        graph = stream.end_capture()
    for _ in range(3):
        comm.allreduce(eager, out=eager)
    cupy.cuda.Device().synchronize()
    with mock.patch.object(cupy_runtime, "record_event") as record, mock.patch.object(streams, "record_event") as other:
        comm.allreduce(eager, out=eager)
    assert not record.called and not other.called  # noqa: PT018
    right(eager, SIZE**3)
    out.fill(0)
    cupy.cuda.Device().synchronize()
    delay(stream.ptr)
    graph.launch(stream)
    comm.synchronize()
    with cupy.cuda.Stream(non_blocking=True):  # it waits for nothing
        right(out)
    WORLD.Barrier()
    if RANK == LAST:  # the others' replays wait for it in vain: the guard ends them
        raises(errors.ArgumentError, "there is no op", lambda: comm.allreduce(source, "mode"))
    else:
        graph.launch(stream)
        for heard in (comm.synchronize, lambda: comm.allreduce(source)):
            error = error_of(heard)
            assert isinstance(error, errors.PeerFailedError), error
    WORLD.Barrier()
    del graph
    works(comm)
    comm.close()


def nccl_threads_and_streams() -> None:
    """Calls on several streams, from several threads, come in one order on every rank."""

    def check(comm: Communicator) -> None:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        arrays = [mine(2000) for _ in streams]
        cupy.cuda.Device().synchronize()
        for turn in range(12):
            with streams[turn % 3]:
                comm.allreduce(arrays[turn % 3], out=arrays[turn % 3])
        comm.synchronize()
        for stream, array in zip(streams, arrays, strict=True):
            stream.synchronize()
            assert (cupy.asnumpy(array) == TOTAL * SIZE**3).all()
        in_threads(lambda: works(comm))

    over_hosts(check)


def nccls_own_errors() -> None:
    """SIM_NCCL_ERROR has rank 0 fail from its third operation on, two of which are start-up's."""
    with pretended_hosts(2):
        comm = Communicator(backend="nccl")
        error = until(lambda: error_of(lambda: works(comm)), "NCCL's error")
        assert isinstance(error, errors.PeerFailedError), error
        assert "rank 0 raised an error (NCCL: RemoteError (6))" in str(error), error
        comm.close()


def nccl_closes_in_time() -> None:
    """With a call under way that no peer joins, and with all of them gone."""
    with pretended_hosts(2):
        comm = Communicator(backend="nccl")
        works(comm)
        if RANK == 0:
            comm.allreduce(mine())
            closing_takes(comm, 5.25)
        comm.close()
        WORLD.Barrier()
    assert not nccl.ghosts


def killed_over_nccl() -> None:
    """Rank LAST is killed in a call, on another host: the others hear of it, and close, in time."""
    with pretended_hosts(2):
        comm = Communicator(WORLD, backend="nccl")
    works(comm)
    if RANK == LAST:
        late(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(guard, "_NOTICE_SECONDS", LONG), no_hang():  # NCCL's error comes first, and is less
        error = error_of(lambda: (comm.allreduce(mine()), comm.synchronize(), comm.synchronize()))
        assert isinstance(error, errors.PeerLostError), error
        assert f"rank {LAST} is gone: its process has ended" in str(error), error
        comm.close()
    machine_streams.wait_for_all()


def killed_joining_anew() -> None:
    """Rank LAST is killed after a fault, where the ranks make a new NCCL communicator."""
    with pretended_hosts(2):
        comm = Communicator(WORLD, backend="nccl")
    works(comm)
    if RANK == LAST:
        library.join = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        late(0.3)
        raises(errors.ArgumentError, "there is no op", lambda: comm.allreduce(mine(), "mode"))
    else:
        error = error_of(lambda: (comm.allreduce(mine()), comm.synchronize()))
        assert isinstance(error, errors.PeerFailedError), error
    with mock.patch.object(nccl_backend, "_NOTICE_SECONDS", LONG), no_hang("what follows"):
        for _ in range(2):
            error = error_of(lambda: comm.allreduce(mine()))
            assert isinstance(error, errors.PeerLostError), error
            assert f"rank {LAST} is gone: its process has ended" in str(error), error
    comm.close()


def nccl_recordings_across_an_abort() -> None:
    """A graph holds NCCL's communicator of its beginning: a recording in which that was aborted fails on every rank."""
    comm = Communicator(backend="nccl")
    works(comm)

    @eager_break
    def fragile() -> None:
        with too_late(comm):
            error = error_of(lambda: (comm.allreduce(mine()), comm.synchronize()))
        if error is not None:
            error_of(lambda: (comm.allreduce(mine()), comm.synchronize()))

    graph = Graph(comm)
    error = error_of(lambda: _record(graph, comm, fragile))
    assert isinstance(error, (errors.GraphStateError, errors.PeerFailedError)), error
    assert "Record the graph again" in str(error), error
    graph.close()
    with Graph(comm) as again:
        total = _record(again, comm)
        again.replay()
        right(total)
    comm.close()
    assert not nccl.ghosts, "a communicator was used after its end"


def _record(graph: Graph, comm: Communicator, between: Callable[[], None] = lambda: None) -> Any:
    with graph.record():
        total = comm.allreduce(mine())
        between()
    return total


def other_work_behind_a_call() -> None:
    """A refusal waits for earlier calls for a call's time at most: work behind them may wait for this very thread."""
    for backend in ("ipc", "nccl"):
        comm, stream = Communicator(backend=backend), cupy.cuda.Stream(non_blocking=True)
        works(comm)
        go = threading.Event()
        with stream:
            comm.allreduce(mine())
            if RANK == LAST:
                machine_streams.submit(stream.ptr, lambda go=go: go.wait(LONG))
            WORLD.Barrier()
            if RANK == LAST:
                with clock.passing(121.0):
                    error = error_of(lambda comm=comm: comm.allreduce(mine(), "mode"))
                assert isinstance(error, errors.ArgumentError), error
            go.set()
            WORLD.Barrier()
            if RANK != LAST:
                error = error_of(lambda comm=comm: comm.allreduce(mine()))
                assert isinstance(error, errors.IpcReduceError), error
        works(comm)
        comm.close()


SCENARIOS: list[Any] = [
    nccl_recordings_across_an_abort, other_work_behind_a_call, nccl_replays_of_others,
    nccl_mismatches_unseen_at_first, nccl_calls_that_wait_on_the_host, nccl_start_up_that_hangs, dropped_with_a_call,
    killed_joining_anew, nccl_repeated_call_that_is_late, interrupted_start_up,
    nccl_is_chosen, without_p2p, without_the_binding, nccl_results, nccl_refusals, nccl_mismatches, nccl_timeouts,
    nccl_graphs, nccl_exception_in_capture, nccl_threads_and_streams, nccls_own_errors, nccl_closes_in_time,
    killed_over_nccl,
]  # fmt: skip
