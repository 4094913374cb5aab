"""The object that vLLM and SGLang keep as ``ca_comm``: the all-reduce of a tensor-parallel group."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..communicator import Communicator
from ..dtypes import DTYPE_NAMES
from ..errors import UnsupportedError
from ..ipc.workspace import bytes_for

MAX_SIZE = 8 << 20  # both engines' own
_DTYPES = frozenset(getattr(torch, name) for name in DTYPE_NAMES if hasattr(torch, name))
_log = logging.getLogger("ipcreduce.serving")


class EngineAllReduce:
    """Sums tensors of a group of ranks on one host, eagerly and in captures. Making one is collective.

    :param group: the ranks, as :class:`Communicator` takes them; the engines pass a process group of gloo.
    :param device: this rank's GPU, as an ordinal, a name or a ``torch.device``. With "cpu" it sums tensors on the host.
    :param max_size: the largest message, in bytes; larger ones are declined. The workspace has room for one.
    :param symm_mem_enabled: vLLM's; it has no effect, because ``max_size`` alone decides.
    :param register_graph_buffers: vLLM's; it has no effect, because nothing has to be registered.
    :raises PeerTimeoutError: if a rank does not come.

    Where the kernels cannot run, as between several hosts, it is ``disabled`` on every rank, and the engine goes on to
    its next way. An engine may set ``disabled`` itself. A dropped one is closed at the end of the process.
    """

    # vLLM's models ask for these before they take all-gathers or fused kernels of vLLM's own class. Here are none.
    fully_connected = False
    mnnvl_lamport_ag_multicast_ptr = 0

    def __init__(
        self, group: Any, device: Any, max_size: int = MAX_SIZE, symm_mem_enabled: bool = False, *,
        register_graph_buffers: bool = True,
    ) -> None:  # fmt: skip
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.max_size = max_size
        self.disabled = True
        self._comm: Communicator | None = None
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        backend = "mpi" if self.device.type == "cpu" else "ipc"
        try:
            self._comm = Communicator(group, device=self.device.index, backend=backend, workspace=bytes_for(max_size))
        except UnsupportedError as error:
            _log.warning("ipcreduce's all-reduce is disabled: %s", error)
            return
        for dtype in (torch.float16, torch.bfloat16, torch.float32):  # loads the kernels: never first in a capture
            self._comm.allreduce(torch.zeros(8, dtype=dtype, device=self.device))
        self._comm.synchronize()
        self.disabled = False
        _log.info("ipcreduce's all-reduce: %s", "; ".join(self._comm.describe().splitlines()))

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """True if :meth:`custom_all_reduce` takes the tensor: by size, dtype, layout and device, as on every rank."""
        return (
            not self.disabled
            and inp.numel() * inp.element_size() <= self.max_size
            and inp.dtype in _DTYPES
            and inp.is_contiguous()
            and inp.device == self.device
        )

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum over the ranks, a new tensor; None for a tensor that is declined. It can be captured.

        :raises IpcReduceError: see :meth:`Communicator.allreduce`.
        """
        if self._comm is None or not self.should_custom_ar(input):
            return None
        return self._comm.allreduce(input)

    def capture(self) -> AbstractContextManager[None]:
        """A context around captures. Nothing is to do there: a captured call is complete by itself, a warm-up real."""
        return nullcontext()

    def custom_all_gather(self, inp: torch.Tensor) -> None:
        """None: declined, always."""

    def custom_reduce_scatter(self, inp: torch.Tensor) -> None:
        """None: declined, always."""

    def close(self) -> None:
        """Give the memory back, and decline everything from now on. Every rank has to. Idempotent."""
        self.disabled = True
        if self._comm is not None:
            self._comm.close()
