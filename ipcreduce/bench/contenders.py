"""The libraries that bench times: ipcreduce; on GPUs NCCL by CuPy, and PyTorch; on the host MPI.

Each contender makes a :class:`Collective` of ``source`` into ``target``, as far as it has it. Both are CuPy arrays,
used on CuPy's current stream, or both are NumPy arrays, or both are lists of such arrays. PyTorch is imported when one
of its contenders is asked for.
"""

from __future__ import annotations

import datetime
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ..calls.request import Member, Request
from ..communicator import Communicator
from ..cuda import cupy_runtime
from ..dtypes import kind_name
from ..graphs.graph import Graph
from ..graphs.session import session_of
from ..ipc import parts
from ..nccl import library
from . import timing
from .collectives import ALLREDUCE, ROOT, Collective

_MPI_TYPES = {"float32": "FLOAT", "float64": "DOUBLE"} | {
    f"{sign}int{bits}": f"{sign}int{bits}_t".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_PATIENCE = datetime.timedelta(seconds=60)  # timeout of PyTorch's process group


def as_lists(source: Any, target: Any) -> tuple[list[Any], list[Any]]:
    """Two arrays, or two lists of arrays, as lists."""
    return (source, target) if isinstance(source, list) else ([source], [target])


class Contender(ABC):
    """An implementation of a collective."""

    name: str
    own = False  # True for a part of ipcreduce, which is not a peer
    gives = "all"  # the results that it computes: see is_right() of the messages

    @abstractmethod
    def prepare(self, source: Any, target: Any) -> Callable[[], Any] | None:
        """A function that makes one call, within :meth:`running`; None if the contender does not take such arrays."""

    def running(self) -> AbstractContextManager[Any]:
        """The context in which to make calls that are not captured."""
        return nullcontext()

    def captured(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        """Capture a graph of ``calls`` calls, and return a function that launches it."""
        return timing.captured(call, calls)

    def collect(self) -> None:  # noqa: B027
        """Copy a call's result into ``target`` if it is elsewhere. This is not timed."""

    def close(self) -> None:  # noqa: B027
        """Free the contender's resources. Collective."""


class Ours(Contender):
    """ipcreduce. Captured calls are recorded in its graphs."""

    name = "ours"

    def __init__(self, comm: Communicator, of: Collective = ALLREDUCE) -> None:
        self._comm, self._of = comm, of
        self._graph: Graph | None = None

    def prepare(self, source: Any, target: Any) -> Callable[[], Any]:
        call = getattr(self._comm, self._of.name)
        if self._of.in_place:
            return lambda: call(target)
        return lambda: call(source, out=target)

    def captured(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        self._close_graph()
        graph = self._graph = Graph(self._comm)
        with graph.record():
            for _ in range(calls):
                call()
        return graph.replay

    def algorithm(self, mode: str, source: Any) -> str:
        """The algorithm of the last call in this mode."""
        if mode == "graph" and self._graph is not None:
            return str(self._graph.segments[0].calls[0]).rpartition(" by ")[2]
        backend = session_of(self._comm).require_backend("bench")
        if self._of is not ALLREDUCE:
            return parts.KERNELS[self._of.what][0] if backend.name == "ipc" else backend.name
        arrays = source if isinstance(source, list) else [source]
        members = tuple(Member(array.shape, kind_name(array.dtype, "sum")) for array in arrays)
        return backend.prepare(Request("sum", members, is_list=isinstance(source, list))).kernels

    def close(self) -> None:
        self._close_graph()

    def _close_graph(self) -> None:
        if self._graph is not None:
            self._graph.close()


class CupyNccl(Contender):
    """NCCL through CuPy's bindings. A list is a group of calls."""

    name = "nccl"

    def __init__(self, mpi: Any, of: Collective = ALLREDUCE) -> None:
        self._nccl, self._of = cupy_runtime.nccl(), of
        identity = mpi.bcast(self._nccl.get_unique_id() if mpi.Get_rank() == 0 else None)
        self._comm = self._nccl.NcclCommunicator(mpi.Get_size(), identity, mpi.Get_rank())

    def prepare(self, source: Any, target: Any) -> Callable[[], Any] | None:
        sources, targets = as_lists(source, target)
        kind = library.DTYPES.get(sources[0].dtype.name)
        if kind is None:
            return None
        stream, (name, further) = cupy_runtime.stream_of()[0], self._of.nccl
        calls = [  # the count is that of the shorter array
            partial(getattr(self._comm, name), one.data.ptr, other.data.ptr, min(one.size, other.size), kind, *further,
                    stream)
            for one, other in zip(sources, targets, strict=True)
        ]  # fmt: skip
        if not isinstance(source, list):
            return calls[0]

        def group() -> None:
            self._nccl.groupStart()
            for call in calls:
                call()
            self._nccl.groupEnd()

        return group


class _Torch(Contender):
    def __init__(self, mpi: Any) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        torch.cuda.set_device(cupy_runtime.current_device())
        if not torch.distributed.is_initialized():  # one process group serves all contenders of PyTorch
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = mpi.bcast(f"tcp://127.0.0.1:{probe.getsockname()[1]}")
            torch.distributed.init_process_group(
                "nccl", init_method=address, rank=mpi.Get_rank(), world_size=mpi.Get_size(), timeout=_PATIENCE
            )

    def _tensor(self, array: Any) -> Any:
        """A PyTorch tensor over an array. bfloat16 passes as int16, because some versions of DLPack lack bfloat16."""
        if array.dtype.name == "bfloat16":
            return self._torch.from_dlpack(array.view("int16")).view(self._torch.bfloat16)
        return self._torch.from_dlpack(array)

    def running(self) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(self._stream())

    def _stream(self) -> Any:
        """CuPy's current stream as a PyTorch stream."""
        return self._torch.cuda.ExternalStream(cupy_runtime.stream_of()[0])

    def captured(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        torch, graph, stream = self._torch, self._torch.cuda.CUDAGraph(), self._stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()

        def launch() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return launch

    def close(self) -> None:
        if self._torch.distributed.is_initialized():
            self._torch.cuda.synchronize()
            self._torch.distributed.destroy_process_group()


class TorchNccl(_Torch):
    """torch.distributed over NCCL. all_reduce only works in place, on a copy. Lists go to all_reduce_coalesced."""

    name = "torch_nccl"

    def __init__(self, mpi: Any, of: Collective = ALLREDUCE) -> None:
        super().__init__(mpi)
        self._of = of

    def prepare(self, source: Any, target: Any) -> Callable[[], Any] | None:
        distributed = self._torch.distributed
        if self._of is ALLREDUCE:
            sources, targets = as_lists(source, target)
            for one, other in zip(sources, targets, strict=True):
                other[...] = one
            tensors = [self._tensor(other) for other in targets]
            if isinstance(source, list):
                return partial(distributed.all_reduce_coalesced, tensors)
            return partial(distributed.all_reduce, tensors[0])
        if isinstance(source, list):
            return None
        further = ROOT if self._of.in_place else self._tensor(source)
        return partial(getattr(distributed, self._of.torch), self._tensor(target), further)


class TorchSymmetric(_Torch):
    """PyTorch's symmetric-memory kernels: one-shot out of place, two-shot in place."""

    def __init__(self, mpi: Any, shots: str) -> None:
        super().__init__(mpi)
        import torch.distributed._symmetric_memory as symmetric

        self.name = f"torch_symm_{shots}"
        self._shots, self._symmetric = shots, symmetric
        self._group = self._torch.distributed.group.WORLD.group_name
        self._collect: Callable[[], Any] = lambda: None
        self._buffer: Any = None  # kept for calls of the same size: its rendezvous is collective and slow

    def prepare(self, source: Any, target: Any) -> Callable[[], Any] | None:
        if isinstance(source, list) or source.nbytes % 16:
            return None
        given = self._tensor(source)
        if given.dtype not in (self._torch.bfloat16, self._torch.float32):
            return None
        if self._buffer is None or (self._buffer.shape, self._buffer.dtype) != (given.shape, given.dtype):
            self._buffer = self._symmetric.empty(given.shape, dtype=given.dtype, device=given.device)
            self._symmetric.rendezvous(self._buffer, self._group)
        buffer = self._buffer
        buffer.copy_(given)
        self._torch.cuda.current_stream().synchronize()  # calls run on another stream
        ops, output = self._torch.ops.symm_mem, self._tensor(target)
        if self._shots == "one_shot":
            return lambda: ops.one_shot_all_reduce_out(buffer, "sum", self._group, output)
        self._collect = lambda: output.copy_(buffer)
        return lambda: ops.two_shot_all_reduce_(buffer, "sum", self._group)

    def collect(self) -> None:
        self._collect()

    def close(self) -> None:
        self._buffer = None
        super().close()


class Mpi(Contender):
    """MPI, which reduces no 16-bit floats. A list is a call for each array."""

    name = "mpi"

    def __init__(self, mpi: Any, of: Collective = ALLREDUCE) -> None:
        self._mpi, self._of = mpi, of

    def prepare(self, source: Any, target: Any) -> Callable[[], Any] | None:
        from mpi4py import MPI

        sources, targets = as_lists(source, target)
        name = sources[0].dtype.name
        if not self._of.moves and name not in _MPI_TYPES:
            return None
        kind = MPI.BYTE if self._of.moves else getattr(MPI, _MPI_TYPES[name])
        method, calls = getattr(self._mpi, self._of.mpi), []
        for pair in zip(sources, targets, strict=True):
            buffers = [[one.view("u1") if self._of.moves else one, kind] for one in pair]
            calls.append(partial(method, *self._of.arguments(*buffers)))
        if not isinstance(source, list):
            return calls[0]

        def one_by_one() -> None:
            for call in calls:
                call()

        return one_by_one


Make = Callable[[Any], Contender]  # from MPI's communicator
PEERS: dict[str, Make] = {
    "nccl": CupyNccl,
    "torch_nccl": TorchNccl,
    "torch_symm_one_shot": lambda mpi: TorchSymmetric(mpi, "one_shot"),
    "torch_symm_two_shot": lambda mpi: TorchSymmetric(mpi, "two_shot"),
}
HOST_PEERS: dict[str, Make] = {"mpi": Mpi}


def peers_of(of: Collective, on_host: bool) -> dict[str, Make]:
    """The peers that can make this collective."""
    if of is ALLREDUCE:
        return HOST_PEERS if on_host else PEERS
    kinds: tuple[Any, ...] = (Mpi,) if on_host else (CupyNccl, TorchNccl)
    return {kind.name: partial(kind, of=of) for kind in kinds}


def known() -> list[str]:
    """The names of all peers."""
    return [*PEERS, *HOST_PEERS]


def attempt(action: Callable[[], Any], mpi: Any) -> tuple[Any, str]:
    """Run ``action`` on every rank. Returns its result, and the first failing rank's error; "" if none fails."""
    result, reason = None, ""
    try:
        result = action()
    except Exception as error:  # of any type: a library, a symbol or a GPU feature may be missing
        reason = f"{type(error).__name__}: {error}"
    return result, next((one for one in mpi.allgather(reason) if one), "")


def find(
    names: list[str] | None, mpi: Any, on_host: bool, peers: Mapping[str, Make]
) -> tuple[list[Contender], dict[str, str]]:  # fmt: skip
    """The named peers that work on every rank, and for each other peer the reason why it does not. Collective.

    :param names: None for all of ``peers``, which are those that there are.
    :param on_host: whether they are to take NumPy arrays.
    """
    found, left_out = [], {}
    elsewhere = PEERS if on_host else HOST_PEERS
    for name in peers if names is None else names:
        if name not in peers:
            takes = f"it takes {'GPU' if on_host else 'NumPy'} arrays"
            left_out[name] = takes if name in elsewhere else "it is not timed with this --op"
            continue
        peer, reason = attempt(partial(peers[name], mpi), mpi)
        if reason:
            left_out[name] = reason
        else:
            found.append(peer)
    return found, left_out
