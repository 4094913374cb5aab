"""Start-up: the ranks compare machines, choose a backend, map each other's memory, and try it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..coordination import exchange, watchdog
from ..coordination.control_page import Page
from ..coordination.watchdog import own_identity
from ..cuda import cupy_runtime, driver
from ..errors import ArgumentError, CudaError, IpcReduceError, UnsupportedError
from . import links, plan, tuning
from .deferred_free import attempt
from .devices import advise_spreading, most_on_a_gpu, raise_wrong, share_device
from .engine import Engine
from .options import Options
from .workspace import Workspace

_VERIFY_SECONDS = 10.0
_VERIFY_ROUNDS = 200  # about 1 us each over NVLink
_VERIFY_ROUNDS_SHARED = 2  # each is a time slice where two ranks share a GPU
_NO_DATA, _WHOLE, _SPLIT = 0, 1, 2  # verify.cu


def start(mpi: Any, options: Options) -> tuple[Engine | None, dict[str, str]]:
    """Make the IPC engine if every rank can use it. Collective.

    :param mpi: a communicator of our own.
    :returns: the engine, or None; and by name the reasons against the backends that were not chosen.
    :raises ArgumentError: if the ranks' options differ, or are wrong on one.
    """
    deadline = time.monotonic() + options.timeout
    reasons = {"nccl": "not part of this version"}
    everyone = _meet(mpi, options, deadline)
    reason = _refusal(everyone)
    if not reason:
        try:
            return _build(mpi, options, deadline), reasons
        except UnsupportedError as error:
            reason = str(error)
    return None, {"ipc": reason} | reasons


def _meet(mpi: Any, options: Options, deadline: float) -> np.ndarray[Any, Any]:
    """Every rank's exchange.IDENTITY; not ok if it has no GPU to use.

    :raises ArgumentError: if a rank's options are wrong, or not the same on every rank.
    """
    record = exchange.message(
        exchange.IDENTITY, options.wrong or _missing(), wrong=options.wrong is not None, host=_host(),
        timeout=options.timeout, algorithm=options.algorithm or "", workspace=options.workspace,
    )  # fmt: skip
    everyone = exchange.allgather(mpi, record, deadline, "start-up")
    raise_wrong(mpi.Get_rank(), everyone)
    for rank, other in enumerate(everyone):
        for field in ("timeout", "algorithm", "workspace"):
            if other[field] != record[0][field]:
                raise ArgumentError(
                    f"rank {mpi.Get_rank()}, start-up: expected the same {field} on every rank; found "
                    f"{record[0][field]} here and {other[field]} on rank {rank}. Pass (or set) the same everywhere."
                )
    return everyone


def _missing() -> str | None:
    """The reason for which this rank has no GPU to use; None if it has one."""
    try:
        if not driver.device_count():
            return "no GPU is visible (CUDA_VISIBLE_DEVICES?)"
        cupy_runtime.load()
        return None
    except IpcReduceError as error:
        return str(error)


def _host() -> str:
    """An identifier of this host. Containers of one host count as one, and fail later if they share no memory."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _refusal(everyone: np.ndarray[Any, Any]) -> str:
    """The reason for which these ranks cannot use the IPC engine, or ""."""
    for rank, other in enumerate(everyone):
        if not other["ok"]:
            return f"rank {rank} has no GPU to use: {exchange.text_of(other)}"
    if len(set(everyone["host"])) > 1:
        return f"the ranks are on {len(set(everyone['host']))} hosts"
    if len(everyone) > plan.MAX_RANKS:
        return f"{len(everyone)} ranks; the kernels take up to {plan.MAX_RANKS}"
    return ""


def _build(mpi: Any, options: Options, deadline: float) -> Engine:
    """The steps of start-up, each ended by a vote, so that all ranks go on or all give up."""
    rank, n = mpi.Get_rank(), mpi.Get_size()
    info, devices = share_device(mpi, options.device, deadline)
    advise_spreading(rank, devices)
    page = _share_page(mpi, rank, n, deadline)
    made = _Made()
    try:
        with _step(mpi, deadline, "starting CUDA"):
            made.context = driver.retain_context(info.ordinal)
        with _step(mpi, deadline, "allocating workspaces"):
            made.workspace = Workspace(rank, n, options.workspace if n > 1 else plan.MB)
        assert made.workspace is not None
        _map_peers(mpi, made.workspace, devices, deadline)
        with _step(mpi, deadline, "registering the control page"):
            capability = min((int(major), int(minor)) for major, minor in devices["capability"])
            made.engine = Engine(
                info, made.context, made.workspace, page,
                capability=capability, timeout=options.timeout, algorithm=options.algorithm,
            )  # fmt: skip
        assert made.engine is not None
        _verify(mpi, made.engine, devices, deadline)
        made.engine.launches.table = _share_table(mpi, devices, deadline)
        made.engine.launches.resident = min(plan.EPOCH_SLOTS, 2 * int(devices["multiprocessors"].min()))
        made.engine.launches.sharing = most_on_a_gpu(devices)
        with _step(mpi, deadline, "start-up"):
            made.engine.watch = watchdog.watch(page)
        return made.engine
    except IpcReduceError:
        with suppress(IpcReduceError):
            if made.workspace is not None:
                attempt(made.context, made.workspace.unmap_peers)
            exchange.confirm(mpi, None, deadline, "giving up")  # before anyone frees what another may still map
            if made.engine is not None:
                made.engine.release()
            if made.workspace is not None:
                attempt(made.context, made.workspace.free)
            if made.context:
                driver.release_context(info.ordinal)
        raise


def _share_table(mpi: Any, devices: np.ndarray[Any, Any], deadline: float) -> plan.Table:
    """Rank 0's tuned table, on every rank; empty if it has none, or the GPUs are of several kinds."""
    table: plan.Table = ()
    names = {bytes(device["name"]) for device in devices}
    if mpi.Get_rank() == 0 and len(names) == 1:
        with suppress(UnsupportedError):  # no cache: then there is no table either
            table = tuning.load(names.pop().decode(errors="replace"), mpi.Get_size())
    everyone = exchange.allgather(mpi, tuning.message(table), deadline, "sharing the tuned table")
    with _step(mpi, deadline, "sharing the tuned table"):
        try:
            return tuning.received(everyone[0], mpi.Get_size())
        except (ValueError, IndexError) as error:
            raise UnsupportedError(str(error)) from error


@dataclass
class _Made:
    """The resources that start-up has made so far."""

    context: int = 0
    workspace: Workspace | None = None
    engine: Engine | None = None


@contextmanager
def _step(mpi: Any, deadline: float, what: str) -> Iterator[None]:
    """The block, then a vote: all ranks go on or all give up. :raises UnsupportedError: with every rank's reason."""
    error: Exception | None = None
    try:
        yield
    except (IpcReduceError, OSError) as caught:
        error = caught
    exchange.confirm(mpi, error, deadline, what)


def _share_page(mpi: Any, rank: int, n: int, deadline: float) -> Page:
    page, error = None, None
    try:
        page = Page.create(rank, n) if rank == 0 else None
    except OSError as caught:
        error = caught
    try:
        record = exchange.message(exchange.PAGE, error, path=page.path if page else "")
        pages = exchange.allgather(mpi, record, deadline, "creating the control page")
        exchange.check(mpi, pages, "creating the control page")
        with _step(mpi, deadline, "opening the control page (is /dev/shm shared between the ranks?)"):
            page = page or Page.open(bytes(pages[0]["path"]).decode(), rank, n)
            page.join(*own_identity())
    finally:
        if page is not None and rank == 0:
            page.unlink()
    assert page is not None
    return page


def _map_peers(mpi: Any, workspace: Workspace, devices: np.ndarray[Any, Any], deadline: float) -> None:
    error: IpcReduceError | None = None
    handle = bytes(driver.IPC_HANDLE_BYTES)
    try:
        handle = workspace.export()
    except CudaError as caught:
        error = caught
    record = exchange.message(exchange.MEMORY, error, handle=np.void(handle), nbytes=workspace.nbytes)
    memory = exchange.allgather(mpi, record, deadline, "exporting workspaces")
    exchange.check(mpi, memory, "exporting workspaces")
    with _step(mpi, deadline, "mapping the peers' workspaces"):
        if (memory["nbytes"] != workspace.nbytes).any():
            raise UnsupportedError(f"the workspaces differ in size: {memory['nbytes'].tolist()} bytes")
        links.check_access(workspace.rank, devices)
        workspace.map_peers([entry["handle"].tobytes() for entry in memory])


def _verify(mpi: Any, engine: Engine, devices: np.ndarray[Any, Any], deadline: float) -> None:
    """Send real data between every two ranks through the mappings, and choose the engine's form of packets.

    :raises UnsupportedError: if a pair fails, naming it, or a rank has no kernel.
    """
    with _step(mpi, deadline, "loading the first kernel"):  # or a peer's would wait for our compiler
        kinds = links.seen(devices)
        engine.launches.load_verify()
    rank, n = engine.rank, engine.n
    error, verdict = None, np.zeros(plan.MAX_RANKS, np.uint32)
    seconds = max(0.0, min(_VERIFY_SECONDS, (deadline - time.monotonic()) / 2))  # so that the verdicts still meet
    shared = most_on_a_gpu(devices) > 1
    try:
        verdict = engine.launches.verify(_VERIFY_ROUNDS_SHARED if shared else _VERIFY_ROUNDS, seconds)
        failed = [peer for peer in range(n) if peer != rank and verdict[peer] not in (_WHOLE, _SPLIT)]
        if failed:
            what = "no data" if verdict[failed[0]] == _NO_DATA else "wrong data"
            raise UnsupportedError(
                f"{what} arrived from rank {failed[0]} ({_name(devices, failed[0])}) at rank {rank} "
                f"({_name(devices, rank)}), though the driver reports P2P access"
            )
    except IpcReduceError as caught:
        error = caught
    record = exchange.message(links.VERDICT, error, split=bool((verdict == _SPLIT).any()), links=kinds)
    everyone = exchange.allgather(mpi, record, deadline, "trying the links")
    exchange.check(mpi, everyone, "trying the links")
    engine.launches.whole_packets, engine.packets = links.packets(everyone)
    with _step(mpi, deadline, "emptying the workspaces"):
        engine.workspace.reset()


def _name(devices: np.ndarray[Any, Any], rank: int) -> str:
    name = bytes(devices["name"][rank]).decode(errors="replace")
    return f"{name}, GPU-{devices['uuid'][rank].tobytes().hex()[:8]}"
