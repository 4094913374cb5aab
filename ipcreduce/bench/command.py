"""The ``bench`` command: choose sizes and contenders, check each contender's results, then time it.

Without GPUs it measures NumPy arrays, and compares ipcreduce with MPI.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..cuda import cupy_runtime
from ..dtypes import DTYPES
from ..errors import ArgumentError, IpcReduceError, UnsupportedError
from ..options import ALGORITHMS
from . import contenders, norms, output, report, timing
from .arguments import count, counts, names_of, size, sizes, why_not_writable
from .collectives import ALLREDUCE, COLLECTIVES
from .data import Message
from .limit import Limit, copy_microseconds

_CHECKS = 4  # checks with new data, before a size is timed
_LATE_SECONDS = 2e-3  # the longest random delay of a rank before a check
_LARGE = 64 << 20  # bytes; larger messages are checked once, and timed in fewer calls
_MODES = ("graph", "eager")
_SMALLEST = 4  # bytes: the default of --smallest
_LARGEST, _HOST_LARGEST = 1 << 30, 64 << 20  # bytes: the defaults of --largest
_EAGER_TURNS = 3  # all contenders take turns this often, because a host's pace changes within seconds

_Run = tuple[timing.Times, timing.Times | None]  # times of a call, end to end and on the host alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    modes, peers = partial(names_of, _MODES), partial(names_of, [*contenders.known(), *norms.OWN])
    add = parser.add_argument
    add("--smallest", type=size, default=_SMALLEST, metavar="BYTES", help="4, 64K, 1M, ... (default 4)")
    add("--largest", type=size, metavar="BYTES", help="(default 1G, without GPUs 64M; of an all-gather, its results)")
    add("--between", action="store_true", help="also 3 * 2**k bytes, not only powers of two")
    add("--dtype", choices=sorted(DTYPES.values()), help="(default bfloat16; without GPUs float32)")
    add("--mode", type=modes, metavar="MODES", help="graph, eager, or graph,eager (default all; without GPUs eager)")
    add("--peers", type=peers, metavar="NAMES", help=(
        f"what to time too, if installed: on GPUs {', '.join(contenders.PEERS)}; without GPUs "
        f"{', '.join(contenders.HOST_PEERS)} (default all; '' for none)"
    ))  # fmt: skip
    add("--arrays", type=count, metavar="N", help="a call on a list of N arrays, which have this many bytes together")
    add("--op", choices=(*COLLECTIVES, norms.OP), default=ALLREDUCE.name, help="the call (default allreduce)")
    add("--hidden", type=count, metavar="N", help=f"the length of the rows of {norms.OP} (default {norms.HIDDEN})")
    add("--rows", type=counts, metavar="N,N,...", help="their numbers (default 1, 2, 4, ..., 512)")
    add("--quantize", choices=norms.QUANTIZE, help="e4m3, by scales of this kind (default none)")
    add("--replays", type=count, default=30, metavar="N", help="timed graph replays, or rounds of calls (default 30)")
    add("--calls", type=count, metavar="N", help="in a graph or a row, on GPUs (default by the bytes, 4 to 200)")
    add("--algorithm", choices=ALGORITHMS, help="force one at all sizes (on GPUs)")
    add("--json", type=Path, metavar="FILE", help="write the times to this file")
    add("--plot", type=Path, metavar="FILE", help="draw the times into this .png, .svg or .pdf; needs matplotlib")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check that the options fit together. Exits with status 2 if they do not."""
    if options.largest is not None and options.smallest > options.largest:
        parser.error(f"--smallest {options.smallest} is above --largest {options.largest} bytes")
    if options.mode == []:
        parser.error(f"argument --mode: '' names no mode. Choose from {', '.join(_MODES)}")
    if options.op == norms.OP:
        sizes_of = {"--smallest": options.smallest != _SMALLEST, "--largest": options.largest is not None}
        sizes_of |= {"--between": options.between, "--arrays": options.arrays is not None}
        given = [name for name, is_given in sizes_of.items() if is_given]
        quantize = options.quantize or "none"
        if reason := norms.why_not(options.hidden or norms.HIDDEN, quantize, options.dtype, given):
            parser.error(reason)
    else:
        for name in ("hidden", "rows", "quantize"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} has no meaning without --op {norms.OP}")
        if options.op != ALLREDUCE.name and options.algorithm is not None:
            parser.error(f"--algorithm has no meaning with --op {options.op}, which has one")


def main(options: argparse.Namespace) -> None:
    """Run the command. Collective.

    :raises IpcReduceError: on every rank, if the command cannot run or a sum is wrong.
    """
    from mpi4py import MPI

    mpi = MPI.COMM_WORLD
    if problem := mpi.bcast(_why_not_kept(options) if mpi.rank == 0 else ""):
        raise ArgumentError(problem)
    with Communicator(device="auto", algorithm=options.algorithm) as comm:
        options = _fitted(options, comm)
        if comm.backend == "host":
            text = f"NumPy arrays, since there is no GPU for these ranks:\n{comm.describe()}\n"
            output.on_rank_0(partial(print, text), mpi)
        result = _Bench(comm, options, mpi).measure()
        if options.plot:
            output.on_rank_0(partial(report.plot, options.plot, result), mpi, "--plot")
        output.on_rank_0(partial(_show, result, comm.size, options), mpi)


def _show(result: dict[str, Any], n: int, options: argparse.Namespace) -> None:
    for name, reason in result["left_out"].items():
        print(f"without {name}: {reason}")
    for mode in options.mode:
        rows = [row for row in result["rows"] if row["mode"] == mode]
        what = f"{COLLECTIVES.get(options.op, ALLREDUCE).what} of {options.dtype}"
        what += f" in {options.arrays} arrays" if options.arrays else ""
        if options.op == norms.OP:
            what = f"RMSNorm of the {what} in rows of {options.hidden}"
            what += "" if options.quantize == "none" else f", quantised: {options.quantize}"
        report.show(rows, f"{mode}, {report.ranks_text(n)}, {what}")


def _why_not_kept(options: argparse.Namespace) -> str:
    """The reason why a file of results cannot be written; "" if all can. It is asked before the measurement."""
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (reason := why_not_writable(path)):
            return f"{option} cannot be written ({reason}). Name a file in a directory that you may write to"
    return report.why_not_drawn(options.plot) if options.plot else ""


def _fitted(options: argparse.Namespace, comm: Communicator) -> argparse.Namespace:
    """The options, with defaults for GPUs or for the host.

    :raises UnsupportedError: if the options need GPUs, and there are none.
    :raises ArgumentError: if the options allow no size.
    """
    on_host = comm.backend == "host"
    of_gpus = {
        f"--algorithm {options.algorithm}": options.algorithm is not None,
        f"--calls {options.calls}": options.calls is not None,
        "--mode graph": "graph" in (options.mode or ()),
    }
    if on_host and (what := next((option for option, given in of_gpus.items() if given), "")):
        raise UnsupportedError(
            f"{what} needs GPUs, and these ranks have none. Leave it out to measure NumPy arrays.\n{comm.describe()}"
        )
    if not on_host and comm.size == 1:
        raise UnsupportedError(f"bench needs at least 2 ranks. Start it by mpirun -n 2 ...\n{comm.describe()}")
    found = argparse.Namespace(**vars(options))
    found.mode = [mode for mode in _MODES if mode in (options.mode or (_MODES[1:] if on_host else _MODES))]
    found.dtype = options.dtype or ("float32" if on_host else "bfloat16")
    itemsize = np.dtype(found.dtype).itemsize
    if options.op == norms.OP:
        found.hidden, found.quantize = options.hidden or norms.HIDDEN, options.quantize or "none"
        found.sizes = [rows * found.hidden * itemsize for rows in options.rows or norms.ROWS]
        return found
    of = COLLECTIVES[options.op]
    unit = itemsize * of.unit(comm.size)
    least = max(options.smallest, unit * (options.arrays or 1))
    usual = max(2 * least, (_HOST_LARGEST if on_host else _LARGEST) // max(1, of.results(1, comm.size)))
    wanted = sizes(least, usual if options.largest is None else options.largest, options.between, itemsize)
    found.sizes = sorted({nbytes // unit * unit for nbytes in wanted})
    if not found.sizes:
        raise ArgumentError(
            f"there is no size to measure: no power of two from --smallest to --largest, {options.smallest} to "
            f"{options.largest} bytes, has room for {options.arrays or 'one'} {found.dtype}. Choose others, or add "
            "3 * 2**k by --between"
        )
    return found


class _Bench:
    """One run of the command: ipcreduce, the other libraries, and the reasons why some of them are left out."""

    def __init__(self, comm: Communicator, options: argparse.Namespace, mpi: Any) -> None:
        self._comm, self._options, self._mpi = comm, options, mpi
        self._on_host = comm.backend == "host"
        if options.op == norms.OP:
            self._ours: contenders.Ours = norms.Ours(comm)
            others = norms.peers(comm, options.algorithm)
        else:
            of = COLLECTIVES[options.op]
            self._ours, others = contenders.Ours(comm, of), contenders.peers_of(of, self._on_host)
        self._peers, self._left_out = contenders.find(options.peers, mpi, self._on_host, others)

    def measure(self) -> dict[str, Any]:
        """Measure every size. :raises IpcReduceError: on every rank, if a result is wrong, or memory is short."""
        comm, options, mpi = self._comm, self._options, self._mpi
        result: dict[str, Any] = report.header(["-m", "ipcreduce", *sys.argv[1:]])
        result |= {"left_out": self._left_out, "rows": []}
        with nullcontext() if self._on_host else cupy_runtime.load().cuda.Stream(non_blocking=True):
            limit = Limit.measure(comm, mpi, options.replays, options.calls) if comm.backend == "ipc" else None
            result["limit"] = {"barrier_us": limit.barrier_us, "push_GBps": limit.push_gbps} if limit else {}
            bound = limit.microseconds if limit else partial(copy_microseconds, comm, mpi, options.replays)
            for nbytes in report.progress(options.sizes, mpi):
                message, reason = contenders.attempt(partial(self._message, nbytes), mpi)
                if reason:
                    raise IpcReduceError(f"there is no room for {report.size_text(nbytes)} ({reason})")
                self._check(message)
                for mode in options.mode:
                    row = self._row(message, mode)
                    result["rows"].append(row | {"limit_us": bound(nbytes, message.of)} | message.fields)
                if options.json:  # after each size, in case a later one fails
                    output.on_rank_0(partial(report.write_json, options.json, result), mpi, "--json")
        comm.synchronize()
        for one in (self._ours, *self._peers):
            one.close()
        return result

    def _message(self, nbytes: int) -> Message | norms.Message:
        options, dtype = self._options, np.dtype(self._options.dtype)
        if options.op == norms.OP:
            rows = nbytes // (options.hidden * dtype.itemsize)
            return norms.Message(rows, options.hidden, dtype, self._comm, options.quantize)
        return Message(nbytes, dtype, self._comm, options.arrays or 0, COLLECTIVES[options.op])

    def _check(self, message: Message | norms.Message) -> None:
        """Check all contenders' results, and leave peers out that are wrong."""
        if reason := _trouble(self._ours, message, self._mpi):
            raise IpcReduceError(f"{message.what}, before it was timed: {reason}")
        for peer in self._peers:
            if peer.name not in self._left_out and (reason := _trouble(peer, message, self._mpi)):
                self._left_out[peer.name] = f"{reason}, at {message.nbytes} bytes"

    def _row(self, message: Message | norms.Message, mode: str) -> dict[str, Any]:
        """Time all contenders in turns. The fields of a stored row, but for the limit."""
        comm, options, ours, nbytes = self._comm, self._options, self._ours, message.nbytes
        runs = self._runs(message, mode)
        usual, host = _usual(runs.pop(ours))
        own, times = ({one.name: _usual(found)[0].median for one, found in runs.items() if one.own is is_own}
                      for is_own in (True, False))  # fmt: skip
        return {
            "ranks": comm.size, "bytes": nbytes, "dtype": options.dtype, "op": "sum", "mode": mode,
            "ours_us": usual.median, "ours_min_us": usual.least, "ours_p99_us": usual.p99,
            "host_us": host and host.median,
            "bus_GBps": report.bus_gbps(nbytes, usual.median, comm.size, message.of),
            "algorithm": None if self._on_host else ours.algorithm(mode, message.source), "arrays": options.arrays,
            "peers_us": times, "own_us": own,
        }  # fmt: skip

    def _runs(self, message: Message | norms.Message, mode: str) -> dict[contenders.Contender, list[_Run]]:
        """The times of each contender that takes such arrays. Ours is the last one, whose results are checked."""
        options, takers = self._options, []
        for peer in self._peers:
            if peer.name in self._left_out:
                continue
            if peer.prepare(message.source, message.target) is not None:
                takers.append(peer)
            elif self._on_host:
                self._left_out[peer.name] = f"it has no {options.dtype}"
        runs: dict[contenders.Contender, list[_Run]] = {one: [] for one in (*takers, self._ours)}
        turns = _EAGER_TURNS if mode == "eager" else 1
        for _ in range(turns):
            for one, found in runs.items():
                message.renew()  # ours, too, has to write the results that are checked
                found.append(_time(one, message, mode, -(-options.replays // turns), options.calls, self._mpi))
            if not all(self._mpi.allgather(message.is_right())):
                raise IpcReduceError(f"{message.what} is wrong ({mode}, when timed)")
        return runs


def _trouble(one: contenders.Contender, message: Message | norms.Message, mpi: Any) -> str:
    """Check a contender on every rank. Returns the first failing rank's error in one line; "" if none fails."""
    _, reason = contenders.attempt(partial(_check, one, message), mpi)
    return "".join(reason.splitlines()[:1])


def _check(one: contenders.Contender, message: Message | norms.Message) -> None:
    """Check a contender's results, if it takes such arrays. :raises ArithmeticError: if a result is wrong."""
    right = True  # the error is raised at the end, because the other ranks wait in the next call
    for _ in range(_CHECKS if message.nbytes <= _LARGE else 1):
        message.renew()
        call = one.prepare(message.source, message.target)
        if call is None:
            return
        time.sleep(random.random() * _LATE_SECONDS)
        with one.running():
            call()
            one.collect()
        message.wait()
        right &= message.is_right(one.gives)
    if not right:
        raise ArithmeticError("its result is wrong")


def _usual(runs: list[_Run]) -> _Run:
    """The run with the median time."""
    return sorted(runs, key=lambda run: run[0].median)[len(runs) // 2]


def _time(
    one: contenders.Contender, message: Message | norms.Message, mode: str, replays: int, calls: int | None, mpi: Any
) -> _Run:
    call, nbytes = one.prepare(message.source, message.target), message.nbytes
    assert call is not None
    if message.on_host:
        return timing.on_host(call, replays, mpi), None
    if calls is None:
        calls = max(4, min(200, _LARGE // nbytes))
        if mode == "eager" and nbytes <= _LARGE:
            calls = max(calls, 20)  # because the time includes the synchronisation at the end
    with one.running():
        call()  # does the work of a first call, such as compiling, before the capture and the times
        message.wait()
        if mode == "eager":
            return timing.eagerly(call, calls, replays, mpi)
    launch = one.captured(call, calls)
    found = timing.in_graph(launch, calls, replays, mpi)
    if isinstance(one, contenders.Ours):  # _runs() checks the last results: let them be those of the graph
        message.renew()
        launch()
        message.wait()
    return found, None
