"""All-reduce and its two halves for the GPUs of one host, by kernels over memory that the ranks share.

    mpirun -n 4 python app.py          # import ipcreduce; total = ipcreduce.allreduce(array)

Importing needs no GPU, no driver and no MPI; each is looked for when it is used.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING

from . import habits as _habits
from .arrays.maps import Map
from .arrays.norms import FP8
from .communicator import Communicator
from .default import allgather, allreduce, allreduce_rmsnorm, broadcast, get_communicator, reduce_scatter
from .errors import (
    AddressChangedError,
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
from .graphs.addresses import collect_addresses
from .graphs.breaks import eager_break
from .graphs.forward_context import forward_context, get_forward_context
from .graphs.graph import Graph
from .graphs.runner import GraphRunner
from .ranks.groups import Group

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # programs that want the log add a handler of their own

__all__ = [  # noqa: RUF022 - as sorted() sorts
    "AddressChangedError",
    "ArgumentError",
    "CaptureError",
    "Communicator",
    "CudaError",
    "FP8",
    "Graph",
    "GraphRunner",
    "GraphStateError",
    "Group",
    "IpcReduceError",
    "Map",
    "PeerFailedError",
    "PeerLostError",
    "PeerTimeoutError",
    "RankMismatchError",
    "UnsupportedError",
    "allgather",
    "allreduce",
    "allreduce_rmsnorm",
    "broadcast",
    "collect_addresses",
    "eager_break",
    "forward_context",
    "get_communicator",
    "get_forward_context",
    "reduce_scatter",
]

if not TYPE_CHECKING:  # for a type checker, every name would be one of this module

    def __getattr__(name: str) -> object:
        """Import ``ipcreduce.torch`` when it is first used, if the program has imported PyTorch."""
        if name != "torch":
            _habits.not_in_module(name)
        if sys.modules.get(name) is None:
            raise AttributeError("ipcreduce.torch needs PyTorch, which is not imported. Write: import ipcreduce.torch")
        return importlib.import_module("ipcreduce.torch")
