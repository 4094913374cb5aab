# mpirun -n 2 python mpi_examples/decorator_order.py
"""Decorator order: ``@ipcreduce.eager_break`` must be outermost. Shows the wrong order's failure and the right order.

Attention needs keys and values (KV) that rank 0 sends to the others at each step, as a prefill server does. A
decorator waits on the host until they have arrived. Outside of the break, it is not part of the break and waits only
once, at the recording. Replays then use old KV. Rank 0 waits until each step's KV has been received, so it falls
behind, and the other ranks' all-reduce ends in a ``PeerTimeoutError``. Without GPUs nothing is recorded, every step
calls the function, and both orders work. Needs two ranks.
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
TIMEOUT = 2.0  # seconds, for a quick demonstration; the default is 120

world = MPI.COMM_WORLD
comm = ipcreduce.Communicator(device="auto", timeout=TIMEOUT)  # takes a GPU for each rank, if there are any
if comm.size == 1:
    print("this example needs two ranks: nothing to show here")
    comm.close()
    sys.exit(0)
on_gpus = comm.backend != "host"
xp = comm.xp
if not on_gpus and comm.rank == 0:
    print("no GPUs here: every step calls the function; with GPUs steps 2 to 4 are replays, and the wrong order fails")

kv = xp.empty(COUNT, np.float32)  # not zeros: the fill would not be ordered with copies on another stream
arrivals = xp.cuda.Stream(non_blocking=True) if on_gpus else None


class Transfers:
    """Transfers of each step's KV from rank 0 to the others."""

    def __init__(self) -> None:
        self.begun = self.taken = 0
        self.sending: list[MPI.Request] = []

    def begin(self) -> None:
        """Begin a step's transfer. Rank 0 first waits until all ranks have received the previous step's KV."""
        MPI.Request.Waitall(self.sending)
        self.begun += 1
        self.values = np.full(COUNT, self.begun, np.float32)
        if comm.rank == 0:
            self.sending = [world.Issend(self.values, rank) for rank in range(1, comm.size)]

    def wait(self) -> None:
        """Wait until this step's KV is in ``kv``."""
        self.taken += 1
        if comm.rank != 0:
            world.Recv(self.values, 0)
        if arrivals is None:
            kv[...] = self.values
        else:
            with arrivals:
                kv.set(self.values)
            arrivals.synchronize()

    def finish(self) -> None:
        """Receive the transfers that nobody has waited for."""
        while self.taken < self.begun:
            self.wait()
        MPI.Request.Waitall(self.sending)


def after_transfer(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function that uses ``kv``, so that it waits for the transfer."""

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
    """Record a step and replay it. Return the number of right steps, and the library's error message or ""."""
    x, right = xp.full((COUNT,), 1, np.float32), 0

    def function() -> Any:
        q = comm.allreduce(x)
        out = xp.empty(COUNT, np.float32)
        attention(q, out)
        return comm.allreduce(out)

    with ipcreduce.Graph(comm) as graph:
        try:
            for step in range(1, STEPS + 1):
                transfers.begin()
                if not on_gpus:
                    y = function()
                elif step == 1:
                    with graph.record():
                        y = function()
                else:
                    graph.replay()
                result = xp.asnumpy(y) if on_gpus else y
                comm.synchronize()  # raises if the replay failed
                right += bool((result == comm.size**2 * step).all())
                print_once(f"step {step}: {result[0]:g}, {comm.size**2 * step} is due")
        except ipcreduce.IpcReduceError as error:
            transfers.finish()  # releases rank 0 from its wait
            return right, f"{type(error).__name__}: {error}"
        transfers.finish()
    return right, ""


def print_once(line: str) -> None:
    if comm.rank == comm.size - 1:
        print(line, flush=True)


transfers = Transfers()
print_once("the wait outside of the break:")
wrong = decode(wrong_order)
print_once(wrong[1] or "every step is right")
transfers = Transfers()
print_once("the break outermost:")
fine = decode(right_order)
comm.close()
shown = wrong == (STEPS, "")
if on_gpus:
    shown = wrong[0] == 1 and "PeerTimeoutError" in wrong[1] and "a decorator outside of eager_break" in wrong[1]
sys.exit(0 if world.allreduce(shown and fine == (STEPS, ""), MPI.LAND) else 1)
