"""Exchanges over MPI that were given up, or that Ctrl-C ended: MPI may still write to their buffers, which are kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ipcreduce import clock
from ipcreduce.arrays.host_splits import SplitParts
from ipcreduce.calls.request import GATHER, SCATTER
from ipcreduce.errors import PeerTimeoutError
from ipcreduce.host.over_mpi import MpiReducer
from ipcreduce.ranks import exchange, mpi
from tests.interrupts.points import Points
from tests.shared import clock as clock_of_tests


class Request:
    """It ends at a look. ``given``: the arguments, of which mpi4py's request keeps the buffers."""

    def __init__(self, world: World, name: str, *given: Any) -> None:
        self.given, self.looks = given, world.looks
        if name == "Iallgather":
            given[1].reshape(-1)[:] = np.tile(given[0].reshape(-1), 2)
        world.begun.append(name)
        weakref.finalize(self, world.note, name, vars(self))

    def Test(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


class World:
    """Two ranks with the same data.

    :param looks: the one at which requests end.
    :ivar begun: the functions that were called. ``freed``: those whose requests were freed before they had ended.
    """

    def __init__(self, looks: float = 2) -> None:
        self.looks, self.begun = looks, list[str]()
        self.freed: list[str] = []

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> Any:
        return partial(Request, self, name)  # no function of Python's, as none of mpi4py's is

    def note(self, name: str, state: dict[str, Any]) -> None:
        if state["looks"] > 0:
            self.freed.append(name)


def allreduce(size: int, ranks: Any) -> None:
    MpiReducer(ranks, 100.0).allreduce(np.ones(size), "sum", 1, lambda: None)


def split(make: Callable[[], SplitParts], ranks: Any) -> None:
    MpiReducer(ranks, 100.0).split(make(), 1, lambda: None)


def at_start_up(ranks: Any) -> None:
    exchange.allgather(ranks, exchange.message(exchange.CONFIRMATION), clock.now() + 100.0, "a test")


HALVES = [slice(0, 4), slice(4, 8)]
EXCHANGES: dict[str, tuple[list[str], Callable[[Any], None]]] = {
    "start-up": (["Iallgather"], at_start_up),
    "short": (["Iallgather"], lambda ranks: allreduce(3, ranks)),
    "long": (["Ialltoall", "Iallgather"], lambda ranks: allreduce(10_000, ranks)),
    "broadcast": (["Ibcast"], lambda ranks: split(lambda: SplitParts.of_root(np.ones(8, np.uint8), 0, 0, 2), ranks)),
    "all-gather": (["Iallgatherv"], lambda ranks: split(
        lambda: SplitParts.at(HALVES, GATHER, "", np.ones(4, np.uint8), np.empty(8, np.uint8)), ranks)),
    "reduce-scatter": (["Ialltoallv"], lambda ranks: split(
        lambda: SplitParts.at(HALVES, SCATTER, "sum", np.ones(8, np.float32), np.empty(4, np.float32)), ranks)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGES)
def test_no_buffer_is_freed_into_which_mpi_may_write(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "_open", {})
    functions, make = EXCHANGES[name]
    world, points = World(), Points()
    points.run(lambda: make(mpi.MpiRanks(world)))
    gc.collect()
    assert (world.begun, world.freed, mpi._open) == (functions, [], {}), "nothing is kept of an exchange that has ended"
    interrupted = 0
    for key, place in points.seen.items():
        world, ended = World(), Points(key)
        ranks = mpi.MpiRanks(world)
        try:
            ended.run(lambda ranks=ranks: make(ranks))
        except KeyboardInterrupt:
            interrupted += 1
        gc.collect()
        assert not world.freed, f"interrupted at {place}"
    assert interrupted > 20
    world = World(looks=np.inf)
    with pytest.raises(PeerTimeoutError), clock_of_tests.passing(200.0):
        make(mpi.MpiRanks(world))
    gc.collect()
    assert not world.freed


def test_what_comes_after_a_broadcast_was_given_up_is_written_to_no_array_of_the_program():
    arrays = []
    for root in (0, 1):
        given: list[Any] = []
        world = World()
        world.Ibcast = lambda array, root, given=given: (given.append(array), Request(World(), "Ibcast"))[1]
        array = np.ones(8, np.uint8)
        MpiReducer(mpi.MpiRanks(world), 100.0).split(SplitParts.of_root(array, root, 0, 2), 1, lambda: None)
        arrays.append([np.shares_memory(array, one) for one in given])
    assert arrays == [[True], [False]]
