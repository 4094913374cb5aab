"""The launches of bulk.cu, each between two of copy.cu: into the area that the peers have mapped, and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..calls.addresses import Places
from ..cuda import driver
from ..device.arguments import BYTES, IN, OUT, OUTS, Setter, Words
from ..device.prepared import Step
from ..types import Stream
from . import lists
from .lists import ListPlan
from .plan import PACKET_BYTES
from .workspace import Workspace

_FIRST, _COUNT, _IS_INWARD = OUTS, OUTS + 1, OUTS + 2  # words of copy.cu
_LINE = 128 // PACKET_BYTES  # chunks are whole lines
_COPY_BLOCKS, _COPY_THREADS, _COPY_BATCH = 264, 512, 4  # the most blocks; packets of a thread at a time


def own_chunk(nbytes: int, n: int, rank: int) -> tuple[int, int]:
    """The first packet of a rank's chunk, and its packets, as in bulk.cu."""
    packets = -(-nbytes // PACKET_BYTES)
    columns = -(-packets // (n * _LINE)) * _LINE
    first = min(rank * columns, packets)
    return first, min(columns, packets - first)


def copy_grid(nbytes: int) -> tuple[int, int]:
    """Grid and block of a copy."""
    return min(_COPY_BLOCKS, -(-nbytes // (_COPY_BATCH * PACKET_BYTES * _COPY_THREADS))), _COPY_THREADS


def in_area(args: Words, workspace: Workspace) -> Words:
    """The arguments of a launch of bulk.cu that takes a message from the area and leaves its result there."""
    args[OUTS : OUTS + workspace.n] = [peer + workspace.area for peer in workspace.peers]
    args[IN] = args[OUT] = args[OUTS]
    return args


class BulkStep(Step):
    """The three launches of a call on one array, or of a part of it: see :class:`Step`.

    :param setters: set the addresses of a call in the arguments of the two copies.
    :param own: see :func:`own_chunk`. It is taken from the program's array, and put there, where that is aligned.
    :param maps: the copy out of the area applies an expression, to all packets.
    """

    __slots__ = ("_area", "_exchange", "_inward", "_nbytes", "_outward", "_own", "_setters", "_whole")

    def __init__(
        self, inward: driver.Launch, exchange: driver.Launch, outward: driver.Launch, setters: Sequence[Setter],
        own: tuple[int, int], *, maps: bool,
    ) -> None:  # fmt: skip
        self._inward, self._exchange, self._outward, self._setters = inward, exchange, outward, setters
        self._own, self._whole = own, maps
        self._area, self._nbytes = int(exchange.args[OUTS]), int(exchange.args[BYTES])
        inward.args[_IS_INWARD] = 1

    def start(self, addresses: Any, stream: Stream) -> None:
        """Launch them."""
        inward, words, outward = self._inward.args.data, self._exchange.args.data, self._outward.args.data
        for set_addresses in self._setters:
            set_addresses(addresses)
        words[IN] = self._own_place(inward, IN, False)
        words[OUT] = self._own_place(outward, OUT, self._whole)
        inward[OUT] = outward[IN] = self._area
        self._inward.run(stream)
        self._exchange.run(stream)
        self._outward.run(stream)

    def _own_place(self, copy: Any, side: int, whole: bool) -> int:
        """The address of this rank's chunk for the exchange: in the program's array, or in the area."""
        at: int = copy[side]
        if whole or (at | self._nbytes) % PACKET_BYTES:
            copy[_COUNT] = 0
            return self._area
        copy[_FIRST], copy[_COUNT] = self._own
        return at


class BulkListStep(Step):
    """The three launches of a list, or of a part of it: see :class:`Step`. The addresses are :data:`Places`."""

    __slots__ = ("_exchange", "_in_area", "_inward", "_outward")

    def __init__(
        self, planned: ListPlan, inward: driver.Launch, exchange: driver.Launch, outward: driver.Launch, length: int
    ) -> None:  # fmt: skip
        """``length``: of the list."""
        inward.args[_IS_INWARD] = 1
        self._inward, self._outward = lists.step(planned, inward, length), lists.step(planned, outward, length)
        self._exchange = exchange
        there = int(exchange.args[OUTS]) + PACKET_BYTES * planned.first.astype(np.uint64)
        self._in_area = there.tobytes(), int(np.bitwise_or.reduce(there))

    def start(self, places: Places, stream: Stream) -> None:
        """Launch them."""
        read, written = self._inward.parts_at(places)
        self._inward.start_parts((read, self._in_area), stream)
        self._exchange.run(stream)
        self._outward.start_parts((self._in_area, written), stream)
