"""Start-up of a communicator: the ranks meet, share a control page and memory, and choose the backends."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from .coordination import exchange, watchdog
from .coordination.connections import connect
from .coordination.control_page import Page
from .coordination.mirror import Mirror
from .coordination.watchdog import Watch
from .device.devices import raise_wrong
from .device.engine import DeviceEngine
from .errors import ArgumentError, IpcReduceError, PeerTimeoutError, UnsupportedError, report
from .host.segment import Segment
from .host.shared import SharedReducer
from .ipc import startup as ipc_startup
from .ipc.options import Options
from .nccl import startup as nccl_startup

# Duplications of communicators that a rank has given up waiting for. MPI cannot cancel one, so the next start-up over
# the same communicator takes it up again: else the ranks' start-ups would never fit together any more.
_pending: list[tuple[Any, Any, Any]] = []


@dataclass
class Started:
    """The parts of a communicator that start-up has made, the same ones on every rank.

    :ivar page: the control page; None for ranks that share no memory, and then all else is None too.
    :ivar shared: carries host arrays; None: MPI does.
    :ivar reasons: the reason against each of "ipc" (our kernels), "nccl", "shm" (host arrays through shared memory)
        and "page" (the control page) that was tried and is not used.
    """

    page: Page | None = None
    watch: Watch | None = None
    shared: SharedReducer | None = None
    engine: DeviceEngine | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def duplicate(mpi_comm: Any, timeout: float) -> Any:
    """A communicator of our own over the same ranks, so that our messages never meet the program's. Collective.

    :raises PeerTimeoutError: if a rank does not come within ``timeout`` seconds.
    :raises UnsupportedError: if MPI has no more communicators.
    """
    kept = [one for one in _pending if one[0] == mpi_comm]
    _pending[:] = [one for one in _pending if one[0] != mpi_comm]
    mine = request = None
    try:
        mine, request = kept[0][1:] if kept else mpi_comm.Idup()
        exchange.complete(request, mpi_comm, time.monotonic() + timeout, "start-up", advice=_LATE)
    except BaseException as error:
        if isinstance(error, RuntimeError) and not isinstance(error, IpcReduceError):  # an MPI.Exception
            raise UnsupportedError(
                f"MPI can make no further communicator ({' '.join(str(error).split())}). It has some thousand: close "
                "those that are not used any more"
            ) from error
        if request is not None:
            _pending.append((mpi_comm, mine, request))
        raise
    return mine


_LATE = "Look for a rank that has not made its Communicator, then make it again on every rank."


def start(mpi: Any, options: Options) -> Started:
    """Make all that the ranks can use. Collective.

    :param mpi: a communicator of our own.
    :raises ArgumentError: if the ranks' options differ, or are wrong on one.
    :raises PeerTimeoutError: if a rank does not come, or comes after another one has given up.
    """
    deadline = time.monotonic() + options.timeout
    everyone = _meet(mpi, options, deadline)
    started = _see_each_other(mpi, everyone, deadline)
    try:
        _choose_engine(mpi, options, everyone, started, deadline)
    except BaseException:
        if started.watch is not None:
            started.watch.stop()
        raise
    return started


def _see_each_other(mpi: Any, everyone: np.ndarray[Any, Any], deadline: float) -> Started:
    """All but the engine."""
    started = Started()
    hosts = len(set(everyone["host"]))
    try:
        if hosts > 1:
            raise UnsupportedError(f"the ranks are on {hosts} hosts")
        started.page = page = _share(mpi, "the control page", Page.create, Page.open, deadline)
        with exchange.step(mpi, deadline, "joining the control page"):  # before anybody looks for a rank there
            page.join(*watchdog.own_identity())
        with exchange.step(mpi, deadline, "watching the other ranks"):
            started.watch = watchdog.watch(page)
    except UnsupportedError as error:
        if started.watch is not None:
            started.watch.stop()
        return _apart(mpi, str(error), deadline)
    try:
        segment = _share(mpi, "memory for host arrays", Segment.create, Segment.open, deadline)
        started.shared = SharedReducer(segment)
    except UnsupportedError as error:
        started.reasons["shm"] = str(error)
    return started


def _choose_engine(
    mpi: Any, options: Options, everyone: np.ndarray[Any, Any], started: Started, deadline: float
) -> None:
    """Make the first engine that can be, or the one that was asked for.

    :raises UnsupportedError: if that one cannot be.
    """
    reasons, wanted = started.reasons, options.backend
    try:
        _check_gpus(everyone)
        if wanted in (None, "ipc"):
            try:
                if "ipc" in reasons or started.page is None:
                    raise UnsupportedError(reasons["ipc"])
                started.engine = ipc_startup.start(mpi, options, started.page, deadline)
                return
            except UnsupportedError as error:
                reasons["ipc"] = str(error)
                if wanted is not None:
                    raise
        if wanted in (None, "nccl"):
            reason = reasons["ipc"] if wanted is None else "it was asked for"
            if started.page is None:
                raise UnsupportedError(reasons["page"])
            started.engine = nccl_startup.start(mpi, options, started.page, reason, deadline)
            if wanted is None:
                _warn_of_falling_back(mpi.Get_rank(), everyone, reason)
        else:
            reasons["ipc"] = "backend mpi was asked for"
    except UnsupportedError as error:
        if wanted in ("ipc", "nccl"):
            raise UnsupportedError(f"backend {wanted} was asked for, and cannot be: {error}") from error
        reasons["nccl" if "ipc" in reasons else "ipc"] = str(error)


def _warn_of_falling_back(rank: int, everyone: np.ndarray[Any, Any], reason: str) -> None:
    """Warn, on rank 0, that GPUs of one host do not get our kernels. Over several hosts that is as it must be."""
    if rank == 0 and len({*everyone["host"].tolist()}) == 1:
        warnings.warn(f"NCCL is used in place of ipcreduce's kernels: {reason}", RuntimeWarning, stacklevel=5)


def _apart(mpi: Any, reason: str, deadline: float) -> Started:
    """The parts for ranks that share no memory, for this ``reason``. Collective."""
    started = Started(reasons={"ipc": reason, "shm": reason})
    rank, n = mpi.Get_rank(), mpi.Get_size()
    try:
        connections = connect(mpi, _machine(), deadline)
    except UnsupportedError as error:
        started.reasons["page"] = str(error)
        return started
    started.page = Page.alone(rank, n)
    started.page.join(*watchdog.own_identity())
    started.watch = watchdog.watch(started.page, Mirror(started.page, connections))
    return started


def _meet(mpi: Any, options: Options, deadline: float) -> np.ndarray[Any, Any]:
    """Every rank's exchange.IDENTITY; not ok if it has no GPU to use."""
    rank = mpi.Get_rank()
    record = exchange.message(
        exchange.IDENTITY, options.wrong or ipc_startup.missing(), wrong=options.wrong is not None, host=_host(),
        until=deadline, timeout=options.timeout, algorithm=options.algorithm or "", backend=options.backend or "",
        workspace=options.workspace,
    )  # fmt: skip
    everyone = exchange.allgather(mpi, record, deadline, "start-up")
    raise_wrong(rank, everyone)
    gone = np.flatnonzero((everyone["until"] < time.monotonic()) & (everyone["host"] == record[0]["host"]))
    if len(gone):
        raise PeerTimeoutError(report(
            rank, 0, expected="all ranks at start-up at one time",
            found=f"that the time of rank {gone[0]} is up", advice=_LATE,
        ))  # fmt: skip
    for other, identity in enumerate(everyone):
        for name in ("timeout", "algorithm", "backend", "workspace"):
            if identity[name] != record[0][name]:
                raise ArgumentError(
                    f"rank {rank}, start-up: expected the same {name} on every rank; found "
                    f"{_shown(record[0][name])} here and {_shown(identity[name])} on rank {other}. Pass (or set) the "
                    "same everywhere."
                )
    return everyone


def _shown(value: Any) -> str:
    return (value.decode() or "None") if isinstance(value, bytes) else str(value)


def _host() -> str:
    """An identifier of this host: ``IPCREDUCE_HOSTID``, or this machine's."""
    return os.environ.get("IPCREDUCE_HOSTID") or _machine()


def _machine() -> str:
    """An identifier of this machine. Its containers count as one, and share nothing if they share no memory."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _check_gpus(everyone: np.ndarray[Any, Any]) -> None:
    for rank, other in enumerate(everyone):
        if not other["ok"]:
            raise UnsupportedError(f"rank {rank} has no GPU to use: {exchange.text_of(other)}")


class _Shareable(Protocol):
    path: str

    def unlink(self) -> None: ...


_Shared = TypeVar("_Shared", bound=_Shareable)


def _share(
    mpi: Any, name: str, create: Callable[[int, int], _Shared], open_it: Callable[[str, int, int], _Shared],
    deadline: float,
) -> _Shared:  # fmt: skip
    """Shared memory that rank 0 creates and all others open. :raises UnsupportedError: if a rank cannot."""
    rank, n = mpi.Get_rank(), mpi.Get_size()
    mine: _Shared | None = None
    error: Exception | None = None
    try:
        mine = create(rank, n) if rank == 0 else None
    except (OSError, UnsupportedError) as caught:
        error = caught
    try:
        record = exchange.message(exchange.PAGE, error, path=mine.path if mine is not None else "")
        pages = exchange.allgather(mpi, record, deadline, f"creating {name}")
        exchange.check(mpi, pages, f"creating {name}")
        with exchange.step(mpi, deadline, f"opening {name} (is /dev/shm shared between the ranks?)"):
            mine = mine if mine is not None else open_it(bytes(pages[0]["path"]).decode(), rank, n)
    finally:
        if mine is not None and rank == 0:
            mine.unlink()
    assert mine is not None
    return mine
