"""Random all-gathers, reduce-scatters and broadcasts for tests/shared/cases.py, and what NumPy says that they give."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tests.shared import reference
from tests.shared.case import Array, Case, Limits, Values
from tests.shared.world import WORLD

COLLECTIVES = ("allgather", "reduce_scatter", "broadcast")
MOVED = [*reference.DTYPES, np.dtype(bool), np.dtype("c8"), np.dtype("c16")]
Shape = tuple[int, ...]
Place = tuple[slice, ...]


class Split(NamedTuple):
    """A call, the same on every rank.

    :ivar whole: the shapes of the whole arrays, by member. :ivar sizes: as it is passed, or None.
    :ivar how: "new", "out" or "in place". :ivar is_list: the members are passed as a list.
    """

    collective: str
    op: str
    whole: tuple[Shape, ...]
    axis: int
    sizes: tuple[int, ...] | None
    root: int
    how: str
    is_list: bool

    def __str__(self) -> str:
        what = f"root {self.root}" if self.collective == "broadcast" else f"axis {self.axis}, sizes {self.sizes}"
        return f"{self.collective} {self.op} of {self.whole}, {what}, {self.how}"

    def place(self, shape: Shape, rank: int) -> Place:
        """Where a rank's part is in a whole array."""
        axis, ranks = self.axis % len(shape), WORLD.size
        sizes = self.sizes or (shape[axis] // ranks,) * ranks
        begin = [*accumulate(sizes, initial=0)][rank]
        return (*(slice(None),) * axis, slice(begin, begin + sizes[rank]))

    def part(self, shape: Shape, rank: int) -> Shape:
        """The shape of a rank's part."""
        return np.empty(shape, bool)[self.place(shape, rank)].shape

    def inputs(self, rank: int) -> tuple[Shape, ...]:
        """The shapes of what a rank passes: in place the whole arrays, of which it passes its part."""
        if self.collective == "allgather" and self.how != "in place":
            return tuple(self.part(shape, rank) for shape in self.whole)
        return self.whole


def draw(rng: np.random.Generator, own: np.random.Generator, ranks: int, limits: Limits) -> Case:
    collective = COLLECTIVES[int(rng.integers(3))]
    dtypes = reference.DTYPES if collective == "reduce_scatter" else MOVED
    is_list = bool(rng.random() < 0.3)
    count = int(2 ** rng.uniform(0, 6)) if is_list else 1
    dimensions = int(rng.integers(1, 4))
    axis = int(rng.integers(-dimensions, dimensions))
    sizes = tuple(int(size) for size in rng.integers(0, int(2 ** rng.uniform(1, 8)), ranks) * (rng.random(ranks) < 0.8))
    sizes = sizes if rng.random() < 0.5 else None
    whole, chosen = [], []
    for _ in range(count):
        dtype = dtypes[int(rng.integers(len(dtypes)))]
        most = max(1, int(2 ** rng.uniform(0, np.log2(limits.largest / count))) // dtype.itemsize)
        length = sum(sizes) if sizes is not None else ranks * int(2 ** rng.uniform(0, np.log2(max(2, most // ranks))))
        others = [1, 1] if rng.random() < 0.3 else [int(2 ** rng.uniform(0, 5)), max(1, most // max(1, length))]
        if rng.random() < 0.05:
            others[0] = 0
        shape = [int(side) for side in rng.permutation(others)][: dimensions - 1]
        shape.insert(axis % dimensions, length)
        whole.append(tuple(shape))
        chosen.append(dtype)
    how = "in place" if collective == "broadcast" else str(rng.choice(["new", "out", "in place"]))
    split = Split(
        collective, str(rng.choice(reference.OPS)), tuple(whole), axis, sizes, int(rng.integers(ranks)), how, is_list
    )
    steps = [int(own.choice((1, 1, 1, 2))) for _ in range(2 * count)]
    inputs = [Array.of(*one) for one in zip(chosen, split.inputs(WORLD.rank), steps[:count], strict=True)]
    outputs = inputs
    if how != "in place":
        shapes = whole if collective == "allgather" else [split.part(shape, WORLD.rank) for shape in whole]
        outputs = [Array.of(*one) for one in zip(chosen, shapes, steps[count:], strict=True)]
    over = tuple(range(count)) if how == "in place" else (None,) * count
    late = int(rng.integers(ranks)) if rng.random() < 0.05 else -1
    return Case(
        "split", split, tuple(inputs), tuple(outputs), over, new=how == "new", special=bool(rng.random() < 0.5),
        late=late, turns=3 if rng.random() < 0.2 else 1,
    )  # fmt: skip


def values(case: Case, rank: int, own: np.random.Generator, common: np.random.Generator) -> Values:
    """Any bits where bytes are moved."""
    found = []
    for one, shape in zip(case.inputs, case.what.inputs(rank), strict=True):
        if case.what.collective == "reduce_scatter":
            found.append(reference.random_array(own, shape, one.dtype, case.special))
        else:
            raw = own.integers(0, 256, (int(np.prod(shape)), one.dtype.itemsize), np.uint8)
            raw[own.random(len(raw)) < 0.2] = 0xFF
            raw = raw & 1 if one.dtype == bool else raw
            found.append(raw.reshape(-1).view(one.dtype).reshape(shape))
    return found


def call(comm: Any, case: Case, way: str, inputs: list[Any], outs: list[Any]) -> list[Any] | None:
    split: Split = case.what
    if split.collective == "broadcast":
        given = inputs if split.is_list else inputs[0]
        assert comm.broadcast(given, split.root) is given
        return None
    options: dict[str, Any] = {"axis": split.axis, "sizes": split.sizes}
    places = [split.place(shape, comm.rank) for shape in split.whole]
    if split.how == "in place":
        parts = [one[place] for one, place in zip(inputs, places, strict=True)]
        inputs, outs = (parts, inputs) if split.collective == "allgather" else (inputs, parts)
    given, out = (inputs, outs) if split.is_list else (inputs[0], outs[0])
    if not case.new:
        options["out"] = out
    op = (split.op,) if split.collective == "reduce_scatter" else ()
    result = getattr(comm, split.collective)(given, *op, **options)
    assert case.new or result is out
    return (result if split.is_list else [result]) if case.new else None


def expected(case: Case, values: list[Values], rank: int) -> list[np.ndarray]:
    split: Split = case.what
    if split.collective == "broadcast":
        return values[split.root]
    results = []
    for index, shape in enumerate(split.whole):
        ofs = [of_rank[index] for of_rank in values]
        if split.collective == "allgather":
            if split.how == "in place":
                ofs = [of_rank[split.place(shape, r)] for r, of_rank in enumerate(ofs)]
            results.append(np.concatenate(ofs, axis=split.axis))
            continue
        place = split.place(shape, rank)
        part = reference.wrapping(ofs, split.op)[place]
        if split.how == "in place":
            whole = ofs[rank].copy()
            whole[place] = part
            part = whole
        results.append(part)
    return results
