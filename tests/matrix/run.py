"""The cells of a backend, one after the other in the same processes."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from argparse import Namespace
from typing import Any

from ipcreduce import Communicator
from tests.matrix import gone, table
from tests.matrix.cell import Cell, Gpu, Host
from tests.matrix.kind import Kind
from tests.matrix.kinds import KINDS
from tests.matrix.ways import WAYS
from tests.shared import bounds, worker
from tests.shared.files_group import Files
from tests.tools import machine


class Column:
    """A backend on this rank, and its communicator, which is made anew behind a cell that is wrong."""

    def __init__(self, backend: str, world: Any, simulated: bool, algorithm: str | None = None) -> None:
        self.backend, self.world, self.host = backend, world, backend in table.HOST
        self.place = Host() if self.host else Gpu(world.rank)
        self.moves, self._algorithm = self.host or simulated, algorithm
        if backend == "host over MPI":
            os.environ["IPCREDUCE_HOSTID"] = f"host {world.rank}"
        elif not self.host:
            machine.pretend_hosts(world.rank, world.size, hosts=1)
        self.comm: Communicator | None = None

    def make(self, **further: Any) -> Communicator:
        """A communicator. Collective."""
        name = "host" if self.host else "nccl" if self.backend == "nccl" else "ipc"
        made = Communicator(self.world, backend=name, **{"algorithm": self._algorithm} | further)
        assert ("shared memory" in made.describe()) == (self.backend != "host over MPI"), made.describe()
        return made

    def cell(self, kind: type[Kind]) -> Cell:
        """The cell of a kind, for every way."""
        self.comm = self.comm or self.make()
        mine = kind(size=self.world.size)
        return Cell(self.backend, mine, self.comm, self.make, self.place, self.world, self.moves)

    def run(self, way: str, kind: type[Kind]) -> bool:
        """Run a cell. Returns whether it is right on every rank."""
        cell, right = self.cell(kind), True
        try:
            WAYS[way](cell)
        except Exception:
            right = False
            traceback.print_exc(file=sys.stdout)
            threading.Thread(target=cell.comm.close, daemon=True).start()  # so that no rank waits for this one
        everywhere = all(self.world.allgather(right))
        if not everywhere:
            cell.comm.close()
            self.comm = None
        return everywhere


def main(options: Namespace) -> None:
    """Run the cells that the command line asks for."""
    bounds.patient()
    if options.among:
        folder, rank, size = options.among
        among = Column(options.backend, Files(folder, int(rank), int(size)), options.sim)
        gone.run([among.cell(kind) for kind in KINDS], among.make)
    else:
        rights: list[bool] = []
        worker.run(lambda: rights.append(run(options)))
        sys.exit(rights != [True])


def run(options: Namespace) -> bool:
    """Run them among MPI's ranks. Returns whether all are right."""
    from tests.shared.world import WORLD

    column, wrong = Column(options.backend, WORLD, options.sim, options.algorithm), 0
    for way, kind in table.cells():
        if not any(words in way for words in options.way) or options.kind not in kind.name:
            continue
        faulthandler.dump_traceback_later(2 * bounds.HANG, exit=True, file=sys.stdout)
        started, found = time.monotonic(), table.why_not(options.backend, way)
        if found:
            found = f"cannot be: {found}"
        elif column.run(way, kind):
            found = f"right, {time.monotonic() - started:.2f} s"
        else:
            found, wrong = "WRONG", wrong + 1
        if WORLD.rank == 0:
            print(f"{table.name(options.backend, way, kind)}: {found}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if column.comm is not None:
        column.comm.close()
    if options.sim:
        from tests.simulated import driver

        gc.collect()
        bounds.until(lambda: not driver.leaks(), lambda: f"the end of {driver.leaks()}")
    return not wrong
