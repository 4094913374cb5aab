"""The launches of a list of arrays: for all arrays of one dtype one launch, which has a table of them as arguments.

In a launch the arrays lie one behind the other, each padded to whole packets (kernels/list.cuh). A part is an array, or
what a launch takes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cuda import driver
from ..device.known_calls import PreparedList
from ..device.known_lists import Addresses, Places, Start, Words
from ..types import Stream
from .plan import PACKET_BYTES, LaunchPlan

ARGUMENT_WORDS = 24  # of struct Args before its table (packets.cuh)
# The most parts of a launch: as many as fit into 4 KB of arguments, and into the 32,764 bytes that a kernel may have
# from CUDA 12.1 on. The larger table costs the host 1.5 us a launch.
SHORT, LONG = 162, 1356
_LONG_SINCE = 12, 1
_IN, _OUT = 0, 1  # words of struct Args
_NO_PART = 0xFFFFFFFF

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def most_parts(version: Sequence[int]) -> int:
    """The most parts of a launch, if the oldest driver of all ranks has this version of CUDA."""
    return LONG if tuple(version) >= _LONG_SINCE else SHORT


@dataclass(frozen=True)
class ListPlan:
    """One launch of a list: its plan, and its parts.

    :ivar parts: the places in the table, which is the same for all lists: :data:`SHORT` or :data:`LONG`.
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


def table(plan: ListPlan) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The words of struct PartTable (list.cuh), in which the addresses are still to be set."""
    count, places = len(plan.members), plan.parts
    words = np.zeros(3 * places, np.uint64)
    numbers = words[2 * places :].view(np.uint32)
    numbers[:places] = _NO_PART
    numbers[:count], numbers[places : places + count] = plan.first, plan.nbytes
    return words


class ListLaunch:
    """One launch of a list, and its arguments, in which :meth:`set` sets the addresses."""

    def __init__(
        self, plan: ListPlan, launch: driver.Launch, args: np.ndarray[Any, np.dtype[np.uint64]], length: int
    ) -> None:  # fmt: skip
        """``length``: of the list."""
        self.plan, self.launch, self._words = plan, launch, args.data
        count, (ins, targets) = len(plan.members), (ARGUMENT_WORDS, ARGUMENT_WORDS + plan.parts)
        self._ins, self._outs = args[ins : ins + count].data.cast("B"), args[targets : targets + count].data.cast("B")
        self._odd = int(np.bitwise_or.reduce(plan.nbytes)) % PACKET_BYTES  # some part is no whole number of packets
        self.every = count == length and not plan.offsets.any()  # each member is a part

    def parts(self, places: Places) -> Places:
        """The places by part of a list, from those by member."""
        if self.every:
            return places
        sources, targets = places
        read = self._parts(sources)
        return read, read if targets is sources else self._parts(targets)

    def _parts(self, members: Addresses) -> Addresses:
        words, bits = members
        there = np.frombuffer(words, np.uint64)[self.plan.members] + self.plan.offsets
        return there.tobytes(), int(np.bitwise_or.reduce(there)) if bits % PACKET_BYTES else bits

    def set(self, parts: Places) -> None:
        """Set the addresses of the parts."""
        (read, read_bits), (written, written_bits) = parts
        self._ins[:], self._words[_IN] = read, read_bits | self._odd  # by which the kernel sees alignment
        self._outs[:], self._words[_OUT] = written, written_bits

    def run(self, parts: Places, stream: Stream) -> None:
        """Launch it for these parts on ``stream``."""
        self.set(parts)
        self.launch.run(stream)


@dataclass(frozen=True, kw_only=True)
class PreparedLaunches(PreparedList):
    """A call on a list of arrays: its launches, in order."""

    launches: tuple[ListLaunch, ...]

    @property
    def start(self) -> Start:
        """:meth:`run`, or what takes less time for these launches."""
        if len(self.launches) == 1 and self.launches[0].every:
            return self.launches[0].run
        return self.run

    def run(self, places: Places, stream: Stream) -> None:
        """Launch it for arrays at these places, by member of the list, on ``stream``."""
        for launch in self.launches:
            launch.run(launch.parts(places), stream)
