"""Start-up, faults and ends on the simulated device: ``mpirun -n 2 python tests/sim/library_worker.py name ...``.

Each function of SCENARIOS is one; it runs on every rank and asserts. ``--visible 0,1/1,0`` sets CUDA_VISIBLE_DEVICES,
rank by rank. ``--among directory rank size`` makes this process a rank without MPI: a killed one ends only itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import linecache
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("--visible")
parser.add_argument("--among", nargs=3)
parser.add_argument("names", nargs="+")
options = parser.parse_args()


class ByFiles(MPI.Intracomm):
    """As much of an MPI communicator as the library uses, among processes that share a directory."""

    def __new__(cls, *_: Any) -> ByFiles:
        return super().__new__(cls, MPI.COMM_SELF)

    def __init__(self, directory: str, rank: str, size: str) -> None:
        self._directory, self._rank, self._size = Path(directory), int(rank), int(size)
        self._messages, self._copies = itertools.count(), itertools.count()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def Idup(self) -> tuple[ByFiles, Any]:
        copy = self._directory / f"copy{next(self._copies)}"
        copy.mkdir(exist_ok=True)
        return ByFiles(str(copy), str(self._rank), str(self._size)), self._exchange(b"", lambda _: None)

    def Iallgather(self, sent: Any, received: Any) -> Any:
        return self._exchange(sent.tobytes(), lambda of_all: self._fill(received, of_all))

    def Ialltoall(self, sent: Any, received: Any) -> Any:
        part = slice(self._rank * sent[0].nbytes, (self._rank + 1) * sent[0].nbytes)
        return self._exchange(sent.tobytes(), lambda of_all: self._fill(received, [data[part] for data in of_all]))

    def Free(self) -> None:
        pass

    @staticmethod
    def _fill(received: Any, parts: list[bytes]) -> None:
        received.reshape(-1)[:] = np.frombuffer(b"".join(parts), np.uint8)

    def _exchange(self, data: bytes, receive: Callable[[list[bytes]], None]) -> Any:
        number = next(self._messages)
        files = [self._directory / f"{number}-{rank}" for rank in range(self._size)]
        partial = files[self._rank].with_suffix(".partial")
        partial.write_bytes(data)
        partial.rename(files[self._rank])

        def test() -> bool:
            if not all(file.exists() for file in files):
                return False
            receive([file.read_bytes() for file in files])
            return True

        return types.SimpleNamespace(Test=test)


WORLD = ByFiles(*options.among) if options.among else MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
LAST = SIZE - 1
TOTAL = SIZE * (SIZE + 1) // 2
os.environ.setdefault("SIM_DEVICES", str(SIZE))
os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")
if options.visible is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = options.visible.split("/")[RANK]

from tests import sim  # noqa: E402

sim.install()

import cupy  # noqa: E402

import ipcreduce  # noqa: E402
from ipcreduce import Communicator, Graph, communicator, errors  # noqa: E402
from ipcreduce.ipc import control, setup  # noqa: E402
from tests.sim import driver, machine  # noqa: E402

GPUS = len(machine.gpus())
SOON = 2.5  # seconds


# ---- what the scenarios use
def mine(count: int = 1000) -> Any:
    """This rank's array: RANK + 1 everywhere, so that sums are TOTAL."""
    return cupy.full((count,), RANK + 1, np.float32)


def right(array: Any, factor: int = 1) -> None:
    values = cupy.asnumpy(array)
    assert (values == TOTAL * factor).all(), f"rank {RANK}: {values[:8]}... where {TOTAL * factor} was due"


def works(comm: Any, count: int = 10) -> None:
    result = comm.allreduce(mine(count))
    comm.synchronize()  # raises what would have spoilt it
    right(result)


def host_works(comm: Any) -> None:
    right(comm.allreduce(np.full(7, RANK + 1.0)))


def good_communicator() -> None:
    with Communicator(timeout=20) as comm:
        assert comm.backend == "ipc", comm.describe()
        works(comm)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block must raise this very class, soon, with these words in the message."""
    started, found = time.monotonic(), None
    try:
        yield
    except Exception as error:
        found = error
    if type(found) is not kind or not all(word in str(found) for word in words):
        raise AssertionError(f"rank {RANK}: {found!r} where {kind.__name__} with {words} was due") from found
    assert time.monotonic() - started < SOON, f"rank {RANK}: {time.monotonic() - started:.1f} s, {found}"


def error_of(call: Callable[[], Any]) -> str:
    """What a call raised, as a text, since an exception keeps arrays alive; "ours: ..." if it is one of ours."""
    try:
        call()
        return ""
    except errors.IpcReduceError as error:
        return f"ours: {error!r}"
    except Exception as error:
        return repr(error)


@contextlib.contextmanager
def environment(rank: int | None = None, **variables: str) -> Iterator[None]:
    """Environment variables for a while, on one rank or on all."""
    before = dict(os.environ)
    os.environ.update(variables if rank in (None, RANK) else {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


pages: list[str] = []  # the files of control pages that this rank has made


def _noted(**arguments: Any) -> tuple[int, str]:
    descriptor, path = tempfile.mkstemp(**arguments)
    pages.append(path)
    return descriptor, path


tempfile, control.tempfile = control.tempfile, types.SimpleNamespace(mkstemp=_noted)  # type: ignore[assignment]


def held() -> dict[str, int]:
    """What the library has taken: from the driver, from the system."""
    gc.collect()
    if GPUS:
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
    return driver.leaks() | {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "page files": sum(map(os.path.exists, pages)),
        "mapped pages": Path("/proc/self/maps").read_text().count("/dev/shm/ipcreduce-"),
        "threads": sum(thread.name.startswith("ipcreduce") for thread in threading.enumerate()),
    }


def grown(before: dict[str, int]) -> dict[str, int]:
    now = held()
    return {kind: now.get(kind, 0) - before.get(kind, 0) for kind in now | before if now.get(kind) != before.get(kind)}


# ---- start-up
def falls_back(*words: str, timeout: float = 20, device: Any = None) -> None:
    """Start-up fails, alike on every rank and for the same reason, and host arrays work."""
    started = time.monotonic()
    with Communicator(timeout=timeout, device=device) as comm:
        assert time.monotonic() - started < SOON, f"rank {RANK}: {time.monotonic() - started:.1f} s"
        reasons = set(WORLD.allgather((comm.backend, comm._reasons.get("ipc"))))
        assert len(reasons) == 1, reasons
        for word in ("backend mpi", *words):
            assert word in comm.describe(), f"{word!r} is not in {comm.describe()}"
        host_works(comm)
        if GPUS:
            with raises(errors.UnsupportedError, "device arrays need backend ipc", *words):
                comm.allreduce(mine())
        else:  # but it can hear of it
            with raises(errors.PeerFailedError, "UnsupportedError", *words):
                host_works(comm)
        comm.synchronize()
        host_works(comm)


def no_peer_access() -> None:
    """One pair without it, of which one rank may hear only from the others."""
    for a, b in sorted({(0, 1), (0, LAST), (LAST - 1, LAST)}):
        with environment(SIM_NO_P2P=f"{a}-{b}"):
            falls_back(f"no P2P access between GPU {a} of rank {a} and GPU {b} of rank {b}")
    good_communicator()


def peers_not_visible() -> None:
    """Each rank sees its own GPU only: fine; and without P2P it is found out when the memory is mapped."""
    assert [gpu.index for gpu in machine.gpus()] == [RANK]
    good_communicator()
    with environment(SIM_NO_P2P=f"0-{LAST}"):
        falls_back("mapping the peers' workspaces failed", f"rank {LAST}: cuIpcOpenMemHandle", "peer access")
    good_communicator()


def link_loses_data() -> None:
    setup._VERIFY_SECONDS = 0.5
    for a, b in sorted({(0, 1), (0, LAST)}):
        with environment(SIM_BROKEN_P2P=f"{a}-{b}"):
            falls_back("no data arrived", f"from rank {b} (Simulated GPU, GPU-{machine.gpu(b).uuid_text[4:12]})")
    good_communicator()


def link_loses_data_with_a_short_timeout() -> None:
    """A timeout below the time for which links are tried."""
    with environment(SIM_BROKEN_P2P="0-1"):
        falls_back("no data arrived", timeout=1.0)
    good_communicator()


def no_gpu() -> None:
    """The last rank sees none."""
    assert bool(GPUS) == (RANK != LAST)
    for device in (None, "auto"):
        falls_back(f"rank {LAST} has no GPU to use", "is a GPU visible?", device=device)


def too_little_memory() -> None:
    for rank in range(SIZE):
        with environment(rank, SIM_MEMORY="1000000"):
            falls_back("allocating workspaces failed on 1 of", f"rank {rank}: cuMemAlloc", "out of memory")
    good_communicator()


def wrong_options() -> None:
    """Wrong on one rank, or not the same on all: an error on every rank, which names that one."""
    wrong: list[tuple[str, Any]] = [("IPCREDUCE_WORKSPACE_MB", text) for text in ("0", "x", "", "1.5", "-1")]
    wrong += [("device", value) for value in (GPUS, -1, "cuda:0", True, 1.0, cupy.cuda.Device(77))]
    wrong += [("timeout", 0), ("timeout", None), ("algorithm", "three_shot")]
    for rank, (name, value) in itertools.product(range(SIZE), wrong):
        _all_refuse(rank, name, value, f"rank {rank}'s {name} must be" if rank != RANK else f"{name} must be")
    for rank, other in enumerate([1, *[0] * LAST]):
        named = f"on rank {other if rank == RANK else rank}"
        _all_refuse(rank, "IPCREDUCE_WORKSPACE_MB", "2", "the same workspace", named)
        _all_refuse(rank, "timeout", 7.0, "the same timeout", named, "7.0", "120.0")
        _all_refuse(rank, "algorithm", "two_shot", "the same algorithm", named, "two_shot")
    good_communicator()


def odd_options() -> None:
    """Those on which a careless check trips."""
    odd = [("device", np.array([0, 1])), ("algorithm", np.array(["one_shot", "two_shot"]))]
    for name, value in [("IPCREDUCE_WORKSPACE_MB", "²"), ("IPCREDUCE_WORKSPACE_MB", "9" * 17), *odd]:
        _all_refuse(LAST, name, value, f"{name} must be")
    good_communicator()


def _all_refuse(rank: int, name: str, value: Any, *words: str) -> None:
    """An option, or a variable, with this value on one rank: each rank has an ArgumentError with these words."""
    variables, arguments = ({name: value}, {}) if name.isupper() else ({}, {name: value})
    where = f"rank {RANK}, start-up: "
    with environment(rank, **variables), raises(errors.ArgumentError, where, *words):
        Communicator(**(arguments if rank == RANK else {}))


# ---- devices
def devices() -> None:
    """Every form of device=; --visible says what each rank sees. Ranks that share a GPU say so once."""
    _uses(RANK % GPUS, "auto")
    assert cupy.cuda.Device().id == RANK % GPUS
    for ordinal in (0, RANK % GPUS, GPUS - 1):
        cupy.cuda.Device(ordinal).use()
        for form in (None, ordinal, np.int64(ordinal), cupy.cuda.Device(ordinal)):
            _uses(ordinal, form)


def _uses(ordinal: int, device: Any) -> None:
    """Works on the GPU with this ordinal here; rank 0 alone is told, for the line below, if the ranks could spread."""
    used, seen = len(set(WORLD.allgather(machine.gpu(ordinal).index))), WORLD.allreduce(GPUS, MPI.MAX)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = Communicator(device=device, timeout=20)
    with comm, cupy.cuda.Device(ordinal):
        assert comm.backend == "ipc", comm.describe()
        assert comm._engine.device.uuid == machine.gpu(ordinal).uuid, comm.describe()
        assert f"GPU {ordinal}: " in comm.describe(), comm.describe()
        works(comm)
    told = [str(warning.message) for warning in caught]
    assert len(told) == (RANK == 0 and used < min(SIZE, seen)), f"rank {RANK}, {used} GPUs used: {told}"
    for warning, text in zip(caught, told, strict=True):
        assert f"{SIZE} ranks share {used} GPU(s) while others are idle" in text, text
        assert "Communicator(device='auto')" in text, text
        line = linecache.getline(warning.filename, warning.lineno)
        assert "Communicator(device=device" in line, f"the warning is about {warning.filename}: {line}"


# ---- the driver fails
REFUSED = {  # what may stay behind, if the driver does not take it back
    "cuDevicePrimaryCtxRelease": {"contexts": 1},
    "cuEventDestroy": {"events": 1},
    "cuIpcCloseMemHandle": {"mappings": 1},
    "cuMemFree": {"allocations": 1, "descriptors": 1},
    "cuMemHostUnregister": {"registered host ranges": 1, "mapped pages": 1, "descriptors": 1},
    "cuModuleUnload": {"modules": 1},
}
failed_calls: list[str] = []  # the names of those that were made to fail


class Noted(driver.CudaError):
    """Keeps the name of the call."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(call, code, text)
        if code == 999:
            failed_calls.append(call)


driver.CudaError = Noted  # type: ignore[misc]


def driver_faults() -> None:
    """Each driver call in turn, from start-up to close(), fails on one rank.

    All ranks work, or fall back, or have an error of ours, alike and soon; later all is well; and nothing is left
    behind but what the driver refused to take back.
    """
    found: list[str] = []
    setup._VERIFY_ROUNDS = 5
    for rank in (0, LAST):
        for k in itertools.count(1):
            failed, problems = _life(rank, k)
            found += [f"call {k} of rank {rank}, {failed}: {problem}" for problem in problems]
            if not failed:
                break
        found += [f"a whole life in {k} driver calls"] * (k < 50)
    print("".join(f"rank {RANK}: {problem}\n" for problem in found), end="", flush=True)
    assert not found, f"{len(found)} problems"


def _life(rank: int, k: int) -> tuple[str, list[str]]:
    """Of a communicator whose ``k``-th driver call on ``rank`` fails.

    :returns: which call it was, "" if it was over before; and what went wrong that must not.
    """
    before, problems, made, calls = held(), [], [], driver.calls()
    failed_calls.clear()
    WORLD.Barrier()
    driver.fault_at(k if rank == RANK else 0)

    def step(call: Callable[[], Any], *, may_fail: bool = True, within: float = SOON) -> str:
        started = time.monotonic()
        error = error_of(call)
        if time.monotonic() - started > within:
            problems.append(f"{time.monotonic() - started:.1f} s for {error}")
        if error and not (may_fail and error.startswith("ours: ")):
            problems.append(error)
        return error

    error = step(lambda: made.append(Communicator(timeout=3.0)))
    ends = WORLD.allgather(made[0].backend if made else "error")
    if len(set(ends)) > 1:
        problems.append(f"start-up ended in {ends}; here {error}")
    elif ends[0] == "mpi":
        step(lambda: host_works(made[0]), may_fail=False)
        if "CUDA_ERROR_UNKNOWN" not in made[0].describe():
            problems.append(made[0].describe())
    elif ends[0] == "ipc":
        results: list[Any] = []
        todo = [lambda count=count: results.append(made[0].allreduce(mine(count))) for count in (10, 3000)]
        if not any(map(step, [*todo, made[0].synchronize])):  # the first that fails is the last
            step(lambda: [right(result) for result in results], may_fail=False)
        results.clear()
        driver.fault_at(0)
        if WORLD.bcast(bool(failed_calls), root=rank):
            for _ in range(2):
                step(lambda: works(made[0]), may_fail=False)
        elif rank == RANK:
            driver.fault_at(calls + k - driver.calls())
    for comm in made:
        step(comm.close, may_fail=False)
    driver.fault_at(0)
    made.clear()
    where = WORLD.bcast(failed_calls[0] if failed_calls else "", root=rank)
    step(good_communicator, may_fail=False)
    left = grown(before)
    if left and left != (REFUSED.get(where) if rank == RANK else None):
        problems.append(f"left behind: {left}")
    return where, problems


# ---- ends
def closed_early() -> None:
    """A rank closes while the others still call: they hear of it, soon, and can close."""
    comm = Communicator(timeout=20)
    works(comm)
    WORLD.Barrier()
    if RANK == 0:
        started = time.monotonic()
        comm.close()
        assert time.monotonic() - started < SOON
    else:
        with raises(errors.PeerLostError, "rank 0", "it closed the communicator"):
            works(comm)
        with raises(errors.PeerLostError, "can only be closed"):
            comm.allreduce(mine())
        comm.close()
    comm.close()
    WORLD.Barrier()
    good_communicator()


def never_closed() -> None:
    """A rank that does not close keeps the others for 5 s, and then nothing of theirs that it does not map."""
    comm = Communicator(timeout=20)
    works(comm)
    if RANK != LAST:
        started = time.monotonic()
        comm.close()
        assert 4 < time.monotonic() - started < 6
    WORLD.Barrier()
    comm.close()
    good_communicator()


def crosswise() -> None:
    """Two communicators, closed in another order on each rank, and twice."""
    pair = [Communicator(timeout=20), Communicator(timeout=20)]
    for comm in pair:
        works(comm)
    communicator._CLOSE_SECONDS = 0.5  # of which each rank waits one
    started = time.monotonic()
    for comm in pair[:: 1 if RANK % 2 else -1] * 2:
        comm.close()
        with raises(errors.ArgumentError, "closed"):
            works(comm)
    assert time.monotonic() - started < SOON
    communicator._CLOSE_SECONDS = 5.0
    WORLD.Barrier()
    good_communicator()


def killed() -> None:
    """With --among: the last rank's process is killed while the others' kernels wait for it."""
    _killed(works)


def killed_in_a_host_call() -> None:
    _killed(host_works)


def _killed(call: Callable[[Any], None]) -> None:
    """The survivors hear of it soon, and can close."""
    before = held()
    comm = Communicator(WORLD, timeout=60, device=RANK)
    assert (comm.backend, comm.rank, comm.size) == ("ipc", RANK, SIZE), comm.describe()
    with cupy.cuda.Device(RANK):
        for turn in range(10):
            right(comm.allreduce(np.full(20_000, RANK + 1.0)))
            right(comm.allreduce(mine(3 + turn)))
        comm.synchronize()
        assert len(pages) == (RANK == 0), pages
        assert not any(map(os.path.exists, pages)), "a page has a name that nobody would remove"
        if RANK == LAST:
            time.sleep(0.2)  # the others are in their call
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(errors.PeerLostError, f"rank {LAST} to take part", "its process has ended", "can only be closed"):
            call(comm)
    with raises(errors.PeerLostError, "can only be closed"):
        comm.allreduce(np.ones(3))
    started = time.monotonic()
    comm.close()
    assert time.monotonic() - started < SOON
    del comm
    while left := grown(before):  # by the next close(), what another survivor had still mapped
        assert time.monotonic() - started < SOON, f"left behind: {left}"
        Communicator(MPI.COMM_SELF).close()


# ---- errors in place, threads, captures, fork
def synchronous() -> None:
    """IPCREDUCE_SYNC=1: what goes wrong in a call is raised by it, on every rank."""
    with environment(IPCREDUCE_SYNC="1"), Communicator(timeout=1.0) as comm:
        works(comm)
        for array, op in ((mine(), "max"), (mine().astype(np.int32), "sum"), (mine(999), "sum")):
            with raises(errors.RankMismatchError, f"on rank {LAST}", "the same call"):
                comm.allreduce(*((array, op) if RANK == LAST else (mine(),)))
            works(comm)
        if RANK == 0:
            with raises(errors.ArgumentError, "op must be"):
                comm.allreduce(mine(), "mode")
        else:
            with raises(errors.PeerFailedError, "rank 0 refused"):
                comm.allreduce(mine())
        works(comm)
        WORLD.Barrier()
        if RANK == LAST:
            time.sleep(2)
        with raises(errors.PeerTimeoutError, f"rank {LAST} never came"):
            comm.allreduce(mine())
        works(comm)


def forked() -> None:
    """In a forked child everything says what to do instead; the parent goes on."""
    comm, source = Communicator(timeout=20), mine()
    works(comm)
    default = ipcreduce.get_communicator()
    graph = Graph(comm)
    with graph.record():
        result = comm.allreduce(source)
    comm.synchronize()
    child = os.fork()
    if not child:
        signal.alarm(20)
        status = 1
        try:
            for call in (
                lambda: comm.allreduce(source), lambda: comm.allreduce(np.ones(3)), comm.synchronize,
                lambda: comm.allreduce(source, "mode"), lambda: ipcreduce.allreduce(source),
                ipcreduce.get_communicator, Communicator, graph.replay, lambda: Graph(comm).record().__enter__(),
                lambda: comm.capture().__enter__(),
            ):  # fmt: skip
                with raises(errors.UnsupportedError, "Start processes by spawn"):
                    call()
            graph.close()
            comm.close()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child"
    graph.replay()
    right(result)
    works(comm)
    works(default)
    graph.close()
    comm.close()
    default.close()


def _fault(comm: Any) -> None:
    """A call that rank 0 refuses, and of which every rank has heard."""
    if RANK == 0:
        with raises(errors.ArgumentError, "op must be"):
            comm.allreduce(mine(), "mode")
    else:
        with raises(errors.PeerFailedError, "rank 0 refused"):
            works(comm)


def threads_after_a_fault() -> None:
    """Two threads call after a fault; either may be the one that meets the other ranks."""
    with Communicator(timeout=20) as comm:
        for _ in range(5):
            _fault(comm)
            found: list[str] = []

            def work(found: list[str] = found) -> None:
                with cupy.cuda.Device(RANK):
                    found.extend(error_of(lambda: works(comm)) for _ in range(10))

            threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive(), "a thread hangs"
            assert found == [""] * 20, found


def captured_after_a_fault() -> None:
    """A foreign capture begins with a fault to settle: refused, and whole; one call later it works."""
    comm, stream = Communicator(timeout=20), cupy.cuda.Stream(non_blocking=True)
    source, target, other = mine(), cupy.zeros(1000, np.float32), cupy.zeros(1000, np.float32)
    for heard in (True, False):
        for mode in ("relaxed", "thread_local", "global"):
            works(comm, 1000)
            cupy.cuda.Device().synchronize()
            if not heard and RANK != 0:
                comm.allreduce(source, out=target)  # ends without the data of rank 0
            WORLD.Barrier()
            if heard or RANK == 0:
                _fault(comm)
            WORLD.Barrier()
            stream.begin_capture(mode)
            if not heard and RANK != 0:
                with raises(errors.PeerFailedError, "rank 0 refused"):
                    comm.allreduce(source, out=target, stream=stream)
            with raises(errors.CaptureError, f"rank {RANK}, call", "not captured on every rank, then capture again"):
                comm.allreduce(source, out=target, stream=stream)
            with stream:
                other += source
            graph = stream.end_capture()
            other.fill(0)
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert (cupy.asnumpy(other) == RANK + 1).all(), "what else was captured"
            works(comm)
            stream.begin_capture(mode)
            comm.allreduce(source, out=target, stream=stream)
            graph = stream.end_capture()
            for factor in (1, 2, 3):
                source.fill((RANK + 1) * factor)
                cupy.cuda.Device().synchronize()
                graph.launch(stream)
                stream.synchronize()
                right(target, factor)
            source.fill(RANK + 1)
    comm.close()


SCENARIOS = [
    no_peer_access, peers_not_visible, link_loses_data, link_loses_data_with_a_short_timeout, no_gpu,
    too_little_memory, wrong_options, odd_options, devices, driver_faults, closed_early, never_closed, crosswise,
    killed, killed_in_a_host_call, synchronous, forked, threads_after_a_fault, captured_after_a_fault,
]  # fmt: skip


def main() -> None:
    chosen = {scenario.__name__: scenario for scenario in SCENARIOS}
    if options.among:
        for name in options.names:
            chosen[name]()
            print(f"{name}: right on rank {RANK}", flush=True)
        return
    if GPUS:
        cupy.cuda.Device(RANK % GPUS).use()
    with contextlib.closing(Communicator(timeout=20)) as comm:  # opens what stays open
        host_works(comm)
    for name in options.names:
        before, started = held(), time.monotonic()
        chosen[name]()
        WORLD.Barrier()
        left = grown(before)
        assert not left or name == "driver_faults", f"rank {RANK}, {name}: left behind: {left}"
        if RANK == 0:
            print(f"{name}: right, {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if options.among:
            sys.exit(1)
        WORLD.Abort(1)
