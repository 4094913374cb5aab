"""Times all-reduce, residual and RMSNorm in one kernel, beside the plain all-reduce and the unfused pair.

    mpirun -n 2 python benchmarks/fused.py OUT.json [--hidden 4096 8192] [--rows 1 16] [--scales given] [--shapes]

Times are microseconds an operation, in CUDA graphs of 100 (the median over replays, of the slowest rank), bfloat16, in
place, with a residual. "chain": the operation behind a matrix product of cuBLAS that writes its input, in float16, less
the plain all-reduce in the same chain. ``--shapes``: every number of blocks a row, by both algorithms.
Results are compared with NumPy before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report, timing
from ipcreduce.bench.limit import our_backend
from ipcreduce.calls.norm_shape import NormAddresses, NormShape
from ipcreduce.ipc import norm_plan

WORLD = MPI.COMM_WORLD
CALLS, REPLAYS, INNER = 100, 15, 256  # INNER: of the matrix products
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


class Bench:
    """The arrays and launches of one shape."""

    def __init__(self, comm: ipcreduce.Communicator, shape: NormShape) -> None:
        self.comm, self.shape = comm, shape
        self._launches = our_backend(comm, "this benchmark").launches
        size, dtype = (shape.rows, shape.hidden), DTYPES[shape.dtype]
        self._values = [np.random.default_rng(rank).standard_normal(size).astype(dtype) for rank in range(comm.size)]
        self._residual = np.random.default_rng(99).standard_normal(size).astype(dtype)
        self._weight = np.random.default_rng(98).standard_normal(shape.hidden).astype(dtype)
        self.x, self._added = self._device(self._values[comm.rank]), self._device(self._residual)
        self._row = self._device(self._weight)
        self._quantised = cp.zeros(size, np.uint8)
        self._scales = cp.full(max(1, shape.rows * shape.hidden // 128), 0.05, np.float32)
        self._left = cp.full((shape.rows, INNER), 0.01, np.float16)
        self._right = cp.full((INNER, shape.hidden), 0.01, np.float16)

    @staticmethod
    def _device(values: Any) -> Any:
        return cp.asarray(values.view(np.uint16)).view(values.dtype)

    def addresses(self, pair: bool = False) -> NormAddresses:
        """In place. With a quantised result the pair alone writes y, over the input."""
        shape, x, added = self.shape, self.x.data.ptr, self._added.data.ptr
        return NormAddresses(
            source=x, weight=self._row.data.ptr, residual=added, residual_out=added,
            out=x if shape.keeps_y or pair else 0,
            quantised=self._quantised.data.ptr if shape.scales else 0,
            scales=self._scales.data.ptr if shape.scales else 0,
        )  # fmt: skip

    def fused(self, plan: norm_plan.NormPlan | None = None) -> Callable[[], None] | None:
        """A function that launches the fused kernel; None if there is none."""
        found = self._launches.fused_norm(self.shape, plan)
        if found is None:
            return None
        found.set(self.addresses())
        return lambda: found.launch.run(cp.cuda.get_current_stream().ptr)

    def plain(self) -> None:
        """The all-reduce alone, in place."""
        self.comm.allreduce(self.x, out=self.x)

    def pair(self) -> Callable[[], None]:
        """A function that launches the all-reduce, and then the norm."""
        norm = self._launches.norm_kernels.pair_launch(self.shape)
        norm.set(self.addresses(pair=True))

        def call() -> None:
            self.plain()
            norm.launch.run(cp.cuda.get_current_stream().ptr)

        return call

    def product(self) -> None:
        """A matrix product that writes the input."""
        cp.matmul(self._left, self._right, out=self.x)

    def plans(self) -> dict[str, norm_plan.NormPlan]:
        """The launch by every algorithm and number of blocks a row for which there is room."""
        launches, found = self._launches, {}
        for name, kernel in norm_plan.KERNELS.items():
            for cluster in (1, 2, 4, 8):
                plan = norm_plan.plan_launch(
                    kernel, cluster, self.shape, self.comm.size, launches.resident, launches.sharing
                )
                if plan is not None and plan.staging <= self._room():
                    found[f"{name} {cluster}"] = plan
        return found

    def _room(self) -> int:
        return our_backend(self.comm, "this benchmark").workspace.half_bytes - (64 << 10)

    def reset(self) -> None:
        """Set the inputs to their first values."""
        self.x.view(np.uint16)[...] = cp.asarray(self._values[self.comm.rank].view(np.uint16))
        self._added.view(np.uint16)[...] = cp.asarray(self._residual.view(np.uint16))

    def check(self, call: Callable[[], Any], keeps_y: bool = True) -> None:
        """One call from the first values. :raises AssertionError: if it is far from NumPy's float64."""
        self.reset()
        cp.cuda.get_current_stream().synchronize()
        call()
        cp.cuda.get_current_stream().synchronize()
        total = sum(values.astype(np.float64) for values in self._values) + self._residual.astype(np.float64)
        assert np.allclose(self._added.get().astype(np.float64), total, rtol=0.02, atol=0.05), "residual_out"
        y = total / np.sqrt((total**2).mean(1, keepdims=True) + self.shape.eps) * self._weight.astype(np.float64)
        if keeps_y:
            assert np.allclose(self.x.get().astype(np.float64), y, rtol=0.03, atol=0.05), "y"


def graph_of(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Microseconds a call."""
    return round(timing.in_graph(timing.captured(call, calls), calls, REPLAYS, WORLD).median, 3)


def in_chain(bench: Bench, call: Callable[[], Any]) -> float:
    """Microseconds of a product and a call behind it."""

    def link() -> None:
        bench.product()
        call()

    link()  # cuBLAS allocates its memory
    return graph_of(link)


def shape_of(rows: int, hidden: int, dtype: str, scales: str) -> NormShape:
    """With a quantised result, y is not kept."""
    return NormShape(rows, hidden, dtype, float(np.float32(1e-6)), 0.0, True, scales, keeps_y=not scales)


def row_of(comm: ipcreduce.Communicator, rows: int, hidden: int, scales: str, shapes: bool) -> dict[str, Any]:
    """The times of one shape."""
    bench = Bench(comm, shape_of(rows, hidden, "bfloat16", scales))
    fused, pair, planned = bench.fused(), bench.pair(), our_backend(comm, "").launches.norm_plan(bench.shape)
    row: dict[str, Any] = {"hidden": hidden, "rows": rows, "KB": rows * hidden * 2 // 1024, "scales": scales}
    row["plan"] = f"{planned.kernel} {planned.cluster} {planned.grid} x {planned.block}" if planned else "pair"
    row["all-reduce"] = graph_of(bench.plain)
    bench.check(pair)
    row["pair"] = graph_of(pair)
    if fused is not None:
        bench.check(fused, bench.shape.keeps_y)
        row["fused"] = graph_of(fused)
    if shapes:
        for name, plan in bench.plans().items():
            call = bench.fused(plan)
            assert call is not None
            bench.check(call, bench.shape.keeps_y)
            row[name] = graph_of(call)
    return row


def chain_of(comm: ipcreduce.Communicator, rows: int, hidden: int, scales: str, shapes: bool) -> dict[str, Any]:
    """The further time of fused kernels and pair behind a matrix product, over the all-reduce there."""
    bench = Bench(comm, shape_of(rows, hidden, "float16", scales))
    plain = in_chain(bench, bench.plain)
    row: dict[str, Any] = {"chain, product and all-reduce": plain}
    calls: dict[str, Callable[[], None] | None] = {"pair": bench.pair(), "fused": bench.fused()}
    calls |= {name: bench.fused(plan) for name, plan in (bench.plans() if shapes else {}).items()}
    for name, call in calls.items():
        if call is not None:
            row[f"chain, {name}"] = round(in_chain(bench, call) - plain, 3)
    return row


def main() -> None:
    """Measure every shape, and write the rows on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("json", type=Path)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 5120, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--scales", nargs="+", default=["none"], choices=["none", "given", "token", "group"])
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--no-chain", action="store_true")
    options = parser.parse_args()
    comm = ipcreduce.Communicator(device="auto", backend="ipc")
    rows: list[dict[str, Any]] = []
    with cp.cuda.Stream(non_blocking=True):
        for hidden in options.hidden:
            for count in options.rows:
                for scales in options.scales:
                    rows.append(row_of(comm, count, hidden, scales.replace("none", ""), options.shapes))
                    if not options.no_chain:
                        rows[-1] |= chain_of(comm, count, hidden, scales.replace("none", ""), options.shapes)
                    if comm.rank == 0:
                        print(rows[-1], flush=True)
    if comm.rank == 0:
        report.write_json(options.json, report.header(["benchmarks/fused.py"]) | {"rows": rows})
    comm.close()


if __name__ == "__main__":
    main()
