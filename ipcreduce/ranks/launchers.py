"""The launcher that has started this process, known by its environment variables, and whether MPI sees its ranks.

If the launcher belongs to another MPI library, each process is rank 0 of 1, and all sums are wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from ..texts import whole
from . import mpi

_LAUNCHERS = (  # name, variable of the rank, variable of the size. Launchers nest in this order: the first one counts
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # SLURM_NTASKS is also set in a batch script, which is no rank
)
_WORLD_SIZE, _TORCHRUN = "WORLD_SIZE", "TORCHELASTIC_RUN_ID"  # variables that torchrun sets
_OTHERS = (_TORCHRUN, "PMIX_RANK", "PALS_RANKID")  # set by launchers, of which the last two may tell no size


@dataclass(frozen=True)
class Launch:
    """A launcher and the rank that it has given this process. ``name`` is "" if no known launcher has started it.

    :ivar variables: the names of the environment variables that hold rank and size.
    """

    name: str = ""
    rank: int = 0
    size: int = 1
    variables: tuple[str, ...] = ()

    @classmethod
    def seen(cls) -> Launch:
        """The launcher of this process."""
        for name, rank, size in _LAUNCHERS:
            own, ranks = whole(os.environ.get(rank)), whole(os.environ.get(size))
            if own is not None and ranks is not None:
                return cls(name, own, ranks, (rank, size))
        return cls()

    def mismatch(self, size: int) -> str:
        """The error message if MPI takes the launcher's ranks for single programs; else "".

        :param size: the size of MPI.COMM_WORLD; 0 if there is no MPI.
        """
        if size != 1 or self.size == 1:
            return ""
        return (
            f"the launcher started {self.size} ranks ({self.variables[-1]}={self.size}, of {self.name}), but to MPI "
            "each of them is rank 0 of 1, because launcher and mpi4py use different MPI libraries. mpi4py uses "
            f"{library()}. Start the ranks with the mpirun of that library, or install mpi4py for the launcher's: "
            "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        )


def seems_alone() -> bool:
    """True if nothing in the environment tells of a launcher, which may have started other ranks."""
    if Launch.seen().name or any(name in os.environ for name in _OTHERS):
        return False
    return os.environ.get(_WORLD_SIZE, "1") == "1"


def check(world: Any) -> None:
    """Check that ``MPI.COMM_WORLD`` has more than one rank if a launcher has started several.

    :raises ArgumentError: under torchrun, whose ranks MPI does not know.
    :raises UnsupportedError: if the launcher is of another MPI than mpi4py's.
    """
    size = int(world.Get_size())
    if size == 1 and _TORCHRUN in os.environ and os.environ.get(_WORLD_SIZE, "1") != "1":
        raise ArgumentError(
            f"torchrun has started {os.environ[_WORLD_SIZE]} processes, but MPI knows this one only, and without a "
            "group ipcreduce uses MPI. Call init_process_group(), make Communicator(torch.distributed.group.WORLD), "
            "and call its allreduce()"
        )
    launch = Launch.seen()
    if problem := launch.mismatch(size):
        raise UnsupportedError(
            f"{problem}. If this process is meant to be alone, make Communicator(MPI.COMM_SELF). A process that a rank "
            f"has started inherits {' and '.join(launch.variables)}: unset them for it"
        )


def library() -> str:
    """The name and version of the MPI library that mpi4py uses. :raises UnsupportedError: if there is none."""
    first = str(mpi.require().Get_library_version()).splitlines()[0]
    return " ".join(first.replace("\0", "").replace("Version:", "").split()).split(", package")[0]
