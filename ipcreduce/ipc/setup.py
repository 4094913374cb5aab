"""Start-up: what every rank has, which backend follows, and the ranks' memory mapped and tried."""

from __future__ import annotations

import os
import socket
import time
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from .. import arrays
from ..cuda import driver
from ..errors import ArgumentError, CudaError, IpcReduceError, UnsupportedError
from . import plan, wire
from .control import Page, own_identity
from .engine import Engine
from .options import Options
from .watchdog import Watchdog
from .workspace import Workspace

_VERIFY_SECONDS = 10.0
_VERIFY_ROUNDS = 200  # about 1 us each over NVLink
_VERIFY_ROUNDS_SHARED = 2  # each is a time slice where two ranks share a GPU
_NOTHING, _WHOLE, _HALVES = 0, 1, 2  # verify.cu
_MIN_CAPABILITY = (8, 0)


def start(mpi: Any, options: Options) -> tuple[Engine | None, dict[str, str]]:
    """Makes the IPC engine if every rank can use it. Collective.

    :param mpi: a communicator of our own.
    :returns: the engine, or None, and why each backend that was not chosen was not, by its name.
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
    """Every rank's wire.IDENTITY; not ok if it has no GPU to use.

    :raises ArgumentError: if a rank's options are wrong, or not the same on every rank.
    """
    record = wire.message(
        wire.IDENTITY, options.wrong or _missing(), wrong=options.wrong is not None, host=_host(), pid=os.getpid(),
        timeout=options.timeout, algorithm=options.algorithm or "", workspace=options.workspace,
    )  # fmt: skip
    everyone = wire.allgather(mpi, record, deadline, "start-up")
    _raise_wrong(mpi.Get_rank(), everyone)
    for rank, other in enumerate(everyone):
        for field in ("timeout", "algorithm", "workspace"):
            if other[field] != record[0][field]:
                raise ArgumentError(
                    f"rank {mpi.Get_rank()}, start-up: expected the same {field} on every rank; found "
                    f"{record[0][field]} here and {other[field]} on rank {rank}. Pass (or set) the same everywhere."
                )
    return everyone


def _raise_wrong(own: int, everyone: np.ndarray[Any, Any]) -> None:
    """:raises ArgumentError: with this rank's own mistake, or else with the first that made one."""
    wrong = np.flatnonzero(everyone["wrong"])
    if len(wrong):
        rank = own if own in wrong else int(wrong[0])
        where = "" if rank == own else f"rank {rank}'s "
        raise ArgumentError(f"rank {own}, start-up: {where}{wire.text_of(everyone[rank])}")


def _missing() -> str | None:
    """Why this rank has no GPU to use, if it has none."""
    try:
        if not driver.device_count():
            return "no GPU is visible (CUDA_VISIBLE_DEVICES?)"
        arrays.available()
        return None
    except IpcReduceError as error:
        return str(error)


def _host() -> str:
    """Tells hosts apart; containers of one host count as one, and fail later if they share no memory."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _refusal(everyone: np.ndarray[Any, Any]) -> str:
    """Why these ranks cannot use the IPC engine, or ""."""
    for rank, other in enumerate(everyone):
        if not other["ok"]:
            return f"rank {rank} has no GPU to use: {wire.text_of(other)}"
    if len(set(everyone["host"])) > 1:
        return f"the ranks are on {len(set(everyone['host']))} hosts"
    if len(everyone) > plan.MAX_RANKS:
        return f"{len(everyone)} ranks; the kernels take up to {plan.MAX_RANKS}"
    return ""


def choose_device(device: Any, rank: int) -> int:
    """The ordinal that ``device`` means here. :raises ArgumentError: if it means none."""
    count = driver.device_count()
    if device is None:
        return arrays.current_device()
    if device == "auto":
        return rank % count  # all ranks are on one host
    ordinal = getattr(device, "id", device)
    if isinstance(ordinal, bool) or not isinstance(ordinal, (int, np.integer)) or not 0 <= ordinal < count:
        raise ArgumentError(
            f"device must be None, 'auto' or the ordinal of one of the {count} visible GPUs; found {device!r}"
        )
    return int(ordinal)


def _build(mpi: Any, options: Options, deadline: float) -> Engine:
    """The steps of start-up, each ended by a vote, so that all ranks go on or all give up."""
    rank, n = mpi.Get_rank(), mpi.Get_size()
    info, devices = _share_device(mpi, options.device, deadline)
    _advise_spreading(rank, devices)
    page = _share_page(mpi, rank, n, deadline)
    context = driver.retain_context(info.ordinal)
    workspace = engine = None
    try:
        workspace = _share_workspace(mpi, rank, n, options.workspace if n > 1 else plan.MB, deadline)
        _map_peers(mpi, workspace, devices, deadline)
        error = None
        try:
            capability = min((int(major), int(minor)) for major, minor in devices["capability"])
            engine = Engine(
                info, context, workspace, page,
                capability=capability, timeout=options.timeout, algorithm=options.algorithm,
            )  # fmt: skip
        except IpcReduceError as caught:
            error = caught
        wire.vote(mpi, error, deadline, "registering the control page")
        assert engine is not None
        _verify(mpi, engine, devices, deadline)
        engine.watchdog = Watchdog(page)
        wire.vote(mpi, None, deadline, "start-up")
        return engine
    except IpcReduceError:
        with suppress(IpcReduceError):
            if workspace is not None:
                workspace.unmap_peers()
            wire.vote(mpi, None, deadline, "giving up")  # before anyone frees what another may still map
            if engine is not None:
                engine.release()
            if workspace is not None:
                workspace.free()
            driver.release_context(info.ordinal)
        raise


def _share_device(mpi: Any, device: Any, deadline: float) -> tuple[driver.DeviceInfo, np.ndarray[Any, Any]]:
    """This rank's GPU and every rank's wire.DEVICE. :raises ArgumentError: where ``device`` is wrong."""
    info, error = None, None
    try:
        info = driver.device_info(choose_device(device, mpi.Get_rank()))
        if device == "auto":
            arrays.use_device(info.ordinal)
        if info.capability < _MIN_CAPABILITY:
            raise UnsupportedError(f"{info.name} has compute capability {info.capability}; 8.0 is needed")
    except IpcReduceError as caught:
        error = caught
    record = wire.message(wire.DEVICE, error, wrong=isinstance(error, ArgumentError))
    if info is not None:
        record["uuid"], record["capability"] = np.void(info.uuid), info.capability
        record["visible"], record["name"] = driver.device_count(), info.name
    devices = wire.allgather(mpi, record, deadline, "choosing devices")
    _raise_wrong(mpi.Get_rank(), devices)
    wire.check(mpi, devices, "choosing devices")
    assert info is not None
    return info, devices


def _advise_spreading(rank: int, devices: np.ndarray[Any, Any]) -> None:
    used = [uuid.tobytes() for uuid in devices["uuid"]]
    if rank == 0 and len(set(used)) < min(len(used), int(devices["visible"].max())):
        warnings.warn(
            f"{len(used)} ranks share {len(set(used))} GPU(s) while others are idle: kernels of one GPU take turns, "
            "about 5 ms each. Make a device current on each rank, or pass Communicator(device='auto')",
            RuntimeWarning,
            stacklevel=6,
        )


def _share_page(mpi: Any, rank: int, n: int, deadline: float) -> Page:
    page, error = None, None
    try:
        page = Page.create(rank, n) if rank == 0 else None
    except OSError as caught:
        error = caught
    record = wire.message(wire.PAGE, error, path=page.path if page else "")
    pages = wire.allgather(mpi, record, deadline, "creating the control page")
    wire.check(mpi, pages, "creating the control page")
    try:
        page = page or Page.open(bytes(pages[0]["path"]).decode(), rank, n)
        page.join(*own_identity())
    except OSError as caught:
        error = caught
    try:
        wire.vote(mpi, error, deadline, "opening the control page (is /dev/shm shared between the ranks?)")
    finally:
        if page is not None and rank == 0:
            page.unlink()
    assert page is not None
    return page


def _share_workspace(mpi: Any, rank: int, n: int, nbytes: int, deadline: float) -> Workspace:
    workspace, error = None, None
    try:
        workspace = Workspace(rank, n, nbytes)
    except CudaError as caught:
        error = caught
    wire.vote(mpi, error, deadline, "allocating workspaces")
    assert workspace is not None
    return workspace


def _map_peers(mpi: Any, workspace: Workspace, devices: np.ndarray[Any, Any], deadline: float) -> None:
    error: IpcReduceError | None = None
    handle = bytes(driver.IPC_HANDLE_BYTES)
    try:
        handle = workspace.export()
    except CudaError as caught:
        error = caught
    record = wire.message(wire.MEMORY, error, handle=np.void(handle), nbytes=workspace.nbytes)
    memory = wire.allgather(mpi, record, deadline, "exporting workspaces")
    wire.check(mpi, memory, "exporting workspaces")
    try:
        if (memory["nbytes"] != workspace.nbytes).any():
            raise UnsupportedError(f"the workspaces differ in size: {memory['nbytes'].tolist()} bytes")
        _check_access(workspace.rank, devices)
        workspace.map_peers([entry["handle"].tobytes() for entry in memory])
    except IpcReduceError as caught:
        error = caught
    wire.vote(mpi, error, deadline, "mapping the peers' workspaces")


def _check_access(rank: int, devices: np.ndarray[Any, Any]) -> None:
    """:raises UnsupportedError: naming the first pair for which the driver reports no P2P access.

    A peer's GPU that is not visible here is left to :func:`_verify`.
    """
    ordinals = {driver.device_info(ordinal).uuid: ordinal for ordinal in range(driver.device_count())}
    own = ordinals[devices["uuid"][rank].tobytes()]
    for peer, uuid in enumerate(devices["uuid"]):
        other = ordinals.get(uuid.tobytes(), own)
        if other != own and not driver.can_access_peer(own, other):
            raise UnsupportedError(
                f"no P2P access between GPU {own} of rank {rank} and GPU {other} of rank {peer} "
                "(see nvidia-smi topo -p2p w)"
            )


def _verify(mpi: Any, engine: Engine, devices: np.ndarray[Any, Any], deadline: float) -> None:
    """Sends real data between every two ranks through the mappings.

    :raises UnsupportedError: naming the pairs that fail. Where packets arrive in halves, the engine is told.
    """
    rank, n = engine.rank, engine.n
    error, verdict = None, np.zeros(plan.MAX_RANKS, np.uint32)
    shared = len({uuid.tobytes() for uuid in devices["uuid"]}) < n
    try:
        verdict = engine.verify(_VERIFY_ROUNDS_SHARED if shared else _VERIFY_ROUNDS, _VERIFY_SECONDS)
        failed = [peer for peer in range(n) if peer != rank and verdict[peer] not in (_WHOLE, _HALVES)]
        if failed:
            what = "no data" if verdict[failed[0]] == _NOTHING else "wrong data"
            raise UnsupportedError(
                f"{what} arrived from rank {failed[0]} ({_name(devices, failed[0])}) at rank {rank} "
                f"({_name(devices, rank)}), though the driver reports P2P access"
            )
    except IpcReduceError as caught:
        error = caught
    record = wire.message(wire.VERDICT, error, halves=bool((verdict == _HALVES).any()))
    everyone = wire.allgather(mpi, record, deadline, "trying the links")
    wire.check(mpi, everyone, "trying the links")
    engine.whole_packets = not everyone["halves"].any()
    engine.workspace.reset()
    wire.vote(mpi, None, deadline, "emptying the workspaces")


def _name(devices: np.ndarray[Any, Any], rank: int) -> str:
    name = bytes(devices["name"][rank]).decode(errors="replace")
    return f"{name}, GPU-{devices['uuid'][rank].tobytes().hex()[:8]}"
