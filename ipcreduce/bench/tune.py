"""``python -m ipcreduce tune``: find the fastest kernel and grid for each message size, and store them as a table.

With ``--hidden`` also the fastest kernel for rows with RMSNorm: see tune_norms.py.

The ranks measure together, in CUDA graphs, and use the slowest rank's time. Communicators made later use the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..calls import request
from ..communicator import Communicator
from ..cuda import cupy_runtime
from ..errors import UnsupportedError
from ..ipc import plan, tuning
from ..ipc.backend import IpcBackend
from . import output, report, tune_norms
from .arguments import count, size, sizes, why_not_writable
from .data import Message
from .limit import our_backend

_SMALLEST, _DTYPE, _OP = 1 << 10, "float16", "sum"
_BLOCKS = {"one_shot": (32, 64, 96, 128, 256, 512, 1024), "two_shot": (32, 64, 128, 256, 512)}
_DEPTHS = (1, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    largest = partial(size, least=_SMALLEST)
    parser.add_argument("--largest", type=largest, default=64 << 20, metavar="BYTES", help="1K or more (default 64M)")
    parser.add_argument(
        "--hidden", type=tune_norms.hidden_sizes, default=[], metavar="N,...",
        help="also tune allreduce_rmsnorm for these hidden sizes, of which there are up to 4",
    )  # fmt: skip
    parser.add_argument("--replays", type=count, default=7, metavar="N", help="replays of each candidate (default 7)")
    parser.add_argument("--dry-run", action="store_true", help="show the table, and do not keep it")


def main(options: argparse.Namespace) -> None:
    """Run the command. Collective.

    :raises IpcReduceError: on every rank, if the command cannot run or a sum is wrong.
    """
    from mpi4py import MPI

    with Communicator(device="auto") as comm:
        if comm.backend != "ipc" or comm.size == 1:
            raise UnsupportedError(f"tune needs GPUs and at least 2 ranks. Start it by mpirun.\n{comm.describe()}")
        backend = our_backend(comm, "tune")
        if backend.launches.gpus.sharing > 1:  # their kernels would take turns, and distort the times
            raise UnsupportedError(f"tune needs a GPU for each rank. Start fewer ranks.\n{comm.describe()}")
        mpi, gpu = MPI.COMM_WORLD, backend.device.name
        if not options.dry_run:  # before it takes minutes
            output.on_rank_0(partial(_check_kept, gpu, comm.size), mpi)
        messages = _measure(comm, backend, options, mpi)
        tables = tuning.Tables(messages, tune_norms.measure(comm, backend, options.hidden, options.replays, mpi))
        if not options.dry_run:  # stored before it is printed, because it has taken minutes
            output.on_rank_0(partial(tuning.save, gpu, comm.size, tables), mpi, "the table")
        output.on_rank_0(partial(_show, tables, None if options.dry_run else (gpu, comm.size)), mpi)


def _check_kept(gpu: str, n: int) -> None:
    """:raises UnsupportedError: if the tables cannot be stored."""
    if reason := why_not_writable(tuning.path_of(gpu, n)):
        raise UnsupportedError(f"the table cannot be stored ({reason}). Set IPCREDUCE_CACHE_DIR, or add --dry-run")


def _show(tables: tuning.Tables, kept: tuple[str, int] | None) -> None:
    for choice in tables.messages:
        print(
            f"up to {report.size_text(choice.up_to):>7}: {choice.algorithm}, blocks of {choice.block}, at most "
            f"{choice.blocks} of them, {choice.depth} packets a thread"
        )
    for norm in tables.norms:
        print(f"hidden {norm.hidden}, up to {norm.up_to:>4} rows: {norm.algorithm}, blocks for a row: {norm.cluster}")
    if kept:
        print(f"kept in {tuning.path_of(*kept)}")


def _measure(comm: Communicator, backend: IpcBackend, options: argparse.Namespace, mpi: Any) -> plan.Table:
    table: list[plan.Choice] = []
    work = sizes(_SMALLEST, options.largest, between=True)
    with cupy_runtime.load().cuda.Stream(non_blocking=True):
        for nbytes in report.progress(work, mpi):
            message = Message(nbytes, np.dtype(_DTYPE), comm)
            candidates = _candidates(nbytes, backend.launches.gpus, table[-1:])
            times = {choice: _time(backend, message, choice, options.replays, mpi) for choice in candidates}
            tune_norms.add_fastest(table, times, nbytes)
    comm.synchronize()
    return plan.checked_table(_fewest(table), comm.size)


def _candidates(nbytes: int, gpus: plan.Gpus, before: list[plan.Choice]) -> Iterator[plan.Choice]:
    """The candidates for a size: each kernel near its range, with every distinct block, grid and depth."""
    n, usual = gpus.n, plan.make_plan(nbytes, gpus)[0].algorithm
    found: dict[tuple[Any, ...], plan.Choice] = {}  # by launch shape, which several choices may share at this size
    for algorithm, blocks in _BLOCKS.items():
        if (algorithm != usual and not _near(nbytes, gpus)) or len(plan.make_plan(nbytes, gpus, algorithm)) > 1:
            continue
        packets = -(-nbytes // plan.PACKET_BYTES)
        threads = packets if algorithm == "one_shot" else -(-packets // n)
        for block, depth in product(blocks, _DEPTHS):
            if block > plan.most_threads(algorithm, depth, n):
                continue
            needed = -(-threads // block)
            grids = {gpus.resident // 2, gpus.resident, gpus.resident_blocks(block, depth)}
            for grid in [plan.EPOCH_SLOTS] if algorithm == "one_shot" else sorted(grids):
                if (algorithm == "one_shot" and needed > grid) or (depth > 1 and needed <= grid):
                    continue  # the grid is too small, or no thread loops and the depth has no effect
                choice = plan.Choice(nbytes, algorithm, block, grid, depth)
                found.setdefault((algorithm, block, min(needed, grid), depth), choice)
    yield from found.values()
    for choice in before:
        step = plan.plan_launch(choice.algorithm, 0, nbytes, gpus, choice)
        if step.block == choice.block:  # its grid holds this size, too
            yield replace(choice, up_to=nbytes)


def _near(nbytes: int, gpus: plan.Gpus) -> bool:
    """True if the planned kernels at an eighth and at 8 times this size differ."""
    around = {plan.make_plan(max(1, nearby), gpus)[0].algorithm for nearby in (nbytes // 8, nbytes * 8)}
    return len(around) > 1


def _time(backend: IpcBackend, message: Message, choice: plan.Choice, replays: int, mpi: Any) -> float:
    """Time a choice, in microseconds. :raises IpcReduceError: if the result is wrong."""
    nbytes = message.source.nbytes
    step = plan.plan_launch(choice.algorithm, 0, nbytes, backend.launches.gpus, choice)
    prepared = backend.launches.by_steps([step], request.plain(message.source.shape, _DTYPE, _OP))
    stream, owner = cupy_runtime.stream_of()
    start = partial(prepared.start, (message.source.data.ptr, message.target.data.ptr))
    calls = max(4, min(100, (16 << 20) // nbytes))
    return tune_norms.timed(message, choice, partial(backend.run, start, stream, owner), calls, replays, mpi)


def _fewest(table: list[plan.Choice]) -> list[plan.Choice]:
    """Shorten a table to ``plan.MAX_CHOICES``: of two neighbours with one algorithm, drop that for smaller sizes."""
    table = list(table)
    while len(table) > plan.MAX_CHOICES:
        alike = (i for i in range(len(table) - 1) if table[i].algorithm == table[i + 1].algorithm)
        del table[next(alike)]
    return table
