"""The launchers of ranks by the environment variables that they set, and whether MPI sees the ranks that they started.

A launcher and an MPI that do not belong together give as many programs of one rank each, whose sums are all wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from . import mpi

_LAUNCHERS = (  # name, and the variables of rank and size; the first that is set counts, since they nest in this order
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # SLURM_NTASKS is also set in a batch script, which is no rank
)
_WORLD_SIZE, _TORCHRUN = "WORLD_SIZE", "TORCHELASTIC_RUN_ID"  # of torchrun


@dataclass(frozen=True)
class Launch:
    """A launcher, as its environment variables tell. ``name`` is "" if none is known to have started this process.

    :ivar variables: the names of those of rank and size.
    """

    name: str = ""
    rank: int = 0
    size: int = 1
    variables: tuple[str, ...] = ()

    @classmethod
    def seen(cls) -> Launch:
        """The launcher of this process."""
        for name, rank, size in _LAUNCHERS:
            texts = os.environ.get(rank, ""), os.environ.get(size, "")
            if all(text.isascii() and text.isdigit() for text in texts):
                return cls(name, int(texts[0]), int(texts[1]), (rank, size))
        return cls()

    def mismatch(self, size: int) -> str:
        """The words for a launcher whose ranks MPI takes for single programs; "" if all is well.

        :param size: of MPI.COMM_WORLD; 0 if there is none.
        """
        if size != 1 or self.size == 1:
            return ""
        return (
            f"the launcher started {self.size} ranks ({self.variables[-1]}={self.size}, of {self.name}), but to MPI "
            f"each of them is rank 0 of 1: launcher and mpi4py do not belong together. mpi4py uses {library()}. Start "
            "the ranks with the mpirun of that library, or install mpi4py for the launcher's: "
            "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        )


def check(world: Any) -> None:
    """Refuse an ``MPI.COMM_WORLD`` of one rank in a process that a launcher has started with others.

    :raises ArgumentError: under torchrun, whose ranks MPI does not know.
    :raises UnsupportedError: if the launcher is of another MPI than mpi4py's.
    """
    size = int(world.Get_size())
    if size == 1 and _TORCHRUN in os.environ and os.environ.get(_WORLD_SIZE, "1") != "1":
        raise ArgumentError(
            f"group must be given under torchrun, of whose {os.environ[_WORLD_SIZE]} processes MPI knows this one "
            "only. Call init_process_group(), then make Communicator(torch.distributed.group.WORLD) and call that"
        )
    launch = Launch.seen()
    if problem := launch.mismatch(size):
        raise UnsupportedError(
            f"{problem}. If this process is meant to be alone, pass Communicator(MPI.COMM_SELF); one that a rank has "
            f"started by itself inherits {' and '.join(launch.variables)}: unset them for it"
        )


def library() -> str:
    """The name and version of the MPI library that mpi4py uses. :raises UnsupportedError: if there is none."""
    first = str(mpi.require().Get_library_version()).splitlines()[0]
    return " ".join(first.replace("\0", "").replace("Version:", "").split()).split(", package")[0]
