"""Ranks whose clock, threads and waits a library has replaced, ``before`` the package is imported or ``after`` that."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from tests.shared import replaced

if sys.argv[1] == "before":
    replaced.replace()
    os.environ["IPCREDUCE_HOSTID"] = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]  # over TCP

import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import PeerTimeoutError, originals

if sys.argv[1] == "after":
    replaced.replace()
signal.alarm(60)
WORLD = MPI.COMM_WORLD


def late(comm: ipcreduce.Communicator) -> None:
    """Rank 1 comes when rank 0 has given up."""
    if WORLD.rank == 0:
        try:
            comm.allreduce(1.0)
            raise AssertionError("no timeout")
        except PeerTimeoutError:
            WORLD.send(None, 1)
    else:
        WORLD.recv(source=0)
        with suppress(PeerTimeoutError):
            comm.allreduce(1.0)
    assert comm.allreduce(1.0) == 2


with ipcreduce.Communicator(timeout=1) as made:
    assert (made.allreduce(np.ones(100_000)) == 2).all()
    assert [one.name for one in originals.running.values()] == ["ipcreduce-watchdog"]
    if sys.argv[1] == "after":
        late(made)
    WORLD.Barrier()
assert not originals.running
print("right", flush=True)
