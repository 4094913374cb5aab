"""The ranks of an mpi4py communicator. They exchange data by nonblocking calls on a duplicate of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import numpy as np

from .. import clock
from ..errors import ArgumentError, IpcReduceError, UnsupportedError, first_line, installing
from ..texts import whole
from . import exchange

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# Duplications for which a start-up has stopped waiting: the communicator, its duplicate and the request. MPI cannot
# cancel them, so the next start-up over the same communicator goes on with them. Otherwise its duplications would not
# match those of the other ranks.
_pending: list[tuple[Any, tuple[Any, Any]]] = []


def loaded() -> Any:
    """mpi4py's module MPI if the program has imported it, else None. Importing it would initialise MPI."""
    return sys.modules.get("mpi4py.MPI")


def is_finalised() -> bool:
    """True if the program has finalised MPI, after which MPI allows no call."""
    module = loaded()
    return module is not None and module.Is_finalized()


def check_runs() -> None:
    """Check that MPI still runs. :raises UnsupportedError: if the program has finalised it."""
    if is_finalised():
        raise UnsupportedError("MPI is finalised. Make and use communicators before MPI.Finalize()")


def why_missing() -> str:
    """The reason why mpi4py or its MPI library cannot be loaded; "" if it can: then MPI is initialised."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:  # mpi4py's wheel raises RuntimeError if it finds no MPI library
        return first_line(error)
    return ""


def require() -> Any:
    """The MPI module, initialised. :raises UnsupportedError: if MPI is missing, not initialised or finalised."""
    if reason := why_missing():
        raise UnsupportedError(
            f"MPI cannot be loaded ({reason}): {installing('mpi')}, or install MPICH or Open MPI, or pass "
            "Communicator a torch.distributed process group or another ipcreduce.Group"
        )
    from mpi4py import MPI

    check_runs()
    if not MPI.Is_initialized():
        raise UnsupportedError("MPI is not initialised. Call MPI.Init(), or leave mpi4py.rc.initialize at True")
    return MPI


class Begun(list[Any]):
    """A request of MPI, kept with its buffers until it has ended, as MPI may write to them until then.

    An interrupt right behind a function of MPI would lose the request that this returns. So C calls it, and stores it.
    """

    def __init__(self, mpi: Any, name: str, *given: Any) -> None:
        """Begin ``mpi.name(*given)``."""
        _open[id(self)] = self
        self.extend(map(methodcaller(name, *given), [mpi]))

    def Test(self) -> bool:
        """True once it has ended."""
        has_ended = bool(self[0].Test())
        if has_ended:
            _open.pop(id(self), None)
        return has_ended


_open: dict[int, Begun] = {}  # those that have not ended, by id


class MpiRanks:
    """The ranks of one mpi4py communicator. See :class:`exchange.Ranks`.

    :ivar mpi: the mpi4py communicator; in what :meth:`join` returns, a duplicate of it.
    """

    call = 0
    silence = "some did not come in time"
    left = False

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.rank, self.size = int(mpi.Get_rank()), int(mpi.Get_size())

    @classmethod
    def of(cls, mpi: Any) -> MpiRanks:
        """The ranks of ``mpi``, a communicator of mpi4py.

        :raises ArgumentError: if it is COMM_NULL, or not an intracommunicator.
        :raises UnsupportedError: if MPI is not initialised, or finalised.
        """
        module = require()
        if mpi == module.COMM_NULL:
            raise ArgumentError(
                "group is MPI.COMM_NULL, which Split() and Create() give to ranks that are not in the new group. Make "
                "the Communicator on the ranks of the group only: if comm != MPI.COMM_NULL"
            )
        if not isinstance(mpi, module.Intracomm):
            raise ArgumentError(f"group is mpi4py's {type(mpi).__name__}, which is no Intracomm. Pass its Merge()")
        return cls(mpi)

    def gather(self, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> exchange.Request:
        """Begin to collect every rank's ``sent``. Collective. :raises UnsupportedError: if MPI is finalised."""
        check_runs()
        return Begun(self.mpi, "Iallgather", sent, received)

    def join(self, timeout: float) -> MpiRanks:
        """The same ranks on a duplicate of the communicator. Collective.

        :raises PeerTimeoutError: if a rank does not come within ``timeout`` seconds.
        :raises UnsupportedError: if MPI can make no further communicator.
        """
        try:
            if not (kept := [one for one in _pending if one[0] == self.mpi]):
                # Called by C, and stored at once: after a call of its own an interrupt could lose it.
                _pending.extend(zip([self.mpi], map(methodcaller("Idup"), [self.mpi]), strict=True))
                kept = _pending[-1:]
            mine, request = kept[0][1]
            exchange.complete(request, self, clock.now() + timeout, "start-up", advice=exchange.LATE)
            joined = MpiRanks(mine)
        except RuntimeError as error:
            if isinstance(error, IpcReduceError):
                raise
            _pending[:] = [one for one in _pending if one[0] != self.mpi]
            raise UnsupportedError(
                f"MPI can make no further communicator ({' '.join(str(error).split())}). It has some thousand: close "
                "those that are not used any more"
            ) from error
        del _pending[_pending.index(kept[0])]
        return joined

    def local_rank(self, hosts: Sequence[bytes]) -> int:
        """This process's number on its host, by the launcher's variables; without them its rank in MPI.COMM_WORLD."""
        for variable in _LOCAL_RANKS:
            local = whole(os.environ.get(variable))
            if local is not None:
                return local
        return int(loaded().COMM_WORLD.Get_rank())

    def close(self) -> None:
        """Free the duplicate. Collective. Idempotent."""
        if self.mpi and not is_finalised():  # it is false once it is free
            self.mpi.Free()
