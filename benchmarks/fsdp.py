"""Time of a training step of a model that ``fully_shard`` has split, over NCCL and over ipcreduce.

    mpirun -n 2 python benchmarks/fsdp.py OUT.json [--tokens 4096] [--layers 8] [--rounds 10]

A layer is two products, 4096 x 16384 and back, in bfloat16. The ways take turns; a time is the median over the rounds
of the slowest rank, in milliseconds. "two" has a communicator for each of FSDP's two streams. The losses are compared
first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ipcreduce
import ipcreduce.torch
from ipcreduce.bench import report

sys.path.insert(0, str(Path(__file__).parent))
from beside import join

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
HIDDEN = 4096


def made(device: torch.device, layers: int, gather: object, scatter: object) -> nn.Module:
    """A sharded model, the same for each way."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)) for _ in range(layers)
    ]
    model = nn.Sequential(*blocks).to(device, torch.bfloat16)
    mesh = init_device_mesh("cuda", (SIZE,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
        if gather is not None:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return model


def stepper(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward, backward, and an optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(step: Callable[[], torch.Tensor], steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    WORLD.Barrier()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(WORLD.allreduce(begin.elapsed_time(end) / steps, MPI.MAX))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    join(device)
    gather, scatter = ipcreduce.torch.FSDPAllGather, ipcreduce.torch.FSDPReduceScatter
    rows = []
    with ipcreduce.Communicator(device=device.index) as one, ipcreduce.Communicator(device=device.index) as other:
        models = {
            "NCCL": made(device, options.layers, None, None),
            "one": made(device, options.layers, gather(one), scatter(one)),
            "two": made(device, options.layers, gather(one), scatter(other)),
        }
        for tokens in options.tokens:
            x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
            steps = {name: stepper(model, x) for name, model in models.items()}
            losses = {name: float(step()) for name, step in steps.items()}
            assert max(losses.values()) - min(losses.values()) < 1e-2 * losses["NCCL"], losses
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(options.rounds):
                for name, step in steps.items():
                    times[name].append(timed(step, 3))
            row = {"tokens": tokens} | {name: round(statistics.median(found[1:]), 3) for name, found in times.items()}
            rows.append(row)
            if RANK == 0:
                print(row, flush=True)
        if RANK == 0:
            head = report.header(["benchmarks/fsdp.py", *sys.argv[1:]])
            report.write_json(options.out, head | {"ranks": SIZE, "layers": options.layers, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
