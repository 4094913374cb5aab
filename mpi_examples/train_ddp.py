# mpirun -n 2 python mpi_examples/train_ddp.py
"""Data-parallel training with PyTorch, by DistributedDataParallel with ipcreduce's hook, and without it.

Each rank has the whole model and a share of each batch. With DistributedDataParallel the hook averages a bucket of
gradients as soon as it is full. On GPUs that happens beside the rest of the backward pass. Without it, the gradients
are averaged after the backward pass. The weights of both are compared with those of a training in one process.
"""

from __future__ import annotations

import os
import sys

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)
from mpi4py import MPI

import ipcreduce
import ipcreduce.torch

STEPS, ROWS, WIDTH = 20, 32, 256  # rows of a batch: on each rank
TOLERANCE = 1e-4  # relative to the largest weight: float32 sums are taken in another order

world = MPI.COMM_WORLD
comm = ipcreduce.Communicator(device="auto")
on_gpus = comm.backend != "host"
device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def join() -> None:
    """Make PyTorch's default group of the ranks. Under torchrun, init_process_group("gloo") is all that it takes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one host
    server = dist.TCPStore("localhost", 0, comm.size, True, wait_for_workers=False) if comm.rank == 0 else None
    port = world.bcast(server.port if server else None)
    store = server or dist.TCPStore("localhost", port, comm.size, False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)).to(device)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x.to(device), x.sum(1, keepdim=True).sign().to(device)


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients over the ranks, in place."""
    gradients = [parameter.grad for parameter in model.parameters()]
    comm.allreduce(gradients, "mean", out=gradients)


def train(model: torch.nn.Module, ranks: list[int], averaged: bool) -> list[torch.Tensor]:
    """Train on the shares of these ranks. Returns the weights.

    :param averaged: the gradients have to be averaged after the backward pass.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, wanted = (torch.cat(parts) for parts in zip(*(batch(step, rank) for rank in ranks), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), wanted).backward()
        if averaged:
            average_gradients(model)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def main() -> bool:
    join()
    parallel = DistributedDataParallel(new_model(), bucket_cap_mb=0.25)
    parallel.register_comm_hook(None, ipcreduce.torch.ddp_hook(comm))
    due = train(new_model(), [*range(comm.size)], averaged=False)  # in one process
    ok = True
    for name, weights in (
        ("DistributedDataParallel", train(parallel, [comm.rank], averaged=False)),
        ("one all-reduce a gradient", train(new_model(), [comm.rank], averaged=True)),
    ):
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(weights, due, strict=True)]
        everyone = world.allgather([weight.cpu().numpy().tobytes() for weight in weights])
        same = all(other == everyone[0] for other in everyone)
        ok = ok and same and max(errors) <= TOLERANCE
        if comm.rank == 0:
            print(
                f"{comm.size} ranks, backend {comm.backend}, {name}: within {max(errors):.1e} of one process, at most "
                f"{TOLERANCE:g}; the ranks have {'the same' if same else 'DIFFERENT'} weights",
                flush=True,
            )
    return ok


if comm.rank == 0 and not on_gpus:
    print("no GPUs here: with GPUs the all-reduces run there, beside the backward pass")
ok = main()
comm.synchronize()
comm.close()
dist.destroy_process_group()
sys.exit(0 if world.allreduce(ok, MPI.LAND) else 1)
