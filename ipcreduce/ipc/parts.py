"""The launches of gather.cu and scatter.cu: of all-gather, broadcast and reduce-scatter.

All arrays of a call go in one launch, which has a table of them as arguments (kernels/parts.cuh), up to the room that
the workspace and the table have. What does not fit goes in further launches: whole rows, or packets of a long row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from ..calls.addresses import Places
from ..calls.request import Request, Rows, unit_of
from ..cuda import driver
from ..device.arguments import ARG_WORDS, IN, Setter, Words
from ..device.prepared import KernelStep, Step
from ..dtypes import reduced_as
from . import lists
from .plan import BYTES, PACKET_BYTES

_GATHER = "gather", "bulk_gather"
KERNELS = {"all-gather": _GATHER, "broadcast": _GATHER, "reduce-scatter": ("scatter", "bulk_scatter")}  # [has tiles]
_PART, _WHOLE, _PITCH, _OFFSETS, _WIDTHS, _FIRST = 0, 1, 2, 3, 11, 15  # words of struct Member
MEMBER_WORDS, TABLE_WORDS = 19, 4  # of struct Member; of struct SplitTable before the members
# The most arrays of a launch: one has a kernel of its own, and then as many as fit into 4 KB and 32,764 bytes.
ONE, SHORT, LONG = 1, *((most // 8 - ARG_WORDS - TABLE_WORDS) // MEMBER_WORDS for most in (4096, 32_764))
_UNUSED = 0xFFFFFFFF  # the first packet of a member that is not in use
_UNSIGNED = {8: "uint64", 4: "uint32", 2: "uint16", 1: "uint8"}


@dataclass
class Piece:
    """The rows, or the part of a row, that a launch takes of an array.

    :ivar member: its index. :ivar part: bytes of this rank's part that come before. :ivar whole: of the whole array.
    :ivar first: by rank, its first packet in the launch.
    """

    member: int
    part: int
    whole: int
    rows: Rows
    first: list[int]


@dataclass
class Plan:
    """One launch of gather.cu or scatter.cu. :ivar packets: by rank, the packets of its message."""

    packets: list[int]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """The packets of the longest message; at least one."""
        return max(1, *self.packets)


def make_plan(every: Mapping[int, Rows], rank: int, most_packets: int, most_pieces: int) -> list[Plan]:
    """Plan the launches, in order, of arrays that are split so. All but ``Piece.part`` is the same on every rank.

    :param every: by member of the call. :param most_packets: of a message. :param most_pieces: of a launch.
    """
    n = max((len(rows.widths) for rows in every.values()), default=0)
    plans = [Plan([0] * n)]
    for member, rows in every.items():
        done = 0
        per_row = [-(-width // PACKET_BYTES) for width in rows.widths]
        while done < rows.rows and any(per_row):
            now = plans[-1]
            fitting = min((most_packets - used) // one for used, one in zip(now.packets, per_row, strict=True) if one)
            taken = min(fitting, rows.rows - done)
            if len(now.pieces) < most_pieces and taken:
                part, whole = done * rows.widths[rank], done * rows.pitch
                now.pieces.append(Piece(member, part, whole, rows, now.packets))
                now.packets = [used + taken * one for used, one in zip(now.packets, per_row, strict=True)]
                done += taken
            elif now.pieces:
                plans.append(Plan([0] * n))
            else:
                plans[-1:] = [*_of_row(member, rows, done, rank, most_packets), Plan([0] * n)]
                done += 1
    return [plan for plan in plans if plan.pieces]


def _of_row(member: int, rows: Rows, row: int, rank: int, most_packets: int) -> Iterator[Plan]:
    """The launches of one row that is too long for one."""
    most = most_packets * PACKET_BYTES
    for begin in range(0, max(rows.widths), most):
        widths = [min(max(width - begin, 0), most) for width in rows.widths]
        part, whole = row * rows.widths[rank] + begin, row * rows.pitch + begin
        piece = Piece(member, part, whole, rows._replace(widths=tuple(widths)), [0] * len(widths))
        yield Plan([-(-width // PACKET_BYTES) for width in widths], [piece])


def places(plan: Plan) -> int:
    """The number of entries in the table of a launch."""
    return next(most for most in (ONE, SHORT, LONG) if len(plan.pieces) <= most)


def table(plan: Plan) -> Words:
    """The words of struct SplitTable, in which the addresses are still to be set."""
    count, n = places(plan), len(plan.packets)
    words = np.zeros(TABLE_WORDS + count * MEMBER_WORDS, np.uint64)
    words[:TABLE_WORDS].view(np.uint32)[:n] = [max(1, packets) for packets in plan.packets]
    members = words[TABLE_WORDS:].reshape(count, MEMBER_WORDS)
    first = members[:, _FIRST:].view(np.uint32)
    first[len(plan.pieces) :] = _UNUSED
    for words_of, piece, begin in zip(members, plan.pieces, first, strict=False):
        words_of[_PITCH] = piece.rows.pitch
        words_of[_OFFSETS : _OFFSETS + n] = piece.rows.offsets
        words_of[_WIDTHS:_FIRST].view(np.uint32)[:n] = piece.rows.widths
        begin[:n] = piece.first
    return words


def most_pieces(most_parts: int) -> int:
    """The most arrays of a launch, as :func:`lists.most_parts` says of lists."""
    return LONG if most_parts == lists.LONG else SHORT


def together(request: Request, n: int) -> Iterator[tuple[str, str, dict[int, Rows]]]:
    """The members of a call that one launch can take.

    Each come as the dtype for which the kernel is compiled, the kind in :data:`plan.CODES`, and the places of the parts
    by member. What is not reduced is moved as unsigned integers.
    """
    assert request.split is not None
    rows = {index: request.split.rows(one.shape, one.itemsize, n) for index, one in enumerate(request.members)}
    if not request.op:
        dtype = _UNSIGNED[min((unit_of(one.itemsize) for one in request.members), default=1)]
        yield dtype, BYTES, rows
        return
    for kind in dict.fromkeys(one.kind for one in request.members):
        every = {index: rows[index] for index, one in enumerate(request.members) if one.kind == kind}
        yield reduced_as(kind), kind, every


def step(plan: Plan, launch: driver.Launch, *, gathers: bool, length: int | None) -> Step:
    """One launch of a call on a list of this length; None for one array.

    :param gathers: the source is the part, and the target the whole array; else it is the other way round.
    """
    begin, order, steps = ARG_WORDS + TABLE_WORDS, 1 if gathers else -1, 0
    for piece in plan.pieces:
        steps |= reduce(or_, (*piece.rows.offsets, *piece.rows.widths), piece.rows.pitch)
    at = (begin + _PART, begin + _WHOLE)[::order]
    before = [(piece.part, piece.whole)[::order] for piece in plan.pieces]
    if length is None:
        return KernelStep(launch, _setter(launch.args.data, at, before[0], steps))
    of_source, of_target = (np.array(one, np.uint64) for one in zip(*before, strict=True))
    members = np.array([piece.member for piece in plan.pieces])
    set_parts = _list_setter(launch.args.data, at, len(members), steps)
    return lists.ListStep(launch, set_parts, members, (of_source, of_target), length)


def _setter(words: memoryview, at: tuple[int, ...], before: tuple[int, ...], steps: int) -> Setter:
    """A function that sets source and target of one array. ``at``: their words. ``before``: the bytes before each."""
    (read, written), (of_source, of_target) = at, before

    def set_addresses(addresses: Sequence[int]) -> None:
        words[read] = source = addresses[0] + of_source
        words[written] = target = addresses[1] + of_target
        words[IN] = source | target | steps  # the kernel sees from these bits how all addresses are aligned

    return set_addresses


def _list_setter(words: memoryview, at: tuple[int, ...], count: int, steps: int) -> Setter:
    """A function that sets sources and targets of several pieces. ``at``: the words of the first one."""
    read, written = (words[one : one + count * MEMBER_WORDS : MEMBER_WORDS] for one in at)
    form: Any = words.format

    def set_parts(parts: Places) -> None:
        (sources, read_bits), (targets, written_bits) = parts
        read[:], written[:] = memoryview(sources).cast(form), memoryview(targets).cast(form)
        words[IN] = read_bits | written_bits | steps

    return set_parts
