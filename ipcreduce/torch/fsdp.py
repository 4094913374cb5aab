"""All-gather and reduce-scatter for models that ``torch.distributed.fsdp.fully_shard`` has sharded.

    for module in sharded:  # each one that fully_shard() has taken
        module.set_custom_all_gather(ipcreduce.torch.FSDPAllGather(comm))
        module.set_custom_reduce_scatter(ipcreduce.torch.FSDPReduceScatter(other))

Calls of 1 MB and more take few multiprocessors (``sms``), and leave the others to the layers. FSDP gathers and scatters
on two streams, so two communicators are faster than one for both. Times: docs/performance.md.

They run on the stream that FSDP makes current, which waits for them as for PyTorch's own. With
``unshard(async_op=True)`` that is the program's stream, on which what follows waits, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..communicator import Communicator
from ..dtypes import op_name
from ..errors import ArgumentError
from ..options import checked_sms
from .ddp import GroupCheck
from .names import check_is_communicator


class _Comm:
    """The communicator, and the memory that FSDP asks for."""

    def __init__(self, comm: Communicator, sms: int | None = 16) -> None:
        """:raises ArgumentError: if ``comm`` is not a Communicator, or ``sms`` not an int from 1 on."""
        check_is_communicator(comm, f"{type(self).__name__}(comm)")
        self._comm, self._group = comm, GroupCheck(comm)
        self._sms = None if sms is None else checked_sms(sms)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor, in which FSDP collects what is gathered or scattered."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class FSDPAllGather(_Comm):
    """The all-gather of parameters, for ``FSDPModule.set_custom_all_gather``.

    :param comm: a communicator of the ranks of the model's process group, in their order.
    :param sms: the most blocks of a call, as for :meth:`Communicator.allreduce`; None for as many as are fastest alone.
        With None give both classes one communicator: kernels of two, which each fill a GPU, can wait for each other.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather every rank's ``input_tensor``, flat, on the current stream.

        :raises ArgumentError: on every rank, if ``group`` is not the communicator's ranks.
        :raises IpcReduceError: see :meth:`Communicator.allgather`.
        """
        self._group.compare_once(group)
        self._comm.allgather(input_tensor, out=output_tensor, sms=self._sms)


class FSDPReduceScatter(_Comm):
    """The reduce-scatter of gradients, for ``FSDPModule.set_custom_reduce_scatter``.

    With backend "ipc" and on the host, ranks are reduced in their order, so the bits are the same in every run.

    :param comm: a communicator of the ranks of the model's process group, in their order.
    :param sms: the most blocks of a call, as for :meth:`Communicator.allreduce`; None for as many as are fastest alone.
        With None give both classes one communicator: kernels of two, which each fill a GPU, can wait for each other.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce every rank's ``input_tensor``, flat, and keep this rank's part, on the current stream.

        :raises ArgumentError: on every rank, if ``group`` is not the communicator's ranks; or for an op of FSDP's own,
            which multiplies first.
        :raises IpcReduceError: see :meth:`Communicator.reduce_scatter`.
        """
        self._group.compare_once(group)
        try:
            self._comm.reduce_scatter(input_tensor, op, out=output_tensor, sms=self._sms)
        except ArgumentError as error:
            try:
                op_name(op)
            except ArgumentError:
                raise ArgumentError(
                    f"{error} FSDP passes such an op for a factor of its own. Call "
                    "set_force_sum_reduction_for_comms(True) on the model, so that it divides by itself"
                ) from error
            raise
