"""Start-up of a communicator: the ranks meet, share a control page and memory, and choose the backends."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from . import clock
from .coordination import exchange, watchdog
from .coordination.connections import connect
from .coordination.control_page import Page
from .coordination.exchange import Ranks
from .coordination.mirror import Mirror
from .coordination.watchdog import Watch
from .device.devices import raise_wrong
from .device.engine import DeviceEngine
from .errors import ArgumentError, PeerTimeoutError, UnsupportedError, report
from .host.segment import Segment
from .host.shared import SharedReducer
from .ipc import startup as ipc_startup
from .ipc.options import Options
from .nccl import startup as nccl_startup


@dataclass
class Started:
    """The parts of a communicator that start-up has made, the same ones on every rank.

    :ivar page: the control page; None for ranks that share no memory, and then all else is None too.
    :ivar shared: carries host arrays; None: MPI does, if there is one.
    :ivar reasons: the reason against each of "ipc" (our kernels), "nccl", "shm" (host arrays through shared memory)
        and "page" (the control page) that was tried and is not used.
    """

    page: Page | None = None
    watch: Watch | None = None
    shared: SharedReducer | None = None
    engine: DeviceEngine | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def start(ranks: Ranks, options: Options) -> Started:
    """Make all that the ranks can use. Collective.

    :param ranks: they have joined.
    :raises ArgumentError: if the ranks' options differ, or are wrong on one.
    :raises PeerTimeoutError: if a rank does not come, or comes after another one has given up.
    """
    deadline = clock.now() + options.timeout
    everyone = _meet(ranks, options, deadline)
    started = _see_each_other(ranks, everyone, deadline)
    try:
        _choose_engine(ranks, options, everyone, started, deadline)
    except BaseException:
        if started.watch is not None:
            started.watch.stop()
        raise
    return started


def _see_each_other(ranks: Ranks, everyone: np.ndarray[Any, Any], deadline: float) -> Started:
    """All but the engine."""
    started = Started()
    hosts = len(set(everyone["host"]))
    try:
        if hosts > 1:
            raise UnsupportedError(f"the ranks are on {hosts} hosts")
        started.page = page = _share(ranks, "the control page", Page.create, Page.open, deadline)
        with exchange.step(ranks, deadline, "joining the control page"):  # before anybody looks for a rank there
            page.join(*watchdog.own_identity())
        with exchange.step(ranks, deadline, "watching the other ranks"):
            started.watch = watchdog.watch(page)
    except UnsupportedError as error:
        if started.watch is not None:
            started.watch.stop()
        return _apart(ranks, str(error), deadline)
    try:
        segment = _share(ranks, "memory for host arrays", Segment.create, Segment.open, deadline)
        started.shared = SharedReducer(segment)
    except UnsupportedError as error:
        started.reasons["shm"] = str(error)
    return started


def _choose_engine(
    ranks: Ranks, options: Options, everyone: np.ndarray[Any, Any], started: Started, deadline: float
) -> None:
    """Make the first engine that can be, or the one that was asked for.

    :raises UnsupportedError: if that one cannot be.
    """
    reasons, wanted = started.reasons, options.backend
    local_rank = ranks.local_rank(everyone["host"].tolist())
    try:
        _check_gpus(everyone)
        if wanted in (None, "ipc"):
            try:
                if "ipc" in reasons or started.page is None:
                    raise UnsupportedError(reasons["ipc"])
                started.engine = ipc_startup.start(ranks, options, started.page, local_rank, deadline)
                return
            except UnsupportedError as error:
                reasons["ipc"] = str(error)
                if wanted is not None:
                    raise
        if wanted in (None, "nccl"):
            reason = reasons["ipc"] if wanted is None else "it was asked for"
            if started.page is None:
                raise UnsupportedError(reasons["page"])
            started.engine = nccl_startup.start(ranks, options, started.page, local_rank, reason, deadline)
            if wanted is None:
                _warn_of_falling_back(ranks.rank, everyone, reason)
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


def _apart(ranks: Ranks, reason: str, deadline: float) -> Started:
    """The parts for ranks that share no memory, for this ``reason``. Collective."""
    started = Started(reasons={"ipc": reason, "shm": reason})
    rank, n = ranks.rank, ranks.size
    try:
        connections = connect(ranks, _network(), deadline)
    except UnsupportedError as error:
        started.reasons["page"] = str(error)
        return started
    page = Page.alone(rank, n)
    page.join(*watchdog.own_identity())
    try:
        with exchange.step(ranks, deadline, "watching the other ranks"):
            started.watch = watchdog.watch(page, Mirror(page, connections))
    except UnsupportedError as error:
        if started.watch is not None:
            started.watch.stop()
        for connection in connections.values():
            connection.close()
        return Started(reasons={**started.reasons, "page": str(error)})
    started.page = page
    return started


def _meet(ranks: Ranks, options: Options, deadline: float) -> np.ndarray[Any, Any]:
    """Every rank's exchange.IDENTITY; not ok if it has no GPU to use."""
    rank = ranks.rank
    record = exchange.message(
        exchange.IDENTITY, options.wrong or ipc_startup.missing(), wrong=options.wrong is not None, host=_host(),
        until=clock.on_host(deadline), timeout=options.timeout, algorithm=options.algorithm or "",
        backend=options.backend or "", workspace=options.workspace,
    )  # fmt: skip
    everyone = exchange.allgather(ranks, record, deadline, "start-up", advice=exchange.LATE)
    raise_wrong(rank, everyone)
    gone = np.flatnonzero((everyone["until"] < clock.on_host(clock.now())) & (everyone["host"] == record[0]["host"]))
    if len(gone):
        raise PeerTimeoutError(report(
            rank, 0, expected="all ranks at start-up at one time",
            found=f"that the time of rank {gone[0]} is up", advice=exchange.LATE,
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


def _network() -> str:
    """An identifier of this machine's loopback address: containers may have a network of their own."""
    with suppress(OSError):
        return f"{_machine()} {os.stat('/proc/self/ns/net').st_ino}"
    return _machine()


def _check_gpus(everyone: np.ndarray[Any, Any]) -> None:
    for rank, other in enumerate(everyone):
        if not other["ok"]:
            raise UnsupportedError(f"rank {rank} has no GPU to use: {exchange.text_of(other)}")


class _Shareable(Protocol):
    path: str

    def unlink(self) -> None: ...


_Shared = TypeVar("_Shared", bound=_Shareable)


def _share(
    ranks: Ranks, name: str, create: Callable[[int, int], _Shared], open_it: Callable[[str, int, int], _Shared],
    deadline: float,
) -> _Shared:  # fmt: skip
    """Shared memory that rank 0 creates and all others open. :raises UnsupportedError: if a rank cannot."""
    rank, n = ranks.rank, ranks.size
    mine: _Shared | None = None
    error: Exception | None = None
    try:
        mine = create(rank, n) if rank == 0 else None
    except (OSError, UnsupportedError) as caught:
        error = caught
    try:
        record = exchange.message(exchange.PAGE, error, path=mine.path if mine is not None else "")
        pages = exchange.allgather(ranks, record, deadline, f"creating {name}")
        exchange.check(ranks, pages, f"creating {name}")
        with exchange.step(ranks, deadline, f"opening {name} (is /dev/shm shared between the ranks?)"):
            mine = mine if mine is not None else open_it(bytes(pages[0]["path"]).decode(), rank, n)
    finally:
        if mine is not None and rank == 0:
            mine.unlink()
    assert mine is not None
    return mine
