# mpirun -n 2 python mpi_examples/decorator_order.py
"""Why ``@ipcreduce.eager_break`` is the outermost decorator: what goes wrong if it is not, and the right order.

Attention needs keys and values (KV) that rank 0 sends to the others at each step, as a server for prompts does. A
decorator waits on the host until they are there. Outside of the break it is not part of the break: it waits once, at
the recording. Replays then use old KV, and rank 0, which waits until a step's KV has been taken, stays behind: the
other ranks' all-reduce ends in a ``PeerTimeoutError``. Needs a GPU, CuPy and two ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import ipcreduce

STEPS, COUNT = 4, 1000
TIMEOUT = 2.0  # seconds; the default, 120, is for programs

world = MPI.COMM_WORLD
comm = ipcreduce.Communicator(device="auto", timeout=TIMEOUT)  # takes a GPU for each rank, if there are any
if comm.backend == "mpi" or comm.size == 1:
    if comm.rank == 0:
        print("this example needs two ranks, GPUs, and CuPy to use them: nothing to show here")
    comm.close()
    sys.exit(0)
import cupy  # noqa: E402

kv = cupy.empty(COUNT, np.float32)  # not zeros: that fill and the copies on another stream would be in no order
arrivals = cupy.cuda.Stream(non_blocking=True)


class Transfers:
    """The KV of each step, from rank 0 to the others."""

    def __init__(self) -> None:
        self.begun = self.taken = 0
        self.sending: list[MPI.Request] = []

    def begin(self) -> None:
        """Rank 0 first waits until all ranks have taken the KV of the step before."""
        MPI.Request.Waitall(self.sending)
        self.begun += 1
        self.values = np.full(COUNT, self.begun, np.float32)
        if comm.rank == 0:
            self.sending = [world.Issend(self.values, rank) for rank in range(1, comm.size)]

    def wait(self) -> None:
        """Returns when this step's KV is in ``kv``."""
        self.taken += 1
        if comm.rank != 0:
            world.Recv(self.values, 0)
        with arrivals:
            kv.set(self.values)
        arrivals.synchronize()

    def finish(self) -> None:
        """Takes what nobody has waited for."""
        while self.taken < self.begun:
            self.wait()
        MPI.Request.Waitall(self.sending)


def after_transfer(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function that uses ``kv``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        transfers.wait()
        function(*args, **kwargs)

    return wrapper


def attention(q: Any, out: Any) -> None:
    out[...] = q * kv


wrong_order = after_transfer(ipcreduce.eager_break(attention))
# @after_transfer
# @ipcreduce.eager_break
# def attention(q, out): ...

right_order = ipcreduce.eager_break(after_transfer(attention))
# @ipcreduce.eager_break
# @after_transfer
# def attention(q, out): ...


def decode(attention: Callable[..., None]) -> tuple[int, str]:
    """Records a step and replays it: how many steps were right, and what the library said, if it did."""
    x, right = cupy.full((COUNT,), 1, np.float32), 0
    with ipcreduce.Graph(comm) as graph:
        try:
            for step in range(1, STEPS + 1):
                transfers.begin()
                if step == 1:
                    with graph.record():
                        q = comm.allreduce(x)
                        out = cupy.empty(COUNT, np.float32)
                        attention(q, out)
                        y = comm.allreduce(out)
                else:
                    graph.replay()
                result = cupy.asnumpy(y)
                comm.synchronize()  # which raises what has gone wrong
                right += bool((result == comm.size**2 * step).all())
                print_once(f"step {step}: {result[0]:g}, {comm.size**2 * step} is due")
        except ipcreduce.IpcReduceError as error:
            transfers.finish()  # so that rank 0 comes along
            return right, f"{type(error).__name__}: {error}"
        transfers.finish()
    return right, ""


def print_once(line: str) -> None:
    if comm.rank == comm.size - 1:
        print(line, flush=True)


transfers = Transfers()
print_once("the wait outside of the break:")
wrong = decode(wrong_order)
print_once(wrong[1])
transfers = Transfers()
print_once("the break outermost:")
fine = decode(right_order)
comm.close()
shown = "PeerTimeoutError" in wrong[1] and "a decorator outside of eager_break" in wrong[1]
sys.exit(0 if world.allreduce(shown and wrong[0] == 1 and fine == (STEPS, ""), MPI.LAND) else 1)
