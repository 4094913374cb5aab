"""A rank that is killed, in plain processes beside the ranks under mpirun, which would all end with it.

Each rank starts one process. The processes make a communicator for each kind, and all calls wait when one is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from ipcreduce import Communicator, PeerLostError
from tests.matrix.cell import Call, Cell, error_of
from tests.shared import bounds, worker
from tests.tools import machine

_OF_LAUNCHERS = "PMI_", "PMIX_", "OMPI_"  # variables that make a process a rank


def check(cell: Cell) -> None:
    """Check that the survivors have heard in the calls of this kind. Collective."""
    if cell.backend not in _printed:  # one run for all kinds
        _printed[cell.backend] = _run(cell.backend, cell.world, cell.moves)
    output = _printed[cell.backend]
    assert f"{cell.kind.name}: right\n" in output or cell.rank == cell.last, output


_printed: dict[str, str] = {}


def _run(backend: str, world: Any, simulated: bool) -> str:
    """What this rank's process prints."""
    with tempfile.TemporaryDirectory() as own:
        folder = world.bcast(own)
        command = [sys.executable, "-m", "tests.matrix", backend, "--among", folder, str(world.rank), str(world.size)]
        environ = {
            name: value for name, value in machine.ranks_environment().items() if not name.startswith(_OF_LAUNCHERS)
        }
        environ["SIM_DEVICES"] = str(world.size)
        done = subprocess.run(
            command + ["--sim"] * simulated, cwd=machine.ROOT, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        world.Barrier()
        return done.stdout


def run(cells: list[Cell], make: Callable[[], Communicator]) -> None:
    """In such a process: all calls at once, in threads of their own. The last rank is killed meanwhile."""
    calls = [(cell, cell.call("own"), make()) for cell in cells]
    rank, last = cells[0].rank, cells[0].last

    def hear(cell: Cell, call: Call, comm: Communicator) -> None:
        with cell.place.current(), worker.shown():
            error = error_of(comm, lambda: call.start(comm))
            cell.expect(PeerLostError, error, f"rank {last} is gone: its process has ended")
        sys.stdout.write(f"{cell.kind.name}: right\n")  # at once, beside those of other threads

    for _, call, comm in calls:
        for turn in range(3):
            call.make(comm, turn)
        call.fill(3)
    if rank == last:
        bounds.late(0.3)  # the others are in their calls by now
        os.kill(os.getpid(), signal.SIGKILL)
    threads = [threading.Thread(target=hear, args=one) for one in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in (cells[0].comm, *(comm for _, _, comm in calls)):
        comm.close()
