# mpirun -n 2 python mpi_examples/train_fsdp.py
"""Train a model that ``fully_shard`` has split among the ranks.

The same model is trained whole, on the whole batch, by one process: the losses are the same.
"""

from __future__ import annotations

import os
import socket
import sys

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)
from mpi4py import MPI

import ipcreduce
import ipcreduce.torch

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
STEPS, BATCH, WIDTH = 5, 8, 64


def join(on_gpu: bool) -> str:
    """Make PyTorch's default group. Returns the type of device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = WORLD.bcast(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(RANK), "WORLD_SIZE": str(SIZE)}
    if on_gpu:
        torch.cuda.set_device(RANK)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return "cuda" if on_gpu else "cpu"


def make_model(device: str) -> nn.Sequential:
    """Two layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """The loss of each step, on these samples."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    device = join(torch.cuda.device_count() >= SIZE)
    torch.manual_seed(1)
    x, y = torch.randn(SIZE * BATCH, WIDTH).to(device), torch.randn(SIZE * BATCH, WIDTH).to(device)
    mine = slice(RANK * BATCH, (RANK + 1) * BATCH)
    with ipcreduce.Communicator(dist.group.WORLD) as comm:
        model = make_model(device)
        mesh = init_device_mesh(device, (SIZE,))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
            module.set_custom_all_gather(ipcreduce.torch.FSDPAllGather(comm))
            module.set_custom_reduce_scatter(ipcreduce.torch.FSDPReduceScatter(comm))
        calls = comm.calls
        losses = [comm.allreduce(loss, "mean") for loss in train(model, x[mine], y[mine])]
        whole = train(make_model(device), x, y)
        assert all(abs(one - other) < 1e-4 for one, other in zip(losses, whole, strict=True)), (losses, whole)
        if RANK == 0:
            made = comm.calls - calls
            print(f"losses {losses[0]:.3f} to {losses[-1]:.3f} on {SIZE} ranks, as of one; {made} calls of ipcreduce")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
