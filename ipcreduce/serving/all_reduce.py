"""The object that vLLM and SGLang keep as ``ca_comm``: the collectives of a tensor-parallel group."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..arrays.norms import FP8
from ..calls.request import ITEMSIZES
from ..communicator import Communicator
from ..dtypes import DTYPE_NAMES
from ..errors import UnsupportedError
from ..ipc.workspace import bytes_for
from ..options import VIRTUAL, is_on, workspace_memory
from . import sleep

MAX_SIZE = 8 << 20  # bytes; the default of both vLLM and SGLang
_DTYPES = frozenset(getattr(torch, name) for name in DTYPE_NAMES if hasattr(torch, name))
_FLOATS8 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"
_MOVED = _DTYPES | {
    getattr(torch, name) for name in ("bool", "complex64", "complex128", *_FLOATS8) if hasattr(torch, name)
}
_NORM_DTYPES = frozenset(getattr(torch, name) for name in ITEMSIZES)
_log = logging.getLogger("ipcreduce.serving")


class ServingAllReduce:
    """Sums and moves tensors of a group of ranks on one host, eagerly and in captures. Making one is collective.

    :param group: the ranks, as :class:`Communicator` takes them. The servers pass a process group of gloo.
    :param device: this rank's GPU, as an ordinal, a name or a ``torch.device``; or "cpu" for tensors on the host.
    :param max_size: the largest message, in bytes. The workspace has room for one message of this size. Larger tensors
        are declined.
    :param symm_mem_enabled: a parameter of vLLM without effect, because ``max_size`` alone decides.
    :param register_graph_buffers: a parameter of vLLM without effect, because no buffer has to be registered.
    :raises PeerTimeoutError: if a rank does not come.

    With IPCREDUCE_BATCH_INVARIANT=1 it takes tensors of every size and layout, because a batch may change both.

    If the kernels cannot run, as between several hosts, ``disabled`` is True on every rank, and the server uses another
    all-reduce. A server may also set ``disabled``. An object that was dropped is closed at the end of the process.
    """

    # vLLM's models read these before they use all-gathers or fused kernels of vLLM's own class, which this class lacks.
    fully_connected = False
    mnnvl_lamport_ag_multicast_ptr = 0

    def __init__(
        self, group: Any, device: Any, max_size: int = MAX_SIZE, symm_mem_enabled: bool = False, *,
        register_graph_buffers: bool = True,
    ) -> None:  # fmt: skip
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.max_size = max_size
        self._takes_all = is_on("IPCREDUCE_BATCH_INVARIANT")
        self.disabled = True
        self._comm: Communicator | None = None
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        backend = "host" if self.device.type == "cpu" else "ipc"
        try:
            self._comm = Communicator(group, device=self.device.index, backend=backend, workspace=bytes_for(max_size))
        except UnsupportedError as error:
            _log.warning("ipcreduce's all-reduce is disabled: %s", error)
            return
        for dtype in (torch.float16, torch.bfloat16, torch.float32):  # loads the kernels, which a capture could not
            self._comm.allreduce(torch.zeros(8, dtype=dtype, device=self.device))
        self._comm.synchronize()
        self.disabled = False
        self._count_calls()
        if backend == "ipc" and workspace_memory() == VIRTUAL:
            sleep.follow(self)

    def _count_calls(self) -> None:
        """Let the log tell, when this object ends, how many calls it has served."""
        self._said: set[str] = set()
        self._calls = itertools.count()
        self._tell = weakref.finalize(self, _tell, self._calls)

    def _count(self, kind: str) -> None:
        """Count a call. The log tells the first of a kind at once: a server may kill its workers as it ends."""
        next(self._calls)
        self._say(f"ipcreduce serves the server's {kind}")

    def _say(self, text: str) -> None:
        """Log a line, once for this object."""
        if text not in self._said:
            self._said.add(text)
            _log.info("%s", text)

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """True if :meth:`custom_all_reduce` takes the tensor.

        That depends on its size, dtype, layout and device, so it is the same on every rank.
        """
        return self._takes("all-reduces", inp, _DTYPES, self._takes_all)

    def _takes(self, kind: str, x: torch.Tensor, dtypes: Collection[torch.dtype], any_form: bool = True) -> bool:
        """Decide by what is the same on every rank. The log has each reason for a no once."""
        if self.disabled:
            return False
        if x.dtype not in dtypes:
            why = f"of {x.dtype}"
        elif x.device != self.device:
            why = f"on {x.device}"
        elif any_form:
            return True
        elif not x.is_contiguous():
            why = "that are not contiguous"
        elif x.numel() * x.element_size() > self.max_size:
            why = f"of more than {self.max_size} bytes"
        else:
            return True
        self._say(f"ipcreduce leaves {kind} of tensors {why} to the server")
        return False

    def make_all_gather(self, x: Any, axis: int, sizes: Sequence[int] | None = None, out: Any = None) -> Any:
        """Every rank's tensor along an axis, in ``out`` or a new tensor; None for one that is declined.

        It can be captured, takes every size and layout, and dtypes that are moved as bytes. ``x`` may be a list, which
        is one call, and ``sizes`` has the ranks' lengths.

        :raises IpcReduceError: see :meth:`Communicator.allgather`.
        """
        every = [*(x if isinstance(x, list) else [x]), *([] if out is None else [out])]
        if self._comm is None or not all(self._takes("all-gathers", one, _MOVED) for one in every):
            return None
        self._count("all-gathers")
        return self._comm.allgather(x, axis=axis, sizes=sizes, out=out)

    def make_reduce_scatter(self, x: Any, axis: int, sizes: Sequence[int] | None = None, out: Any = None) -> Any:
        """This rank's part of the sum, in ``out`` or a new tensor; None for a tensor that is declined.

        It can be captured, and takes every size and layout. Its bits are those of the all-reduce.

        :raises IpcReduceError: see :meth:`Communicator.reduce_scatter`.
        """
        every = [x] if out is None else [x, out]
        if self._comm is None or not all(self._takes("reduce-scatters", one, _DTYPES) for one in every):
            return None
        self._count("reduce-scatters")
        return self._comm.reduce_scatter(x, axis=axis, sizes=sizes, out=out)

    def make_broadcast(self, x: Any, root: int) -> Any:
        """The tensor, with rank ``root``'s values; None if it is declined. It can be captured.

        :raises IpcReduceError: see :meth:`Communicator.broadcast`.
        """
        if self._comm is None or not self._takes("broadcasts", x, _MOVED):
            return None
        self._count("broadcasts")
        return self._comm.broadcast(x, root)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum over the ranks in a new tensor; None for a tensor that is declined. It can be captured.

        :raises IpcReduceError: see :meth:`Communicator.allreduce`.
        """
        if self._comm is None or not self.should_custom_ar(input):
            return None
        self._count("all-reduces")
        return self._comm.allreduce(input)

    def fused_allreduce_rmsnorm(
        self, input_: torch.Tensor, residual_inp_: torch.Tensor, weight_: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The normalised rows and the residual sum, in new tensors; None for tensors that are declined.

        Our hook in SGLang calls it, and SGLang itself on AMD's GPUs, where it ignores what it raises. So the choice
        depends on sizes, dtypes, layouts and devices alone, which are the same on every rank, and an error is in the
        log.

        :raises IpcReduceError: see :meth:`Communicator.allreduce_rmsnorm`.
        """
        if not self._can_normalise(input_, residual_inp_, weight_):
            return None
        try:
            return self.normalise(input_, weight_, residual_inp_, eps)
        except Exception:
            _log.exception("an all-reduce with RMSNorm failed")
            raise

    def normalise(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float,
        weight_bias: float = 0.0, scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The normalised rows and the residual sum, in new tensors, of any size. It can be captured.

        :param scale: one float32, by which the rows are quantised to float8_e4m3fn; None for rows of x's dtype.
        :raises UnsupportedError: if this object is disabled.
        :raises IpcReduceError: see :meth:`Communicator.allreduce_rmsnorm`.
        """
        if self._comm is None or self.disabled:
            raise UnsupportedError("ipcreduce's all-reduce is disabled here. Start the server without its fused pass")
        self._count("all-reduces with RMSNorm")
        if scale is None:
            return self._comm.allreduce_rmsnorm(x, weight, eps, residual=residual, weight_bias=weight_bias)
        rows, _, total = self._comm.allreduce_rmsnorm(
            x, weight, eps, residual=residual, weight_bias=weight_bias, quantize=FP8(scale=scale)
        )
        return rows, total

    def _can_normalise(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        return (
            self.should_custom_ar(x)
            and x.dtype in _NORM_DTYPES
            and x.numel() > 0
            and x.dim() > 0
            and tuple(residual.shape) == tuple(x.shape)
            and tuple(weight.shape) == (x.shape[-1],)
            and all(
                one.dtype == x.dtype and one.device == x.device and one.is_contiguous() for one in (residual, weight)
            )
        )

    def capture(self) -> AbstractContextManager[None]:
        """A context for captures, which does nothing: ipcreduce's calls need no preparation for a capture."""
        return nullcontext()

    def custom_all_gather(self, inp: torch.Tensor) -> None:
        """Decline the tensor: return None. vLLM then calls the group's all-gather, which is :meth:`make_all_gather`."""

    def custom_reduce_scatter(self, inp: torch.Tensor) -> None:
        """Decline the tensor: return None. vLLM then calls the group's own, which is :meth:`make_reduce_scatter`."""

    def suspend(self) -> None:
        """Give the workspace's memory back, as the server sleeps. Every rank must call it. Captures stay valid.

        :raises UnsupportedError: on every rank, if the workspace is not in virtual memory.
        """
        if self._comm is not None:
            self._comm.suspend()

    def resume(self) -> None:
        """Get the memory again. Every rank must call it. :raises IpcReduceError: see :meth:`Communicator.resume`."""
        if self._comm is not None:
            self._comm.resume()

    def close(self) -> None:
        """Free the memory, and decline every tensor from now on. Every rank must call it. Idempotent."""
        if not self.disabled:
            self._tell()
        self.disabled = True
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()


def _tell(calls: itertools.count[int]) -> None:
    _log.info("ipcreduce has served %d calls of the server; one that was captured counts once", next(calls))
