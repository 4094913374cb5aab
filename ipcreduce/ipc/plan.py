"""Which kernels an all-reduce launches: a pure function of what every rank knows to be the same.

Nothing here may depend on one rank's pointers, GPU load or environment: grids that differ between ranks hang. Shapes
and limits are what was quickest over 2 and 4 H200 (benchmarks/NOTES.md); other GPUs and world sizes use them as
reasoned defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..numerics import DTYPE_NAMES, OPS

ALGORITHMS = ("one_shot", "two_shot", "direct")
MAX_RANKS = 8
PACKET_BYTES = 16
EPOCH_SLOTS = 512  # as in exchange.cuh: no grid may be larger
RESIDENT = 264  # blocks of a looped kernel that an H200 holds at once, two a multiprocessor: see KERNEL in sync.cuh
CODE_BYTES = 128  # the slots of a (dtype, op) begin so much further than those of the one before it
CODES_BYTES = CODE_BYTES * len(DTYPE_NAMES) * len(OPS)

KB, MB = 1 << 10, 1 << 20

# Up to here one hop of (n-1) S bytes beats two of 2 (n-1)/n S. For n above 4 not measured: the traffic grows with n.
_ONE_SHOT_BYTES = {1: 0, 2: 8 * MB, 3: 192 * KB, 4: 192 * KB, 5: 128 * KB, 6: 96 * KB, 7: 64 * KB, 8: 64 * KB}
_LAUNCH_BYTES = 1 << 30  # at most: the kernels count packets and bytes of one launch in 32 bits
_GRAPH_BYTES = 1 * MB  # up to here most hosts take longer to launch an eager call than the GPU takes for it

MOST_CHOICES = 24  # in a table


@dataclass(frozen=True)
class Choice:
    """How messages of up to ``up_to`` bytes are reduced, as ``python -m ipcreduce tune`` has found it."""

    up_to: int
    algorithm: str
    block: int  # threads
    blocks: int  # at most
    depth: int  # packets that a thread takes at a time


Table = tuple[Choice, ...]  # by size; the last one also takes all larger messages. Empty: the defaults below


def most_threads(algorithm: str, depth: int, n: int) -> int:
    """The staged kernels' own limits of threads a block; 0 if there is no such kernel."""
    if algorithm == "one_shot":
        return 1024 if depth == 1 else 0
    if algorithm == "two_shot" and depth in (1, 2, 4):
        return 512 if depth * n <= 4 else 256
    return 0


def most_blocks(resident: int, sharing: int) -> int:
    """Blocks that one launch may have at most, so that those of all ranks on a GPU are there at once.

    Where ranks share a GPU, blocks that wait for a peer must not keep that peer's out. A launch then has no block of
    more than 512 threads, and every kernel leaves room for two of those a multiprocessor, which is what ``resident``
    counts. A rank may have two grids there: with programmatic launch the next one waits beside the one that runs.
    """
    return EPOCH_SLOTS if sharing == 1 else max(1, resident // (2 * sharing))


def resident_blocks(block: int, depth: int, n: int, resident: int) -> int:
    """Blocks of two_shot that every rank's GPU holds at once, of those that a launch may have."""
    return min(EPOCH_SLOTS, resident * most_threads("two_shot", depth, n) // block)


def checked_table(choices: Iterable[Choice], n: int) -> Table:
    """:raises ValueError: if a kernel cannot run so over ``n`` ranks."""
    table = tuple(choices)
    for choice in table:
        threads = most_threads(choice.algorithm, choice.depth, n)
        if not (0 < choice.block <= threads and choice.block % 32 == 0 and 0 < choice.blocks <= EPOCH_SLOTS):
            raise ValueError(f"no kernel runs by {choice}")
    sizes = [choice.up_to for choice in table]
    if len(table) > MOST_CHOICES or sizes != sorted({*sizes}):
        raise ValueError(f"expected up to {MOST_CHOICES} choices by size; found sizes {sizes}")
    return table


@dataclass(frozen=True)
class Step:
    """One kernel launch: all-reduces ``nbytes`` bytes at ``offset`` of the message."""

    algorithm: str
    offset: int
    nbytes: int
    grid: int
    block: int
    depth: int  # packets that a thread takes at a time


def code_offset(dtype: str, op: str) -> int:
    """How far into each half the slots of this dtype and op begin, in bytes.

    Ranks that disagree about either then wait for each other's packets instead of folding them.
    """
    return CODE_BYTES * (DTYPE_NAMES.index(dtype) * len(OPS) + OPS.index(op))


def row_bytes(packets: int) -> int:
    """Bytes from one source's row of slots to the next: row_bytes() of exchange.cuh."""
    warps = -(-packets // 32)
    return PACKET_BYTES * (warps * 32 + -(-warps // 8) * 8)


def staging_bytes(algorithm: str, nbytes: int, n: int) -> int:
    """What one launch needs in each half of every workspace, in bytes."""
    packets = -(-nbytes // PACKET_BYTES)
    if algorithm == "one_shot":
        return (n - 1) * row_bytes(packets)
    columns = row_bytes(-(-packets // n))
    return (n - 1) * (columns + row_bytes(EPOCH_SLOTS) if algorithm == "direct" else 2 * columns)


@lru_cache(maxsize=4096)
def make_plan(
    nbytes: int,
    n: int,
    half_bytes: int,
    forced: str | None = None,
    table: Table = (),
    resident: int = RESIDENT,
    sharing: int = 1,
) -> tuple[Step, ...]:
    """The launches for a message of ``nbytes`` bytes over ``n`` ranks, in order.

    :param half_bytes: size of each half of the workspace, the same on every rank.
    :param forced: one of :data:`ALGORITHMS` at any size; None for the quickest staged one. "direct" is staged too until
        a graph is registered, by two_shot.
    :param table: measured choices, the same on every rank.
    :param resident: blocks that every rank's GPU holds at once, as :data:`RESIDENT`.
    :param sharing: the most ranks on one GPU, the same on every rank.
    """
    if not nbytes or n == 1:
        return ()
    if forced == "direct":
        forced = "two_shot"
    choice, algorithm = None, forced or ("one_shot" if nbytes <= _ONE_SHOT_BYTES[n] else "two_shot")
    if table and not forced:
        choice = next((one for one in table if nbytes <= one.up_to), table[-1])
        algorithm = choice.algorithm
    one_shot_packets = most_blocks(resident, sharing) * _one_shot_threads(sharing)
    segment = _segment_bytes(algorithm, n, half_bytes, one_shot_packets)
    if algorithm == "one_shot" and not forced and nbytes > segment:  # two shots stage less, and in a loop
        algorithm = "two_shot"
        segment = _segment_bytes(algorithm, n, half_bytes, one_shot_packets)
    even = -(-nbytes // -(-nbytes // segment))  # rather than a small one at the end, which costs as much to start
    unit = _unit(segment)
    even = -(-even // unit) * unit
    return tuple(
        step(algorithm, at, min(even, nbytes - at), n, choice, resident, sharing) for at in range(0, nbytes, even)
    )


def direct(step: Step, n: int, resident: int = RESIDENT, sharing: int = 1) -> Step:
    """The direct launch that takes a staged one's place where that is forced and the peers have mapped its output.

    It is nowhere the default: over 2 and 4 H200 staged ones are ahead, or level, at every size (NOTES.md).
    """
    resident = min(resident, most_blocks(resident, sharing))
    shape = _direct_shape(-(-step.nbytes // PACKET_BYTES // n), n, resident)
    return Step("direct", step.offset, step.nbytes, *shape)


def kernels(n: int, forced: str | None = None, table: Table = ()) -> set[tuple[str, int]]:
    """(algorithm, depth) of every kernel that :func:`make_plan` and :func:`direct` have a launch for, at any size."""
    if n == 1:
        return set()
    if forced == "direct":
        return {("two_shot", 1), ("direct", _direct_shape(1, n, RESIDENT)[2])}
    if forced:
        return {(forced, 1)}
    return {("one_shot", 1), ("two_shot", 1)} | {(choice.algorithm, choice.depth) for choice in table}


def eager_as_graph(step: Step) -> bool:
    """Whether an eager call is launched as a graph of one kernel.

    That costs the host 2 us less and the GPU 1 us more, where it is not waited for: it cannot overlap (NOTES.md).
    """
    return step.nbytes <= _GRAPH_BYTES


def _unit(nbytes: int) -> int:
    """What launches of about ``nbytes`` bytes are multiples of."""
    return 16 * KB if nbytes > 16 * KB else PACKET_BYTES


def _one_shot_threads(sharing: int) -> int:
    """The most threads a block of one_shot: of 1,024, a multiprocessor may hold one block only."""
    return 1024 if sharing == 1 else 512


def _segment_bytes(algorithm: str, n: int, half_bytes: int, one_shot_packets: int) -> int:
    """The largest message of one launch; of one_shot, which has a thread a packet, ``one_shot_packets`` at most."""
    room = half_bytes - CODES_BYTES
    rows = (n - 1) * (1 if algorithm == "one_shot" else 2)
    packets = max(32, room // rows // PACKET_BYTES * 32 // 33 - 8 - 32)  # 33 packets a warp, rounded up to lines
    if algorithm == "one_shot":
        packets = min(packets, one_shot_packets)
    else:
        packets *= n
    nbytes = min(packets * PACKET_BYTES, _LAUNCH_BYTES)
    nbytes -= nbytes % _unit(nbytes)
    if staging_bytes(algorithm, nbytes, n) > room:
        raise ValueError(f"a half of {half_bytes} bytes is too small for {n} ranks")
    return nbytes


def step(
    algorithm: str,
    offset: int,
    nbytes: int,
    n: int,
    choice: Choice | None = None,
    resident: int = RESIDENT,
    sharing: int = 1,
) -> Step:
    """One launch, by a choice if that is of this algorithm and its grid can hold the message, else by default."""
    packets = -(-nbytes // PACKET_BYTES)
    threads = packets if algorithm == "one_shot" else -(-packets // n)
    most = most_blocks(resident, sharing)
    if choice is not None and choice.algorithm == algorithm:
        grid = -(-threads // choice.block)
        if algorithm == "two_shot":
            grid = min(grid, choice.blocks, most)
        if grid <= most and choice.block <= _one_shot_threads(sharing):
            return Step(algorithm, offset, nbytes, grid, choice.block, choice.depth)
    if algorithm == "one_shot":
        return Step(algorithm, offset, nbytes, *_one_shot_shape(threads, most))
    grid, block, depth = _two_shot_shape(threads, n, min(resident, most))
    return Step(algorithm, offset, nbytes, min(grid, most), block, depth)


def _one_shot_shape(packets: int, most: int) -> tuple[int, int, int]:
    """(grid, block, depth): a thread a packet; up to 4 KB at most two blocks, then spread over the multiprocessors.

    :param most: blocks.
    """
    if packets <= 256:
        block = 32 * -(-packets // 64)
    elif packets <= 512:
        block = 64
    else:
        blocks = 128 if packets <= 32 * 1024 else EPOCH_SLOTS
        block = 32 * -(-packets // (blocks * 32))
    block = max(block, 32 * -(-packets // (most * 32)))
    return -(-packets // block), block, 1


def _two_shot_shape(columns: int, n: int, resident: int) -> tuple[int, int, int]:
    """(grid, block, depth): a thread a column, spread over the multiprocessors, up to 3 MB at n=4; then in tiles."""
    if columns <= 48 * KB:
        block = 32 if columns <= 4 * KB else 64 if columns <= 32 * KB else 128
        most = resident_blocks(block, 1, n, resident)
    elif n == 2:
        block, most = most_threads("two_shot", 1, n), resident
    else:
        block, most = 256, -(-resident // 2)
    return min(most, -(-columns // block)), block, 1


def _direct_shape(columns: int, n: int, resident: int) -> tuple[int, int, int]:
    """(grid, block, depth): tiles, over 2 ranks of several columns a thread."""
    grid, block = (resident, 512) if n == 2 and columns > 256 * KB else (-(-resident // 2), 256)
    return min(grid, -(-columns // block)), block, 4 if n == 2 else 1
