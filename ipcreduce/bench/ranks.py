"""The ranks of a command: the launcher that started them, the MPI that they see, and their common end."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from ..coordination import mpi
from ..errors import UnsupportedError
from . import output

_LAUNCHERS = (  # name, and the variables of rank and size; the first that is set counts, since they nest in this order
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # SLURM_NTASKS is also set in a batch script, which is no rank
)
_MEETING_SECONDS = 5.0  # how long a rank that ends waits for the others to end too
_UNREAD_SECONDS = 0.3  # a launcher may drop what it has not yet read when a rank fails


@dataclass(frozen=True)
class Launch:
    """A launcher, as its environment variables tell. ``name`` is "" if none is known to have started this process."""

    name: str = ""
    rank: int = 0
    size: int = 1
    variable: str = ""

    @classmethod
    def seen(cls) -> Launch:
        """The launcher of this process."""
        for name, rank, size in _LAUNCHERS:
            texts = os.environ.get(rank, ""), os.environ.get(size, "")
            if all(text.isascii() and text.isdigit() for text in texts):
                return cls(name, int(texts[0]), int(texts[1]), size)
        return cls()


class Ranks:
    """The ranks of this run. ``rank`` is MPI's where MPI has several, or else the launcher's."""

    def __init__(self) -> None:
        self.launch = Launch.seen()
        self.rank, self.size = self.launch.rank, 0  # of MPI, after join()
        self._ends: Any = None  # a communicator for nothing but the end

    def join(self) -> None:
        """Initialise MPI. Collective. :raises UnsupportedError: if there is none."""
        if self._ends is None:
            self._ends = mpi.require().COMM_WORLD.Dup()
            self.size = int(self._ends.Get_size())
            if self.size > 1:
                self.rank = int(self._ends.Get_rank())

    def mismatch(self) -> str:
        """The advice for a launcher whose ranks MPI takes for single programs; "" if all is well. After join()."""
        launch = self.launch
        if self.size != 1 or launch.size == 1:
            return ""
        return (
            f"the launcher started {launch.size} ranks ({launch.variable}={launch.size}, of {launch.name}), but to MPI "
            f"each of them is rank 0 of 1: launcher and mpi4py do not belong together. mpi4py uses {library()}. Start "
            "the ranks with the mpirun of that library, or install mpi4py for the launcher's: "
            "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        )

    def tell(self, text: str) -> None:
        """Print ``text`` on rank 0. Collective. :raises IpcReduceError: on every rank, if it cannot be written."""
        output.on_rank_0(lambda: print(text), self._ends if self.size > 1 else None)

    def end(self, text: str, status: int) -> NoReturn:
        """Exit with ``status`` on every rank, once rank 0 has printed ``text``: to stderr if ``status`` is not 0.

        A rank that ends alone prints its own text after 5 s, and ends the others.
        """
        problem = output.put(text, sys.stderr if status else sys.stdout) if self.rank == 0 else ""
        if status and max(self.size, self.launch.size) > 1:
            self._meet(text, status)
        if problem and not status:  # only of help and version: no rank has joined the others, so none is told
            output.put(f"ipcreduce: {problem}", sys.stderr)
            status = 1
        sys.exit(status)

    def _meet(self, text: str, status: int) -> None:
        try:
            self.join()
        except UnsupportedError:  # then the pause below has to do
            pass
        else:
            request, deadline = self._ends.Ibarrier(), time.monotonic() + _MEETING_SECONDS
            while not request.Test():
                if time.monotonic() > deadline:
                    self.abort("" if self.rank == 0 else text, status)
                time.sleep(1e-3)
        if self.rank:
            time.sleep(_UNREAD_SECONDS)  # a launcher may end rank 0 when this one has failed

    def abort(self, text: str, status: int = 1) -> NoReturn:
        """Print ``text`` to stderr and end every rank. After join()."""
        if text:
            output.put(text, sys.stderr)
        if self.size > 1:
            time.sleep(_UNREAD_SECONDS)
            self._ends.Abort(status)
        sys.exit(status)


def library() -> str:
    """The name and version of the MPI library that mpi4py uses. :raises UnsupportedError: if there is none."""
    first = str(mpi.require().Get_library_version()).splitlines()[0]
    return " ".join(first.replace("\0", "").replace("Version:", "").split()).split(", package")[0]
