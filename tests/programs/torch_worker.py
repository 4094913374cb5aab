"""``python -m tests.programs.torch_worker DIRECTORY RANK SIZE``: a rank of a process group of PyTorch, on the CPU."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.modules["mpi4py"] = None  # type: ignore[assignment]

import numpy as np
import pytest
import torch
import torch.distributed

from ipcreduce import Communicator, errors


def main(directory: str, rank: int, size: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    world = torch.distributed.group.WORLD
    halves = [torch.distributed.new_group([*range(size // 2)]), torch.distributed.new_group([*range(size // 2, size)])]
    own = halves[rank >= size // 2]
    with Communicator(world, timeout=60) as comm, Communicator(own, timeout=60) as half:
        assert (comm.rank, comm.size) == (rank, size)
        assert (half.rank, half.size) == (rank % (size // 2), size // 2)
        assert comm.allreduce(rank + 1) == size * (size + 1) // 2
        assert half.allreduce(1) == size // 2
        source = torch.full((1000,), rank + 1.0)
        assert (np.asarray(comm.allreduce(source)) == size * (size + 1) / 2).all()
    with pytest.raises(errors.ArgumentError, match=r"which is no group .* a torch.distributed process group"):
        Communicator(halves[rank < size // 2], timeout=60)  # of others
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    with pytest.raises(errors.ArgumentError, match=r"which is no group \("):
        Communicator(world, timeout=60)
    assert "mpi4py.MPI" not in sys.modules
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
