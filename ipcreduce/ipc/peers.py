"""Start-up of the IPC backend: the ranks choose GPUs, map each other's memory, and try the links."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .. import clock
from ..cuda import cupy_runtime, driver
from ..device.deferred_free import attempt
from ..device.devices import advise_spreading, most_on_a_gpu, open_to_processes, share_device
from ..device.kernels import LARGE_SHARED_BYTES
from ..errors import IpcReduceError, UnsupportedError
from ..options import Options
from ..originals import time
from ..page.control_page import Page
from ..ranks import exchange
from ..ranks.exchange import Agreed, Ranks
from ..texts import decoded, text_in
from . import lists, p2p_check, plan, tuning, virtual
from .backend import IpcBackend, unregister
from .workspace import Workspace

_VERIFY_SECONDS = 10.0
_PART_SECONDS = 5.0  # how long a rank that leaves start-up waits for the others to unmap its memory
_VERIFY_ROUNDS = 200  # about 1 us each over NVLink
_VERIFY_ROUNDS_SHARED = 2  # if two ranks share a GPU, each round takes a time slice
_NO_DATA, _WHOLE, _SPLIT = 0, 1, 2  # the verdicts of verify.cu


def missing() -> str | None:
    """The reason why this rank has no GPU to use; None if it has one."""
    try:
        if not driver.device_count():
            return "no GPU is visible (CUDA_VISIBLE_DEVICES?)"
        cupy_runtime.load()
        return None
    except IpcReduceError as error:
        return str(error)


def start(
    ranks: Ranks, options: Options, page: Page, local_rank: int, deadline: float, warn: Callable[[str], None]
) -> IpcBackend:  # fmt: skip
    """Make the IPC backend, step by step. A vote ends each step, so that either all ranks go on, or all raise.

    :param ranks: the ranks, which have joined. Each has a GPU to use.
    :param page: the control page, which all ranks have joined.
    :param local_rank: this process's number on its host.
    :param deadline: on the clock of :mod:`ipcreduce.clock`.
    :param warn: takes warnings to show at the end, the same on every rank.
    :raises ArgumentError: if ``options.device`` is wrong on a rank. :raises Agreed: if a step fails.
    """
    rank, n = ranks.rank, ranks.size
    if n > plan.MAX_RANKS:
        raise Agreed(f"{n} ranks; the kernels take up to {plan.MAX_RANKS}")
    info, devices = share_device(ranks, options.device, local_rank, deadline)
    advise_spreading(devices, warn)
    context, workspace, backend, not_virtual = 0, None, None, ""
    capability, area_bytes = _lowest(devices, options)
    try:
        with exchange.step(ranks, deadline, "starting CUDA"), open_to_processes(info.ordinal):
            context = driver.retain_context(info.ordinal)
        workspace, not_virtual = virtual.start(ranks, options, area_bytes, info.ordinal, context, devices, deadline)
        if workspace is None:
            with exchange.step(ranks, deadline, "allocating workspaces"):
                workspace = Workspace(rank, n, options.workspace if n > 1 else plan.MB, area_bytes)
            _map_peers(ranks, workspace, devices, deadline)
        with exchange.step(ranks, deadline, "registering the control page"):
            backend = IpcBackend(
                info, context, workspace, page,
                capability=capability, timeout=options.timeout, algorithm=options.staged,
            )  # fmt: skip
        _verify(ranks, backend, devices, deadline)
        backend.launches.table, backend.launches.norm_table = _share_tables(ranks, devices, deadline, warn)
        resident = min(plan.EPOCH_SLOTS, 2 * int(devices["multiprocessors"].min()))
        backend.launches.gpus = backend.launches.gpus._replace(resident=resident, sharing=most_on_a_gpu(devices))
        backend.launches.most_parts = lists.most_parts(min(devices["driver"].tolist()))
        backend.not_virtual = not_virtual
        return backend
    except BaseException as error:
        _tell(ranks, page, error, deadline)  # first, because the others wait for this rank in the next exchange
        heard: IpcReduceError | None = None
        try:
            if workspace is not None:  # the page may be registered, also if an interrupt has left no backend
                attempt(context, workspace.unmap_peers, partial(unregister, page))
            if isinstance(error, Agreed):
                exchange.confirm(ranks, None, deadline, "giving up")  # all have unmapped before any rank frees memory
            else:
                _part(page)
            if backend is not None:
                backend.release()
            if workspace is not None:
                attempt(context, workspace.free)
            if context:
                driver.release_context(info.ordinal)
        except IpcReduceError as caught:
            heard = caught
        if heard is not None and ranks.left and isinstance(error, Agreed):  # a rank has left start-up in between
            raise heard from error
        raise


def _lowest(devices: np.ndarray[Any, Any], options: Options) -> tuple[tuple[int, int], int]:
    """The lowest compute capability of all ranks' GPUs, and the bytes of the area of bulk.cu; 0 if one lacks that."""
    capability = min((int(major), int(minor)) for major, minor in devices["capability"])
    runs_bulk = capability >= plan.BULK_CAPABILITY and int(devices["shared_bytes"].min()) >= LARGE_SHARED_BYTES
    if options.algorithm == plan.BULK and not runs_bulk:
        needed = ".".join(map(str, plan.BULK_CAPABILITY))
        raise Agreed(
            f"algorithm 'bulk' needs GPUs of compute capability {needed} or higher, with {LARGE_SHARED_BYTES >> 10} KB "
            "of shared memory for a block"
        )
    return capability, plan.area_bytes(options.workspace) if runs_bulk and len(devices) > 1 else 0


def _tell(ranks: Ranks, page: Page, error: BaseException, deadline: float) -> None:
    """Tell the other ranks that this one leaves start-up, if it does, and end their kernels' waits for it."""
    if not isinstance(error, Agreed):
        page.abort()
    exchange.tell(ranks, error, deadline)


def _part(page: Page) -> None:
    """Wait until the peers have unmapped this rank's memory, when start-up ends with an error.

    :raises IpcReduceError: if a peer may still map it after 5 s: then the memory must not be freed.
    """
    page.leave()
    deadline = clock.now() + _PART_SECONDS
    while not all(page.has_unmapped(peer) for peer in range(page.n) if peer != page.rank):
        if clock.now() > deadline:
            raise IpcReduceError("a rank still maps the memory of the other ranks")
        time.sleep(1e-3)


def _share_tables(
    ranks: Ranks, devices: np.ndarray[Any, Any], deadline: float, warn: Callable[[str], None]
) -> tuning.Tables:  # fmt: skip
    """Rank 0's tuned tables, on every rank. They are empty if rank 0 has none, or if the GPUs are of several kinds."""
    tables = tuning.Tables()
    problems: list[str] = []
    names = {bytes(device["name"]) for device in devices}
    if ranks.rank == 0 and len(names) == 1:
        with suppress(UnsupportedError):  # without a cache there is no table
            tables = tuning.load(decoded(names.pop()), ranks.size, problems.append)
    everyone = exchange.allgather(ranks, tuning.message(tables, *problems), deadline, "sharing the tuned table")
    if problem := text_in(everyone[0]):
        warn(problem)
    with exchange.step(ranks, deadline, "sharing the tuned table"):
        try:
            return tuning.received(everyone[0], ranks.size)
        except (ValueError, IndexError) as error:
            raise UnsupportedError(str(error)) from error


def _map_peers(ranks: Ranks, workspace: Workspace, devices: np.ndarray[Any, Any], deadline: float) -> None:
    def own() -> dict[str, Any]:
        return {"handle": np.void(workspace.export()), "nbytes": workspace.nbytes}

    memory = exchange.share(ranks, exchange.MEMORY, own, deadline, "exporting workspaces")
    with exchange.step(ranks, deadline, "mapping the peers' workspaces"):
        if (memory["nbytes"] != workspace.nbytes).any():
            raise UnsupportedError(f"the workspaces differ in size: {memory['nbytes'].tolist()} bytes")
        p2p_check.check_access(workspace.rank, devices)
        workspace.map_peers([entry["handle"].tobytes() for entry in memory])


def _verify(ranks: Ranks, backend: IpcBackend, devices: np.ndarray[Any, Any], deadline: float) -> None:
    """Send data between every two ranks through the mappings, and decide whether packets are sent whole.

    :raises Agreed: if data did not arrive between two ranks, which the message names, or if a rank has no kernel.
    """
    with exchange.step(ranks, deadline, "loading the first kernel"):  # otherwise a peer's kernel waits for a compiler
        kinds = p2p_check.seen(devices)
        backend.launches.load_verify()
    rank, n = backend.rank, backend.n
    seconds = max(0.0, min(_VERIFY_SECONDS, (deadline - clock.now()) / 2))  # leaves time to exchange the verdicts
    rounds = _VERIFY_ROUNDS_SHARED if most_on_a_gpu(devices) > 1 else _VERIFY_ROUNDS

    def own() -> dict[str, Any]:
        verdict = backend.launches.verify(rounds, seconds)
        failed = [peer for peer in range(n) if peer != rank and verdict[peer] not in (_WHOLE, _SPLIT)]
        if failed:
            what = "no data" if verdict[failed[0]] == _NO_DATA else "wrong data"
            raise UnsupportedError(
                f"{what} arrived from rank {failed[0]} ({_name(devices, failed[0])}) at rank {rank} "
                f"({_name(devices, rank)}), though the driver reports P2P access"
            )
        return {"split": bool((verdict == _SPLIT).any()), "links": kinds}

    everyone = exchange.share(ranks, p2p_check.VERDICT, own, deadline, "trying the links")
    backend.kernels.whole_packets, backend.packets = p2p_check.packets(everyone)
    with exchange.step(ranks, deadline, "emptying the workspaces"):
        backend.workspace.reset()


def _name(devices: np.ndarray[Any, Any], rank: int) -> str:
    name = decoded(bytes(devices["name"][rank]))
    return f"{name}, GPU-{devices['uuid'][rank].tobytes().hex()[:8]}"
