"""The collectives of the servers' groups: each asks the group's reducer first, and then the server's own method.

An object of a server gets the methods by a class of its own, made of one of these and the class that it had. So
torch.compile sees what it saw before: both servers call most of the methods within operators of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..collectives import traced
from ..errors import UnsupportedError
from .all_reduce import ServingAllReduce

Sizes = Sequence[int] | None


def give(owner: Any, methods: type) -> None:
    """Let ``owner``, and no other object of its class, have the methods."""
    theirs: Any = type(owner)
    if not issubclass(theirs, methods):
        owner.__class__ = _joined(methods, theirs)


@cache
def _joined(methods: type, theirs: type) -> type:
    return type(theirs.__name__, (methods, theirs), {"__module__": theirs.__module__})


def _found(reducer: Any) -> ServingAllReduce | None:
    """The all-reduce, if it is ipcreduce's now: servers take it away for a time, and when they end."""
    return reducer if isinstance(reducer, ServingAllReduce) else None


class _Methods:
    """The calls of a reducer by an object that has it as ``ca_comm``. Each result is None where it declines."""

    ca_comm: Any

    def _gather(self, x: Any, axis: int, sizes: Sizes = None, out: Any = None) -> Any:
        reducer = _found(self.ca_comm)
        return None if reducer is None else reducer.make_all_gather(x, axis, sizes, out)

    def _scatter(self, x: Any, axis: int, sizes: Sizes = None, out: Any = None) -> Any:
        reducer = _found(self.ca_comm)
        return None if reducer is None else reducer.make_reduce_scatter(x, axis, sizes, out)

    def _send(self, x: Any, root: int) -> Any:
        reducer = _found(self.ca_comm)
        return None if reducer is None else reducer.make_broadcast(x, root)


class CommunicatorMethods(_Methods):
    """The collectives of vLLM's CudaCommunicator. Version 0.26.0 has no ``reduce_scatterv_into_output``."""

    pynccl_comm: Any

    def all_gather(self, input_: Any, dim: int = -1) -> Any:
        found = self._gather(input_, dim)
        return super().all_gather(input_, dim) if found is None else found  # type: ignore[misc]

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Sizes = None) -> Any:
        found = self._gather(input_, dim, sizes)
        return super().all_gatherv(input_, dim, sizes) if found is None else found  # type: ignore[misc]

    def reduce_scatter(self, input_: Any, dim: int = -1) -> Any:
        found = self._scatter(input_, dim)
        return self._by_nccl().reduce_scatter(input_, dim) if found is None else found

    def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: Sizes = None) -> Any:
        found = self._scatter(input_, dim, sizes)
        return self._by_nccl().reduce_scatterv(input_, dim, sizes) if found is None else found

    def reduce_scatterv_into_output(self, input_: Any, output: Any, dim: int = -1, sizes: Sizes = None) -> Any:
        found = self._scatter(input_, dim, sizes, output)
        return self._by_nccl().reduce_scatterv_into_output(input_, output, dim, sizes) if found is None else found

    def broadcast(self, tensor: Any, src: int = 0) -> Any:
        found = self._send(tensor, src)
        return super().broadcast(tensor, src) if found is None else found  # type: ignore[misc]

    def _by_nccl(self) -> Any:
        """The server's methods. Its reduce-scatters return memory that nothing has written where NCCL is off."""
        if self.pynccl_comm is None or self.pynccl_comm.disabled:
            raise UnsupportedError(
                "ipcreduce declines this reduce-scatter, and VLLM_DISABLE_PYNCCL leaves vLLM no other. Unset it; "
                "ipcreduce's log has the reason"
            )
        return super()


class VllmGroupMethods(_Methods):
    """The collectives of vLLM's GroupCoordinator that do not call its communicator."""

    device_communicator: Any

    @property
    def ca_comm(self) -> Any:
        """The communicator's, while the group has one."""
        return getattr(self.device_communicator, "ca_comm", None)

    def broadcast(self, input_: Any, src: int = 0) -> Any:
        found = self._send(input_, src)
        return super().broadcast(input_, src) if found is None else found  # type: ignore[misc]


class SGLangMethods(_Methods):
    """The collectives of SGLang's GroupCoordinator.

    The two with an underscore run within operators of SGLang. The others may be compiled: then they are SGLang's, and
    call those two.
    """

    @traced
    def all_gather(self, input_: Any, dim: int = -1, output_tensor_list: Any = None) -> Any:
        asks = output_tensor_list is None and not torch.compiler.is_compiling()
        found = self._gather(input_, dim) if asks else None
        return super().all_gather(input_, dim, output_tensor_list) if found is None else found  # type: ignore[misc]

    def _all_gather_into_tensor(self, output: Any, input: Any) -> None:
        flat = output.is_contiguous()
        if not flat or self._gather(input.reshape(-1), 0, None, output.view(-1)) is None:
            super()._all_gather_into_tensor(output, input)  # type: ignore[misc]

    def all_gatherv(self, input_: Any, sizes: Sizes = None, output: Any = None) -> Any:
        found = self._gather(input_, 0, sizes, output)
        if found is None:
            return super().all_gatherv(input_, sizes, output)  # type: ignore[misc]
        return found if isinstance(found, list) else [found]

    def _reduce_scatter_tensor(self, output: Any, input: Any) -> Any:
        found = self._scattered_flat(output, input)
        return super()._reduce_scatter_tensor(output, input) if found is None else output  # type: ignore[misc]

    @traced
    def reduce_scatter_tensor(self, output: Any, input: Any) -> None:
        """Sum, and keep this rank's part. Where SGLang is deterministic, it would reduce a clone and take a slice."""
        if torch.compiler.is_compiling() or self._scattered_flat(output, input) is None:
            super().reduce_scatter_tensor(output, input)  # type: ignore[misc]

    def _scattered_flat(self, output: Any, input: Any) -> Any:
        flat = output.is_contiguous()
        return self._scatter(input.reshape(-1), 0, None, output.view(-1)) if flat else None

    def reduce_scatterv(self, input_: Any, output: Any = None, sizes: Sizes = None) -> Any:
        found = self._scatter(input_, 0, sizes, output)
        return super().reduce_scatterv(input_, output, sizes) if found is None else found  # type: ignore[misc]

    def broadcast(self, input_: Any, src: int = 0) -> Any:
        found = self._send(input_, src)
        return super().broadcast(input_, src) if found is None else found  # type: ignore[misc]
