"""Times an all-reduce with an expression, beside a plain one, and a plain one with a second kernel behind it.

    mpirun -n 2 python benchmarks/maps.py OUT.json

Every call is checked against NumPy before it is timed. Times are microseconds a call in a CUDA graph of 100 (median
over replays, maximum over ranks). The second kernel is this package's own (kernels/map.cu, on a communicator of one
rank), and CuPy's ElementwiseKernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
from mpi4py import MPI

import ipcreduce
from ipcreduce import Map
from ipcreduce.bench import report, timing

WORLD = MPI.COMM_WORLD
HIDDEN, ROWS = 8192, (1, 8, 64, 256, 1024)
CALLS, REPLAYS = 100, 25

Values = np.ndarray[Any, Any]


def silu(v: Values, a: Values) -> Values:
    """The last two expressions, in float32."""
    return v / (1 + np.exp(-v)) + a


# By name: the expression, its function for the check, and the CuPy kernel that does the same, if it is timed.
EXPRESSIONS: dict[str, tuple[str, Callable[[Values, Values], Values], str]] = {
    "v * s": ("v * s", lambda v, a: v * np.float32(0.5), ""),
    "v + row": ("v + row", lambda v, a: v + a[:1], ""),
    "v + a": ("v + a", lambda v, a: v + a, "y = v + a"),
    "silu(v) + a": (
        "__fdividef(v, 1 + __expf(-v)) + a", silu, "y = __fdividef((float)v, 1 + __expf(-(float)v)) + (float)a"
    ),
    "silu(v) + a, exact division": ("v / (1 + __expf(-v)) + a", silu, ""),
}  # fmt: skip


def measure(comm: Any, alone: Any, rows: int, name: str) -> dict[str, Any]:
    """Check one expression for one size, and time it."""
    text, function, of_cupy = EXPRESSIONS[name]
    given = [np.random.default_rng([rows, rank]).integers(-8, 9, (rows, HIDDEN)) for rank in range(WORLD.size)]
    other = np.random.default_rng([rows, 99, WORLD.rank]).integers(-8, 9, (rows, HIDDEN)).astype(np.float16)
    x, a = cp.asarray(given[WORLD.rank].astype(np.float16)), cp.asarray(other)
    out, row = cp.empty_like(x), a[0].copy()
    operands = {key: value for key, value in {"a": a, "row": row, "s": 0.5}.items() if key in text.split(" ")}
    operands = operands or {"a": a}
    then = Map(text, **operands)

    def plain() -> None:
        comm.allreduce(x, out=out)

    def mapped() -> None:
        comm.allreduce(x, out=out, then=then)

    def own_second() -> None:
        comm.allreduce(x, out=out)
        alone.allreduce(out, out=out, then=then)

    calls = {"plain": plain, "mapped": mapped, "two": own_second}
    if of_cupy:
        kernel = cp.ElementwiseKernel("float16 v, float16 a", "float16 y", of_cupy, "second")

        def cupy_second() -> None:
            comm.allreduce(x, out=out)
            kernel(out, a, out)

        calls["cupy"] = cupy_second
    wanted = function(sum(given).astype(np.float16).astype(np.float32), other.astype(np.float32))
    for key, call in calls.items():
        out.fill(0)
        call()
        comm.synchronize()
        found = out.get().astype(np.float32)
        exact = sum(given) if key == "plain" else wanted
        assert np.allclose(found, exact, rtol=2e-3, atol=1e-2), f"{name}, {rows} rows, {key}: {found}, not {exact}"
        if "expf" not in text and key != "plain":
            assert (found == wanted.astype(np.float16).astype(np.float32)).all(), f"{name}, {rows} rows, {key}"
    found_times = {}
    for _ in range(2):  # in turns: the smaller one of two counts
        for key, call in calls.items():
            median = timing.in_graph(timing.captured(call, CALLS), CALLS, REPLAYS, WORLD).median
            found_times[key] = round(min(median, found_times.get(key, median)), 3)
    eager = {
        f"host of {key}": round(timing.eagerly(calls[key], 200, 5, WORLD)[1].median, 2) for key in ("plain", "mapped")
    }
    return {"rows": rows, "KB": rows * HIDDEN * 2 // 1024, "expression": text} | found_times | eager


def main(out: str) -> None:
    """Measure everything, and write the rows on rank 0."""
    comm = ipcreduce.Communicator(device="auto")
    alone = ipcreduce.Communicator(MPI.COMM_SELF)
    rows = []
    with cp.cuda.Stream(non_blocking=True):
        for count in ROWS:
            for name in EXPRESSIONS:
                rows.append({"name": name} | measure(comm, alone, count, name))
                if comm.rank == 0:
                    print(rows[-1], flush=True)
    if comm.rank == 0:
        report.write_json(Path(out), report.header(["benchmarks/maps.py"]) | {"rows": rows})
    alone.close()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1])
