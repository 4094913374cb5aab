"""Threads in which another GPU than the communicator's is current, or none, and streams of another GPU."""

from __future__ import annotations

from typing import Any

import cupy

from ipcreduce import Communicator, Graph, errors
from tests.sim.scenarios.common import LAST, OTHER, OWN, RANK, SIZE, in_threads, mine, raises, right, works


def threads_with_another_device() -> None:
    """Threads with no device current, or another one: results lie on the communicator's GPU, and nothing changes."""
    with Communicator(timeout=5) as comm:
        source = mine()

        def call(current: int) -> None:
            result = comm.allreduce(source)
            assert result.data.device_id == OWN, f"rank {RANK}: on GPU {result.data.device_id}"
            comm.synchronize()
            with cupy.cuda.Device(OWN):
                right(result)
            assert cupy.cuda.Device().id == current, f"rank {RANK}: GPU {cupy.cuda.Device().id} has become current"

        works(comm)
        in_threads(lambda: call(0), device=None)
        in_threads(lambda: call(OTHER), device=OTHER)
        works(comm)


def stream_of_another_device() -> None:
    """It cannot be used at all, which the driver says; the others hear of it, and all go on."""
    with cupy.cuda.Device(OTHER):
        foreign = cupy.cuda.Stream(non_blocking=True)
    with Communicator(timeout=5) as comm:
        works(comm)
        if RANK == LAST:
            with raises(errors.CudaError, "INVALID_HANDLE"):
                comm.allreduce(mine(), stream=foreign)
        else:
            with raises(errors.PeerFailedError, f"rank {LAST} refused", "INVALID_HANDLE"):
                works(comm, 1000)
        works(comm)


def recordings_with_another_device() -> None:
    """record() is refused on the ranks where another GPU is current; later ones work."""
    source = mine()

    def record(comm: Any) -> None:
        with Graph(comm) as graph:
            with graph.record():
                result = comm.allreduce(source)
            assert result.data.device_id == OWN, f"rank {RANK}: on GPU {result.data.device_id}"
            right(result)

    with Communicator(timeout=5) as comm:
        works(comm)
        for wrong in ([LAST], range(SIZE)):
            if RANK in wrong:
                with cupy.cuda.Device(OTHER), raises(errors.ArgumentError, f"GPU {OWN} to be the current one"):
                    record(comm)
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} refused", "to be the current one"):
                    record(comm)
            record(comm)
            works(comm)
        in_threads(lambda: record(comm), device=None)


SCENARIOS = [threads_with_another_device, stream_of_another_device, recordings_with_another_device]
