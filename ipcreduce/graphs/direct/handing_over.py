"""Slabs in virtual memory, handed over as file descriptors to the ranks that write into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...ranks import exchange
from ...ranks.descriptors import MAX_DESCRIPTORS, several_handed_over
from ...ranks.exchange import Channel
from .mappings import Key


def hand_over(
    ranks: Channel, wanted: Sequence[Sequence[int]], export: Callable[[int], int], take: Callable[[Key, int], None],
    deadline: float,
) -> None:  # fmt: skip
    """Hand the slabs that are ``wanted`` of each rank over to all others, some at a time. Collective.

    :param wanted: the numbers of the slabs by rank, the same on every rank.
    :param export: makes a descriptor of one of this rank's slabs.
    :param take: maps a peer's slab. The descriptor is closed behind it.
    :raises IpcReduceError: on every rank, if one of them fails.
    """
    for begin in range(0, max(map(len, wanted)), MAX_DESCRIPTORS):
        parts = [numbers[begin : begin + MAX_DESCRIPTORS] for numbers in wanted]
        exports = [partial(export, number) for number in parts[ranks.rank]]
        counts = [len(part) for part in parts]
        with (
            several_handed_over(ranks, exports, counts, 0, deadline, "memory of graphs") as descriptors,
            exchange.step(ranks, deadline, "mapping memory of graphs"),
        ):
            for rank in range(ranks.size):
                for number, descriptor in zip(parts[rank], descriptors[rank], strict=True):
                    if rank != ranks.rank:
                        take((rank, number), descriptor)
