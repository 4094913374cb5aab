"""All-reduce for the GPUs of one host: CUDA IPC kernels compiled by NVRTC, over MPI, without PyTorch.

    mpirun -n 4 python app.py          # import ipcreduce; total = ipcreduce.allreduce(array)

Importing needs no GPU, no driver and no MPI; each is looked for when it is used.
"""

from __future__ import annotations

from .communicator import Communicator
from .default import allreduce, get_communicator
from .errors import (
    ArgumentError,
    CaptureError,
    CudaError,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    UnsupportedError,
)
from .graphs.graph import Graph

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CaptureError",
    "Communicator",
    "CudaError",
    "Graph",
    "GraphStateError",
    "IpcReduceError",
    "PeerFailedError",
    "PeerLostError",
    "PeerTimeoutError",
    "RankMismatchError",
    "UnsupportedError",
    "allreduce",
    "get_communicator",
]
