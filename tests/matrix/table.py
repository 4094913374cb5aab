"""The table: every kind of call on every backend in every way. Each cell runs, or says here why it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.matrix.kind import Kind
from tests.matrix.kinds import KINDS
from tests.matrix.ways import WAYS

BACKENDS = "ipc", "nccl", "one rank", "host in shared memory", "host over MPI"
HOST = BACKENDS[3:]
_WHY_NOT = (  # backends, ways, reason
    (HOST, ("captured by others", "recorded and replayed", "on several streams"), "the host has no streams"),
    (("one rank",), ("late rank", "ranks that differ", "rank closes", "rank gone"), "there is no other rank"),
    (("host over MPI",), ("rank gone",), "MPI ends all processes if one of them is killed"),
)


def cells() -> list[tuple[str, type[Kind]]]:
    """The ways and kinds, in the order in which they run."""
    return list(product(WAYS, KINDS))


def why_not(backend: str, way: str) -> str:
    """Why a way cannot be on a backend; "" if it can."""
    return next((why for backends, ways, why in _WHY_NOT if backend in backends and way in ways), "")


def name(backend: str, way: str, kind: type[Kind]) -> str:
    """A cell in words."""
    return f"{backend} | {kind.name} | {way}"


def outcomes(backend: str, output: str) -> Iterator[tuple[str, str, bool]]:
    """Of each cell of a backend its name, what a run has printed of it, and whether that is as it has to be."""
    found = dict(line.split(": ", 1) for line in output.splitlines() if line.startswith(f"{backend} | "))
    for way, kind in cells():
        why, cell = why_not(backend, way), name(backend, way, kind)
        outcome = found.get(cell, "not reached")
        yield cell, outcome, outcome.startswith(f"cannot be: {why}" if why else "right")
