"""Times all-reduce, residual and RMSNorm in one kernel beside the plain all-reduce and the unfused pair.

    mpirun -n 2 python benchmarks/fused.py OUT.json [--only table,fp8,chain,shapes,eager,peers] [--seconds 220]

- table: bfloat16 with a residual, in graphs of 100: all-reduce, fused, pair, and what the last two take more
- fp8: the results quantised by a given scale, by one a row, and by one every 128 elements, beside those that are not
- chain: between two matrix products of PyTorch, from which only the time of all three is known
- shapes: every number of blocks and units a thread for which there is room, behind one another and in that chain
- eager: calls that are not captured, in turns: on the host alone the least and the median, and from end to end
- peers: FlashInfer's call beside ours, behind one another and in that chain; nothing without FlashInfer

"pair" is the call of a communicator without fused kernels, which runs the all-reduce, and then the norm. Before it is
timed, a call's results are compared with NumPy's bit for bit, three times: with other data, outputs that are poisoned,
and one rank late. FlashInfer rounds otherwise, so its results only have to be within four steps of bfloat16. Times are
microseconds: medians of the slowest rank, over replays and over three turns. The chain has copies instead of products
if there is no PyTorch. A part that runs out of its time says what it left out.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy as cp
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report, timing
from ipcreduce.bench.norms import without_fused

try:
    from benchmarks.norm_cases import EPS, Call, Case, Products, WrongError, load, name_of, plans
    from benchmarks.norm_peers import FlashInfer
except ImportError:  # a script whose clone is not on the path
    from norm_cases import EPS, Call, Case, Products, WrongError, load, name_of, plans
    from norm_peers import FlashInfer

WORLD = MPI.COMM_WORLD
HIDDEN, ROWS = (4096, 5120, 8192), tuple(1 << power for power in range(10))
FEW_ROWS, FP8_ROWS = (1, 8, 32, 64), (1, 8, 32, 64, 128, 256)
TURNS, EAGER_TURNS = 3, 24


def say(text: str) -> None:
    """Print on rank 0."""
    if WORLD.rank == 0:
        print(text, flush=True)


class Bench:
    """The parts, their options and their rows."""

    def __init__(self, comms: tuple[Any, Any], options: argparse.Namespace) -> None:
        self.comms, self.options, self.wrong = comms, options, 0
        self.ends = 0.0  # of the part that runs

    def cases(self, rows: tuple[int, ...], scales: str = "") -> Iterator[Case]:
        """A case for every shape, as long as there is time."""
        every = [(h, r) for r in self.options.rows or rows for h in self.options.hidden]  # the largest come last
        for index, (hidden, count) in enumerate(every):
            if WORLD.bcast(time.monotonic() > self.ends):
                say(f"  out of time: {len(every) - index} shapes left out, from {hidden} x {count} on")
                return
            yield Case(self.comms, count, hidden, scales)

    def checked(self, case: Case, name: str, call: Call, plain: bool = False, bits: bool = True) -> bool:
        """True if the results of a call are right, which it says otherwise."""
        try:
            case.check(name, call, plain, bits)
        except WrongError as error:
            self.wrong += 1
            say(f"  WRONG {error}")
            return False
        return True

    def timed(self, calls: dict[str, Call], captured: Callable[[Call, int], Call] = timing.captured) -> dict[str, Any]:
        """The microseconds of each call in a graph. All take turns."""
        count = self.options.calls
        graphs = {name: captured(call, count) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, launch in graphs.items():
                found[name].append(timing.in_graph(launch, count, self.options.replays, WORLD).median)
        return {name: round(statistics.median(times), 3) for name, times in found.items()}

    def calls(self, case: Case) -> dict[str, Call]:
        """The calls of a shape whose results are right."""
        every = {"all-reduce": case.plain, "fused": case.fused, "pair": case.pair}
        return {name: call for name, call in every.items() if self.checked(case, name, call, name == "all-reduce")}

    def table(self) -> Iterator[dict[str, Any]]:
        """All-reduce, fused, and pair."""
        for case in self.cases(ROWS):
            yield place(case) | {"by": case.by} | more(self.timed(self.calls(case)))

    def fp8(self) -> Iterator[dict[str, Any]]:
        """The three kinds of scales beside the call without quantisation."""
        for case in self.cases(FP8_ROWS):
            calls = {"fused": case.fused} if self.checked(case, "fused", case.fused) else {}
            for kind in ("given", "token", "group"):
                other = Case(self.comms, *case.x.shape, kind)
                if self.checked(other, kind, other.fused):
                    calls[kind] = other.fused
            yield place(case) | more(self.timed(calls), "fused")

    def chain(self) -> Iterator[dict[str, Any]]:
        """The same as the table, between two products."""
        for case in self.cases(FEW_ROWS):
            products = Products(case)
            calls = {name: products.around(call, name == "all-reduce") for name, call in self.calls(case).items()}
            found = more(self.timed(calls, products.captured))
            yield place(case) | {"by": case.by, "products": "torch" if products.torch else "copies"} | found

    def shapes(self) -> Iterator[dict[str, Any]]:
        """Every launch, alone and between products. The times are what they take more than the all-reduce there."""
        for case in self.cases(ROWS):
            planned = list(plans(case))
            load(case, planned)
            calls: dict[str, Call] = {"all-reduce": case.plain}
            calls |= {name_of(one): case.by_plan(one) for one in planned}
            calls = {name: call for name, call in calls.items() if self.checked(case, name, call, call == case.plain)}
            products = Products(case)
            chains = {name: products.around(call, name == "all-reduce") for name, call in calls.items()}
            alone, chained = self.timed(calls), self.timed(chains, products.captured)
            yield place(case) | {"by": case.by, "alone": alone, "chained": chained} | best(alone, chained)

    def eager(self) -> Iterator[dict[str, Any]]:
        """Calls that are not captured, for arrays of CuPy and PyTorch."""
        for case in self.cases((1, 16)):
            kinds: dict[str, Any] = {"": (case.x, case.weight, case.residual, case.total)}
            products = Products(case)
            if products.torch:
                kinds[" tensors"] = tuple(map(products.tensor, kinds[""]))
            row = place(case)
            for kind, arrays in kinds.items():
                calls = self._eager_calls(*arrays)
                row |= {name + kind: times for name, times in self._eagerly(calls, products).items()}
            yield row

    def peers(self) -> Iterator[dict[str, Any]]:
        """Another library's call, alone and between products, as ``shapes`` has it."""
        try:
            peer = FlashInfer(max(self.options.rows or ROWS), max(self.options.hidden))
        except ImportError as error:
            say(f"  without FlashInfer: {error}")
            return
        for case in self.cases(ROWS):
            products = Products(case)
            calls = self.calls(case) | {
                name: call for name, call in peer.calls(case, products).items()
                if self.checked(case, name, call, bits=False)
            }  # fmt: skip
            chains = {name: products.around(call, name == "all-reduce") for name, call in calls.items()}
            alone, chained = (self.timed(every, products.captured) for every in (calls, chains))
            yield place(case) | {"by": case.by, "alone": alone, "chained": chained}
        peer.close()

    def _eager_calls(self, x: Any, weight: Any, residual: Any, total: Any) -> dict[str, Call]:
        """Calls as programs write them: ``functools.partial`` would pass the keywords in a slower way."""
        comm, pairs = self.comms
        return {
            "all-reduce": lambda: comm.allreduce(x, out=total),
            "in place": lambda: comm.allreduce_rmsnorm(x, weight, EPS, residual=residual, out=x, residual_out=residual),
            "new outputs": lambda: comm.allreduce_rmsnorm(x, weight, EPS, residual=residual),
            "pair in place": lambda: pairs.allreduce_rmsnorm(
                x, weight, EPS, residual=residual, out=x, residual_out=residual
            ),
        }

    def _eagerly(self, calls: dict[str, Call], products: Products) -> dict[str, str]:
        """Of each call the host's time, least and median, and the median from end to end."""
        torch = products.torch
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
        with torch.cuda.stream(products._stream) if torch else cp.cuda.get_current_stream():
            for _ in range(EAGER_TURNS):
                for name, call in calls.items():
                    for times, one in zip(found[name], timing.eagerly(call, self.options.calls, 1, WORLD), strict=True):
                        times.append(one.median)
        return {
            name: f"{min(hosts):.2f}, {statistics.median(hosts):.2f}, {statistics.median(ends):.2f}"
            for name, (ends, hosts) in found.items()
        }


def place(case: Case) -> dict[str, Any]:
    """The shape, as every row has it."""
    shape = case.shape
    return {"hidden": shape.hidden, "rows": shape.rows, "KB": shape.nbytes // 1024}


def more(times: dict[str, float], base: str = "all-reduce") -> dict[str, Any]:
    """The times, and behind each what it takes more than the base."""
    found: dict[str, Any] = {}
    for name, microseconds in times.items():
        found[name] = microseconds
        if name != base and base in times:
            found[f"{name}, more"] = round(microseconds - times[base], 3)
    return found


def best(alone: dict[str, float], chained: dict[str, float]) -> dict[str, Any]:
    """Of all launches the best alone, the best in a chain, and that with the least sum of both: +alone/+chained."""
    base = alone["all-reduce"], chained["all-reduce"]
    extra = {name: (alone[name] - base[0], chained[name] - base[1]) for name in alone if name != "all-reduce"}
    orders = {"best alone": lambda one: one[0], "best chained": lambda one: one[1], "best in both": sum}
    found = {}
    for what, key in orders.items():
        name = min(extra, key=lambda one: key(extra[one]), default="")
        found[what] = f"{name} {extra[name][0]:+.2f}/{extra[name][1]:+.2f}" if name else ""
    return found


def shown(row: dict[str, Any]) -> str:
    """A row in one line. Tables of shapes follow in lines of their own."""
    first = f"{row['hidden']:>5} x {row['rows']:<3} {row['KB']:>5} KB"
    apart = "hidden", "rows", "KB", "alone", "chained"
    cells = [f"{name} {value}" for name, value in row.items() if name not in apart]
    lines = [" | ".join([first, *cells])]
    if "alone" in row:
        base = row["alone"]["all-reduce"], row["chained"]["all-reduce"]
        lines.append(f"      all-reduce {base[0]:.2f}, chained {base[1]:.2f}; each launch +alone/+chained:")
        every = [
            f"{name} {row['alone'][name] - base[0]:+.2f}/{row['chained'][name] - base[1]:+.2f}"
            for name in row["alone"] if name != "all-reduce"
        ]  # fmt: skip
        lines += ["      " + "; ".join(every[start : start + 6]) for start in range(0, len(every), 6)]
    return "\n".join(lines)


PARTS = {
    "table": Bench.table, "fp8": Bench.fp8, "chain": Bench.chain, "shapes": Bench.shapes, "eager": Bench.eager,
    "peers": Bench.peers,
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("json", type=Path)
    add("--only", default=",".join(PARTS), help="parts, with commas between them")
    add("--seconds", type=float, default=220, help="for all parts together")
    add("--hidden", type=int, nargs="+", default=HIDDEN)
    add("--rows", type=int, nargs="+", help="instead of each part's own")
    add("--calls", type=int, default=100, help="in a graph")
    add("--replays", type=int, default=13)
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in PARTS]:
        parser.error(f"--only {unknown[0]}: there is no such part. Choose from {', '.join(PARTS)}")
    return options


def main() -> None:
    """Run the parts, and write the rows on rank 0 after each."""
    options = arguments()
    faulthandler.dump_traceback_later(1.5 * options.seconds + 60, exit=True)
    comms = tuple(ipcreduce.Communicator(device="auto", backend="ipc") for _ in range(2))
    without_fused(comms[1])
    bench, result = Bench(comms, options), report.header(["benchmarks/fused.py", *options.only])
    begin = time.monotonic()
    with cp.cuda.Stream(non_blocking=True):
        for index, name in enumerate(options.only):
            left = begin + options.seconds - time.monotonic()
            bench.ends = time.monotonic() + left / (len(options.only) - index)
            say(f"{name} (at {time.monotonic() - begin:.0f} s)")
            rows = result[name] = []
            try:
                for row in PARTS[name](bench):
                    rows.append(row)
                    say(shown(row))
            except Exception as error:  # the other parts may still work
                traceback.print_exc()
                result[f"{name}, error"] = f"{type(error).__name__}: {error}"
                bench.wrong += 1
            if WORLD.rank == 0:
                report.write_json(options.json, result)
    say(f"{time.monotonic() - begin:.0f} s, {bench.wrong} wrong")
    for comm in comms:
        comm.close()
    raise SystemExit(bool(bench.wrong))


if __name__ == "__main__":
    main()
