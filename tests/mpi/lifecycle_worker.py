"""Beginnings and ends of MPI: ``mpirun -n 2 python tests/mpi/lifecycle_worker.py scenario``, one a process.

mpi4py initialises MPI when mpi4py.MPI is imported, so each scenario imports it by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import mpi4py
import numpy as np
import pytest

import ipcreduce
from ipcreduce import Communicator, UnsupportedError
from ipcreduce.page.layout import page_bytes
from tests.shared import worker
from tests.shared.bounds import late, until


def right(comm: Any) -> None:
    assert comm.allreduce(np.full(3, comm.rank + 1)).tolist() == [comm.size * (comm.size + 1) // 2] * 3


def unsupported(words: str, *calls: Callable[[], Any]) -> None:
    """Each call must raise UnsupportedError with these words."""
    for call in calls:
        found = None
        try:
            call()
        except UnsupportedError as error:
            found = str(error)
        assert found is not None, f"no error where {words!r} was due"
        assert words in found, found


def not_initialised() -> None:
    """rc.initialize = False: said so until MPI.Init(), and after MPI.Finalize()."""
    mpi4py.rc.initialize = False
    everything = (Communicator, ipcreduce.get_communicator, lambda: ipcreduce.allreduce(np.ones(3)))
    unsupported("MPI is not initialised. Call MPI.Init()", *everything)
    from mpi4py import MPI

    assert not MPI.Is_initialized(), "initialised behind the program's back"
    MPI.Init()
    with Communicator() as comm:
        right(comm)
    MPI.Finalize()
    unsupported("MPI is finalised", *everything)


def finalised_before_close() -> None:
    """The program finalises MPI and closes afterwards, or never: no error, no noise, no hang."""
    from mpi4py import MPI

    closed, left, default = Communicator(), Communicator(), ipcreduce.get_communicator()
    for comm in (closed, left, default):
        right(comm)
    MPI.Finalize()
    unsupported("MPI is finalised", Communicator)
    for comm in (left, default):  # whose data go through shared memory
        right(comm)
    closed.close()
    closed.close()


def never_closed() -> None:
    """The interpreter's exit closes what is open, in the same order on every rank, however late one of them is."""
    from mpi4py import MPI

    for comm in (Communicator(), Communicator(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)), Communicator()):
        right(comm)
    ipcreduce.allreduce(np.ones(3))
    late(MPI.COMM_WORLD.rank)


def exit_closes() -> None:
    """What the interpreter does at its end, done while we can still look."""
    open_ones = [Communicator(), ipcreduce.get_communicator()]
    for comm in open_ones:
        right(comm)
    atexit._run_exitfuncs()
    for comm in open_ones:
        found = None
        try:
            right(comm)
        except ipcreduce.ArgumentError as error:
            found = error
        assert "the communicator is closed" in str(found), found


def used_until_the_end() -> None:
    """A communicator in a cycle of objects; and a daemon thread that still waits in a call."""
    from mpi4py import MPI

    holder: dict[str, Any] = {"comm": Communicator()}
    holder["self"] = holder
    right(holder["comm"])
    waiting = Communicator()
    if MPI.COMM_WORLD.rank == 0 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:

        def wait() -> None:
            with contextlib.suppress(ipcreduce.IpcReduceError):
                waiting.allreduce(np.ones(3))

        threading.Thread(target=wait, daemon=True).start()
        until(lambda: waiting._state.calls.number, "the call")


def without_threads() -> None:
    """MPI_THREAD_SINGLE."""
    mpi4py.rc.thread_level = "single"
    from mpi4py import MPI

    assert MPI.Query_thread() in (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED), MPI.Query_thread()
    with Communicator() as comm:
        for count in (1, 100_000):
            assert (comm.allreduce(np.ones(count)) == comm.size).all()
        right(comm)


def synchronously() -> None:
    """IPCREDUCE_SYNC=1, as set by the test, changes nothing on the host."""
    with Communicator() as comm:
        right(comm)
        comm.synchronize()


def no_room() -> None:
    """/dev/shm is full on rank 0: every rank warns once, or has the error that the program makes of it."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.Get_size()
    reserve = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes != page_bytes(size):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, nbytes)

    with mock.patch.object(os, "posix_fallocate", full):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Communicator() as comm:
                right(comm)
        assert [(one.category, one.filename) for one in caught] == [(RuntimeWarning, __file__)], caught
        assert "has no room for one more communicator" in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="has no room for one more communicator"):
                Communicator()
    with Communicator() as comm:
        assert "MB of shared memory" in comm.describe()
        right(comm)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        not_initialised, finalised_before_close, never_closed, exit_closes, used_until_the_end, without_threads,
        synchronously, no_room,
    )
}  # fmt: skip


if __name__ == "__main__":
    try:
        SCENARIOS[sys.argv[1]]()
        print(f"{sys.argv[1]}: right", flush=True)
    except BaseException:
        worker.show()
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init()
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)
        sys.exit(1)
