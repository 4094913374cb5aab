"""Start-up that fails, alike on every rank, and devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import json
import linecache
import logging
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cupy
import numpy as np
from mpi4py import MPI

from ipcreduce import Communicator, Graph, errors
from ipcreduce import clock as library_clock
from ipcreduce.bench import info, ranks
from ipcreduce.cuda import driver
from ipcreduce.device.kernels import Kernel
from ipcreduce.ipc import lists, peers, plan, tuning
from ipcreduce.ipc.launches import Launches
from ipcreduce.nccl import join as nccl_startup
from ipcreduce.nccl import library
from ipcreduce.page import shared_files
from tests.shared import clock, start_up_faults
from tests.shared.bounds import LONG, as_shipped, late, no_hang
from tests.sim.scenarios.common import (
    GPUS,
    LAST,
    RANK,
    SIZE,
    WORLD,
    environment,
    error_of,
    good_communicator,
    host_works,
    mine,
    raises,
    right,
    works,
)
from tests.simulated import compiler, machine


# ---- start-up
def falls_back(*words: str, device: Any = None) -> None:
    """Start-up fails, alike on every rank and for the same reason, and host arrays work."""
    with no_hang("start-up"):
        made = Communicator(device=device)
    with made as comm:
        reasons = set(WORLD.allgather((comm.backend, comm._state.reasons.get("ipc"))))
        assert len(reasons) == 1, reasons
        for word in ("backend host", *words):
            assert word in comm.describe(), f"{word!r} is not in {comm.describe()}"
        host_works(comm)
        if GPUS:
            with raises(errors.UnsupportedError, "device arrays need backend ipc or nccl", *words):
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


@contextlib.contextmanager
def tried_in_vain(a: int, b: int, seconds: tuple[float, float]) -> Iterator[None]:
    """The link of this pair is broken. It is tried for ``seconds``, least and most, which pass once the others work."""
    verify = Launches.verify

    def tried(launches: Launches, rounds: int, given: float) -> Any:
        least, most = seconds
        assert least <= given <= most, given
        verdicts = (ctypes.c_uint32 * SIZE).from_address(launches._workspace.address)  # see Launches.verify
        verdicts[:] = [0] * SIZE
        good = [peer for peer in range(SIZE) if peer != RANK and {peer, RANK} != {a, b}]
        when = lambda: all(verdicts[peer] for peer in good)  # noqa: E731
        with clock.passing(given + 1, when, move=clock.advance_device):
            return verify(launches, rounds, given)

    with environment(SIM_BROKEN_P2P=f"{a}-{b}"), mock.patch.object(Launches, "verify", tried):
        yield


def link_loses_data() -> None:
    for a, b in sorted({(0, 1), (0, LAST)}):
        with as_shipped(), tried_in_vain(a, b, (10.0, 10.0)):
            falls_back("no data arrived", f"from rank {b} (Simulated GPU, GPU-{machine.gpu(b).uuid_text[4:12]})")
    good_communicator()


def link_loses_data_with_a_short_timeout() -> None:
    """A timeout below the time for which links are tried: half of what is left of it, so that the verdicts meet."""
    assert peers._VERIFY_SECONDS > 120
    with tried_in_vain(0, 1, (1.0, 60.0)):
        falls_back("no data arrived")
    good_communicator()


def slow_compiler() -> None:
    """A rank whose kernel comes late: no other tries the links before, which it does for some seconds only."""
    compile_kernel, verify = compiler.compile_kernel, Launches.verify
    folder = Path(WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None))

    def slow(*arguments: Any) -> bytes:
        if RANK == LAST and arguments[0] == "verify":
            late(0.5)
            (folder / "compiled").touch()
        return compile_kernel(*arguments)

    def tried(*arguments: Any) -> Any:
        assert (folder / "compiled").exists(), "before the last rank could"
        return verify(*arguments)

    with mock.patch.object(Launches, "verify", tried), mock.patch.object(compiler, "compile_kernel", slow):
        good_communicator()
    WORLD.Barrier()
    if RANK == 0:
        shutil.rmtree(folder)


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


def exclusive_compute_mode() -> None:
    """Another process has the only context that a GPU admits: every rank hears of it, and what to do."""
    words = (
        "GPU ",
        " takes no further process",
        "busy or unavailable",
        "a GPU of its own, start MPS, or set the compute mode",
    )
    for rank, device in itertools.product((0, LAST), (None, "auto")):
        with environment(rank, SIM_EXCLUSIVE="1"), mock.patch.dict(cupy.cuda.Device._retained, clear=device == "auto"):
            falls_back(f"failed on 1 of {SIZE} ranks: rank {rank}: ", *words, device=device)
    good_communicator()


def no_compiler() -> None:
    """A rank that cannot compile the first kernel."""
    advice = "the compiler is not installed: pip install '.[cuda13]' in a clone of ipcreduce, or [cuda12]"
    fails = mock.patch.object(compiler, "compile_kernel", side_effect=errors.UnsupportedError(advice))
    for rank in (0, LAST):
        with fails if rank == RANK else contextlib.nullcontext():
            falls_back(f"loading the first kernel failed on 1 of {SIZE} ranks: rank {rank}: {advice}")
    good_communicator()


def no_cache() -> None:
    """A rank whose kernel cache, and with it the place of tuned tables, cannot be used: it starts as the others do."""
    no_directory = errors.UnsupportedError("the kernel cache cannot be made: set IPCREDUCE_CACHE_DIR")
    for rank in (0, LAST):
        missing = mock.patch.object(tuning, "cache_directory", side_effect=no_directory)
        with missing if rank == RANK else contextlib.nullcontext():
            good_communicator()


def wrong_options() -> None:
    """Wrong on one rank, or not the same on all: an error on every rank, which names that one."""
    wrong: list[tuple[str, Any]] = [("IPCREDUCE_WORKSPACE_MB", text) for text in ("0", "x", "", "1.5", "-1")]
    wrong += [("device", value) for value in (GPUS, -1, "gpu:0", True, 1.0, cupy.cuda.Device(77))]
    wrong += [("workspace", 1000), ("timeout", 0), ("timeout", None), ("algorithm", "three_shot")]
    for rank, (name, value) in itertools.product(range(SIZE), wrong):
        _all_refuse(rank, name, value, f"rank {rank}'s {name} " if rank != RANK else f"{name} ")
    for rank, other in enumerate([1, *[0] * LAST]):
        named = f"on rank {other if rank == RANK else rank}"
        _all_refuse(rank, "IPCREDUCE_WORKSPACE_MB", "2", "workspace must be the same", named)
        _all_refuse(rank, "workspace", 5 << 20, "workspace must be the same", named, str(5 << 20))
        _all_refuse(rank, "timeout", 7.0, "timeout must be the same", named, "7.0", "120.0")
        _all_refuse(rank, "algorithm", "two_shot", "algorithm must be the same", named, "two_shot")
    good_communicator()


def odd_options() -> None:
    """Those on which a careless check trips. An argument comes before its variable."""
    with environment(RANK, IPCREDUCE_WORKSPACE_MB="2"), Communicator(workspace=3 << 20) as comm:
        assert "3 MB of workspace" in comm.describe()
        assert (comm.allreduce(cupy.ones(1 << 20, np.float32)) == SIZE).all()
    odd = [("device", np.array([0, 1])), ("algorithm", np.array(["one_shot", "two_shot"]))]
    for name, value in [("IPCREDUCE_WORKSPACE_MB", "²"), ("IPCREDUCE_WORKSPACE_MB", "9" * 17), *odd]:
        _all_refuse(LAST, name, value, f"{name} is ")
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


def auto_in_a_part() -> None:
    """A communicator of a part of the ranks: "auto" still takes a GPU for each rank of the host."""
    part = WORLD.Split(RANK * 2 // SIZE)
    with Communicator(part, device="auto") as comm:
        assert comm._state.backend.device.ordinal == RANK % GPUS, comm.describe()
    part.Free()


class Group:
    """The ranks without their MPI communicator, as far as the library can see."""

    rank, size = RANK, SIZE

    def allgather(self, data: bytes) -> list[bytes]:
        return WORLD.allgather(data)


def any_group() -> None:
    """On one host; and on as many pretended ones as there are ranks, over NCCL, where host arrays have no way."""
    with Communicator(Group(), device="auto") as comm:
        assert comm.backend == "ipc", comm.describe()
        assert comm._state.backend.device.ordinal == RANK % GPUS, comm.describe()
        works(comm)
        host_works(comm)
    with environment(IPCREDUCE_HOSTID=f"host {RANK}"), Communicator(Group()) as comm:
        assert comm.backend == "nccl", comm.describe()
        works(comm)
        with raises(errors.UnsupportedError, "or pass device arrays"):
            host_works(comm)
        works(comm)
        kind = errors.UnsupportedError if RANK == LAST else errors.PeerFailedError
        with raises(kind, "or pass device arrays"):
            (host_works if RANK == LAST else works)(comm)
        works(comm)
    with environment(IPCREDUCE_HOSTID=f"host {RANK}"), Communicator(Group(), device="auto") as comm:
        assert comm._state.backend.device.ordinal == 0, "each is the first on its host"
        works(comm)


def no_secret_is_shown() -> None:
    """No IPC handle, name of a mailbox, NCCL identity, secret or peer's address in logs, errors, texts and ``info``."""
    found: list[bytes] = []
    mapped: list[int] = []

    def kept(function: Callable[..., Any], keep: Callable[[Any], object]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            keep(result)
            return result

        return call

    def secret(result: Any) -> None:
        found.append(bytes(result))

    run = ranks.Ranks()
    run.join()
    log, shown = io.StringIO(), []
    handler = logging.StreamHandler(log)
    root = logging.getLogger("ipcreduce")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    with (
        mock.patch.object(driver, "export_memory", kept(driver.export_memory, secret)),
        mock.patch.object(driver, "open_memory", kept(driver.open_memory, mapped.append)),
        mock.patch.object(secrets, "token_bytes", kept(secrets.token_bytes, secret)),
        mock.patch.object(secrets, "token_hex", kept(secrets.token_hex, lambda digits: secret(bytes.fromhex(digits)))),
        mock.patch.object(library, "new_id", kept(library.new_id, secret)),
    ):
        for hosts, algorithm, memory in ((1, "direct", "vmm"), (1, "direct", "ipc"), (SIZE, None, "vmm")):
            with environment(IPCREDUCE_HOSTID=f"host {RANK * hosts // SIZE}", IPCREDUCE_MEMORY=memory):
                with Communicator(algorithm=algorithm) as comm, Graph(comm) as graph:
                    with graph.record():
                        comm.allreduce(mine())
                    shown += [repr(comm), comm.describe(), repr(graph), graph.describe(), repr(graph.pool)]
                    shown += [
                        repr(vars(comm._state.backend)),
                        repr(vars(comm._state.calls.page)),
                        repr(comm._state.calls),
                    ]
                    mapped += comm._state.backend.workspace.peers[1:] if hosts == 1 else []
                    shown += _texts_of_refused_calls(comm, graph)
                    shown += [
                        comm._state.calls.page.calls.describe(rank, call) for rank in range(SIZE) for call in (1, 2, 3)
                    ]
                    works(comm)
                collected = info.collect(run)
                shown += [json.dumps(collected), info._text(collected)]
        fails = mock.patch.object(driver, "open_memory", side_effect=errors.CudaError("cuIpcOpenMemHandle", 1, "no"))
        with environment(IPCREDUCE_MEMORY="ipc"), fails, Communicator() as comm:
            assert "cuIpcOpenMemHandle failed: no" in comm.describe()
            shown.append(comm.describe())
    root.removeHandler(handler)
    root.setLevel(level)
    assert len(found) >= 2 + (RANK == 0), f"{len(found)} secrets"
    found = [one for of_rank in WORLD.allgather(found) for one in of_rank]
    assert mapped
    text = "\n".join([log.getvalue(), *shown])
    for word in ("there is no op", f"({6 + SIZE},)", "GraphStateError", "kernel cache: ", "float32"):
        assert word in text, word
    for secret_bytes in found:
        for part in (secret_bytes[8:40], secret_bytes[-24:]):  # as text, as hexadecimal digits, as a list of numbers
            if any(part):
                for form in (part.hex(), repr(part)[2:-1], ", ".join(map(str, part))):
                    assert form not in text, f"rank {RANK}: a secret of {len(secret_bytes)} bytes is shown"
    for address in mapped:
        for form in (str(address), f"{address:x}", f"{address:X}"):
            assert form not in text, f"rank {RANK}: an address at which a peer's memory is mapped is shown"


def _texts_of_refused_calls(comm: Communicator, graph: Graph) -> list[str]:
    """The errors of a wrong argument, of calls that differ and of a wrong state, on this rank."""
    texts = []
    for make in (
        lambda: comm.allreduce(mine(), "mode" if RANK == 0 else "sum"),
        lambda: comm.allreduce(mine(7 + RANK)),
        lambda: graph.record().__enter__(),
    ):
        texts.append(error_of(lambda make=make: (make(), comm.synchronize())))
        assert texts[-1]
        works(comm)
    return texts


def a_rank_leaves_before_the_links_are_tried() -> None:
    """The kernels of the others do not wait for its data, so that all ranks free their memory."""

    def leave(*_: Any) -> None:
        raise RuntimeError("it leaves")

    patched = mock.patch.object(Launches, "verify", leave) if RANK == LAST else contextlib.nullcontext()
    error = RuntimeError if RANK == LAST else errors.PeerFailedError
    with patched, raises(error, "it leaves"):
        Communicator()
    good_communicator()


def no_port_is_opened() -> None:
    """By ranks that share memory, whatever they call. Ranks on several hosts have a connection for each other one."""

    def ports() -> set[str]:
        """The TCP sockets of this process, by inode."""
        rows = [row for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
        listed = [row.split()[9] for row in rows]
        own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
        return {inode for inode in listed if f"socket:[{inode}]" in own}

    before = ports()
    for algorithm in (None, "direct"):
        with Communicator(algorithm=algorithm) as comm, Graph(comm) as graph:
            with graph.record():
                comm.allreduce(mine())
            comm.suspend(pools=True)
            comm.resume()
            works(comm)
            comm.allgather(mine())
            assert ports() == before
    with environment(IPCREDUCE_HOSTID=f"host {RANK}"), Communicator() as comm:
        works(comm)
        assert len(ports() - before) == SIZE - 1, "the test sees no ports"


def files_are_private() -> None:
    """Every file in /dev/shm is made with mode 0600, and its name is gone once the ranks have it."""
    made: list[tuple[str, int]] = []
    create = shared_files.create

    def kept(nbytes: int) -> tuple[int, str]:
        descriptor, path = create(nbytes)
        made.append((path, os.fstat(descriptor).st_mode & 0o7777))
        return descriptor, path

    patched = mock.patch.object(shared_files, "create", kept)
    with patched, Communicator(algorithm="direct") as comm, Graph(comm) as graph:
        with graph.record():
            comm.allreduce(mine())
        assert graph.state == "registered"
        everywhere = [one for of_rank in WORLD.allgather(made) for one in of_rank]
        assert len(everywhere) == 3, everywhere  # the page, memory for NumPy arrays, and the page of closed graphs
        assert {mode for _, mode in everywhere} == {0o600}
        assert not [path for path, _ in everywhere if os.path.exists(path)]


def _uses(ordinal: int, device: Any) -> None:
    """Works on the GPU with this ordinal here; each rank is told once, for the line below, if they could spread."""
    used, seen = len(set(WORLD.allgather(machine.gpu(ordinal).index))), WORLD.allreduce(GPUS, MPI.MAX)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = Communicator(device=device)
    with comm, cupy.cuda.Device(ordinal):
        assert comm.backend == "ipc", comm.describe()
        assert comm._state.backend.device.uuid == machine.gpu(ordinal).uuid, comm.describe()
        assert f"GPU {ordinal}: " in comm.describe(), comm.describe()
        works(comm)
    told = [str(warning.message) for warning in caught]
    assert len(told) == (used < min(SIZE, seen)), f"rank {RANK}, {used} GPUs used: {told}"
    for warning, text in zip(caught, told, strict=True):
        assert f"{SIZE} ranks share {used} GPU(s) while others are idle" in text, text
        assert 'Pass Communicator(device="auto")' in text, text
        line = linecache.getline(warning.filename, warning.lineno)
        assert "Communicator(device=device" in line, f"the warning is about {warning.filename}: {line}"


def one_smaller_gpu() -> None:
    """Grids are what the smallest GPU of all ranks holds at once, on every rank."""
    for rank in range(SIZE):
        small = environment(rank, SIM_MULTIPROCESSORS="2")
        with small, Communicator(algorithm="two_shot") as comm:
            works(comm, 120_000)
            first = plan.make_plan(120_000 * 4, comm._state.backend.launches.gpus, "two_shot")[0]
            assert (first.algorithm, first.grid * first.block) == ("two_shot", 4 * 512), first
        small = environment(rank, SIM_MULTIPROCESSORS="2")
        with small, Communicator(algorithm="direct") as comm, Graph(comm) as graph:
            source = mine(120_000)
            with graph.record():
                result = comm.allreduce(source)
            right(result)
            assert graph.state == "registered"
            launched = comm._state.session.direct.launched[graph.segments[0].calls[0]][0]
            assert (launched.part.algorithm, launched.part.grid) == ("direct", 2), launched
    good_communicator()


def one_gpu_with_little_shared_memory() -> None:
    """Calls with few blocks take the usual kernels, on every rank."""
    for rank in range(SIZE):
        with environment(rank, SIM_SHARED_BYTES=str(99 << 10)), Communicator() as comm:
            right(comm.allreduce(mine(300_000), sms=8))
            assert comm.allgather(mine(300_000), sms=8).shape == (SIZE * 300_000,)
            assert "for sms=" not in comm.describe()
            works(comm)
    good_communicator()


def an_older_driver() -> None:
    """A launch has as many arrays of a list as the oldest driver of all ranks takes, on every rank."""
    for rank in range(SIZE):
        old = mock.patch.object(driver, "driver_version", return_value=(12, 0))
        with old if rank == RANK else contextlib.nullcontext(), Communicator() as comm:
            arrays = [cupy.full(3 + index % 2, (RANK + 1) * index, np.float32) for index in range(lists.SHORT + 1)]
            for index, array in enumerate(comm.allreduce(arrays)):
                assert (array.get() == SIZE * (SIZE + 1) // 2 * index).all(), index
            (prepared,) = (one for of, one in comm._state.backend._prepared.items() if of.is_list)
            assert [len(step._members) for step in prepared.steps] == [lists.SHORT, 1]
    good_communicator()


def packets_over_pcie() -> None:
    """They go in halves wherever a rank sees PCIe between two, though whole ones have arrived in the start-up test."""
    for a, b in sorted({(0, 1), (0, LAST)}):
        with environment(SIM_PCIE=f"{a}-{b}"), Communicator() as comm:
            assert f"packets go in halves of 8 bytes: PCIe between the GPUs of rank {a} and rank {b}" in comm.describe()
            assert not comm._state.backend.kernels.whole_packets
            works(comm, 5000)
            assert comm._state.backend.kernels._compile(Kernel("one_shot", "float32")).count(b'PACKETS": "0"') == 1
    with environment(LAST, SIM_PCIE=f"0-{LAST}"), Communicator() as comm:  # only one sees it
        assert not comm._state.backend.kernels.whole_packets
        works(comm)
    _packets_go_whole("packets arrive whole")


def packets_over_unseen_links() -> None:
    """Where no process sees both GPUs, the start-up test decides, and describe() says so."""
    with environment(SIM_PCIE=f"0-{LAST}"):
        _packets_go_whole(
            "packets arrive whole in the start-up test. No process sees the GPUs of both rank 0 and rank 1, so the "
            "driver could not be asked for NVLink"
        )


def packets_over_links_that_another_sees() -> None:
    """Rank 0 alone sees all GPUs: the other ranks take its word, about their own links too."""
    assert len(machine.gpus()) == (SIZE if RANK == 0 else 1)
    _packets_go_whole("packets arrive whole")
    with environment(SIM_PCIE=f"{LAST - 1}-{LAST}"), Communicator() as comm:
        assert f"PCIe between the GPUs of rank {LAST - 1} and rank {LAST}" in comm.describe(), comm.describe()
        assert not comm._state.backend.kernels.whole_packets
        works(comm)


def _packets_go_whole(line: str) -> None:
    with Communicator() as comm:
        assert line in comm.describe().splitlines(), comm.describe()
        assert comm._state.backend.kernels.whole_packets
        works(comm)


def shared_gpus() -> None:
    """Grids are bounded by the most ranks on any GPU, alike on all ranks, also on one that has a GPU to itself."""
    used = WORLD.allgather(machine.gpu(RANK % GPUS).index)
    most = max(map(used.count, used))
    with Communicator() as comm:
        gpus = comm._state.backend.launches.gpus
        assert (f"{most} ranks on a GPU, so at most {132 // most} blocks" in comm.describe()) == (most > 1)
        assert ('pass device="auto"' in comm.describe()) == (most > 1)
        for nbytes in (4, 70_000, 1_000_000, 9_000_000):
            steps = plan.make_plan(nbytes, gpus)
            assert len(set(WORLD.allgather(steps))) == 1
            assert most == 1 or all(2 * most * step.grid <= 264 and step.block <= 512 for step in steps), steps
        works(comm, 250_000)
    with Communicator(algorithm="direct") as comm, Graph(comm) as graph:
        source = mine(250_000)
        with graph.record():
            result = comm.allreduce(source)
        right(result)
        assert graph.state == "registered"
        for launched in comm._state.session.direct.launched[graph.segments[0].calls[0]]:
            assert launched.part.algorithm == "direct"
            assert most == 1 or 2 * most * launched.part.grid <= 264


def exceptions_at_start_up() -> None:
    """On the last rank, before and behind every exchange, over our kernels and over NCCL.

    Once it has left, time passes for what the others wait for by themselves: packets of its kernels, and NCCL.
    """
    victim, has_left = RANK == LAST, start_up_faults.has_left
    passing = {
        "ipc": functools.partial(clock.passing, LONG + 1, has_left, move=clock.advance_device),
        "nccl": functools.partial(clock.passing, LONG + 1, has_left),
    }
    with mock.patch.object(nccl_startup, "_half", side_effect=lambda _: library_clock.now() + LONG):
        for backend, least in (("ipc", 30), ("nccl", 20)):

            def make(backend: str = backend) -> Communicator:
                with contextlib.nullcontext() if victim else passing[backend]():
                    return Communicator(timeout=1e8, backend=backend)

            but = (
                "starting CUDA" if backend == "nccl" else ""
            )  # then the others join: that ends with all ranks or never
            folder = WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else "")
            places = start_up_faults.everywhere(make, works, victim, SIZE, folder, but)
            assert places >= least, (backend, places)
            WORLD.Barrier()
            if RANK == 0:
                shutil.rmtree(folder)
    good_communicator()


def a_warning_that_is_an_error() -> None:
    """Of ranks that share a GPU; where it is an error on one rank, no rank has a communicator, at once."""
    for strict in ({LAST}, set(range(SIZE))):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if RANK in strict else "ignore")
            words = [f"{SIZE} ranks share 1 GPU(s) while others are idle"]
            words += [] if RANK in strict else [f"rank {LAST} has left start-up (RuntimeWarning"]
            with raises(RuntimeWarning if RANK in strict else errors.PeerFailedError, *words):
                Communicator(device=0, timeout=3600)
    good_communicator()


SCENARIOS = [
    no_peer_access, peers_not_visible, link_loses_data, link_loses_data_with_a_short_timeout, slow_compiler, no_gpu,
    too_little_memory, packets_over_pcie, packets_over_unseen_links, packets_over_links_that_another_sees,
    one_smaller_gpu, one_gpu_with_little_shared_memory, an_older_driver, shared_gpus, wrong_options, odd_options,
    devices, auto_in_a_part, any_group, no_secret_is_shown, no_port_is_opened, files_are_private,
    exclusive_compute_mode, no_compiler, no_cache,
    exceptions_at_start_up, a_rank_leaves_before_the_links_are_tried, a_warning_that_is_an_error,
]  # fmt: skip
