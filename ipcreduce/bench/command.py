"""The ``bench`` command: choose sizes and contenders, check each contender's results, then time it."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..communicator import Communicator
from ..cuda import cupy_runtime
from ..errors import ArgumentError, IpcReduceError, UnsupportedError
from ..ipc import plan
from ..numerics import DTYPES
from . import contenders, report, timing
from .data import Message
from .limit import Limit

_CHECKS = 4  # checks with new data, before a size is timed
_LATE_SECONDS = 2e-3  # the longest random delay of a rank before a check
_LARGE = 64 << 20  # bytes; larger messages are checked once, and timed in fewer calls
_EAGER_TURNS = 3  # turns of all contenders, since the pace of a host changes within seconds

_Run = tuple[timing.Times, timing.Times | None]  # times of a call, end to end and on the host alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("--smallest", type=size, default=4, metavar="BYTES", help="4, 64K, 1M, ... (default 4)")
    parser.add_argument("--largest", type=size, default=1 << 30, metavar="BYTES", help="(default 1G)")
    parser.add_argument("--between", action="store_true", help="also 3 * 2**k bytes, not only powers of two")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES.values()))
    parser.add_argument("--mode", default="graph,eager", help="graph, eager, or both (the default)")
    parser.add_argument("--peers", default=",".join(contenders.PEERS), help="libraries to time too, if installed")
    parser.add_argument("--replays", type=int, default=30, help="timed graph replays, or eager rounds (default 30)")
    parser.add_argument("--algorithm", choices=plan.ALGORITHMS, help="force one at all sizes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")


def size(text: str) -> int:
    """Parse a number of bytes, such as "4", "64K" or "1G"."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else int(text)


def sizes(smallest: int, largest: int, between: bool) -> list[int]:
    """The powers of two from ``smallest`` to ``largest`` bytes, and with ``between`` also 3 * 2**k."""
    found = [1 << k for k in range(41)] + ([3 << k for k in range(40)] if between else [])
    return sorted(nbytes for nbytes in found if smallest <= nbytes <= largest)


def main(options: argparse.Namespace) -> None:
    """Run the command. Collective. :raises IpcReduceError: on every rank, if it cannot run or a sum is wrong."""
    modes = [mode for mode in ("graph", "eager") if mode in options.mode.split(",")]
    unknown = {*options.mode.split(",")} - {*modes} | {*filter(None, options.peers.split(","))} - {*contenders.PEERS}
    if unknown:
        raise ArgumentError(f"--mode takes graph and eager, --peers {', '.join(contenders.PEERS)}; found {unknown}")
    if options.plot:
        report.require_matplotlib()
    with Communicator(device="auto", algorithm=options.algorithm) as comm:
        if comm.backend != "ipc" or comm.size == 1:
            raise UnsupportedError(f"bench needs GPUs and at least 2 ranks under mpirun; found:\n{comm.describe()}")
        result = _measure(comm, modes, options)
        if comm.rank == 0:
            for name, reason in result["left_out"].items():
                print(f"without {name}: {reason}")
            for mode in modes:
                rows = [row for row in result["rows"] if row["mode"] == mode]
                report.show(rows, f"{mode}, {comm.size} ranks, sum of {options.dtype}")
            if options.plot:
                report.plot(options.plot, result)


def _measure(comm: Communicator, modes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    from mpi4py import MPI

    mpi = MPI.COMM_WORLD
    peers, left_out = contenders.find([name for name in options.peers.split(",") if name], mpi)
    ours = contenders.Ours(comm)
    dtype = next(one for one, name in DTYPES.items() if name == options.dtype)
    work = sizes(max(options.smallest, dtype.itemsize), options.largest, options.between)
    result: dict[str, Any] = {**report.header(["-m", "ipcreduce", *sys.argv[1:]]), "left_out": left_out, "rows": []}
    with cupy_runtime.load().cuda.Stream(non_blocking=True):
        limit = Limit.measure(comm, mpi, options.replays)
        result["limit"] = {"barrier_us": limit.barrier_us, "push_GBps": limit.push_gbps}
        for nbytes in report.progress(work, comm.rank == 0):
            message = Message(nbytes, dtype, comm)
            if reason := _trouble(partial(_check, ours, message), mpi):
                raise IpcReduceError(f"the sum of {nbytes} bytes, before it was timed: {reason}")
            for peer in peers:
                if peer.name not in left_out and (reason := _trouble(partial(_check, peer, message), mpi)):
                    left_out[peer.name] = f"{reason}, at {nbytes} bytes"
            for mode in modes:
                takers = [peer for peer in peers if peer.name not in left_out]
                takers = [peer for peer in takers if peer.prepare(message.source, message.target) is not None]
                runs: dict[contenders.Contender, list[_Run]] = {one: [] for one in (*takers, ours)}
                turns = _EAGER_TURNS if mode == "eager" else 1
                for _ in range(turns):
                    message.renew()
                    for one, found in runs.items():
                        found.append(_time(one, message, mode, -(-options.replays // turns), mpi))
                    if not all(mpi.allgather(message.is_right())):  # the last results are ours
                        raise IpcReduceError(f"the sum of {nbytes} bytes is wrong ({mode}, when timed)")
                times = {peer.name: _usual(runs[peer])[0].median for peer in takers}
                usual, host = _usual(runs[ours])
                result["rows"].append({
                    "ranks": comm.size, "bytes": nbytes, "dtype": options.dtype, "op": "sum", "mode": mode,
                    "ours_us": usual.median, "ours_min_us": usual.least, "ours_p99_us": usual.p99,
                    "host_us": host and host.median, "bus_GBps": report.bus_gbps(nbytes, usual.median, comm.size),
                    "algorithm": ours.algorithm(mode, message.source), "limit_us": limit.microseconds(nbytes),
                    "peers_us": times,
                })  # fmt: skip
            if comm.rank == 0 and options.json:  # after each size, in case a later one fails
                report.write_json(options.json, result)
    comm.synchronize()
    for one in (ours, *peers):
        one.close()
    return result


def _trouble(action: Callable[[], None], mpi: Any) -> str:
    """Run ``action`` on every rank and return the first failing rank's error in one line; "" if none fails."""
    reason = ""
    try:
        action()
    except Exception as error:  # other libraries raise any type
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return next((one for one in mpi.allgather(reason) if one), "")


def _check(one: contenders.Contender, message: Message) -> None:
    """Check a contender's results. Arrays that it does not take pass. :raises ArithmeticError: if one is wrong."""
    stream, right = cupy_runtime.load().cuda.get_current_stream(), True
    for _ in range(_CHECKS if message.source.nbytes <= _LARGE else 1):
        message.renew()
        call = one.prepare(message.source, message.target)
        if call is None:
            return
        time.sleep(random.random() * _LATE_SECONDS)
        with one.running():
            call()
            one.collect()
        stream.synchronize()
        right &= message.is_right()  # raised at the end: earlier, the other ranks would wait in the next call
    if not right:
        raise ArithmeticError("its result is wrong")


def _usual(runs: list[_Run]) -> _Run:
    """The run with the median time."""
    return sorted(runs, key=lambda run: run[0].median)[len(runs) // 2]


def _time(one: contenders.Contender, message: Message, mode: str, replays: int, mpi: Any) -> _Run:
    call, nbytes = one.prepare(message.source, message.target), message.source.nbytes
    assert call is not None
    calls = max(4, min(200, _LARGE // nbytes))
    with one.running():
        call()  # first-call work, such as compiling, is kept out of the capture and the times
        cupy_runtime.load().cuda.get_current_stream().synchronize()
        if mode == "eager":  # at least 20 calls, since the time includes the synchronisation at the end
            return timing.eagerly(call, max(calls, 20) if nbytes <= _LARGE else calls, replays, mpi)
    launch = one.captured(call, calls)
    found = timing.in_graph(launch, calls, replays, mpi)
    if isinstance(one, contenders.Ours):  # check these too: a graph may run other kernels
        message.renew()
        launch()
        cupy_runtime.load().cuda.get_current_stream().synchronize()
    return found, None
