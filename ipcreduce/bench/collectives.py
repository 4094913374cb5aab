"""The collectives that bench times, with what they are called in other libraries, and what they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROOT = 0  # of a broadcast
_SUM = 0  # NCCL's


@dataclass(frozen=True)
class Collective:
    """A method of a communicator. A message is what a rank passes, and its results are new or in place.

    :ivar name: of the method. :ivar what: it gives, in words.
    :ivar nccl: the method of CuPy's NCCL, and its arguments between dtype and stream.
    :ivar torch: the function of torch.distributed. :ivar mpi: the method of mpi4py.
    :ivar moves: it reduces nothing. :ivar in_place: the result is in the array that is passed.
    """

    name: str
    what: str
    nccl: tuple[str, tuple[int, ...]]
    torch: str
    mpi: str
    moves: bool = False
    in_place: bool = False

    def results(self, count: int, n: int) -> int:
        """The elements of a result, of ``count`` that a rank passes."""
        return {"allgather": count * n, "reduce_scatter": count // n}.get(self.name, count)

    def unit(self, n: int) -> int:
        """Messages are multiples of so many elements."""
        return n if self.name == "reduce_scatter" else 1

    def bus(self, n: int) -> float:
        """The factor by which nccl-tests multiply bytes, for a bandwidth to be compared with that of a link."""
        factors = {"allreduce": 2 * (n - 1) / n, "allgather": n - 1, "reduce_scatter": (n - 1) / n}
        return factors.get(self.name, 1)

    def wire(self, n: int) -> float:
        """The bytes that leave a rank at least, for a byte of a message: in one hop, or in two if these are less."""
        return min(n - 1, self.bus(n))

    def copied(self, n: int) -> float:
        """The bytes of a copy that reads and writes as much as a rank does at least, for a byte of a message."""
        return (1 + (0 if self.in_place else self.results(n, n) / n)) / 2

    def arguments(self, source: Any, target: Any) -> tuple[Any, ...]:
        """The arrays that MPI takes."""
        return (target,) if self.in_place else (source, target)


_EVERY = (
    Collective("allreduce", "sum", ("allReduce", (_SUM,)), "all_reduce", "Allreduce"),
    Collective("allgather", "all-gather", ("allGather", ()), "all_gather_into_tensor", "Allgather", moves=True),
    Collective(
        "reduce_scatter", "reduce-scatter", ("reduceScatter", (_SUM,)), "reduce_scatter_tensor", "Reduce_scatter_block"
    ),
    Collective("broadcast", "broadcast", ("broadcast", (ROOT,)), "broadcast", "Bcast", moves=True, in_place=True),
)
COLLECTIVES = {one.name: one for one in _EVERY}
ALLREDUCE = COLLECTIVES["allreduce"]
