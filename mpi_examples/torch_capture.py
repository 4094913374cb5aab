# mpirun -n 4 python mpi_examples/torch_capture.py
"""An ipcreduce all-reduce inside torch.cuda.graph, captured and replayed by PyTorch.

No registration is needed. Every rank must replay the same graphs in the same order, and close the communicator only
after the last replay. Without GPUs the same work is done on tensors of the host, one call a turn. Needs PyTorch.
"""

from __future__ import annotations

import sys

from mpi4py import MPI

import ipcreduce

TURNS, COUNT = 100, 5000

comm = ipcreduce.Communicator(device="auto")  # takes a GPU for each rank, if there are any
try:
    import torch
except ImportError:
    if comm.rank == 0:
        print("this example needs PyTorch: pip install torch")
    comm.close()
    sys.exit(0)

graph = None
if comm.backend == "host":
    if comm.rank == 0:
        print(
            "no GPUs here: with GPUs PyTorch captures the work once, all-reduce included, and each turn is one launch"
        )
    x, total = torch.ones(COUNT), torch.empty(COUNT)
else:
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    x, total = torch.ones(COUNT, device="cuda"), torch.empty(COUNT, device="cuda")
    comm.allreduce(x, out=total, stream=torch.cuda.current_stream())  # compiles the kernels before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        comm.allreduce(doubled, out=total, stream=torch.cuda.current_stream())
        y = total + 1

wrong = 0
for turn in range(TURNS):
    x.fill_((comm.rank + 1) * turn)
    if graph is not None:
        graph.replay()
    else:
        comm.allreduce((x * 2).numpy(), out=total.numpy())  # NumPy's view of the same memory
        y = total + 1
    expected = 2 * turn * sum(range(1, comm.size + 1)) + 1
    wrong += not bool((y == expected).all())

if comm.rank == 0:
    print(f"{comm.size} ranks, backend {comm.backend}: {TURNS} turns, {wrong} wrong", flush=True)
comm.synchronize()
del graph
comm.close()
sys.exit(0 if MPI.COMM_WORLD.allreduce(wrong) == 0 else 1)
