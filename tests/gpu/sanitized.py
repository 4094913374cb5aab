"""Calls that use one kernel, in every dtype: ``mpirun -n 2 python tests/gpu/sanitized.py one_shot``.

tests/tools/sanitizers.py runs it under compute-sanitizer. Arrays end where their memory does, and come from no pool
but the graphs': what reads or writes behind one is found. All that a rank reads has been written by itself before,
since initcheck sees no store of another process, nor of a bulk copy, and forgets what kernels store in memory that
other processes map: slots are filled when they are made, the outputs of graphs here, by the driver, and what bulk
copies write as it is allocated.
"""

from __future__ import annotations

import sys

import cupy
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench.limit import our_backend
from ipcreduce.cuda import cupy_runtime, driver
from tests.gpu import cupy_module
from tests.shared import bounds, reference, sweep, worker
from tests.shared.cases import Limits

CASES = 15 if cupy.__name__ != "cupy" else 40  # on the simulated device every thread costs microseconds
LARGEST = 20_000  # bytes: several tiles, but few time slices
COUNTS = (1, 511, 4096, 10_001)  # numbers: in the graphs, some whole packets and some not, which are staged
TURNS = 3


def communicator(algorithm: str | None = None) -> ipcreduce.Communicator:
    """A communicator that has to use our kernels. Its time is long: under the tools kernels are slow."""
    return ipcreduce.Communicator(backend="ipc", algorithm=algorithm, timeout=120)


def initialised(nbytes: int) -> cupy.cuda.MemoryPointer:
    """An allocation that is written at once, for what bulk copies store."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
    cupy.ndarray((nbytes,), np.uint8, memory).fill(0xA5)
    cupy.cuda.Device().synchronize()
    return memory


def swept_by_bulk_copies(kind: str) -> int:
    cupy.cuda.set_allocator(initialised)
    try:
        return swept(kind, "bulk")
    finally:
        cupy.cuda.set_allocator(None)


def swept(kind: str, algorithm: str | None) -> int:
    """Random calls of a kind. Returns their number, as all of these do."""
    with communicator(algorithm) as comm:
        limits = Limits(LARGEST, rows=20)
        return int(sweep.run(cupy_module, {"one": comm}, [kind], 1, CASES, limits, late_seconds=0, tight=True)["calls"])


def graphs(algorithm: str) -> int:
    """A graph of each dtype, with odd sizes and tails, recorded, registered if that is its way, and replayed."""
    with communicator(algorithm) as comm:
        for number, dtype in enumerate(reference.DTYPES):
            op = reference.OPS[number % len(reference.OPS)]
            of_all = [
                [reference.random_array(np.random.default_rng([number, rank, n]), (n,), dtype, False) for n in COUNTS]
                for rank in range(comm.size)
            ]
            expected = [reference.reduce([values[at] for values in of_all], op) for at in range(len(COUNTS))]
            with ipcreduce.Graph(comm) as graph:
                sources = [cupy.asarray(values) for values in of_all[comm.rank]]
                with graph.record():
                    results = [comm.allreduce(source, op) for source in sources]
                assert (graph.state == "registered") == (algorithm == "direct"), graph.describe()
                for _ in range(TURNS):
                    for result in results:
                        driver.fill(result.data.ptr, 0xA5, result.nbytes)
                    graph.replay()
                    comm.synchronize()
                    for result, right in zip(results, expected, strict=True):
                        assert reference.same(result.get(), right), (algorithm, dtype, op, right.size)
    return len(reference.DTYPES) * len(COUNTS) * (TURNS + 1)


def start_up() -> int:
    """The kernel that tries the links."""
    for _ in range(TURNS):
        communicator().close()
    return TURNS


def barrier_and_push() -> int:
    """The kernel of bench's limit: flags alone, and with data."""
    with communicator() as comm:
        comm.allreduce(cupy.ones(10, np.float32))
        backend, (stream, owner) = our_backend(comm, "the sanitizer's program"), cupy_runtime.stream_of()
        for nbytes in (0, 16, LARGEST // 16 * 16):
            launch = backend.launches.limit(nbytes, 2, 256)
            backend.order.launch(launch.run, stream, owner)
        comm.synchronize()
        assert (comm.allreduce(cupy.ones(10, np.float32)) == comm.size).all()
    return 3


PROGRAMS = {
    "one_shot": lambda: swept("plain", "one_shot") + graphs("one_shot"),
    "two_shot": lambda: swept("plain", "two_shot") + graphs("two_shot"),
    "direct": lambda: graphs("direct"),
    "bulk": lambda: swept_by_bulk_copies("plain"),
    "split": lambda: swept("split", None),  # gather.cu and scatter.cu
    "bulk_split": lambda: swept_by_bulk_copies("split"),
    "spread": lambda: swept("split", "two_shot"),  # all broadcasts over three ranks and more
    "fused_one_shot": lambda: swept("norm", "one_shot"),
    "fused_two_shot": lambda: swept("norm", "two_shot"),
    "rmsnorm": lambda: swept("norm", None),
    "verify": start_up,
    "limit": barrier_and_push,
}


def main() -> None:
    bounds.patient()
    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    cupy.cuda.set_allocator(None)  # no pool, which would give more than was asked for
    for name in sys.argv[1:]:
        calls = PROGRAMS[name]()
        if MPI.COMM_WORLD.rank == 0:
            print(f"{name}: {calls} cases, all right", flush=True)


if __name__ == "__main__":
    worker.run(main)
