"""Communicators that give their memory back for a while: suspend() and resume()."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import cupy
import numpy as np
from mpi4py import MPI

from ipcreduce import FP8, Communicator, Graph, Map, errors
from ipcreduce.device import deferred_free
from ipcreduce.graphs.direct import registration
from ipcreduce.graphs.direct.registration import DirectGraphs
from ipcreduce.graphs.session import session_of
from ipcreduce.nccl import library
from ipcreduce.ranks import descriptors
from ipcreduce.ranks.descriptors import MAX_DESCRIPTORS
from tests.shared import clock
from tests.shared.bounds import until
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    WORLD,
    delay,
    environment,
    error_of,
    fault,
    good_communicator,
    grown,
    held,
    host_works,
    mine,
    open_files,
    raises,
    right,
    works,
)
from tests.sim.scenarios.ends import gives_back, no_hang
from tests.sim.scenarios.virtual import virtual
from tests.simulated import driver, machine, machine_streams, nccl, virtual_memory

MB = 1 << 20
PIECE = 2 * MB
HELD = 6 * MB  # for a workspace of 4 MB and a quarter of that for sms=, in whole pieces
IS_SUSPENDED = "the communicator is suspended. Call resume() on every rank first."


def _bits(array: Any) -> bytes:
    cupy.cuda.Device().synchronize()
    return cupy.asnumpy(array).tobytes()


def _memory() -> tuple[int, dict[str, int]]:
    """The GPU's free bytes, without what CuPy keeps, and what the library holds, without launches that it repeats."""
    now = held()
    return machine.memory_info()[0], now | {"executables": 0}


@contextmanager
def _recorded(comm: Communicator, count: int = 40_001) -> Iterator[tuple[Graph, Any]]:
    """A graph of a long call and short ones, and the result of the first."""
    source = cupy.asarray(np.random.default_rng(RANK).standard_normal(count).astype(np.float32))
    with Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(source, "avg")
            for _ in range(3):
                comm.allreduce(result[:100], "max")
        comm.synchronize()
        yield graph, result


def replays_after_resume() -> None:
    """A graph has the same bits; the memory, as the driver counts it, is given back but for a piece."""
    out, rows, weight = cupy.zeros(10, np.float32), cupy.ones((2, 512), np.float16), cupy.ones(512, np.float16)
    residual, then = cupy.zeros((2, 512), np.float16), Map("v + 1")
    with virtual(workspace=16 * MB) as comm, _recorded(comm) as (graph, result):
        known: list[Callable[[], Any]] = [
            lambda: comm.allreduce(out, out=out), lambda: comm.allreduce([out, residual], out=[out, residual]),
            lambda: comm.allreduce(out, then=then, out=out),
            lambda: comm.allreduce_rmsnorm(rows, weight, residual=residual, out=rows, residual_out=residual),
        ]  # fmt: skip
        for call in 3 * known:  # they take the fast path from now on
            call()
        expected, before = _bits(result), _memory()
        for _ in range(3):
            comm.suspend()
            assert _memory()[0] == before[0] + 20 * MB - PIECE  # with a quarter more for sms=
            assert not any(there._mapped for there in comm._state.backend.launches._workspace._there)
            assert "backend ipc, suspended" in comm.describe()
            assert "suspended" in repr(comm)
            for refused in (
                *known, graph.replay, lambda: works(comm), lambda: host_works(comm), comm.synchronize,
                lambda: comm.empty(1), lambda: comm.allreduce([mine()]), Graph(comm).record().__enter__,
            ):  # fmt: skip
                with raises(errors.GraphStateError, f"rank {RANK}, call", IS_SUSPENDED):
                    refused()
            result.fill(0)
            comm.resume()
            assert "suspended" not in comm.describe() + repr(comm)
            assert (now := _memory()) == before, (now, before)
            graph.replay()
            assert _bits(result) == expected
            works(comm)
            host_works(comm)


def idempotent() -> None:
    """Each may be called again; and around close(), after errors, and with nobody to give memory to."""
    with virtual(workspace=4 * MB) as comm:
        comm.resume()
        comm.suspend()
        before = held()
        comm.suspend(timeout=1)
        assert not grown(before)
        comm.resume()
        comm.resume()
        works(comm)
        fault(comm)  # the next call settles it
        comm.suspend(timeout=np.float32(60))  # type: ignore[arg-type]
        comm.resume()
        works(comm)
        comm.suspend()
    for again in (comm.suspend, comm.resume):
        with raises(errors.ArgumentError, "the communicator is closed"):
            again()
    comm.close()
    with Communicator() as comm:
        for wrong in (0, -1, True, "1", float("nan")):
            with raises(errors.ArgumentError, "timeout is "):
                comm.suspend(timeout=wrong)  # type: ignore[arg-type]
        works(comm)
    with Communicator(backend="host") as comm:
        comm.suspend()
        host_works(comm)
        comm.resume()
    with Communicator(MPI.COMM_SELF) as comm:
        comm.suspend(pools=True)
        assert (cupy.asnumpy(comm.allreduce(mine())) == RANK + 1).all()
        comm.resume()
    good_communicator()


def resumed_within_resume() -> None:
    """A handler's resume() within resume() raises, and the outer one goes on: no rank stays suspended."""
    with virtual(workspace=4 * MB) as comm:
        comm.suspend()
        backend = comm._state.backend
        assert backend is not None
        usual = backend.resume

        def resume(*given: Any) -> bool:
            with raises(errors.UnsupportedError, "this call was made within call"):
                comm.resume()
            return usual(*given)

        with mock.patch.object(backend, "resume", resume) if RANK == 0 else nullcontext():
            comm.resume()
        if RANK:  # hears of the call that failed on rank 0
            with raises(errors.PeerFailedError, "rank 0 raised an error"):
                works(comm)
        works(comm)
        comm.suspend()
        comm.resume()
        works(comm)


def not_suspended() -> None:
    """Without virtual memory every rank raises; in a recording or a capture too; nothing changes."""
    with environment(IPCREDUCE_MEMORY="ipc"), Communicator() as comm:
        where = "behind IPC handles: IPCREDUCE_MEMORY is ipc"
        with raises(errors.UnsupportedError, f"rank {RANK}, suspend()", where):
            comm.suspend()
        works(comm)
    with environment(LAST, SIM_NO_VMM="1"), Communicator() as comm:
        with raises(errors.UnsupportedError, "behind IPC handles", f"rank {LAST}: the driver has no virtual memory"):
            comm.suspend()
        works(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    with virtual(workspace=4 * MB) as comm:
        works(comm)
        with raises(errors.GraphStateError, "in a recording"), Graph(comm) as graph, graph.record():
            comm.suspend()
        with comm.capture(), raises(errors.GraphStateError, "in capture()"):
            comm.suspend()
        works(comm)
        with stream:
            stream.begin_capture()
            with raises(errors.GraphStateError, "the current stream is being captured"):
                comm.suspend()
            comm.allreduce(mine(), out=cupy.zeros(1000, np.float32))
            stream.end_capture()
        works(comm)


def ranks_that_differ() -> None:
    """A rank makes another call, comes late, or is busy: all ranks raise, and go on as before."""
    with virtual(workspace=4 * MB) as comm:
        works(comm)
        with raises(errors.RankMismatchError, "suspend() on rank 0", "sum of float32 (10,)"):
            comm.suspend() if RANK == 0 else works(comm)
        works(comm)
        if RANK == 0:
            with clock.passing(121.0), raises(errors.PeerTimeoutError, "did not call within 120 s"):
                comm.suspend()
        WORLD.Barrier()
        if RANK:
            with raises(errors.PeerTimeoutError, "did not call within 120 s"):
                comm.suspend()
        works(comm)
    with virtual(workspace=4 * MB) as comm:
        works(comm)
        release = [False]
        stream = cupy.cuda.Stream(non_blocking=True)
        if RANK == 0:
            machine_streams.submit(stream.ptr, lambda: until(lambda: release[0], "the end of the test"))
            with raises(errors.PeerTimeoutError, "rank 0, call", "GPU 0 was still busy after 0.1 s"):
                comm.suspend(timeout=0.1)
        else:
            with raises(errors.PeerFailedError, "suspend() failed on rank 0 (rank 0, call", "GPU 0 was still busy"):
                comm.suspend(timeout=0.1)
        release[0] = True
        cupy.cuda.Device().synchronize()
        works(comm)


def late_for_resume() -> None:
    """A rank that comes too late for resume() finds all suspended as before. They try again."""
    with virtual(workspace=4 * MB) as comm, _recorded(comm) as (graph, result):
        expected = _bits(result)
        comm.suspend()
        if RANK == 0:
            with clock.passing(121.0), raises(errors.PeerTimeoutError, "did not call within 120 s"):
                comm.resume()
        WORLD.Barrier()
        if RANK:
            with raises(errors.PeerTimeoutError, "did not call within 120 s"):
                comm.resume()
        with raises(errors.GraphStateError, IS_SUSPENDED):
            works(comm)
        comm.resume()
        graph.replay()
        assert _bits(result) == expected


def no_memory_to_resume() -> None:
    """Another program has taken the memory: all stay suspended, until there is some again."""
    with virtual(workspace=4 * MB) as comm, _recorded(comm) as (graph, result):
        expected = _bits(result)
        comm.suspend()
        before = held()
        used = machine.memory_bytes() - machine.memory_info()[0]
        with environment(0, SIM_MEMORY=str(used + 3 * MB)):
            if RANK == 0:
                with raises(errors.CudaError, "rank 0, call", "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
                    comm.resume()
            else:
                with raises(errors.PeerFailedError, "resume() failed on rank 0", "OUT_OF_MEMORY", "again after that"):
                    comm.resume()
        assert not grown(before), grown(before)
        with raises(errors.GraphStateError, IS_SUSPENDED):
            graph.replay()
        comm.resume()
        graph.replay()
        assert _bits(result) == expected
        comm.suspend()


def no_descriptors_to_resume() -> None:
    """With fewer open files than it takes, one rank keeps all suspended, until it has closed some."""
    with virtual(workspace=4 * MB, algorithm="direct") as comm, Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(mine())
        comm.suspend(pools=True)
        before, left = held(), 0
        while any(found := WORLD.allgather(_resumed_with(comm, left if RANK == LAST else None))):
            assert all("again after that" in text or rank == LAST for rank, text in enumerate(found)), found
            assert all(text.startswith("ours: ") and "PeerLostError" not in text for text in found), found
            assert all("Too many open files" in text or "out of memory" in text for text in found), found
            assert not grown(before), (left, grown(before))
            with raises(errors.GraphStateError, IS_SUSPENDED):
                works(comm)
            left += 1
        assert left > 4, f"only {left} descriptors"
        graph.replay()
        right(result)
        works(comm)
        del result


def _resumed_with(comm: Communicator, left: int | None) -> str:
    """What resume() raises where only so many files can be opened; None: as many as one likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    copies: list[int] = []
    try:
        if left is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            with suppress(OSError):
                while True:
                    copies.append(os.dup(0))
            for one in copies[:left]:
                os.close(one)
            del copies[:left]
        return error_of(comm.resume)
    finally:
        for one in copies:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def mailboxes_that_strangers_fill() -> None:
    """Their names stand in /proc/net/unix. It keeps no rank from starting, nor from resuming."""
    usual = descriptors.Mailbox.__init__

    def filled(self: descriptors.Mailbox, name: str) -> None:
        usual(self, name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, suppress(BlockingIOError):
            stranger.setblocking(False)
            while True:
                stranger.sendto(b"?", f"\0{name}")

    filling = mock.patch.object(descriptors.Mailbox, "__init__", filled)
    with filling, virtual(workspace=4 * MB, algorithm="direct") as comm, Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(mine())
        assert graph.state == "registered"
        comm.suspend(pools=True)
        comm.resume()
        graph.replay()
        right(result)
        del result


def interrupted_while_resuming() -> None:
    """Ctrl-C on one rank, among the descriptors: each rank hears of it once, and all can try again."""
    with virtual(workspace=4 * MB) as comm:
        works(comm)
        comm.suspend()
        before = held()
        for name in ("connect", "send", "receive"):
            interrupted = mock.patch.object(descriptors.Mailbox, name, side_effect=KeyboardInterrupt)
            if RANK == LAST:
                with interrupted, suppress(KeyboardInterrupt):
                    comm.resume()
                    raise AssertionError("no KeyboardInterrupt")
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} raised an error (KeyboardInterrupt"):
                    comm.resume()
            assert set(grown(before)) <= {"executables"}, (name, grown(before))
            with raises(errors.GraphStateError, IS_SUSPENDED):
                works(comm)
            comm.resume()
            works(comm)
            comm.suspend()


def _lacks_data(array: Any) -> bool:
    """True if all of it is NaN, or -1 where there is none."""
    _bits(array)
    host = cupy.asnumpy(array)
    return bool((host == -1).all() if host.dtype.kind == "i" else np.isnan(host.astype(np.float32)).all())


def graphs_of_others() -> None:
    """Their replays end at once while suspended, with bytes 0xFF, whatever their kernels; resume() tells of them."""
    stream = cupy.cuda.Stream(non_blocking=True)
    half = cupy.full((4, 512), RANK + 1, np.float16)
    weight = cupy.ones(512, np.float16)
    large = mine(300_000)
    calls: list[Callable[[Communicator], Any]] = [
        lambda comm: comm.allreduce(mine()),
        lambda comm: comm.allreduce(cupy.full((5,), 7, np.int32)),
        lambda comm: comm.allreduce(large),
        lambda comm: comm.allreduce([mine(), mine(5)])[0],
        lambda comm: comm.allreduce(mine(), then=Map("v + 1")),
        lambda comm: comm.allreduce_rmsnorm(half, weight)[0],
        lambda comm: comm.allreduce_rmsnorm(half, weight, quantize=FP8(per="token"))[2],
    ]
    for algorithm in ("one_shot", "two_shot"):
        with virtual(workspace=8 * MB, algorithm=algorithm) as comm:
            graphs, outs, expected = [], [], []
            for call in calls:
                expected.append(_bits(call(comm)))
                with stream:
                    stream.begin_capture()
                    outs.append(call(comm))
                    graphs.append(stream.end_capture())
            for turn in range(3):
                if turn:
                    outs[0].fill(0)
                    cupy.cuda.Device().synchronize()
                    delay(stream.ptr)
                    graphs[0].launch(stream)
                    comm.suspend()
                    assert _bits(outs[0]) == expected[0], "suspend() waits for what was launched before"
                    for graph, out in zip(graphs, outs, strict=True):
                        if turn == 1 or RANK == 0:
                            graph.launch(stream)
                            assert _lacks_data(out)
                    if turn == 1 or RANK == 0:
                        with raises(
                            errors.GraphStateError, f"rank {RANK}, call", "was launched while it was suspended"
                        ):
                            comm.resume()
                    else:
                        comm.resume()
                    if turn == 2 and RANK:
                        with raises(errors.PeerFailedError, "rank 0 raised an error (GraphStateError"):
                            works(comm)
                    works(comm)
                for graph, out, bits in zip(graphs, outs, expected, strict=True):
                    graph.launch(stream)
                    assert _bits(out) == bits


def a_hundred_cycles() -> None:
    """Flat in memory, descriptors, mappings and handles, with replays between."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("ipcreduce-sim-physical")

    with virtual(workspace=2 * MB) as comm, _recorded(comm, 100) as (graph, result):
        expected = _bits(result)
        comm.suspend()
        suspended = held(), machine.memory_info(), mapped()
        comm.resume()
        resumed = held(), machine.memory_info(), mapped()
        for _ in range(100):
            comm.suspend()
            assert (machine.memory_info(), mapped()) == suspended[1:]
            comm.resume()
            graph.replay()
        assert _bits(result) == expected
        assert (machine.memory_info(), mapped()) == resumed[1:]
        assert not grown(resumed[0]), grown(resumed[0])
        comm.suspend()
        assert not grown(suspended[0]), grown(suspended[0])


def killed_while_suspended() -> None:
    """With --among: the last rank is killed meanwhile. The others hear of it in resume(), and close."""
    _killed("")


def killed_in_resume() -> None:
    """With --among: it is killed when it has sent its descriptor, or before."""
    _killed("cuMemExportToShareableHandle")


def _killed(at: str) -> None:
    before = held()
    with cupy.cuda.Device(RANK):
        comm = Communicator(WORLD, device=RANK, workspace=4 * MB)
        works(comm)
        comm.suspend()
        if RANK == LAST:
            if at:
                kill = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                with mock.patch.dict(virtual_memory.CALLS, {at: kill}):
                    comm.resume()
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(errors.PeerLostError, f"rank {LAST} is gone", "its process has ended"):
            comm.resume()
        with raises(errors.PeerLostError, "can only be closed"):
            works(comm)
    with no_hang("close()"):
        comm.close()
    del comm
    gives_back(before)


def suspended_over_nccl() -> None:
    """NCCL does it, from 2.29.7 on. An older one is refused on every rank."""
    with Communicator(backend="nccl") as comm, _recorded(comm, 100) as (graph, result):
        expected = _bits(result)
        older = mock.patch.object(library, "version", return_value=22809)
        with older, raises(errors.UnsupportedError, "from 2.29.7 on", "here is NCCL 2.28.9"):
            comm.suspend()
        works(comm)
        for _ in range(2):
            comm.suspend()
            with raises(errors.GraphStateError, IS_SUSPENDED):
                graph.replay()
            comm.suspend()
            comm.resume()
            graph.replay()
            assert _bits(result) == expected
            works(comm)
        comm.suspend()
    assert not nccl.ghosts


def pools_given_back() -> None:
    """The memory of graphs, too: of ours and of others', but for two pieces. A shared one stays, and a small one."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with virtual(workspace=4 * MB) as comm, virtual(workspace=2 * MB) as other, Graph(comm) as graph:
        kept = comm.empty(1000)
        kept.fill(7)
        sources, long = [mine(10_000), mine()], mine(PIECE // 4)
        with graph.record():
            scratch = cupy.empty(3 * MB, np.uint8)  # of a slab of several pieces
            copies = [source * 1 for source in sources]
            results = [comm.allreduce(copy) for copy in copies]
        with stream:
            stream.begin_capture()
            captured = [comm.allreduce(source) for source in (sources[0], long)]
            theirs = stream.end_capture()
        before = _memory()
        assert graph.pool.nbytes == 2 * PIECE
        del scratch
        for _ in range(3):
            comm.suspend(pools=True)
            # Of a workspace of 4 MB, pools, and another library's large result, two pieces stay: one for the workspace,
            # and one for the rest.
            assert _memory()[0] == before[0] + HELD + graph.pool.nbytes + PIECE - 2 * PIECE
            assert (cupy.asnumpy(kept) == 7).all()
            theirs.launch(stream)
            cupy.cuda.Device().synchronize()
            with raises(errors.GraphStateError, "suspend(pools=True)", "Call resume() first"):
                _record_in(other, graph)
            with raises(errors.GraphStateError, "was launched while it was suspended"):
                comm.resume()
            works(comm)
            assert (now := _memory()) == before, (now, before)
            theirs.launch(stream)
            cupy.cuda.Device().synchronize()
            graph.replay()
            for result in (*captured, *results):
                right(result)
        shared = _record_in(other, graph)
        before = _memory()
        comm.suspend(pools=True)
        assert _memory()[0] == before[0] + HELD + PIECE - 2 * PIECE
        shared.replay()
        comm.resume()
        graph.replay()
        shared.close()
        comm.suspend(pools=True)
        graph.close()  # frees what is not there
        comm.resume()
        works(comm)


def direct_graphs() -> None:
    """They write to the peers' new memory at the old addresses, in pools and in arrays of empty()."""
    before, was_open = held(), open_files()
    with virtual(workspace=4 * MB, algorithm="direct") as comm, Graph(comm) as graph:
        source, kept = mine(10_000), comm.empty(10_000)
        with graph.record():
            results = [comm.allreduce(source) for _ in range(3)]
            comm.allreduce(source, out=kept)
        assert graph.state == "registered", graph.describe()
        comm.synchronize()
        mapped = held()["virtual mappings"]
        assert mapped == SIZE + SIZE, "workspaces, and each rank's pool"
        for turn in range(4):
            free = machine.memory_info()[0]
            comm.suspend(pools=turn < 3)
            given = machine.memory_info()[0] - free
            assert given == (HELD + graph.pool.nbytes - 2 * PIECE if turn < 3 else HELD - PIECE), given
            slabs = session_of(comm).pools.elsewhere.mappings._places.values()
            assert any(slab._mapped for slab in slabs) == (turn == 3)
            right(kept)
            for each in [*results, kept]:
                each.fill(0)
            comm.resume()
            assert machine.memory_info()[0] == free
            assert held()["virtual mappings"] == mapped
            graph.replay()
            for each in [*results, kept]:
                right(each)
        assert graph.state == "registered"
        _closed_meanwhile(comm)
        comm.suspend(pools=True)
        del each, results, kept, source  # an array keeps its memory
    assert not grown(before), (grown(before), open_files() - was_open)


def nothing_is_shared() -> None:
    """While suspended this process has none of the peers' memory, and none of its own is open to others."""
    memory = "/memfd:ipcreduce-sim-physical-"

    def physical() -> list[list[str]]:
        found = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
        return [name.removeprefix(memory).split("-")[1:3] for name in found if name.startswith(memory)]

    with virtual(workspace=4 * MB, algorithm="direct") as comm, Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(mine())
        comm.synchronize()
        opened, leaks = open_files(), driver.leaks()
        assert {pid for _, pid in physical()} == {str(pid) for pid in WORLD.allgather(os.getpid())}
        export = mock.Mock(wraps=virtual_memory.CALLS["cuMemExportToShareableHandle"])
        with mock.patch.dict(virtual_memory.CALLS, {"cuMemExportToShareableHandle": export}):
            comm.suspend(pools=True)
        own = [str(PIECE), str(os.getpid())]
        # One for the workspace, one for the pools. The simulated device has a descriptor of each of its memories.
        assert physical() == [own, own], physical()
        assert not open_files() - opened, open_files() - opened
        assert "mappings" not in driver.leaks(), "behind IPC handles"
        assert not export.called
        for piece in virtual_memory._handles.values():
            assert not piece.exportable
        comm.resume()
        graph.replay()
        right(result)
        assert (open_files(), driver.leaks()) == (opened, leaks)


def _closed_meanwhile(comm: Communicator) -> None:
    """One rank closes a graph while suspended, and the other ranks after that."""
    graph, other = Graph(comm), Graph(comm)
    for each in (graph, other):
        with each.record():
            result = comm.allreduce(mine())
        assert each.state == "registered"
    comm.synchronize()
    comm.suspend(pools=True)
    if RANK == 0:
        graph.close()
    comm.resume()
    other.replay()
    right(result)
    graph.close()
    comm.synchronize()
    other.replay()
    right(result)
    other.close()


def many_direct_outputs() -> None:
    """More slabs than go in one message, of which the ranks have different numbers."""
    count = MAX_DESCRIPTORS + 5
    with virtual(workspace=2 * MB, algorithm="direct") as comm, Graph(comm) as graph:
        before = held()["descriptors"]
        with graph.record():
            held_back = [cupy.empty(PIECE, np.uint8) for _ in range(2 * RANK)]
            results = []
            for _ in range(count):
                results.append(comm.allreduce(mine(100)))
                held_back.append(cupy.empty(PIECE - 512, np.uint8))  # so the next is in another slab
        assert graph.state == "registered", graph.describe()
        assert graph.pool.slabs >= count
        del held_back
        comm.synchronize()
        comm.suspend(pools=True)
        comm.resume()
        graph.replay()
        for each in results:
            right(each)
        works(comm)
        opened = held()
        # Each piece of memory is a descriptor of the simulated device's.
        assert opened["descriptors"] - before <= opened["virtual mappings"] + 1, (before, opened)


def _record_in(comm: Communicator, graph: Graph) -> Graph:
    """A graph of another communicator, in the pool of this graph."""
    other = Graph(comm, pool=graph.pool)
    with other.record():
        comm.allreduce(mine())
    return other


# What may stay behind if the driver does not take it back, by the call that fails.
_STAYS = {
    "cuMemFree": {"allocations", "descriptors"},
    "cuMemUnmap": {"virtual mappings", "reserved ranges", "descriptors"},
    "cuMemRelease": {"physical", "descriptors"},
}


def suspended_driver_faults() -> None:
    """Each driver call of suspend() and resume() fails once on a rank: a typed error on every rank, and no leak."""
    for name in ("suspend", "resume"):
        k = 1
        while _fails_at(name, LAST, k):
            k += 1
        assert k > 14, f"only {k} driver calls in {name}()"
    good_communicator()


def _fails_at(name: str, rank: int, k: int) -> bool:
    """Let the k-th driver call fail. False if there are fewer."""
    before, known = held(), len(driver.failed)
    with virtual(workspace=2 * MB, algorithm="direct") as comm, Graph(comm) as graph:
        with graph.record():
            result = comm.allreduce(mine())
        comm.synchronize()
        calls: dict[str, Callable[[], None]] = {"suspend": lambda: comm.suspend(pools=True), "resume": comm.resume}
        if name == "resume":
            calls["suspend"]()
        driver.fault_at(k if rank == RANK else 0)
        error = error_of(calls[name])
        driver.fault_at(0)
        failed = WORLD.bcast(driver.failed[known:], rank)
        known = len(driver.failed)
        errors_of_ranks = WORLD.allgather(error)
        if failed:
            _check_errors(comm, name, failed[0], errors_of_ranks)
        elif name == "suspend":
            comm.resume()
        if not any("PeerLostError" in text for text in errors_of_ranks):
            graph.replay()
            right(result)
        del result
    stays = _STAYS.get(failed[0] if failed else "", set()) if rank == RANK else set()

    def is_freed() -> bool:
        deferred_free.flush()  # what a peer had mapped when this rank closed
        return set(grown(before)) <= stays

    until(is_freed, f"the end of all that was held when call {k} of {name}(), {failed}, failed")
    return bool(failed)


def _check_errors(comm: Communicator, name: str, failed: str, found: list[str]) -> None:
    assert all(text.startswith("ours: ") for text in found) or not any(found), (name, failed, found)
    if not any(found):  # a failure that does not matter
        comm.resume()
        works(comm)
    elif "PeerLostError" in found[0]:
        assert all("PeerLostError" in text for text in found), (name, failed, found)
        with raises(errors.PeerLostError):
            works(comm)
    elif name == "suspend":
        works(comm)
    else:
        comm.resume()
        works(comm)


def collected_while_another_is_registered() -> None:
    """What is mapped for the graph that is registered stays, when the last graph of other slabs goes."""
    for where in ("mapping", "switching"):
        with virtual(workspace=4 * MB, algorithm="direct") as comm:
            old = [_registered(comm)]
            confirm = DirectGraphs._confirm

            def collecting(self: Any, number: int, error: Any, what: str) -> None:
                confirm(self, number, error, what)  # noqa: B023
                if what.startswith(where):  # noqa: B023
                    old.clear()  # noqa: B023

            with mock.patch.object(DirectGraphs, "_confirm", collecting):
                graph = Graph(comm)
                with graph.record():
                    result = comm.allreduce(mine())
            assert (graph.state, old) == ("registered", [])
            graph.replay()
            comm.synchronize()
            right(result)


def collected_in_resume() -> None:
    """Of slabs of which a rank has said that it wants them, none goes before they are sent."""
    with virtual(workspace=4 * MB, algorithm="direct") as comm:
        old, usual = [_registered(comm)], registration.hand_over
        comm.suspend(pools=True)

        def collecting(*given: Any) -> None:
            old.clear()
            WORLD.Barrier()
            usual(*given)

        with mock.patch.object(registration, "hand_over", collecting):
            comm.resume()
        assert not comm._state.session.direct.mappings.kept()
        works(comm)


def _registered(comm: Communicator) -> Graph:
    graph = Graph(comm)
    with graph.record():
        comm.allreduce(mine())
    assert graph.state == "registered"
    comm.synchronize()
    return graph


SCENARIOS = [
    replays_after_resume, idempotent, resumed_within_resume, not_suspended, ranks_that_differ, late_for_resume,
    no_memory_to_resume, no_descriptors_to_resume, mailboxes_that_strangers_fill, interrupted_while_resuming,
    graphs_of_others, a_hundred_cycles, suspended_over_nccl, pools_given_back, direct_graphs,
    many_direct_outputs, nothing_is_shared, killed_while_suspended, killed_in_resume,
    suspended_driver_faults, collected_while_another_is_registered, collected_in_resume,
]  # fmt: skip
