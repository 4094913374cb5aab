"""The launches of a list of arrays: for all arrays of one dtype one launch, which has a table of them as arguments.

In a launch the arrays lie one after the other, each padded to whole packets (kernels/list.cuh). A part is an array, or
what a launch takes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..calls.addresses import Addresses, Places
from ..cuda import driver
from ..device.arguments import ARG_WORDS, IN, OUT, Setter, Words, part_table
from ..device.prepared import Start, Step
from ..types import Stream
from .plan import PACKET_BYTES, LaunchPlan

# The most parts of a launch: as many as fit into 4 KB of arguments, and into the 32,764 bytes that a kernel may have
# from CUDA 12.1 on. The larger table costs the host 1.5 us a launch.
SHORT, LONG = 162, 1356
_LONG_SINCE = 12, 1

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def most_parts(version: Sequence[int]) -> int:
    """The most parts of a launch, if the oldest driver of all ranks has this version of CUDA."""
    return LONG if tuple(version) >= _LONG_SINCE else SHORT


@dataclass(frozen=True)
class ListPlan:
    """One launch of a list: its plan, and its parts.

    :ivar parts: the number of entries in the table, the same for all lists: :data:`SHORT` or :data:`LONG`.
    :ivar members: by part, the index of its array.
    :ivar offsets: by part, the bytes of its array that come before it.
    :ivar first: by part, its first packet in the launch.
    :ivar nbytes: by part.
    """

    step: LaunchPlan
    parts: int
    members: Numbers
    offsets: Words
    first: Numbers
    nbytes: Numbers


def make_plan(sizes: Sequence[int], most: int, planned: Callable[[int], Iterable[LaunchPlan]]) -> list[ListPlan]:
    """Plan the launches, in order, for arrays of these sizes in bytes, which all ranks share.

    :param most: the most parts of a launch, the same on every rank.
    :param planned: the plan of one array of so many bytes.
    """
    found = []
    every = np.asarray(sizes, np.int64)
    members = np.flatnonzero(every)
    for at in range(0, len(members), most):
        chunk = members[at : at + most]
        nbytes = every[chunk]
        packets = -(-nbytes // PACKET_BYTES)
        ends = np.cumsum(packets)
        begins = ends - packets
        for step in planned(int(ends[-1]) * PACKET_BYTES):
            begin, end = step.offset // PACKET_BYTES, (step.offset + step.nbytes) // PACKET_BYTES
            low, high = int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(begins, end))
            skipped = np.maximum(begin - begins[low:high], 0) * PACKET_BYTES
            first = np.maximum(begins[low:high] - begin, 0)
            left = np.minimum(nbytes[low:high] - skipped, (end - begin - first) * PACKET_BYTES)
            parts = SHORT if high - low <= SHORT else LONG
            found.append(ListPlan(step, parts, chunk[low:high], skipped.astype(np.uint64), first, left))
    return found


def table(plan: ListPlan) -> Words:
    """The words of struct ListTable (list.cuh), in which the addresses are still to be set."""
    return part_table(plan.parts, plan.first, plan.nbytes)


def setter(plan: ListPlan, args: Words) -> Setter:
    """A function that sets the addresses of the launch's parts."""
    words, count = args.data, len(plan.members)
    ins, targets = (args[at : at + count].data.cast("B") for at in (ARG_WORDS, ARG_WORDS + plan.parts))
    odd = int(np.bitwise_or.reduce(plan.nbytes)) % PACKET_BYTES  # some part is not a whole number of packets

    def set_parts(parts: Places) -> None:
        (read, read_bits), (written, written_bits) = parts
        ins[:], words[IN] = read, read_bits | odd  # by which the kernel sees alignment
        targets[:], words[OUT] = written, written_bits

    return set_parts


def step(plan: ListPlan, launch: driver.Launch, length: int) -> ListStep:
    """One launch of an all-reduce of a list of this length."""
    return ListStep(launch, setter(plan, launch.args), plan.members, (plan.offsets, plan.offsets), length)


class ListStep(Step):
    """One launch of a list: see :class:`Step`. Its addresses are :data:`Places`, by member of the list.

    :param set_parts: sets the places by part in the launch's arguments.
    :param members: by part, the index of its array. :param before: bytes of source and target that come before it.
    :param length: of the list.
    """

    __slots__ = ("_before", "_every", "_members", "_set_parts", "launch", "start")

    def __init__(
        self, launch: driver.Launch, set_parts: Setter, members: Numbers, before: tuple[Words, Words], length: int
    ) -> None:
        self.launch, self._set_parts, self._members, self._before = launch, set_parts, members, before
        self._every = len(members) == length and not any(one.any() for one in before)  # each member is a part
        self.start: Start = self.start_parts if self._every else self._start

    def set(self, places: Places) -> None:
        """Set the addresses in the launch's arguments."""
        self._set_parts(self.parts_at(places))

    def bound(self, places: Places) -> tuple[Start, Places]:
        """The function to call, and its first argument, for a call that is repeated with these addresses."""
        return self.start_parts, self.parts_at(places)

    def _start(self, places: Places, stream: Stream) -> None:
        self.start_parts(self.parts_at(places), stream)

    def start_parts(self, parts: Places, stream: Stream) -> None:
        """Launch it, for the places by part."""
        self._set_parts(parts)
        self.launch.run(stream)

    def parts_at(self, places: Places) -> Places:
        """The places by part."""
        if self._every:
            return places
        (sources, targets), (of_source, of_target) = places, self._before
        read = self._parts_of(sources, of_source)
        return read, read if targets is sources else self._parts_of(targets, of_target)

    def _parts_of(self, members: Addresses, before: Words) -> Addresses:
        words, bits = members
        there = np.frombuffer(words, np.uint64)[self._members] + before
        return there.tobytes(), int(np.bitwise_or.reduce(there)) if bits % PACKET_BYTES else bits
