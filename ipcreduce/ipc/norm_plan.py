"""The plan of a fused all-reduce with RMSNorm: kernel and launch shape, as a pure function of what all ranks share.

A row lies in a block or in a cluster of blocks (kernels/fused_one_shot.cu, fused_two_shot.cu). The shapes were among
the fastest of those tried over 2 and 4 H200. For other GPUs and numbers of ranks they are estimates, until ``tune`` has
measured a hidden size there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..calls.request import NormShape
from .plan import (
    ALGORITHMS,
    CODE_BYTES,
    CODES,
    EPOCH_SLOTS,
    FUSED_DTYPES,
    MB,
    ONE_HOP_BYTES,
    PACKET_BYTES,
    Gpus,
    row_bytes,
)

UNIT = 8  # elements of a packet
GROUP = 64  # elements of which a row must have whole numbers
MAX_HIDDEN = 16_384  # for which the kernels have room
_SHARE = 16  # units; the share of a block is a multiple of it
_SHORT_HIDDEN, _LONG_HIDDEN = 5120, 8192  # up to so many elements, a row is a short one, and not yet a very long one
_CLUSTERED_HIDDEN = 3072  # from here on, several blocks have a row
_WIDE_BLOCK = 512  # threads. For many rows wider blocks are slower: they leave more of a multiprocessor empty
_FEW_ROWS, _SOME_ROWS, _MANY_ROWS = _ROWS = 64, 128, 256
_MAX_DEPTH = 2
_TWO_SHOT_THREADS = {2: 512, 3: 352, 4: 256, 5: 224, 6: 224, 7: 160, 8: 160}  # by n
_CODES_END = CODE_BYTES * len(CODES)
_CLUSTERS = (1, 2, 4, 8)

MAX_CHOICES = 40  # rows of a table


@dataclass(frozen=True)
class NormChoice:
    """The kernel for up to ``up_to`` rows of ``hidden`` elements, as found by ``python -m ipcreduce tune --hidden``."""

    hidden: int
    up_to: int
    algorithm: str
    cluster: int  # blocks that have a row together


NormTable = tuple[NormChoice, ...]  # by hidden size and rows. The last row of a hidden size also serves more rows


def checked_table(choices: Iterable[NormChoice]) -> NormTable:
    """Validate a table. :raises ValueError: if a choice has no kernel, or if they are too many or in disorder."""
    table = tuple(choices)
    for choice in table:
        numbers = choice.hidden, choice.up_to, choice.cluster
        if not all(type(number) is int and 0 < number < 1 << 32 for number in numbers):  # a file may hold any JSON
            raise ValueError(f"{choice} has what is no whole number")
        fits = choice.hidden % GROUP == 0 and choice.hidden <= MAX_HIDDEN
        if not fits or choice.algorithm not in [*ALGORITHMS] or choice.cluster not in _clusters_for(choice.hidden):
            raise ValueError(f"no kernel runs by {choice}")
    places = [(choice.hidden, choice.up_to) for choice in table]
    if len(table) > MAX_CHOICES or places != sorted({*places}):
        raise ValueError(f"the rows {places} are more than {MAX_CHOICES}, or do not ascend")
    return table


def _clusters_for(hidden: int) -> list[int]:
    """The numbers of blocks that can have a row together, so that each has a part of it."""
    return [one for one in _CLUSTERS if one == 1 or one * _SHARE * UNIT <= hidden]


@dataclass(frozen=True)
class NormPlan:
    """A fused launch. ``grid`` counts blocks, of which ``cluster`` share a row; ``depth``: units a thread."""

    kernel: str
    cluster: int
    depth: int
    grid: int
    block: int
    staging: int  # bytes in each half of each workspace

    def fits(self, gpus: Gpus) -> bool:
        """True if the workspaces have room for it."""
        return self.staging <= gpus.half_bytes - _CODES_END

    def tiles(self, rows: int) -> int:
        """The rows that a block has, one after the other."""
        return -(-rows // (self.grid // self.cluster))


def most_threads(kernel: str, gpus: Gpus, cluster: int, depth: int) -> int:
    """The most threads in a block: see the kernels. If ranks share a GPU, a multiprocessor has to hold two blocks."""
    if kernel == "fused_two_shot":
        return _TWO_SHOT_THREADS[gpus.n]
    if gpus.n == 2 and cluster == 2 and depth == 1:
        return 512
    return (1024 if gpus.n <= 4 else 512) // (1 if gpus.sharing == 1 else 2)


def make_plan(
    shape: NormShape, gpus: Gpus, forced: str | None = None, table: NormTable = ()
) -> NormPlan | None:  # fmt: skip
    """Plan the launch for rows of ``shape``, which are aligned; None if no fused kernel takes them.

    See :func:`ipcreduce.ipc.plan.make_plan` for the arguments.
    """
    n = gpus.n
    if n == 1 or not shape.rows or not _has_kernel(shape):
        return None
    too_long = shape.hidden > (_LONG_HIDDEN if gpus.clusters and shape.rows <= _MANY_ROWS else _SHORT_HIDDEN)
    # As for the plain all-reduce, because the norm costs the same after both. Over 2 ranks very long rows, and long
    # ones if they are many, go in two hops from 2 MB on, since then a block has fewer threads.
    most = 2 * MB if n == 2 and too_long else ONE_HOP_BYTES[n]
    algorithm = forced or ("one_shot" if shape.nbytes <= most else "two_shot")
    names = dict.fromkeys((algorithm, forced or "two_shot"))  # two_shot needs less room
    if n == 2 and not forced:
        names["one_shot"] = None  # for as much room it holds rows of which two_shot has too many
    ways = [(name, cluster) for name in names for cluster in (_clusters(shape, name) if gpus.clusters else [1])]
    chosen = [(one.algorithm, one.cluster) for one in _choices(shape, gpus, forced, table) if shape.rows <= one.up_to]
    plans = (plan_launch(ALGORITHMS[name].fused, cluster, shape, gpus) for name, cluster in (*chosen[:1], *ways))
    return next((plan for plan in plans if plan is not None and plan.fits(gpus)), None)


def _has_kernel(shape: NormShape) -> bool:
    return shape.dtype in FUSED_DTYPES and shape.hidden % GROUP == 0 and 0 < shape.hidden <= MAX_HIDDEN


def _choices(shape: NormShape, gpus: Gpus, forced: str | None, table: NormTable) -> list[NormChoice]:
    """The measured choices for rows of this length, of which the last one is for any number of rows."""
    usable = [one for one in table if one.hidden == shape.hidden and (gpus.clusters or one.cluster == 1)]
    found = [] if forced else usable
    return [*found[:-1], *(replace(last, up_to=max(last.up_to, shape.rows)) for last in found[-1:])]


def every_plan(shape: NormShape, gpus: Gpus) -> Iterator[tuple[NormChoice, NormPlan]]:
    """Every launch that a table can choose for ``shape``: the choice, and its plan."""
    if gpus.n > 1 and shape.rows and _has_kernel(shape):
        for name, algorithm in ALGORITHMS.items():
            for cluster in _clusters_for(shape.hidden) if gpus.clusters else [1]:
                plan = plan_launch(algorithm.fused, cluster, shape, gpus)
                if plan is not None and plan.fits(gpus):
                    yield NormChoice(shape.hidden, shape.rows, name, cluster), plan


def variants(
    shape: NormShape, gpus: Gpus, forced: str | None = None, table: NormTable = ()
) -> set[tuple[str, int, int]]:  # fmt: skip
    """The kernel, cluster and depth of every launch for rows of this length, of any number, if there is room."""
    found: set[NormPlan | None] = set()
    gpus = gpus._replace(half_bytes=1 << 62)
    limits = {gpus.most_blocks, min(gpus.resident, gpus.most_blocks)}
    edges = {blocks // cluster for blocks in limits for cluster in (1, 2, 4, 8)} | {EPOCH_SLOTS, *_ROWS}
    for name in [forced] if forced else [*ALGORITHMS]:
        for rows in {1} | edges | {edge + 1 for edge in edges}:  # the plan may change at these numbers
            found.add(make_plan(replace(shape, rows=rows), gpus, name))
    for choice in _choices(shape, gpus, forced, table):
        for rows in (1, _MANY_ROWS + 1):
            kernel = ALGORITHMS[choice.algorithm].fused
            found.add(plan_launch(kernel, choice.cluster, replace(shape, rows=rows), gpus))
    return {(plan.kernel, plan.cluster, plan.depth) for plan in found if plan is not None}


def _clusters(shape: NormShape, algorithm: str) -> list[int]:
    """The numbers of blocks for a row, the best first; 1 and more, where a block cannot hold a row.

    Several blocks send and poll a row faster than one, as long as rows are few. In two hops several are no faster for a
    short row, since the blocks have few threads.
    """
    hidden, rows, fewest = shape.hidden, shape.rows, [1, 2, 4]
    if hidden > _SHORT_HIDDEN and rows <= _SOME_ROWS:
        return [8, 4, 2, 1]
    if algorithm == "two_shot" or hidden < _CLUSTERED_HIDDEN:
        return fewest
    if rows <= _FEW_ROWS:
        return [4, *fewest]
    return [2, *fewest] if hidden > _WIDE_BLOCK * UNIT and rows <= _MANY_ROWS else fewest


def plan_launch(kernel: str, cluster: int, shape: NormShape, gpus: Gpus) -> NormPlan | None:
    """Plan a launch with so many blocks for a row, whatever the room.

    None if they do not hold it, or if it takes tiles, which clusters do not have.
    """
    two_shot = kernel == "fused_two_shot"
    units = shape.hidden // UNIT
    parts = cluster * (gpus.n if two_shot else 1)
    for depth in (1,) if two_shot else range(1, _MAX_DEPTH + 1):
        share = _SHARE * -(-units // (_SHARE * parts * depth))
        block = 32 * -(-share // 32)
        is_wide = block > _WIDE_BLOCK and shape.rows > _MANY_ROWS
        if block <= most_threads(kernel, gpus, cluster, depth) and not (is_wide and depth < _MAX_DEPTH):
            break
    else:
        return None
    blocks = min(gpus.most_blocks, gpus.resident) if two_shot else gpus.most_blocks
    if cluster > 1 and shape.rows * cluster > blocks:
        return None
    grid = min(shape.rows * cluster, blocks)
    slots = block * grid * depth * -(-shape.rows * cluster // grid)
    staging = (gpus.n - 1) * (2 if two_shot else 1) * row_bytes(slots)
    if slots * PACKET_BYTES >= 1 << 32:  # the kernels count slots in 32 bits
        return None
    return NormPlan(kernel, cluster, depth, grid, block, staging)
