"""The plan of an all-reduce: its kernel launches, as a pure function of values that all ranks share.

No function here may use one rank's pointers, GPU load or environment, because kernels whose grids differ between ranks
hang. The shapes and limits were the fastest over 2 and 4 H200 (benchmarks/NOTES.md). For other GPUs and numbers of
ranks they are estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..dtypes import KIND_NAMES, OPS


class Algorithm(NamedTuple):
    """The way in which a kernel exchanges a message.

    :ivar hops: of each element. In two, each rank reduces its part of the message, and sends that to all.
    :ivar loops: a thread takes packets in turns; without, each has a thread of its own.
    :ivar fused: the kernel that also normalises rows.
    """

    hops: int
    loops: bool
    fused: str

    def parts(self, n: int) -> int:
        """The parts of a message, each of which has a row of slots for each peer and hop."""
        return 1 if self.hops == 1 else n


ALGORITHMS = {
    "one_shot": Algorithm(hops=1, loops=False, fused="fused_one_shot"),
    "two_shot": Algorithm(hops=2, loops=True, fused="fused_two_shot"),
}
BULK = "bulk"  # the kernel of long calls with few blocks, for GPUs of this compute capability on:
BULK_CAPABILITY = 9, 0
MAX_RANKS = 8
PACKET_BYTES = 16
EPOCH_SLOTS = 512  # as in packets.cuh; also the largest grid
RESIDENT = 264  # blocks of a looped kernel resident on an H200, two a multiprocessor: see KERNEL in sync.cuh
FUSED_DTYPES = "float16", "bfloat16"  # of kernels that also normalise rows
BYTES = "bytes"  # the dtype of what is moved and not reduced
# Each (dtype, op) here has slots of its own: ranks that differ in it wait for packets, and reduce no wrong ones. An
# entry's index is its code. Those of launches that are planned here come before those of norms (CODES_BYTES).
CODES = {
    of: code
    for code, of in enumerate(
        [
            *product(KIND_NAMES, OPS),
            *product(KIND_NAMES, (f"reduce-scatter {op}" for op in OPS)),
            *product((BYTES,), ("all-gather", "broadcast", "spread")),
            *product(FUSED_DTYPES, ("norm",)),
        ]
    )
}
CODE_BYTES = 128  # distance between the slot origins of consecutive codes
CODES_BYTES = CODE_BYTES * CODES["float16", "norm"]  # of (dtype, op)

KB, MB = 1 << 10, 1 << 20

# The largest message, by n, for which one hop of (n-1) S bytes is faster than two hops of 2 (n-1)/n S bytes. From n = 5
# on the sizes are estimates, which fall because the traffic of one hop grows with n.
ONE_HOP_BYTES = {1: 0, 2: 8 * MB, 3: 192 * KB, 4: 192 * KB, 5: 128 * KB, 6: 96 * KB, 7: 64 * KB, 8: 64 * KB}
_LAUNCH_BYTES = 1 << 30  # the most of one launch, because kernels count its packets and bytes in 32 bits
LAUNCH_PACKETS = _LAUNCH_BYTES // PACKET_BYTES
BULK_BYTES = 1 * MB  # from this size on, it is used for calls that may not have all blocks
SPREAD_BYTES = 256 * KB  # from this size on a broadcast over more than two ranks goes in two hops: measured over 4
_BULK_BLOCKS, _TILE_BLOCKS, _BULK_THREADS = 8, 24, 512  # so few blocks fill the links
_STAGE_BYTES, _ROUNDS, _LEAST_TILES = 32 * KB, 4, 3  # of tiles.cuh
_MAX_AREA = 256 * MB
_GRAPH_BYTES = 1 * MB  # up to this size, most hosts take longer to launch an eager call than the GPU takes to run it

MAX_CHOICES = 24  # rows of a table


@dataclass(frozen=True)
class Choice:
    """The kernel and launch shape for messages of up to ``up_to`` bytes, as found by ``python -m ipcreduce tune``."""

    up_to: int
    algorithm: str
    block: int  # threads a block
    blocks: int  # the largest grid
    depth: int  # packets that a thread takes at a time


Table = tuple[Choice, ...]  # by size. The last row also serves all larger messages. Empty: the defaults below


class Gpus(NamedTuple):
    """The ranks' GPUs and workspaces, as far as plans depend on them. The same values on every rank.

    :ivar n: the number of ranks. :ivar half_bytes: the size of each half of a workspace.
    :ivar resident: the number of blocks that every GPU holds at once, as :data:`RESIDENT`.
    :ivar sharing: the most ranks on one GPU.
    :ivar area: the bytes in which :data:`BULK` works; 0 for GPUs without that.
    :ivar clusters: the GPUs have clusters of blocks (sm_90).
    """

    n: int
    half_bytes: int
    resident: int = RESIDENT
    sharing: int = 1
    area: int = 0
    clusters: bool = True

    @property
    def most_blocks(self) -> int:
        """The most blocks of one launch for which the blocks of all ranks on a GPU are resident at once.

        If ranks share a GPU, blocks that wait for a peer must not keep the peer's blocks from running. A block then has
        at most 512 threads, and ``resident`` counts two such blocks for each multiprocessor, for which every kernel
        leaves room. A rank may have two grids there: with programmatic launch, the next grid waits beside the running
        one.
        """
        return EPOCH_SLOTS if self.sharing == 1 else max(1, self.resident // (2 * self.sharing))

    @property
    def most_resident(self) -> int:
        """The most blocks of a launch by bulk copies, of which a multiprocessor holds one."""
        return max(1, min(self.resident, self.most_blocks) // 2)

    @property
    def one_shot_threads(self) -> int:
        """The most threads in a block of one_shot. A multiprocessor may have room for one block of 1,024 only."""
        return 1024 if self.sharing == 1 else 512

    def resident_blocks(self, block: int, depth: int) -> int:
        """The number of blocks of a two_shot launch that every rank's GPU holds at once, at most ``EPOCH_SLOTS``."""
        return min(EPOCH_SLOTS, self.resident * most_threads("two_shot", depth, self.n) // block)


def most_threads(algorithm: str, depth: int, n: int) -> int:
    """The most threads in a block of one_shot or two_shot; 0 if there is no such kernel."""
    if algorithm == "one_shot":
        return 1024 if depth == 1 else 0
    if algorithm == "two_shot" and depth in (1, 2, 4):
        return 512 if depth * n <= 4 else 256
    return 0


def checked_table(choices: Iterable[Choice], n: int) -> Table:
    """Validate a table for ``n`` ranks.

    :raises ValueError: if a choice has no kernel, or if the rows are too many or not in ascending order of size.
    """
    table = tuple(choices)
    for choice in table:
        numbers = (choice.up_to, choice.block, choice.blocks, choice.depth)
        if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):  # a file may hold any JSON
            raise ValueError(f"{choice} has what is no whole number")
        threads = most_threads(choice.algorithm, choice.depth, n)
        if not (0 < choice.block <= threads and choice.block % 32 == 0 and 0 < choice.blocks <= EPOCH_SLOTS):
            raise ValueError(f"no kernel runs by {choice}")
    sizes = [choice.up_to for choice in table]
    if len(table) > MAX_CHOICES or sizes != sorted({*sizes}):
        raise ValueError(f"the sizes {sizes} are more than {MAX_CHOICES}, or do not ascend")
    return table


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel launch, for ``nbytes`` bytes from byte ``offset`` of the message on."""

    algorithm: str
    offset: int
    nbytes: int
    grid: int
    block: int
    depth: int  # packets that a thread takes at a time


def code_offset(dtype: str, op: str) -> int:
    """The byte offset, in each half of a workspace, of the slots for one of :data:`CODES`."""
    return CODE_BYTES * CODES[dtype, op]


def row_bytes(packets: int) -> int:
    """The bytes from one source rank's row of slots to the next row, as row_bytes() of packets.cuh."""
    warps = -(-packets // 32)
    return PACKET_BYTES * (warps * 32 + -(-warps // 8) * 8)


def staging_bytes(algorithm: str, nbytes: int, n: int) -> int:
    """The bytes that one launch needs in each half of each workspace."""
    row, packets = ALGORITHMS[algorithm], -(-nbytes // PACKET_BYTES)
    return (n - 1) * row.hops * row_bytes(-(-packets // row.parts(n)))


@lru_cache(maxsize=4096)
def make_plan(
    nbytes: int, gpus: Gpus, forced: str | None = None, table: Table = (), sms: int = EPOCH_SLOTS
) -> tuple[LaunchPlan, ...]:
    """Plan the launches, in order, for a message of ``nbytes`` bytes.

    :param forced: one of :data:`ALGORITHMS`, or :data:`BULK`, to use at any size; None for the fastest.
    :param table: measured choices, the same on every rank.
    :param sms: the most blocks of a launch.
    """
    if not nbytes or gpus.n == 1:
        return ()
    if sms < EPOCH_SLOTS and gpus.area and not forced and nbytes >= BULK_BYTES:
        usual = make_plan(nbytes, gpus, None, table)
        forced = BULK if any(step.grid > sms for step in usual) else None
    if forced == BULK:
        return _bulk_plan(nbytes, gpus, sms)
    choice, algorithm = None, forced or ("one_shot" if nbytes <= ONE_HOP_BYTES[gpus.n] else "two_shot")
    if table and not forced:
        choice = next((one for one in table if nbytes <= one.up_to), table[-1])
        algorithm = choice.algorithm
    segment = _segment_bytes(algorithm, gpus, sms)
    if algorithm == "one_shot" and not forced and nbytes > segment:  # two_shot needs less room, and its threads loop
        algorithm = "two_shot"
        segment = _segment_bytes(algorithm, gpus, sms)
    pieces = _even(nbytes, segment, _unit(segment))
    return tuple(plan_launch(algorithm, *piece, gpus, choice, sms) for piece in pieces)


def _bulk_plan(nbytes: int, gpus: Gpus, sms: int) -> tuple[LaunchPlan, ...]:
    grid = min(sms, _BULK_BLOCKS, gpus.most_resident)
    return tuple(LaunchPlan(BULK, *piece, grid, _BULK_THREADS, 1) for piece in _even(nbytes, gpus.area, _unit(nbytes)))


def spread_plan(nbytes: int, gpus: Gpus, forced: str | None = None) -> list[LaunchPlan]:
    """Plan the launches of spread.cu for a broadcast, as :func:`make_plan`; none if gather.cu takes it."""
    if gpus.n <= 2 or forced not in (None, "two_shot") or nbytes < (1 if forced else SPREAD_BYTES):
        return []
    peers = gpus.n - 1  # each has a row of slots, and a chunk of the message
    segment = min(packets_of_rows(peers, gpus.half_bytes) * peers * PACKET_BYTES, _LAUNCH_BYTES)
    segment -= segment % _unit(segment)
    plans = []
    for at, size in _even(nbytes, segment, _unit(segment)):
        columns = -(-size // PACKET_BYTES // peers)
        shape = _looped_shape(columns, gpus._replace(n=MAX_RANKS), gpus.most_blocks)  # as of two_shot over 8
        plans.append(LaunchPlan("spread", at, size, *shape))
    return plans


def _even(nbytes: int, segment: int, unit: int) -> Iterator[tuple[int, int]]:
    """Offset and bytes of launches of equal size, because each takes the same time to start."""
    even = -(-nbytes // -(-nbytes // segment) // unit) * unit
    for at in range(0, nbytes, even):
        yield at, min(even, nbytes - at)


class Tiles(NamedTuple):
    """The launch of a kernel of tiles.cuh. :ivar round_tiles: those of a block in a round, which is T there."""

    grid: int
    block: int
    round_tiles: int


def tiles(gpus: Gpus, sms: int, *, reduces: bool) -> Tiles | None:
    """The launch with as many blocks as have room in the area; None if not one has."""
    room = gpus.area // (gpus.n - 1) if reduces else gpus.area  # of a message
    tile = _STAGE_BYTES // (gpus.n if reduces else gpus.n - 1) // 128 * 128
    most = min(sms, _TILE_BLOCKS, gpus.most_resident, room // (_ROUNDS * _LEAST_TILES * tile))
    return Tiles(most, _BULK_THREADS, room // (_ROUNDS * tile * most)) if most else None


def area_bytes(workspace: int) -> int:
    """The bytes in which :data:`BULK` works, beside a workspace of so many bytes."""
    return min(workspace // 4 // (16 * KB) * (16 * KB), _MAX_AREA)


def kernels(n: int, forced: str | None = None, table: Table = ()) -> set[tuple[str, int]]:
    """The (algorithm, depth) of every kernel that :func:`make_plan` launches at some size."""
    if n == 1:
        return set()
    if forced:
        return {(forced, 1)} - {(BULK, 1)}
    return {("one_shot", 1), ("two_shot", 1)} | {(choice.algorithm, choice.depth) for choice in table}


def is_short(nbytes: int) -> bool:
    """True if an eager call of so many bytes should run as a graph of one kernel, where it is one launch.

    That saves the host 2 us, and the host is the bottleneck at these sizes. The GPU takes 1 us longer, because the
    kernels do not overlap (benchmarks/NOTES.md).
    """
    return nbytes <= _GRAPH_BYTES


def _unit(nbytes: int) -> int:
    """The unit, in bytes, to which the size of a launch of about ``nbytes`` bytes is rounded."""
    return 16 * KB if nbytes > 16 * KB else PACKET_BYTES


def packets_of_rows(rows: int, half_bytes: int) -> int:
    """The most packets of so many rows of slots in each half of a workspace."""
    room = half_bytes - CODES_BYTES
    return max(32, room // rows // PACKET_BYTES * 32 // 33 - 8 - 32)  # room for 33 a warp, rounded to lines of 8


def _segment_bytes(algorithm: str, gpus: Gpus, sms: int) -> int:
    """The bytes of the largest launch. one_shot has a thread for each packet."""
    n, half_bytes, row = gpus.n, gpus.half_bytes, ALGORITHMS[algorithm]
    packets = packets_of_rows((n - 1) * row.hops, half_bytes) * row.parts(n)
    if not row.loops:
        packets = min(packets, min(sms, gpus.most_blocks) * gpus.one_shot_threads)
    nbytes = min(packets * PACKET_BYTES, _LAUNCH_BYTES)
    nbytes -= nbytes % _unit(nbytes)
    if staging_bytes(algorithm, nbytes, n) > half_bytes - CODES_BYTES:
        raise ValueError(f"a half of {half_bytes} bytes is too small for {n} ranks")
    return nbytes


def plan_launch(
    algorithm: str, offset: int, nbytes: int, gpus: Gpus, choice: Choice | None = None, sms: int = EPOCH_SLOTS
) -> LaunchPlan:
    """Plan one launch: by ``choice`` if it has this algorithm and its grid holds the message, or else by default."""
    packets = -(-nbytes // PACKET_BYTES)
    row = ALGORITHMS[algorithm]
    threads = -(-packets // row.parts(gpus.n))
    most = min(sms, gpus.most_blocks)
    if choice is not None and choice.algorithm == algorithm:
        grid = -(-threads // choice.block)
        if row.loops:
            grid = min(grid, choice.blocks, most)
        if grid <= most and choice.block <= gpus.one_shot_threads:
            return LaunchPlan(algorithm, offset, nbytes, grid, choice.block, choice.depth)
    if not row.loops:
        return LaunchPlan(algorithm, offset, nbytes, *_one_shot_shape(threads, gpus, most))
    return LaunchPlan(algorithm, offset, nbytes, *_looped_shape(threads, gpus, most))


def parts_shape(packets: int, gpus: Gpus, sms: int | None) -> tuple[int, int]:
    """Grid and block of gather.cu or scatter.cu, if the longest message has so many packets."""
    room = min(EPOCH_SLOTS if sms is None else sms, gpus.most_blocks)
    most = most_threads("two_shot", 1, gpus.n)
    block = min(_one_shot_shape(packets, gpus, room)[1], most)
    if packets > (64 * KB if gpus.n == 2 else 512):
        block = min(32 * -(-packets // (128 * 32)), most)
    return min(room, gpus.resident * most // block, -(-packets // block)), block


def _one_shot_shape(packets: int, gpus: Gpus, most: int) -> tuple[int, int, int]:
    """Grid, block and depth. Each packet has a thread. Up to 4 KB there are at most two blocks; then they fill the GPU.

    Over two ranks 64 blocks do from 16 KB to 1 MB: alone they are 0 to 3 % slower, and beside long matrix products they
    cost about half (benchmarks/NOTES.md). That was not measured over more.

    :param most: the largest grid.
    """
    if packets <= 256:
        block = 32 * -(-packets // 64)
    elif packets <= 512:
        block = 64
    elif gpus.n == 2 and packets <= 64 * KB:
        block = min(max(128, 32 * -(-packets // (64 * 32))), gpus.one_shot_threads)
    else:
        blocks = 128 if packets <= 32 * 1024 else EPOCH_SLOTS
        block = 32 * -(-packets // (blocks * 32))
    block = max(block, 32 * -(-packets // (most * 32)))
    return -(-packets // block), block, 1


def _looped_shape(columns: int, gpus: Gpus, most: int) -> tuple[int, int, int]:
    """:func:`_two_shot_shape` with at most ``most`` blocks."""
    grid, block, depth = _two_shot_shape(columns, gpus._replace(resident=min(gpus.resident, gpus.most_blocks)))
    if grid > most:  # larger blocks in place of more of them
        block = min(most_threads("two_shot", depth, gpus.n), 32 * -(-columns // (32 * most)))
        grid = min(most, gpus.resident_blocks(block, depth), -(-columns // block))
    return grid, block, depth


def _two_shot_shape(columns: int, gpus: Gpus) -> tuple[int, int, int]:
    """Grid, block and depth. Up to 3 MB at n=4, each column has a thread, and these fill the GPU. Then come tiles."""
    if columns <= 48 * KB:
        block = 32 if columns <= 4 * KB else 64 if columns <= 32 * KB else 128
        most = gpus.resident_blocks(block, 1)
    elif gpus.n == 2:
        block, most = most_threads("two_shot", 1, gpus.n), gpus.resident
    else:
        block, most = 256, -(-gpus.resident // 2)
    return min(most, -(-columns // block)), block, 1
