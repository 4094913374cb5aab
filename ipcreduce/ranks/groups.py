"""The groups of which a communicator can be made: mpi4py's, PyTorch's, and any other that can gather bytes."""

from __future__ import annotations

import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from .. import clock
from ..errors import ArgumentError, PeerLostError, UnsupportedError, report
from ..logs import INFO, log
from ..originals import Thread
from ..texts import described, shown, text_of, whole
from . import exchange, launchers, mpi
from .mpi import MpiRanks

_MAX_RANKS = 1 << 16  # start-up gathers 2 KB of each
_LOCAL_RANK = "LOCAL_RANK"  # a variable that torchrun sets
_MEMBER = exchange.struct(exchange.Kind.MEMBER, ("rank", "<u4"), ("size", "<u4"))


class Group(Protocol):
    """Processes that can exchange bytes. A :class:`Communicator` needs this at its start-up, and not later.

    Write one over what has started the processes: pipes or a manager of multiprocessing, Ray, Dask, a TCP store.
    """

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``size`` - 1, a different one in each process."""

    @property
    def size(self) -> int:
        """The number of processes, the same in each."""

    def allgather(self, data: bytes, /) -> list[bytes]:
        """Every process's ``data``, in the order of their ranks. All give the same number of bytes, about 2 KB.

        It is called in another thread, one call at a time, about 20 times for each communicator. It may block: the
        communicator stops waiting after its ``timeout``. An exception means that the group has failed, and becomes
        :class:`PeerLostError`.
        """


def of(group: Any) -> exchange.Ranks:
    """The ranks of ``group``. No other rank is asked.

    :param group: None stands for MPI.COMM_WORLD, or for this process alone if there is neither MPI nor a launcher.
    :raises ArgumentError: if it is not a group, or if its rank is not between 0 and its size.
    :raises UnsupportedError: if it is a group of MPI, and MPI cannot be used or does not know the launcher's ranks.
    """
    by_default = group is None
    if by_default:
        missing = mpi.why_missing()
        alone = missing and launchers.seems_alone() and not _torch_has_ranks()
        group = _alone(missing) if alone else mpi.require().COMM_WORLD
    module: Any = mpi.loaded()
    try:
        is_of_mpi = module is not None and isinstance(group, module.Comm)
        made = None if is_of_mpi else _of_torch(group) or _of_object(group)
    except (Exception, SystemExit) as error:  # the group's library raises errors of its own
        raise ArgumentError(
            f"group is {shown(group)}, which is no group ({described(error)}). Pass an mpi4py intracommunicator, a "
            "torch.distributed process group, or an object with rank, size and allgather(bytes): see ipcreduce.Group"
        ) from error
    if made is None:
        ranks = MpiRanks.of(group)
        if group == module.COMM_WORLD:  # any other communicator of one rank is meant to have one
            launchers.check(group)
            if by_default and ranks.size == 1:
                _warn_of_peers()
        return ranks
    if not 0 <= made.rank < made.size <= _MAX_RANKS:
        raise ArgumentError(
            f"this process has rank {shown(made.rank)} in a group of {shown(made.size)}, and ranks go from 0 to size - "
            f"1, for at most {_MAX_RANKS} processes. Make the communicator in the processes of the group only"
        )
    return made


class _Alone:
    """A :class:`Group` of this process only."""

    rank, size = 0, 1

    def allgather(self, data: bytes) -> list[bytes]:
        return [data]


@cache
def _alone(missing: str) -> _Alone:
    """The group of this process where there is no MPI, for the reason ``missing``. The first call logs it."""
    log(
        INFO,
        "MPI cannot be loaded (%s), and no launcher has started this process: it is a group of one rank, in which an "
        "all-reduce is a copy",
        missing,
    )
    _warn_of_peers()
    return _Alone()


@cache
def _warn_of_peers() -> None:
    """Warn a process of multiprocessing that it is a group of one rank. Its parent may have started others."""
    module: Any = sys.modules.get("multiprocessing.process")
    if getattr(module, "parent_process", lambda: None)() is not None:
        warnings.warn(
            "multiprocessing has started this process, and without a group it is a group of one rank, in which an "
            "all-reduce is a copy. If it has peers, pass Communicator an ipcreduce.Group of them",
            RuntimeWarning,
            stacklevel=4,
        )


def _of_object(group: Any) -> GroupRanks:
    """The ranks of an object with the members of :class:`Group`. :raises Exception: if it has not all of them."""
    if not callable(group.allgather):
        raise TypeError("allgather is no method")
    return GroupRanks(group, group.allgather, operator.index(group.rank), operator.index(group.size))


def _torch_has_ranks() -> bool:
    """True if the program has made a group of several processes in PyTorch, even if no launcher has started them."""
    distributed: Any = sys.modules.get("torch.distributed")
    started = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return started and distributed.get_world_size() > 1


def _of_torch(group: Any) -> GroupRanks | None:
    """The ranks of a process group of PyTorch; None for any other object.

    :raises Exception: if PyTorch does not know the group any more.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "ProcessGroup", None)  # some builds of PyTorch have none
    if kind is None or not isinstance(group, kind):
        return None
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    cuda = sys.modules["torch"].cuda
    # Groups over NCCL take data from the current GPU, and each thread has its own current GPU.
    on_device = partial(cuda.device, cuda.current_device()) if cuda.is_initialized() else nullcontext

    def allgather(data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * size
        with on_device():
            distributed.all_gather_object(gathered, data, group=group)
        return gathered

    return GroupRanks(group, allgather, rank, size)


class GroupRanks:
    """The ranks of a group that only has a blocking ``allgather``. See :class:`exchange.Ranks`."""

    call = 0
    silence = "the group's allgather has not answered in time"
    left = False

    def __init__(self, group: Any, allgather: Callable[[bytes], Any], rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group, self._allgather = group, allgather

    def gather(self, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> exchange.Request:
        """Begin to collect every rank's ``sent`` in ``received``, in another thread. Collective."""
        data, call = sent.tobytes(), _open.get(id(self._group))
        if call is None or call.data != data:
            call = _open[id(self._group)] = _Call(self._group, self._allgather, data, call)
        return _Gathering(self, call, received)

    def join(self, timeout: float) -> GroupRanks:
        """Wait for all ranks. :raises ArgumentError: if the group does not order the data by rank."""
        record = exchange.message(_MEMBER, rank=self.rank, size=self.size)
        until = clock.now() + timeout
        everyone = exchange.allgather(self, record, until, "start-up", advice=exchange.LATE)
        for place, other in enumerate(everyone):
            if (other["rank"], other["size"]) != (place, self.size):
                raise ArgumentError(
                    f"the group's allgather has put the bytes of rank {other['rank']} of {other['size']} at place "
                    f"{place}, where those of rank {place} of {self.size} belong. Give each process a rank of its own, "
                    "and sort by it"
                )
        return self

    def local_rank(self, hosts: Sequence[bytes]) -> int:
        """This process's number on its host: torchrun's, or else the number of lower ranks on this host.

        :param hosts: an identifier of each rank's host.
        """
        local = whole(os.environ.get(_LOCAL_RANK))
        return list(hosts[: self.rank]).count(hosts[self.rank]) if local is None else local

    def close(self) -> None:
        """Do nothing, because the group belongs to the program."""


class _Call:
    """One call of a group's ``allgather``, in a thread of its own, after the call before it has ended."""

    def __init__(self, group: Any, allgather: Callable[[bytes], Any], data: bytes, before: _Call | None) -> None:
        self.group, self.data = group, data
        self.found: Any = None
        self.error: BaseException | None = None
        run = partial(self._run, allgather, before)
        self.thread = Thread(run, "ipcreduce-allgather")
        try:
            self.thread.start()
        except OSError as error:
            if before is not None and before.thread.is_alive:
                raise UnsupportedError(text_of(error)) from error
            run()  # so that the other ranks hear of what else this process cannot do

    def _run(self, allgather: Callable[[bytes], Any], before: _Call | None) -> None:
        try:
            if before is not None:
                before.thread.join(math.inf)
            found = allgather(self.data)
            if isinstance(found, (list, tuple)):  # perhaps of a subclass, whose methods may raise, as bytes' may
                found = [bytes(one) if isinstance(one, bytes) else one for one in found]
            self.found = found
        except BaseException as error:  # SystemExit too: it would end this thread only
            self.error = error


# Calls whose answer nothing has used yet, by the id of their group, which they keep alive. A start-up that stops
# waiting leaves its call here. The next start-up over the group uses that call if it would send the same data, or else
# lets it end before its own call. So the calls of all ranks still match.
_open: dict[int, _Call] = {}


class _Gathering:
    """A call under way: see :class:`exchange.Request`."""

    def __init__(self, ranks: GroupRanks, call: _Call, received: np.ndarray[Any, Any]) -> None:
        self._ranks, self._call, self._received = ranks, call, received

    def Test(self) -> bool:
        """True once the data of all ranks are there.

        :raises PeerLostError: if the group has failed. :raises ArgumentError: if it has returned anything else.
        """
        call = self._call
        if call.thread.is_alive:
            return False
        _open.pop(id(call.group), None)
        if call.error is not None:
            raise PeerLostError(report(
                self._ranks.rank, 0, f"the group's allgather raised {described(call.error)}",
                "Look for a rank that has ended, then make the group and the Communicator anew on every rank.",
            )) from call.error  # fmt: skip
        found, size, length = call.found, self._ranks.size, len(call.data)
        problem = "" if isinstance(found, (list, tuple)) else type(found).__name__
        if not problem and len(found) != size:
            problem = f"{len(found)} items"
        for rank, data in enumerate([] if problem else found):
            if not isinstance(data, bytes) or len(data) != length:
                problem = problem or f"{_described(data)} of rank {rank}"
        if problem:
            raise ArgumentError(
                f"the group's allgather has returned {problem}, though each of {size} ranks gave {length} bytes. "
                f"Return a list of {size} bytes objects of that length: see ipcreduce.Group"
            )
        self._received.reshape(-1)[:] = np.frombuffer(b"".join(found), np.uint8)
        return True


def _described(data: Any) -> str:
    return f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
