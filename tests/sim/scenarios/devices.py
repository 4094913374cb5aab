"""Threads in which another GPU than the communicator's is current, or none, and streams of another GPU."""

from __future__ import annotations

from typing import Any

import cupy

from ipcreduce import Communicator, Graph, errors
from tests.sim.scenarios.common import LAST, OTHER, OWN, RANK, SIZE, delay, in_threads, mine, raises, right, works
from tests.simulated import machine, machine_streams


def threads_with_another_device() -> None:
    """Threads with no device current, or another one: results lie on the communicator's GPU, and nothing changes."""
    with Communicator() as comm, Graph(comm) as graph:
        source = mine()
        with graph.record():
            total = comm.allreduce(source)

        def call(current: int) -> None:
            result = comm.allreduce(source)
            assert result.data.device_id == OWN, f"rank {RANK}: on GPU {result.data.device_id}"
            for _ in range(3):
                graph.replay()
            comm.synchronize()
            with cupy.cuda.Device(OWN):
                right(result)
                right(total)
                total.fill(-1)
            assert cupy.cuda.Device().id == current, f"rank {RANK}: GPU {cupy.cuda.Device().id} has become current"

        works(comm)
        in_threads(lambda: call(0), device=None)
        in_threads(lambda: call(OTHER), device=OTHER)
        works(comm)


def arrays_of_another_device() -> None:
    """They are refused as array and as out, and no peer waits."""
    with Communicator() as comm:
        own = mine()
        with cupy.cuda.Device(OTHER):
            foreign = cupy.zeros(own.shape, own.dtype)
        for array, out in ((foreign, None), (own, foreign), (foreign, foreign)):
            with raises(errors.ArgumentError, f"lies on GPU {OTHER}, but this communicator uses GPU {OWN}"):
                comm.allreduce(array, out=out)
            works(comm)


def stream_of_another_device() -> None:
    """It cannot be used at all, which the driver says; the others hear of it, and all go on."""
    with cupy.cuda.Device(OTHER):
        foreign = cupy.cuda.Stream(non_blocking=True)
    with Communicator() as comm:
        works(comm)
        if RANK == LAST:
            with raises(errors.CudaError, "INVALID_HANDLE"):
                comm.allreduce(mine(), stream=foreign)
        else:
            with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "INVALID_HANDLE"):
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

    with Communicator() as comm:
        works(comm)
        for wrong in ([LAST], range(SIZE)):
            if RANK in wrong:
                with cupy.cuda.Device(OTHER), raises(errors.ArgumentError, f"Make GPU {OWN} current first"):
                    record(comm)
            else:
                with raises(errors.PeerFailedError, f"rank {LAST} raised an error", "another GPU is current"):
                    record(comm)
            record(comm)
            works(comm)
        in_threads(lambda: record(comm), device=None)


def memory_with_another_device() -> None:
    """comm.empty() gives memory of the communicator's GPU, whichever is current."""
    with Communicator() as comm:
        for current in (OTHER, OWN, OTHER):
            with cupy.cuda.Device(current):
                array = comm.empty(16)
            where = machine.block_at(array.data.ptr).gpu
            assert (array.data.device_id, where) == (OWN, machine.gpu(OWN).index), f"rank {RANK}: on GPU {where}"
        with cupy.cuda.Device(OTHER):  # what is allocated says so by itself
            assert comm._graph_session._memory.allocator(512).device_id == OWN
        works(comm)


def pool_of_another_device() -> None:
    """A graph does not take memory of another GPU than its kernels run on."""
    with Communicator() as comm, Graph(comm) as graph:
        with graph.record():
            comm.allreduce(mine())
        with cupy.cuda.Device(OTHER), Communicator() as other:
            words = f"the pool's memory is on GPU {OWN}, but this communicator uses GPU {OTHER}"
            with raises(errors.ArgumentError, words), Graph(other, pool=graph.pool).record():
                pass
            works(other)


def faults_with_another_device() -> None:
    """The call that settles a fault leaves this thread's current GPU as it is."""
    source, out = mine(), mine()
    with Communicator() as comm:
        works(comm)

        def settle() -> None:
            with raises(errors.ArgumentError, "there is no op"):
                comm.allreduce(source, "mode")
            comm.allreduce(source, out=out)
            assert cupy.cuda.Device().id == OTHER, f"rank {RANK}: GPU {cupy.cuda.Device().id} has become current"

        in_threads(settle, device=OTHER)
        comm.synchronize()
        right(out)


def default_streams_of_two_devices() -> None:
    """Their handle is the same: calls, replays and waits mean the communicator's, and keep their order."""
    stream, array = cupy.cuda.Stream(non_blocking=True), mine()
    with Communicator() as comm:
        works(comm)
        with Graph(comm) as graph:
            with graph.record():
                total = comm.allreduce(array)
            cupy.cuda.Device(OWN).synchronize()
            delay(stream.ptr)
            comm.allreduce(array, out=array, stream=stream.ptr)
            in_threads(lambda: comm.allreduce(array, out=array), device=OTHER)
            in_threads(comm.synchronize, device=OTHER)
            assert machine_streams.is_idle(0)
            right(array, SIZE)
            ones = mine()
            ones.fill(1)
            for _ in range(3):
                comm.allreduce(ones, out=ones)  # quick by now
            delay(0)
            in_threads(lambda: comm.allreduce(ones, out=ones), device=OTHER)
            in_threads(comm.synchronize, device=OTHER)
            assert (ones.get() == SIZE**4).all(), "behind the calls on our default stream"
            delay(0)
            comm.allreduce(array, out=array)
            in_threads(graph.replay, device=OTHER)
            in_threads(comm.synchronize, device=OTHER)
            right(array, SIZE**2)
            right(total, SIZE**3)
        works(comm)


SCENARIOS = [
    threads_with_another_device, arrays_of_another_device, stream_of_another_device, recordings_with_another_device,
    memory_with_another_device, pool_of_another_device, default_streams_of_two_devices, faults_with_another_device,
]  # fmt: skip
