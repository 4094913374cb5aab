"""Workspaces in virtual memory, and behind IPC handles where that cannot be had, or with IPCREDUCE_MEMORY=ipc."""

from __future__ import annotations

import contextlib
import gc
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cupy
import numpy as np

from ipcreduce import Communicator, Graph, errors
from ipcreduce.device import deferred_free
from ipcreduce.ipc import peers
from ipcreduce.ranks import descriptors
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    SIZE,
    WORLD,
    environment,
    fault,
    good_communicator,
    grown,
    held,
    host_works,
    open_files,
    raises,
    works,
)
from tests.sim.scenarios.driver_faults import REFUSED
from tests.simulated import driver, machine

IN_VIRTUAL, BEHIND_HANDLES = (
    "MB of workspace in virtual memory",
    "workspace: behind IPC handles, not in virtual memory: ",
)


@contextlib.contextmanager
def virtual(**options: Any) -> Iterator[Communicator]:
    with Communicator(**options) as comm:
        assert (comm.backend, IN_VIRTUAL in comm.describe()) == ("ipc", True), comm.describe()
        yield comm


def in_both_memories() -> None:
    """The same bits, of short and long arrays, and of a graph that is replayed."""

    def results(comm: Communicator) -> list[bytes]:
        generator = np.random.default_rng(RANK)
        found = []
        for count in (1, 1000, 40_001):
            host = generator.standard_normal(count).astype(np.float32)
            found.append(cupy.asnumpy(comm.allreduce(cupy.asarray(host))).tobytes())
        source = cupy.asarray(host)
        with Graph(comm) as graph:
            with graph.record():
                result = comm.allreduce(source)
            graph.replay()
            found.append(cupy.asnumpy(result).tobytes())
        comm.synchronize()
        return found

    with environment(IPCREDUCE_MEMORY="ipc"), Communicator() as comm:
        assert f"{BEHIND_HANDLES}IPCREDUCE_MEMORY is ipc" in comm.describe(), comm.describe()
        assert "virtual mappings" not in driver.leaks()
        expected = results(comm)
    with virtual() as comm:
        assert results(comm) == expected
        assert driver.leaks()["virtual mappings"] == SIZE
        host_works(comm)
    assert "virtual mappings" not in driver.leaks()


def falls_back(reason: str) -> None:
    before = driver.leaks().get("physical", 0)
    with Communicator() as comm:
        lines = [line for line in comm.describe().splitlines() if line.startswith(BEHIND_HANDLES)]
        assert len(set(WORLD.allgather((comm.backend, *lines)))) == 1
        assert comm.backend == "ipc"
        assert len(lines) == 1, comm.describe()
        assert reason in lines[0], lines[0]
        assert driver.leaks().get("physical", 0) == before
        works(comm)


def not_in_virtual_memory() -> None:
    """All ranks use IPC handles, for the same reason, where one lacks something."""
    for rank in (0, LAST):
        for value, words in (
            ("1", "the driver has no virtual memory"),
            ("descriptors", "the driver exports no memory"),
        ):
            with environment(rank, SIM_NO_VMM=value):
                falls_back(f"allocating workspaces in virtual memory failed on 1 of {SIZE} ranks: rank {rank}: {words}")
        refused = mock.patch.object(descriptors, "Mailbox", side_effect=PermissionError(1, "no sockets here"))
        with refused if rank == RANK else contextlib.nullcontext():
            falls_back("no sockets here")
        other = types.SimpleNamespace(**{**vars(os), "getpid": lambda: 1})
        with mock.patch.object(descriptors, "os", other) if rank == RANK else contextlib.nullcontext():
            falls_back(f"no descriptor has come from rank {rank}, process 1: ")
    with environment(SIM_MEMORY=str((2 << 20) - 1)):  # whole pieces have 2 MB
        falls_back("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
    with virtual() as comm:
        works(comm)
    _refuse_what_differs()


def _refuse_what_differs() -> None:
    with environment(LAST, IPCREDUCE_MEMORY="ipc"), raises(errors.ArgumentError, "memory must be the same", "ipc"):
        Communicator()
    with environment(0, IPCREDUCE_MEMORY="virtual"), raises(errors.ArgumentError, "IPCREDUCE_MEMORY is 'virtual'"):
        Communicator()
    good_communicator()


def peers_without_access() -> None:
    """Where the GPUs do not reach each other, virtual memory is of no use either."""
    with environment(SIM_NO_P2P=f"0-{LAST}"), Communicator() as comm:
        assert comm.backend != "ipc"
        assert f"no P2P access between GPU 0 of rank 0 and GPU {LAST} of rank {LAST}" in comm.describe()
        assert "physical" not in driver.leaks()
        host_works(comm)


def virtual_driver_faults() -> None:
    """Each of its driver calls fails on one rank.

    Before the communicator is there, all ranks use IPC handles instead; in close(), what the driver refuses to take
    back is all that stays.
    """
    names = ("DeviceGetAttribute", "MemGetAllocationGranularity", "MemAddressReserve", "MemCreate", "MemMap")
    names += ("MemSetAccess", "MemExportToShareableHandle", "MemImportFromShareableHandle")
    for rank in (0, LAST):
        for name in (f"cu{name}" for name in names):
            before = held()
            driver.fault_in(name if rank == RANK else "")
            falls_back(f"rank {rank}: {name} failed: CUDA_ERROR_UNKNOWN")
            assert not grown(before), (name, grown(before))
        for name in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree"):
            before, left = held(), REFUSED[name]
            with virtual() as comm:
                works(comm)
                driver.fault_in(name if rank == RANK else "")
            assert grown(before) == (left if rank == RANK else {}), (name, grown(before))
    good_communicator()


def a_link_that_loses_data() -> None:
    """The test of the links finds it in virtual memory, too, and nothing stays."""
    before = held()
    lost = mock.patch.object(peers, "_WHOLE", 99), mock.patch.object(peers, "_SPLIT", 99)
    with lost[0], lost[1], Communicator() as comm:
        assert comm.backend != "ipc"
        assert "wrong data arrived" in comm.describe(), comm.describe()
        assert "physical" not in driver.leaks()
        assert "virtual mappings" not in driver.leaks()
    assert not {kind for kind in grown(before) if kind != "threads"}, grown(before)


def fifty_communicators() -> None:
    """Descriptors, mappings and memory are as before; a call that fails changes nothing about that."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("ipcreduce-sim-physical")

    with virtual() as comm:
        works(comm)
    before, free = held(), machine.memory_info()
    assert not mapped()
    for turn in range(50):
        with Communicator() as comm:
            if turn % 10 == 0:
                assert mapped() == SIZE
                fault(comm)
            host_works(comm)
    assert not grown(before), grown(before)
    assert (mapped(), machine.memory_info()) == (0, free)


def pages_mapped() -> int:
    """The control pages in this process's memory."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/ipcreduce-")


def no_descriptor_is_left() -> None:
    """And no page: of communicators that work, that fail to start, or whose start is interrupted.

    None waits for the garbage collector, but those of the interrupted ones.
    """
    good_communicator()
    collect = gc.collect
    for memory in ("ipc", "vmm"):
        with environment(IPCREDUCE_MEMORY=memory), mock.patch.object(gc, "collect", return_value=0):
            expected, pages = open_files(), pages_mapped()
            for turn in range(25):
                _made(turn)
                WORLD.Barrier()  # each has closed, so the memory of all is free
                deferred_free.flush()
                if turn % 5 == 3:
                    collect()
                assert open_files() == expected, (memory, turn, open_files() - expected)
                assert pages_mapped() == pages, (memory, turn, pages_mapped())


def _made(turn: int) -> None:
    """A communicator that lives shortly, if it does; the last rank has a fault in some turns."""
    failing = ("cuMemImportFromShareableHandle", "cuMemExportToShareableHandle", "cuIpcOpenMemHandle", "cuMemSetAccess")
    if turn % 5 == 4:
        driver.fault_in(failing[turn // 5 % 4] if RANK == LAST else "")
    interrupted = mock.patch.object(descriptors.Mailbox, "send", side_effect=KeyboardInterrupt)
    try:
        with (
            interrupted if (turn % 5, RANK) == (3, LAST) else contextlib.nullcontext(),
            Communicator(algorithm="direct" if turn % 5 == 2 else None, backend="ipc") as comm,
            contextlib.ExitStack() as held_back,
        ):
            works(comm)
            if turn % 5 == 2:
                with held_back.enter_context(Graph(comm)).record():
                    comm.allreduce(cupy.ones(100, np.float32))
            host_works(comm)
    except (KeyboardInterrupt, errors.IpcReduceError):
        assert turn % 5 > 2, turn
    finally:
        driver.fault_in("")


SCENARIOS = [
    in_both_memories, not_in_virtual_memory, peers_without_access, a_link_that_loses_data, fifty_communicators,
    no_descriptor_is_left, virtual_driver_faults,
]  # fmt: skip
