"""The collectives that bench times, with what they are called in other libraries, and what they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROOT = 0  # of a broadcast
_SUM = 0  # NCCL's code of the op "sum"


@dataclass(frozen=True)
class Collective:
    """A collective that bench times: its name in each library, and what it moves. A message is what one rank passes.

    :ivar name: of the communicator's method. :ivar what: its result, in words.
    :ivar nccl: the method of CuPy's NCCL, and its arguments between dtype and stream.
    :ivar torch: the function of torch.distributed. :ivar mpi: the method of mpi4py.
    :ivar moves: True if nothing is reduced. :ivar in_place: True if the result is in the array that is passed.
    """

    name: str
    what: str
    nccl: tuple[str, tuple[int, ...]]
    torch: str
    mpi: str
    moves: bool = False
    in_place: bool = False

    def results(self, count: int, n: int) -> int:
        """The elements of a result, if each rank passes ``count``."""
        return {"allreduce": count, "allgather": count * n, "reduce_scatter": count // n, "broadcast": count}[self.name]

    def unit(self, n: int) -> int:
        """The number of elements of which a message must be a multiple."""
        return n if self.name == "reduce_scatter" else 1

    def bus(self, n: int) -> float:
        """The factor by which nccl-tests multiply bytes, for a bandwidth to be compared with that of a link."""
        factors = {"allreduce": 2 * (n - 1) / n, "allgather": n - 1, "broadcast": 1, "reduce_scatter": (n - 1) / n}
        return factors[self.name]

    def wire(self, n: int) -> float:
        """The bytes that leave a rank for each byte of a message: in one hop or in two, whichever sends less."""
        return min(n - 1, self.bus(n))

    def copied(self, n: int) -> float:
        """The bytes to copy for each byte of a message, so that the copy reads and writes as much as a rank has to."""
        return (1 + (0 if self.in_place else self.results(n, n) / n)) / 2

    def arguments(self, source: Any, target: Any) -> tuple[Any, ...]:
        """The arrays to pass to MPI's method."""
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
