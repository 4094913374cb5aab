"""What one rank does, and how the others hear of it: soon, and with the reason first."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

import ipcreduce
from ipcreduce import Communicator, Graph, errors
from tests.shared import clock
from tests.shared.bounds import LONG, late, no_hang, until
from tests.sim.scenarios.common import (
    LAST,
    RANK,
    WORLD,
    close_seconds,
    fault,
    good_communicator,
    host_works,
    mine,
    raises,
    right,
    told,
    works,
)


def _closes_soon(comm: Any) -> None:
    with no_hang("close()"):
        comm.close()


# ---- it refuses a call and ends
def refused_and_ended() -> None:
    """With --among: rank 0 refuses a call and its program ends, of which the others hear in this order."""
    comm = Communicator(WORLD, device=RANK)
    with cupy.cuda.Device(RANK):
        works(comm)
        fault(comm)
        if RANK != 0:  # rank 0 closes at exit
            with raises(errors.PeerLostError, "rank 0 is gone", "can only be closed"):
                works(comm)
            _closes_soon(comm)


def refused_and_closed() -> None:
    """Rank 0 refuses a call and closes: the others hear of the call first, whether they wait in it or come later."""
    for others_come in ("before", "later"):
        comm = Communicator()
        works(comm)
        WORLD.Barrier()
        late(0.3 if (RANK == 0) == (others_come == "before") else 0)
        if RANK == 0:
            with raises(errors.ArgumentError, "there is no op"):
                comm.allreduce(mine(), "mode")
        else:
            with raises(errors.PeerFailedError, "rank 0 raised an error", "there is no op"):
                comm.allreduce(mine())
                watch = comm._state.watch
                until(lambda watch=watch: watch.lost, "the end of rank 0")  # the watchdog has seen it leave
                comm.synchronize()
            with raises(errors.PeerLostError, "rank 0", "it closed the communicator"):
                works(comm)
        _closes_soon(comm)
        WORLD.Barrier()
    good_communicator()


def refused_again_alone() -> None:
    """Rank 0 refuses call after call while the others are elsewhere: it gives up, and the others hear that it has."""
    comm = Communicator()
    works(comm)
    fault(comm)
    words = "waited in vain for rank 1 to make a call", "right after an error", "can only be closed"
    if RANK == 0:
        for op in ("mode", "sum"):
            with clock.passing(LONG + 1), raises(errors.PeerLostError, *words):
                comm.allreduce(mine(), op)
    WORLD.Barrier()
    if RANK != 0:
        with raises(errors.PeerLostError, *words):
            works(comm)
    WORLD.Barrier()
    if RANK == 0:
        _closes_soon(comm)  # before the others
    WORLD.Barrier()
    _closes_soon(comm)
    WORLD.Barrier()
    good_communicator()


# ---- it closes
def closed_where_others_meet() -> None:
    """Rank 0 closes after a fault, while the others already wait for it to go on: they need not wait for long."""
    comm = Communicator()
    works(comm)
    fault(comm)
    if RANK == 0:
        late(0.5)
    else:
        with raises(errors.PeerLostError, "rank 0 is gone", "it closed the communicator"):
            works(comm)
    _closes_soon(comm)
    WORLD.Barrier()
    good_communicator()


def closed_ahead_of_a_fault() -> None:
    """Rank 0 has made the call that another refuses, and one more, and closes: nobody waits for it to settle this."""
    comm = Communicator()
    works(comm)
    if RANK == 0:
        comm.allreduce(mine(10))
        comm.allreduce(mine(10))
    WORLD.Barrier()
    if RANK == 0:
        told(comm)
        with close_seconds(0.5):
            comm.close()
    elif RANK == LAST:
        with raises(errors.ArgumentError, "there is no op"):
            comm.allreduce(mine(), "mode")
    else:
        with raises(errors.PeerFailedError, f"rank {LAST} raised an error"):
            works(comm)
    if RANK != 0:
        with raises(errors.PeerLostError, "rank 0 is gone", "it closed the communicator"):
            works(comm)
    WORLD.Barrier()
    _closes_soon(comm)
    WORLD.Barrier()
    good_communicator()


def closed_within_a_recording() -> None:
    """Rank 0 may not: no recording becomes a graph, on any rank, and all go on."""
    with Communicator() as comm:
        works(comm)
        with Graph(comm) as graph:
            kind = errors.GraphStateError if RANK == 0 else errors.PeerFailedError
            with raises(kind, "close() within a recording"), graph.record():
                comm.allreduce(mine())
                if RANK == 0:
                    comm.close()
            assert graph.state == "failed", graph.state
        works(comm)


def closed_with_a_call_under_way() -> None:
    """Rank 0 closes while its kernel waits for ranks that are elsewhere: the kernel is ended after some time."""
    comm = Communicator()
    works(comm)
    WORLD.Barrier()
    if RANK == 0:
        comm.allreduce(mine())
        with close_seconds(0.5):  # after which its kernel is ended
            _closes_soon(comm)
    WORLD.Barrier()
    if RANK != 0:
        with raises(errors.PeerFailedError, "rank 0", "it closed the communicator"):
            works(comm)
    _closes_soon(comm)
    WORLD.Barrier()
    good_communicator()


# ---- what it passes
def first_call_refused() -> None:
    """The call that would have made the default communicator: it is made all the same, so that the others hear."""
    for array in (np.full(7, RANK + 1.0), mine()):
        if RANK == LAST:
            with raises(errors.ArgumentError, "member 0 of the list: it is a float"):
                ipcreduce.allreduce([1.0, 2.0])
        else:
            with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "member 0 of the list: it is a float"):
                ipcreduce.allreduce(array)
                ipcreduce.get_communicator().synchronize()
        right(ipcreduce.allreduce(array))
        ipcreduce.get_communicator().close()
        WORLD.Barrier()


def list_among_host_arrays() -> None:
    """A list on one rank, which comes late, where the others reduce NumPy arrays."""
    with Communicator() as comm:
        assert comm.backend == "ipc", comm.describe()
        for rank in (0, LAST):
            if rank == RANK:
                late(0.3)
                with raises(errors.ArgumentError, "member 0 of the list: it is a float"):
                    comm.allreduce([1.0] * 7)
            else:
                with raises(
                    errors.PeerFailedError, f"rank {rank} raised an error", "member 0 of the list: it is a float"
                ):
                    host_works(comm)
            host_works(comm)
            works(comm)


def misaligned_arrays() -> None:
    """An address that is no multiple of the itemsize, which no kernel can read, as array and as out."""
    memory = cupy.zeros(4096, np.uint8)
    odd = cupy.ndarray((1000,), np.float32, memory.data + 1)
    with Communicator() as comm:
        for array, out in ((odd, None), (mine(), odd), (odd, odd)):
            if RANK == LAST:
                with raises(
                    errors.ArgumentError, f"address {odd.data.ptr:#x} of array or out is no multiple of the itemsize, 4"
                ):
                    comm.allreduce(array, out=out)
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "no multiple of the itemsize"):
                    works(comm, 1000)
            works(comm)
        aligned = cupy.ndarray((1000,), np.float32, memory.data + 4)
        aligned[...] = mine()
        right(comm.allreduce(aligned, out=aligned))
        comm.synchronize()


SCENARIOS = [
    refused_and_ended, refused_and_closed, refused_again_alone, closed_where_others_meet, closed_within_a_recording,
    closed_ahead_of_a_fault, closed_with_a_call_under_way, first_call_refused, list_among_host_arrays,
    misaligned_arrays,
]  # fmt: skip
