"""Start-up of a communicator: the ranks meet, share a control page and memory, and choose the backends."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import clock, process
from .cuda.compiler import kernel_directory
from .device.backend import DeviceBackend
from .device.devices import raise_wrong
from .errors import ArgumentError, IpcReduceError, PeerTimeoutError, RankMismatchError, UnsupportedError, report
from .host.segment import Segment
from .host.shared import SharedReducer
from .interrupts import uninterrupted
from .ipc import peers as ipc_startup
from .nccl import join as nccl_startup
from .options import Options
from .originals import Socket
from .page import shared_files, watchdog
from .page.control_page import Page
from .page.mirror import Mirror
from .page.watchdog import Watch
from .ranks import exchange
from .ranks.connections import connect
from .ranks.exchange import Agreed, Ranks
from .texts import encoded, out_of_descriptors, text_in, with_limit

_NO_ROOM = (
    "/dev/shm has no room for one more communicator: its NumPy arrays go by messages of MPI, some 100 times as slow if "
    "they are short, or without MPI not at all. Close those that are not used any more, or make /dev/shm larger "
    "(docker run --shm-size)"
)
_APART = (
    "Let the ranks share /dev/shm (one container, or docker run --ipc=host), or open TCP between them, at ports that "
    "the system chooses"
)
_FOLDER = Path(__file__).resolve().parent
_CLOSE_SECONDS = 5.0  # for the peers to unmap this rank's memory, if start-up fails once the backend is made


@dataclass
class Started:
    """The parts of a communicator that start-up has made, the same ones on every rank.

    :ivar ranks: they have joined. :ivar page: the control page; before start-up has made it, one of this process only.
    :ivar shared: reduces host arrays; None if MPI has to, where there is one.
    :ivar reasons: the reason against each of "ipc" (our kernels), "nccl" and "shm" (host arrays through shared memory)
        that was tried and is not used.
    :ivar warnings: what to warn of, once all is made.
    :ivar opened: the communicator's state that the block has made of these parts, and registered with the process.
    """

    ranks: Ranks
    page: Page
    watch: Watch | None = None
    shared: SharedReducer | None = None
    backend: DeviceBackend | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    opened: process.Closable | None = None

    def close(self) -> None:
        """Give everything back."""
        if self.opened in process.live:
            process.live.remove(self.opened)
        if self.backend is not None:
            with suppress(IpcReduceError):
                self.backend.close(_CLOSE_SECONDS, ())
        else:
            self.page.leave()
        if self.watch is not None:
            self.watch.stop()


@contextmanager
def starting(given: Ranks, options: Options) -> Iterator[Started]:
    """Make all that the ranks can use, for the block to make a communicator of. Collective.

    All ranks hear at once of an exception, here or in the block. Then no rank has a communicator.

    :param given: they have not joined.
    :raises ArgumentError: if the ranks' options differ, or are wrong on one.
    :raises PeerTimeoutError: if a rank does not come, or comes after another one has given up.
    :raises PeerFailedError: if an exception on another rank has ended start-up.
    :raises RankMismatchError: if the ranks have different builds of this package.
    :raises UnsupportedError: if the ranks neither share memory nor reach each other, or the backend cannot be.
    """
    ranks = started = None
    deadline = clock.now() + options.timeout
    try:
        ranks = given.join(options.timeout)
        deadline = clock.now() + options.timeout
        started = Started(ranks, Page.alone(ranks.rank, ranks.size))
        everyone = _meet(ranks, options, deadline)
        _see_each_other(ranks, everyone, started, deadline)
        _choose_backend(ranks, options, everyone, started, deadline)
        yield started
        exchange.confirm(ranks, None, deadline, "the end of start-up")
    except BaseException as error:
        if ranks is None:
            raise
        exchange.tell(ranks, error, deadline)
        if started is not None:
            started.close()
        if ranks.left:  # MPI has some thousand communicators, and frees one if all ranks do
            ranks.close()
        if isinstance(error, OSError):
            raise UnsupportedError(f"rank {ranks.rank}, start-up: {with_limit(error)}") from error
        raise


def _see_each_other(ranks: Ranks, everyone: np.ndarray[Any, Any], started: Started, deadline: float) -> None:
    """Make all parts but the backend."""
    hosts = len(set(everyone["host"]))
    try:
        if hosts > 1:
            raise Agreed(f"the ranks are on {hosts} hosts")
        started.page = page = _share(ranks, "the control page", Page, deadline)
        with exchange.step(ranks, deadline, "joining the control page"):  # before anybody looks for a rank there
            page.join(*watchdog.own_identity())
        with exchange.step(ranks, deadline, "watching the other ranks"):
            started.watch = watchdog.watch(page)
    except Agreed as error:
        _see_over_tcp(ranks, str(error), started, deadline)
        return
    try:
        started.shared = SharedReducer(_share(ranks, "memory for host arrays", Segment, deadline))
    except Agreed as error:
        started.reasons["shm"] = str(error)
        if shared_files.NO_ROOM in str(error):
            started.warnings.append(_NO_ROOM)


def _see_over_tcp(ranks: Ranks, reason: str, started: Started, deadline: float) -> None:
    """Make these parts for ranks that share no memory, for this ``reason``. Collective.

    :raises UnsupportedError: if the ranks cannot connect either.
    """
    if started.watch is not None:
        started.watch.stop()
    started.page, started.watch = Page.alone(ranks.rank, ranks.size), None
    started.reasons |= {"ipc": reason, "shm": reason}
    connections: dict[int, Socket] = {}
    try:
        if ranks.size > 1:
            connections = connect(ranks, _network(), deadline)
        with exchange.step(ranks, deadline, "watching the other ranks"):
            started.page.join(*watchdog.own_identity())
            started.watch = watchdog.watch(started.page, Mirror(started.page, connections))
    except Agreed as error:
        raise UnsupportedError(report(
            ranks.rank, 0, f"the ranks neither share memory ({reason}) nor reach each other over TCP ({error})", _APART
        )) from error  # fmt: skip
    finally:
        if started.watch is None:
            for connection in connections.values():
                connection.close()


def _choose_backend(
    ranks: Ranks, options: Options, everyone: np.ndarray[Any, Any], started: Started, deadline: float
) -> None:
    """Make the first backend that can be, or the one that was asked for.

    :raises UnsupportedError: if that one cannot be.
    """
    reasons, wanted, warn, page = started.reasons, options.backend, started.warnings.append, started.page
    hosts = everyone["host"].tolist()
    local_rank = ranks.local_rank(hosts)

    def tried(name: str, start: Callable[..., DeviceBackend], *given: Any) -> DeviceBackend | None:
        try:
            return start(ranks, options, page, local_rank, *given)
        except Agreed as error:
            reasons[name] = str(error)
            return None

    no_gpu = next((rank for rank, other in enumerate(everyone) if not other["ok"]), None)
    if no_gpu is not None:
        missing = f"rank {no_gpu} has no GPU to use: {text_in(everyone[no_gpu])}"
        reasons[wanted if wanted in ("ipc", "nccl") else "nccl" if "ipc" in reasons else "ipc"] = missing
    elif wanted == "host":
        reasons["ipc"] = "backend host was asked for"
    else:
        if wanted != "nccl" and "ipc" not in reasons:
            started.backend = tried("ipc", ipc_startup.start, deadline, warn)
        if wanted != "ipc" and started.backend is None:
            reason = reasons["ipc"] if wanted is None else "it was asked for"
            started.backend = tried("nccl", nccl_startup.start, reason, deadline)
            if started.backend is not None and wanted is None and len({*hosts}) == 1:  # over several it has to be
                warn(f"NCCL is used in place of ipcreduce's kernels: {reason}")
    if wanted in ("ipc", "nccl") and started.backend is None:
        raise UnsupportedError(
            f"backend {wanted} was asked for, and cannot be: {reasons[wanted]}. To get the best one that works here, "
            "leave backend= and IPCREDUCE_BACKEND away"
        )


def _meet(ranks: Ranks, options: Options, deadline: float) -> np.ndarray[Any, Any]:
    """Every rank's exchange.IDENTITY; not ok if it has no GPU to use."""
    rank = ranks.rank
    record = exchange.message(
        exchange.IDENTITY, options.wrong or ipc_startup.missing(), wrong=options.wrong is not None, build=_build(),
        host=_host(), clock=_clock(), until=clock.on_host(deadline), timeout=options.timeout,
        algorithm=options.algorithm or "", backend=options.backend or "", workspace=options.workspace,
        memory=options.memory,
    )  # fmt: skip
    everyone = exchange.allgather(ranks, record, deadline, "start-up", advice=exchange.LATE)
    _check_same_build(ranks, everyone["build"].tolist())
    raise_wrong(rank, everyone)
    comparable = (everyone["clock"] == record[0]["clock"]) & (everyone["clock"] != b"")
    gone = np.flatnonzero((everyone["until"] < clock.on_host(clock.now())) & comparable)
    if len(gone):
        happened = f"rank {gone[0]} waits no more, as its timeout has passed"
        raise PeerTimeoutError(report(rank, 0, happened, exchange.LATE))
    for other, identity in enumerate(everyone):
        for name in ("timeout", "algorithm", "backend", "workspace", "memory"):
            if identity[name] != record[0][name]:
                mine, theirs = _shown(record[0][name]), _shown(identity[name])
                happened = f"{name} must be the same on every rank, but is {mine} here and {theirs} on rank {other}"
                raise ArgumentError(report(rank, 0, happened, "Pass or set the same value on every rank."))
    return everyone


def _check_same_build(ranks: Ranks, builds: list[bytes]) -> None:
    """:raises RankMismatchError: on every rank, if one has another build: its sums may have other bits."""
    if len({*builds}) == 1:
        return
    ranks.left = True
    places = {build: [rank for rank, other in enumerate(builds) if other == build] for build in builds}
    found = " and ".join(f"{_shown(build)} on ranks {where}" for build, where in places.items())
    raise RankMismatchError(report(
        ranks.rank, 0, f"the ranks do not run the same ipcreduce, but {found}",
        f"Install the same one for every rank. That of this rank is in {_FOLDER}.",
    ))  # fmt: skip


@cache
def _build() -> str:
    """The version of this package, and a digest of its modules and kernels on disk, or of the zip with them."""
    sources = sorted(path for path in _FOLDER.rglob("*.py") if path.parent.name != "kernels")  # a wheel has them there
    sources = sources or [path for path in _FOLDER.parents if path.is_file()]  # a zip
    with suppress(UnsupportedError):  # host arrays need no kernels
        sources += sorted(kernel_directory().glob("*.cu*"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    return f"{sys.modules[__package__].__version__}, code {digest.hexdigest()[:16]}"


def _shown(value: Any) -> str:
    return (value.decode() or "None") if isinstance(value, bytes) else str(value)


def _host() -> str:
    """An identifier of this host: ``IPCREDUCE_HOSTID``, or this machine's."""
    return _digest(os.environ.get("IPCREDUCE_HOSTID") or _machine())


def _network() -> str:
    """An identifier of this process's loopback address: containers may have a network of their own."""
    return _digest(_machine(), _namespace("net"))


def _clock() -> str:
    """An identifier of the clock of ``time.monotonic()``: containers may have their own. "" if it is unknown."""
    boot = _boot()
    return _digest(boot, _namespace("time")) if boot else ""


def _machine() -> str:
    """An identifier of this machine, the same in all containers on it."""
    return _boot() or socket.gethostname()


def _boot() -> str:
    """The kernel's identifier of this run of it; "" if /proc does not tell.

    :raises OSError: if this process can open no file: by another identifier it would be on another host than its peers.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        if out_of_descriptors(error):
            raise
        return ""


def _namespace(kind: str) -> str:
    """An identifier of a namespace of this process; "" where the kernel has none of it, or /proc does not tell."""
    with suppress(OSError):
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    return ""


def _digest(*parts: str) -> str:
    """64 characters that stand for names of any length and script. They serve only to tell the names apart."""
    return hashlib.sha256(b"\0".join(map(encoded, parts))).hexdigest()


_Shared = TypeVar("_Shared", Page, Segment)


def _share(ranks: Ranks, name: str, kind: type[_Shared], deadline: float) -> _Shared:
    """Shared memory that rank 0 creates and all other ranks open. :raises Agreed: if a rank cannot."""
    rank, n = ranks.rank, ranks.size
    mine: _Shared | None = None
    path = ""

    def own() -> dict[str, Any]:
        nonlocal mine, path
        with uninterrupted():
            mine = kind.create(rank, n) if rank == 0 else None
            path = mine.path if mine is not None else ""
        return {"path": path}

    try:
        pages = exchange.share(ranks, exchange.PAGE, own, deadline, f"creating {name}")
        path = bytes(pages[0]["path"]).decode()
        with exchange.step(ranks, deadline, f"opening {name} (is /dev/shm shared between the ranks?)"):
            mine = mine if mine is not None else kind.open(path, rank, n)
    finally:
        shared_files.remove(path)  # by every rank: rank 0 may have been killed
    assert mine is not None
    return mine
