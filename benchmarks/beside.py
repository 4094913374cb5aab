"""Cost of all-reduces beside matrix products: what a program loses by them.

    mpirun -n 2 python benchmarks/beside.py OUT.json [--tokens 8192 2048] [--bytes 33554432] [--sms 8 16]

A layer is two products (tokens x 4096 x 4096, bfloat16) on one stream, and behind them an all-reduce of their result on
a second stream of high priority, as a backward pass has them. The ways take turns:

    NCCL        torch.distributed.all_reduce
    ipcreduce   Communicator.allreduce
    sms=8       the same with a limit of blocks

The host enqueues all layers while the GPU is held back. Times are milliseconds of all layers: the slowest rank's median
over the turns. ``alone`` is that of the all-reduces without products. ``cost`` is the time with both, less that of the
products in the same turn. Results are checked first.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import ipcreduce
from ipcreduce.bench import report

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
HIDDEN = 4096
HELD_CYCLES = 60_000_000  # 30 ms and more, for which the GPU is held back
CHECKED = 1 << 16  # elements at each end of a result
AllReduce = Callable[[torch.Tensor], object]


def join(device: torch.device) -> None:
    """Make PyTorch's default group of the ranks, which are on one host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = WORLD.bcast(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(RANK), "WORLD_SIZE": str(SIZE)}
    dist.init_process_group("nccl", device_id=device)


class Layers:
    """The layers of one number of tokens and bytes."""

    def __init__(self, device: torch.device, layers: int, tokens: int, nbytes: int) -> None:
        self.weights = [torch.randn(HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16) / 64 for _ in range(2)]
        self.x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        self.products = [torch.empty_like(self.x) for _ in range(2)]
        self.gradients = [torch.zeros(nbytes // 2, device=device, dtype=torch.bfloat16) for _ in range(layers)]
        self.beside = torch.cuda.Stream(device, priority=-1)

    def run(self, reduce: AllReduce | None, *, multiply: bool) -> float:
        """Milliseconds of all layers."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        current = torch.cuda.current_stream()
        torch.cuda.synchronize()
        WORLD.Barrier()
        torch.cuda._sleep(HELD_CYCLES)
        first.record()
        self.beside.wait_stream(current)
        for gradient in self.gradients:
            if multiply:
                torch.mm(self.x, self.weights[0], out=self.products[0])
                torch.mm(self.products[0], self.weights[1], out=self.products[1])
            if reduce is not None:
                self.beside.wait_stream(current)
                with torch.cuda.stream(self.beside):
                    reduce(gradient)
        current.wait_stream(self.beside)
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    def check(self, name: str, reduce: AllReduce) -> None:
        """Compare both ends of a result with the sum of every rank's, on the host."""
        gradient = self.gradients[0]
        for late in range(SIZE):
            generator = torch.Generator(gradient.device).manual_seed(100 * late + RANK)
            gradient.normal_(generator=generator)
            ends = torch.cat([gradient[:CHECKED], gradient[-CHECKED:]]).float().cpu().numpy()
            due = sum(WORLD.allgather(ends))
            if late == RANK:
                torch.cuda._sleep(HELD_CYCLES // 10)
            reduce(gradient)
            found = torch.cat([gradient[:CHECKED], gradient[-CHECKED:]]).float().cpu().numpy()
            assert abs(found - due).max() <= 2**-7 * abs(due).max(), f"{name}: wrong sums"
            gradient.zero_()


def ways(comm: ipcreduce.Communicator, limits: list[int]) -> dict[str, AllReduce]:
    found: dict[str, AllReduce] = {
        "NCCL": lambda x: dist.all_reduce(x),
        "ipcreduce": lambda x: comm.allreduce(x, out=x),
    }
    for sms in limits:
        found[f"sms={sms}"] = lambda x, sms=sms: comm.allreduce(x, out=x, sms=sms)
    return found


def median(times: list[float]) -> float:
    return float(WORLD.allreduce(statistics.median(times), MPI.MAX))


def measure(layers: Layers, every: dict[str, AllReduce], turns: int) -> dict[str, dict[str, float]]:
    for name, reduce in every.items():
        layers.check(name, reduce)
    alone: dict[str, list[float]] = {name: [] for name in every}
    cost: dict[str, list[float]] = {name: [] for name in every}
    products: list[float] = []
    for turn in range(turns + 2):
        for name, reduce in every.items():
            of_products = layers.run(None, multiply=True)
            both, without = layers.run(reduce, multiply=True), layers.run(reduce, multiply=False)
            if turn >= 2:  # the GPU's clock has fallen by then
                products.append(of_products)
                cost[name].append(both - of_products)
                alone[name].append(without)
    found = {name: {"alone": median(alone[name]), "cost": median(cost[name])} for name in every}
    return {"products": {"alone": median(products)}} | found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path)
    add("--tokens", type=int, nargs="+", default=[8192, 2048])
    add("--bytes", type=int, nargs="+", default=[32 << 20])
    add("--sms", type=int, nargs="+", default=[8])
    add("--layers", type=int, default=16)
    add("--turns", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda", RANK)
    torch.cuda.set_device(device)
    join(device)
    rows = []
    with ipcreduce.Communicator(device=RANK) as comm:
        every = ways(comm, options.sms)
        for tokens in options.tokens:
            for nbytes in options.bytes:
                layers = Layers(device, options.layers, tokens, nbytes)
                found = measure(layers, every, options.turns)
                rows.append({"tokens": tokens, "bytes": nbytes, "ms": found})
                if RANK == 0:
                    print(f"{tokens} tokens, {nbytes} bytes, products {found['products']['alone']:.2f} ms")
                    for name in every:
                        one, ratio = found[name], found[name]["cost"] / found["NCCL"]["cost"]
                        text = f"alone {one['alone']:6.2f}, cost {one['cost']:6.2f}, {ratio:5.2f} x NCCL's"
                        print(f"  {name:10} {text}", flush=True)
                del layers
        if RANK == 0:
            about = {"layers": options.layers, "turns": options.turns, "ranks": SIZE, "rows": rows}
            report.write_json(options.out, report.header(sys.argv) | about)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
