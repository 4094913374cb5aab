"""Ratios that ``python -m ipcreduce bench`` does not show, each of two times of one run.

    mpirun -n 4 python -m benchmarks.figures --json FILE [--only dtypes,shapes,...] [--largest BYTES]

dtypes and ops against bfloat16 sum; ragged, misaligned and in-place against plain messages; the longest messages
against the wire; eager calls against a bare launch; a transformer's block with and without programmatic launch; what
the ends of waits cost; start-up. Prints "what, bytes: us, ratio (wanted: at most ...)"; times are the slowest rank's
medians. Results are not checked here: tests/gpu does that, and bench before it times.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import cupy
import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import arguments, contenders, report, timing
from ipcreduce.bench.limit import Limit
from ipcreduce.calls import request
from ipcreduce.cuda import compiler, cupy_runtime, driver
from ipcreduce.device import kernels
from ipcreduce.dtypes import DTYPES, OPS
from ipcreduce.graphs.session import session_of
from ipcreduce.page.flight_recorder import RING

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIZES = [1 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20]
HIDDEN = 8192  # of the transformer's block, bfloat16
Call = Callable[[], Any]


class Run:
    """What the measurements share."""

    def __init__(self, comm: ipcreduce.Communicator, options: argparse.Namespace) -> None:
        self.comm, self.largest = comm, options.largest
        self.calls, self.replays, self.turns, self.before = (
            options.calls, options.replays, options.turns, options.before
        )  # fmt: skip
        self.backend = session_of(comm).require_backend("figures")
        self.rows: list[dict[str, Any]] = []

    def sizes(self) -> list[int]:
        return [nbytes for nbytes in SIZES if nbytes <= self.largest]

    def captured(self, call: Call, nbytes: int) -> tuple[Call, int]:
        """A graph of many calls of so many bytes, and of how many."""
        call()
        cupy_runtime.load().cuda.get_current_stream().synchronize()
        calls = max(4, min(self.calls, (64 << 20) // max(1, nbytes)))
        return timing.captured(call, calls), calls

    def in_turns(self, *graphs: tuple[Call, int]) -> list[float]:
        """Microseconds of a call in each of these graphs, which take turns."""
        turns = [[timing.in_graph(*graph, self.replays, WORLD).median for graph in graphs] for _ in range(self.turns)]
        return [statistics.median(times) for times in zip(*turns, strict=True)]

    def in_graph(self, call: Call, nbytes: int) -> float:
        """Microseconds of a call in a graph of many."""
        return timing.in_graph(*self.captured(call, nbytes), self.replays, WORLD).median

    def keep(self, what: str, nbytes: int, us: float, base: float, wanted: float) -> None:
        row = {"what": what, "bytes": nbytes, "us": us, "base_us": base, "ratio": us / base, "wanted": wanted}
        self.rows.append(row)
        if self.comm.rank == 0:
            late = "" if us <= base * wanted else "   MORE"
            print(f"{what}, {nbytes}: {us:.2f}, {us / base:.3f} (wanted: at most {wanted}){late}", flush=True)


def arrays_of(nbytes: int, dtype: np.dtype[Any] = BFLOAT16, spare: int = 0) -> tuple[Any, Any]:
    count = max(1, nbytes // dtype.itemsize) + spare
    return cupy.full(count, 1, dtype), cupy.full(count, 1, dtype)


def dtypes(run: Run) -> None:
    """Floats within 1.05 of bfloat16 sum (float64 1.1), integers within 1.4."""
    for nbytes in run.sizes():
        source, target = arrays_of(nbytes)
        base = run.in_graph(functools.partial(run.comm.allreduce, source, out=target), nbytes)
        for dtype, name in DTYPES.items():
            for op in OPS if name in ("bfloat16", "float32", "int32") else ("sum", "max"):
                source, target = arrays_of(nbytes, dtype)
                us = run.in_graph(functools.partial(run.comm.allreduce, source, op, out=target), nbytes)
                wanted = 1.4 if dtype.kind in "iu" else 1.1 if name == "float64" else 1.05
                run.keep(f"{op} of {name}", nbytes, us, base, wanted)


def shapes(run: Run) -> None:
    """Ragged within 1.1, misaligned by one element within 1.5, in place within 3 % of plain messages."""
    for nbytes in run.sizes():
        source, target = arrays_of(nbytes, spare=8)
        count = nbytes // 2
        plain, off = slice(count), slice(1, count + 1)
        cases = [
            ("plain", source[plain], target[plain], 1.0),
            ("ragged", source[: count - 1], target[: count - 1], 1.1),
            ("misaligned", source[off], target[off], 1.5),
            ("misaligned input", source[off], target[plain], 1.5),
            ("in place", source[plain], source[plain], 1.03),
        ]
        times = run.in_turns(
            *(run.captured(functools.partial(run.comm.allreduce, a, out=b), nbytes) for _, a, b, _ in cases)
        )
        for (what, _, _, wanted), us in zip(cases, times, strict=True):
            run.keep(what, nbytes, us, times[0], wanted)


def lists(run: Run) -> None:
    """Lists of arrays within 1.1 times one array of the same bytes, plus 1 us."""
    for dtype in (BFLOAT16, np.dtype(np.float32)):
        for count in (4, 32, 200, 1000):
            if count << 10 > run.largest:
                continue
            pairs = [arrays_of(1 << 10, dtype) for _ in range(count)]
            sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
            nbytes = count << 10
            source, target = arrays_of(nbytes, dtype)
            base, us = run.in_turns(
                run.captured(functools.partial(run.comm.allreduce, source, out=target), nbytes),
                run.captured(functools.partial(run.comm.allreduce, sources, out=targets), nbytes),
            )
            run.keep(f"list, {count} {dtype}", nbytes, us, base, 1.1 + 1 / base)


def long(run: Run) -> None:
    """512 MB and 1 GiB within 1.1 of the wire's time; and what direct launches, which no plan has, would bring."""
    limit = Limit.measure(run.comm, WORLD, run.replays)
    with ipcreduce.Communicator(algorithm="direct") as forced:
        for nbytes in (1 << 20, 16 << 20, 64 << 20, 256 << 20, 512 << 20, 1 << 30):
            if nbytes > run.largest:
                continue
            source, target = arrays_of(nbytes)[0], forced.empty(nbytes // 2, BFLOAT16)
            us = run.in_graph(functools.partial(run.comm.allreduce, source, out=target), nbytes)
            if nbytes >= 512 << 20:
                run.keep("against the wire", nbytes, us, limit.microseconds(nbytes) - limit.barrier_us, 1.1)
            direct, calls = contenders.Ours(forced), max(4, (64 << 20) // nbytes)
            replay = direct.captured(functools.partial(forced.allreduce, source, out=target), calls)
            assert direct.algorithm("graph", source) == "direct" or forced.size == 1
            run.keep(
                "direct against staged", nbytes, timing.in_graph(replay, calls, run.replays, WORLD).median, us, 1.1
            )
            direct.close()


def eager(run: Run) -> None:
    """Host time of a cached call within a bare launch + 1 us; end to end at most 5 us. And a replay: + 1 us."""
    source, target = arrays_of(1024)
    call = functools.partial(run.comm.allreduce, source, out=target)
    for _ in range(4):
        call()
    run.comm.synchronize()
    prepared = run.backend.prepare(request.plain(source.shape, "bfloat16", "sum"))
    launch, stream = prepared.steps[0].launch, cupy_runtime.stream_of()[0]
    graph = ipcreduce.Graph(run.comm)
    with graph.record():
        call()
    run.comm.synchronize()
    executable = graph.segments[0].executable
    assert executable is not None
    call()
    bare = functools.partial(launch.run, stream)
    bare_graph = of_cupy = functools.partial(cupy_runtime.launch_graph, executable.handle, stream)
    bindings = driver.load()
    if hasattr(bindings, "CUgraphExec"):  # not on the simulated device
        handles = bindings.CUgraphExec(executable.handle), bindings.CUstream(stream)
        bare_graph = functools.partial(bindings.cuGraphLaunch, *handles)
    for which, before in (("", run.before), (" behind others", 0)):  # then the flight recorder's slots are rewritten
        ends, hosts = alternately(run, before, bare, call, bare_graph, graph.replay, of_cupy)
        run.keep(f"eager call{which}, host (bare launch + 1)", 1024, hosts[1], hosts[0] + 1, 1.0)
        run.keep(f"eager call{which}, end to end (5 us)", 1024, ends[1], 5.0, 1.0)
        run.keep(f"replay{which}, host (bare launch + 1)", 1024, hosts[3], hosts[2] + 1, 1.0)
    run.keep("cuGraphLaunch, host, by CuPy (by the bindings)", 1024, hosts[4], hosts[2], 1.0)
    graph.close()


def alternately(run: Run, before: int, *calls: Call) -> tuple[list[float], list[float]]:
    """End to end and host times of calls that take turns: the pace of a host changes within seconds.

    :param before: calls that are made at the beginning of each turn and not timed.
    """

    def turn(call: Call) -> tuple[timing.Times, timing.Times]:
        for _ in range(before):
            call()
        return timing.eagerly(call, 100, run.replays, WORLD)

    turns = [[turn(call) for call in calls] for _ in range(run.turns)]
    ends, hosts = (
        [statistics.median(turn[i][part].median for turn in turns) for i in range(len(calls))] for part in (0, 1)
    )
    return ends, hosts


def block(run: Run) -> None:
    """Three all-reduces between ordinary kernels: no slower than with programmatic launch off; NCCL beside it."""
    found, left_out = contenders.find(["nccl"], WORLD, on_host=False, peers=contenders.PEERS)
    nccl = found[0] if found else None
    if run.comm.rank == 0 and left_out:
        print(f"without NCCL: {left_out['nccl']}", flush=True)
    for batch in (1, 2, 4, 8, 16, 32, 64):
        nbytes = batch * HIDDEN * 2
        if nbytes > run.largest:
            continue
        source, target = arrays_of(nbytes)

        ours = functools.partial(three, source, functools.partial(run.comm.allreduce, source, out=target))
        graphs = [run.captured(ours, nbytes)]
        with plain_launches(run):
            graphs.append(run.captured(ours, nbytes))
        call = nccl.prepare(source, target) if nccl else None
        if call is not None:
            graphs.append(run.captured(functools.partial(three, source, call), nbytes))
        on, off, *peer = run.in_turns(*graphs)
        run.keep("block, programmatic against plain", nbytes, on, off, 1.0)
        for us in peer:
            run.keep("block against NCCL", nbytes, on, us, 1.0)


def three(array: Any, call: Call) -> None:
    """A block: ordinary kernels that write what is reduced next."""
    for _ in range(3):
        array.fill(1)
        call()


@contextmanager
def plain_launches(run: Run) -> Iterator[None]:
    """Launches prepared within are not programmatic."""
    made, prepared = kernels.driver.Launch, run.backend._prepared
    kept = dict(prepared)
    prepared.clear()

    def plain(*arguments: Any, programmatic: bool = False, shared: int = 0) -> Any:
        return made(*arguments, shared=shared)

    try:
        with mock.patch.object(kernels.driver, "Launch", plain):
            yield
    finally:
        prepared.clear()
        prepared.update(kept)


def ends_of_waits(run: Run) -> None:
    """The abort word and the deadline within 1 % of the same kernels without."""
    for nbytes in run.sizes():
        source, target = arrays_of(nbytes)
        call = functools.partial(run.comm.allreduce, source, out=target)
        graphs = [run.captured(call, nbytes)]
        with endless_waits(run):
            graphs.append(run.captured(call, nbytes))
        with_ends, endless = run.in_turns(*graphs)
        run.keep("waits that end", nbytes, with_ends, endless, 1.01)


@contextmanager
def endless_waits(run: Run) -> Iterator[None]:
    """Kernels that are compiled within look at neither the clock nor the abort word."""
    tables = run.backend.kernels._functions, run.backend._prepared
    with tempfile.TemporaryDirectory() as directory:
        sources = Path(directory, "kernels")
        shutil.copytree(compiler.kernel_directory(), sources)
        header = sources / "packets.cuh"
        text = header.read_text()
        assert text.count("spins < kSpinsBetweenChecks") == 1
        header.write_text(text.replace("spins < kSpinsBetweenChecks", "true"))
        kept = [dict(table) for table in tables]
        for table in tables:
            table.clear()
        compiler._headers_digest.cache_clear()
        try:
            with mock.patch.object(compiler, "kernel_directory", return_value=sources):
                yield
        finally:
            for table, old in zip(tables, kept, strict=True):
                table.clear()
                table.update(old)
            compiler._headers_digest.cache_clear()


PARTS = {part.__name__: part for part in (dtypes, shapes, lists, long, eager, block, ends_of_waits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by name")
    parser.add_argument("--largest", type=arguments.size, default=1 << 30)
    parser.add_argument("--calls", type=int, default=200, help="in a graph, at most")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--turns", type=int, default=7, help="of the contenders of a figure")
    parser.add_argument("--before", type=int, default=RING, help="calls before each turn of which the host is timed")
    options = parser.parse_args()
    cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    warm = cupy.full(512, 1, BFLOAT16)
    cupy.cuda.get_current_stream().synchronize()
    WORLD.Barrier()
    started = time.perf_counter()
    with ipcreduce.Communicator() as comm:
        made = time.perf_counter() - started
        comm.allreduce(warm, out=warm)
        comm.synchronize()
        first = time.perf_counter() - started - made
        run = Run(comm, options)
        cold = max(WORLD.allgather(made + first))
        if comm.rank == 0:
            print(
                f"start-up {made:.2f} s, first call {first * 1e3:.1f} ms; slowest rank, both {cold:.2f} s", flush=True
            )
        with cupy.cuda.Stream(non_blocking=True):
            for name in options.only.split(","):
                PARTS[name](run)
                if comm.rank == 0 and options.json:  # what there is, if something stops this later
                    startup = {"communicator_s": made, "first_call_s": first, "slowest_s": cold}
                    result = {**report.header(["-m", "benchmarks.figures", *sys.argv[1:]]), "ranks": comm.size}
                    report.write_json(options.json, {**result, "startup": startup, "rows": run.rows})
        comm.synchronize()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # on this rank alone, perhaps: the others would wait
        traceback.print_exc()
        sys.stderr.flush()
        WORLD.Abort(1)
