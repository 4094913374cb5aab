"""``python -m tests.programs.group_worker SCENARIO DIRECTORY RANK SIZE``: a rank of a group over files.

mpi4py cannot be imported in it. Which rank does what the others must hear of is the last one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    sys.modules["mpi4py"] = None  # type: ignore[assignment]

import numpy as np
import pytest

import ipcreduce
from ipcreduce import Communicator, errors
from ipcreduce.host.segment import Segment
from ipcreduce.page.control_page import Page
from ipcreduce.ranks import connections
from tests.shared import bounds, clock
from tests.shared.files_group import Files
from tests.tools import machine


def right(comm: Communicator, count: int = 1000) -> None:
    result = comm.allreduce(np.full(count, comm.rank + 1.0))
    assert (result == comm.size * (comm.size + 1) / 2).all(), result


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block must raise this very class, with these words in the message."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.type is kind
    assert all(word in str(caught.value) for word in words), f"{words} in {caught.value}"


# ---- scenarios
def results(group: Files) -> None:
    with Communicator(group) as comm, Communicator(group, device="auto") as other:
        assert (comm.rank, comm.size, comm.backend) == (group.rank, group.size, "host")
        assert "of shared memory" in comm.describe()
        for one in (comm, other):
            for count in (1, 1000, 1_000_000):
                right(one, count)
            assert one.allreduce(group.rank, "max") == group.size - 1
            with raises(errors.ArgumentError, "there is no op"):
                one.allreduce(1.0, 0)
            right(one)
    for thread in threading.enumerate():
        if thread.name == "ipcreduce-allgather":
            thread.join(60)
            assert not thread.is_alive(), "it was answered"


def a_rank_is_killed(group: Files) -> None:
    comm = Communicator(group)
    right(comm)
    if group.is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(errors.PeerLostError, f"rank {group.size - 1}"):
        right(comm)
    comm.close()


def rank_0_is_killed_while_the_page_is_opened(group: Files) -> None:
    _rank_0_is_killed(group, Page)


def rank_0_is_killed_while_the_segment_is_opened(group: Files) -> None:
    _rank_0_is_killed(group, Segment)


def _rank_0_is_killed(group: Files, kind: Any) -> None:
    """Its file goes with those who survive. It tells the path and does not come to the vote behind that."""
    opens, creates, gather, paths = kind.open, kind.create, group.allgather, []
    is_created: list[bool] = []
    told: list[bytes] = []  # since then, by rank 0: the path and its vote

    def opening(path: str, *arguments: Any) -> Any:
        paths.append(path)
        if group.is_last:  # once the others have opened it: the name may go at once, with the next file of anybody
            for rank in range(1, group.size - 1):
                group.await_file(f"opened-{rank}")
            assert os.path.exists(path)
        opened = opens(path, *arguments)
        if group.is_last:
            os.kill(int((group.directory / "pid").read_text()), signal.SIGKILL)
            group.write("failed")
        group.write(f"opened-{group.rank}")
        return opened

    def telling(data: bytes) -> list[bytes]:
        if is_created:
            told.append(data)
        if len(told) == 2:
            time.sleep(60)
        return gather(data)

    def creating(*arguments: Any) -> Any:
        is_created.append(True)
        return creates(*arguments)

    if group.rank == 0:
        group.write("pid", str(os.getpid()).encode())
        group.allgather = telling  # type: ignore[method-assign]
    kind.open, kind.create = opening, creating
    with raises(errors.PeerLostError, "a rank has failed"):
        Communicator(group, timeout=60)
    assert len(paths) == 1
    assert not os.path.exists(paths[0])


def calls_differ(group: Files) -> None:
    with Communicator(group) as comm:
        with raises(errors.RankMismatchError, "(3,)", "(4,)"):
            comm.allreduce(np.ones(3 + group.is_last))
        right(comm)


def options_differ(group: Files) -> None:
    with raises(errors.ArgumentError, "timeout must be the same on every rank"):
        Communicator(group, timeout=100 + group.is_last)
    with Communicator(group) as comm:
        right(comm)


def allgather_raises(group: Files) -> None:
    """The group fails in the midst of start-up, where the ranks vote."""
    allgather, calls = group.allgather, itertools.count(1)

    def fails(data: bytes) -> list[bytes]:
        if next(calls) == 4:
            group.write("failed")
            raise EOFError("of the program")
        return allgather(data)

    if group.is_last:
        group.allgather = fails  # type: ignore[method-assign]
    found = "EOFError: of the program" if group.is_last else "ConnectionResetError: a rank has failed"
    with raises(
        errors.PeerLostError, f"rank {group.rank}, start-up: ", f"the group's allgather raised {found}", "anew"
    ):
        Communicator(group)


def allgather_hangs(group: Files) -> None:
    allgather, calls = group.allgather, itertools.count(1)

    def hangs(data: bytes) -> list[bytes]:
        if next(calls) == 4:
            group.write("hangs")
            threading.Event().wait()
        return allgather(data)

    if group.is_last:
        group.allgather = hangs  # type: ignore[method-assign]
    passing = clock.passing(121.0, (group.directory / "hangs").exists)
    words = "start-up: ", "the group's allgather has not answered in time"
    with passing, raises(errors.PeerTimeoutError, *words):
        Communicator(group)


def late(group: Files) -> None:
    """Those who gave up waiting for the last rank start up with it when it comes, over the same group."""
    if group.is_last:
        for rank in range(group.size - 1):
            group.await_file(f"gave up {rank}")
    else:
        words = f"not all {group.size} ranks came to start-up", "allgather has not answered", "then make it again"
        with clock.passing(121.0), raises(errors.PeerTimeoutError, *words):
            Communicator(group)
        group.write(f"gave up {group.rank}")
    with Communicator(group) as comm:
        right(comm)


def apart(group: Files) -> None:
    """On pretended hosts, without GPUs: nothing can carry host arrays."""
    os.environ["IPCREDUCE_HOSTID"] = f"host {group.rank}"
    with Communicator(group) as comm:
        assert f"host arrays: cannot be reduced, because the ranks are on {group.size} hosts" in comm.describe()
        for _ in range(2):
            with raises(errors.UnsupportedError, "one of mpi4py, or pass device arrays", "host arrays need memory"):
                comm.allreduce(1.0)
        group.allgather(b"")  # before any of them closes


def apart_without_tcp(group: Files) -> None:
    """The ranks cannot have a control page."""
    os.environ["IPCREDUCE_HOSTID"] = f"host {group.rank}"

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no port")

    connections.Socket.listen = refused  # type: ignore[method-assign]
    words = f"(the ranks are on {group.size} hosts) nor reach each other over TCP (listening for the other ranks failed"
    with raises(errors.UnsupportedError, words, "open TCP between them"):
        Communicator(group)


def one_rank_twice(group: Files) -> None:
    other = types.SimpleNamespace(rank=0, size=group.size, allgather=group.allgather)
    with raises(
        errors.ArgumentError,
        f"the bytes of rank 0 of {group.size} at place 1, where those of rank 1 of {group.size} belong",
    ):
        Communicator(other)


SCENARIOS = [
    results, a_rank_is_killed, rank_0_is_killed_while_the_page_is_opened, rank_0_is_killed_while_the_segment_is_opened,
    calls_differ, options_differ, allgather_raises, allgather_hangs, late, apart,
    apart_without_tcp, one_rank_twice,
]  # fmt: skip


def among_processes(module: str, *arguments: object, size: int, timeout: float = 120) -> list[tuple[int, str]]:
    """Run ``python -m module *arguments RANK SIZE`` for each rank. Returns exit status and output, by rank."""
    environ = machine.ranks_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size)], cwd=machine.ROOT, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]  # fmt: skip
    until = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(0.1, until - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def main(name: str, directory: str, rank: str, size: str) -> None:
    bounds.patient()
    assert "mpi4py.MPI" not in sys.modules
    [scenario] = [one for one in SCENARIOS if one.__name__ == name]
    scenario(Files(directory, int(rank), int(size)))
    assert "mpi4py.MPI" not in sys.modules
    assert sys.modules["mpi4py"] is None
    assert "torch" not in sys.modules
    assert ipcreduce.Group
    print("right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
