"""The memory of graphs without a GPU: blocks never overlap, are used again by their stream only, and all go back."""

from __future__ import annotations

import itertools
import os
import signal
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipcreduce.cuda import driver, virtual_memory
from ipcreduce.cuda.virtual_memory import Range
from ipcreduce.errors import UnsupportedError
from ipcreduce.graphs import pool as pools
from ipcreduce.graphs import recording
from ipcreduce.graphs.direct import driver_calls
from ipcreduce.graphs.direct.mappings import Mappings, Marks, marks_bytes
from ipcreduce.graphs.direct.registration import DirectGraphs
from ipcreduce.graphs.pool import GraphPool
from ipcreduce.page import shared_files

MB = 1 << 20
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.sampled_from([0, 1, 512, 513, 5000, MB, 2 * MB, 3 * MB]), st.integers(1, 2)),
        st.tuples(st.just("free"), st.integers(0, 50), st.just(0)),
    ),
    max_size=60,
)


class Device:
    """Allocations, as the driver gives them: far apart, or right behind each other."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self._next = 0x10000000

    def allocate(self, nbytes: int) -> int:
        address = self._next
        self.held[address] = nbytes
        self._next += nbytes
        return address

    def free(self, address: int) -> None:
        del self.held[address]


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "free_later", lambda context, *steps: [step() for step in steps])
        patch.setattr(pools, "using_relaxed", lambda context: nullcontext())
        patch.setattr(pools, "attempt", lambda context, *steps: [step() for step in steps])
        yield patch


@pytest.fixture
def device(patched: pytest.MonkeyPatch) -> Device:
    return fresh(patched)


def fresh(patch: pytest.MonkeyPatch) -> Device:
    device = Device()
    patch.setattr(driver, "allocate", device.allocate)
    patch.setattr(driver, "free", device.free)
    return device


@given(OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_blocks(patched: Any, operations: list[tuple[str, int, int]]):
    device, pool = fresh(patched), GraphPool(0, 0)
    pool.retain()
    blocks: dict[int, int] = {}
    stream_of: dict[int, int] = {}  # each 512 bytes that were ever given out: to which stream
    for what, number, stream in operations:
        if what == "free":
            if blocks:
                address = [*blocks][number % len(blocks)]
                del blocks[address]
                pool._free(address)
            continue
        address, nbytes = pool._allocate(number, stream), max(1, number)
        assert address % 512 == 0
        assert all(address >= other + size or other >= address + nbytes for other, size in blocks.items())
        assert any(a <= address and address + nbytes <= a + size for a, size in device.held.items())
        assert pool.find(address, nbytes) is not None
        for page in range(address, address + nbytes, 512):
            assert stream_of.setdefault(page, stream) == stream
        blocks[address] = nbytes
    assert pool.nbytes == sum(device.held.values())
    assert pool.slabs == len(device.held)
    pool.release()
    for address in blocks:
        assert any(a <= address < a + size for a, size in device.held.items()), "freed with an array in it"
        pool._free(address)
    assert not device.held


def test_the_smallest_range_that_fits_and_neighbours_join(device: Device):
    pool = GraphPool(0, 0)
    pool.retain()
    first, second, third, fourth = (pool._allocate(nbytes, 1) for nbytes in (4096, 1024, 2048, 512))
    for address in (first, third):
        pool._free(address)
    assert pool._allocate(2000, 1) == third  # not the beginning of the 4096
    pool._free(second)
    assert pool._allocate(5120, 1) == first
    assert pool.nbytes == 2 * MB
    assert fourth == third + 2048
    pool._free(first)
    assert pool._allocate(5120, 2) != first  # work on stream 1 may still use it


def test_nothing_goes_back_while_a_graph_uses_the_pool(device: Device):
    pool = GraphPool(0, 0)
    pool.retain()
    pool.retain()
    pool._free(pool._allocate(3 * MB, 1))
    pool.release()
    assert pool.nbytes == 4 * MB  # whole units of 2 MB
    assert pool._allocate(3 * MB, 1) in device.held  # the same again
    assert pool.slabs == 1
    pool.release()
    assert pool.nbytes == 4 * MB
    pool._free(next(iter(device.held)))
    assert pool.nbytes == 0 == len(device.held)


class Place:
    """Addresses in virtual memory. At the first step ``collected`` runs, as if Python collected a graph there."""

    nbytes = 2 * MB

    def __init__(self, address: int, collected: Callable[[], None]) -> None:
        self.address, self._collected, self.steps = address, collected, list[str]()

    def __getattr__(self, step: str) -> Callable[..., None]:
        def take(*given: Any) -> None:
            assert not self.steps or self.steps[-1] != "close", f"{step} of addresses that are gone"
            self.steps.append(step)
            self._collected()

        return take


def two_places(monkeypatch: pytest.MonkeyPatch, users: list[Callable[[], None]]) -> list[Place]:
    """The next ones that are reserved. The first step at one of them lets the user go."""
    places = [Place(4 * MB * number, lambda: users and users.pop()()) for number in (1, 2)]
    unused = iter(places)
    monkeypatch.setattr(Range, "over", lambda *given: next(unused))
    monkeypatch.setattr(virtual_memory, "rounded", lambda ordinal, nbytes: nbytes)
    monkeypatch.setattr(virtual_memory, "create", lambda *given: 1)
    monkeypatch.setattr(virtual_memory, "import_descriptor", lambda descriptor: 1)
    return places


def check_gone(places: list[Place]) -> None:
    assert [one.steps[-1] for one in places] == ["close"] * 2
    assert any(len(one.steps) > 1 for one in places)


@pytest.mark.parametrize(
    ("method", "given"), [("suspend", (1, 2 * MB)), ("prepare", ()), ("resume", ()), ("drop_prepared", ())]
)
def test_the_last_graph_is_collected_while_a_pool_is_given_back(
    patched: Any, monkeypatch: pytest.MonkeyPatch, method: str, given: tuple[int, ...]
):
    """The memory goes back to the driver, but not between two steps."""
    pool = GraphPool(0, 0, virtual=True)
    pool.retain()
    places = two_places(monkeypatch, [pool.release])
    for address in [pool._allocate(2 * MB, 1) for _ in places]:
        pool._free(address)
    pool.is_suspended = True
    getattr(pool, method)(*given)
    assert pool.slabs == 0
    check_gone(places)


@pytest.mark.parametrize(
    ("method", "given"), [("suspend", ()), ("prepare", ((1, 0), 3)), ("resume", ()), ("drop_prepared", ())]
)
def test_the_last_graph_is_collected_while_mappings_are_given_back(
    monkeypatch: pytest.MonkeyPatch, method: str, given: tuple[Any, ...]
):
    mappings, keys = Mappings(), [(1, 0), (1, 1)]
    places = two_places(monkeypatch, [lambda: mappings.drop(serial, keys)])
    for key in keys:
        mappings.take(key, 3, 0, 2 * MB)
    serial = mappings.use(keys)
    getattr(mappings, method)(*given)
    assert not mappings.kept()
    check_gone(places)


@pytest.mark.parametrize("within", ["min", "bisect"])
def test_the_last_graph_goes_while_another_one_allocates(device: Device, monkeypatch: pytest.MonkeyPatch, within: str):
    """No block is given out twice, whichever steps of the pool Python collects between."""
    later: list[Any] = []
    monkeypatch.setattr(pools, "free_later", lambda context, *steps: later.extend(steps))
    pool = GraphPool(0, 0)
    pool.retain()
    live = [pool._allocate(4096, 1) for _ in range(6)]
    pool.release()
    pool.retain()  # the next graph, before the pool has shrunk
    for number in (4, 2):
        pool._free(live.pop(number))
    freed = [live.pop(1)]

    usual = {"min": min, "bisect": bisect}[within]

    def collecting(*given: Any, **options: Any) -> Any:
        found = usual(*given, **options)
        if freed:
            pool._free(freed.pop())
            while later:
                later.pop(0)()
        return found

    monkeypatch.setattr(pools, within, collecting, raising=False)
    for _ in range(6):
        live.append(pool._allocate(4096, 1))
    assert not freed
    assert len({*live}) == len(live)
    assert all(abs(one - other) >= 4096 for one, other in itertools.combinations(live, 2))


def test_a_pool_that_a_graph_uses_again_before_it_went_back_stays(device: Device, monkeypatch: pytest.MonkeyPatch):
    """What goes back to the driver may have to wait, for the end of a capture."""
    later: list[Any] = []
    monkeypatch.setattr(pools, "free_later", lambda context, *steps: later.extend(steps))
    pool = GraphPool(0, 0)
    pool.retain()
    pool._free(pool._allocate(512, 1))
    pool.release()
    pool.retain()
    assert later
    for step in later:
        step()
    assert pool.nbytes == 2 * MB == sum(device.held.values())


def test_a_hold_keeps_a_slab_and_no_block(device: Device):
    pool = GraphPool(0, 0)
    pool.retain()
    block, large = pool._allocate(4096, 1), pool._allocate(2 * MB, 1)
    holds = [pool.hold(block, 4096), pool.hold(block + 512, 100)]
    assert pool.hold(0, 1) is None
    for address in (block, large):
        pool._free(address)
    assert pool._allocate(1024, 1) == block
    pool._free(block)
    pool.release()
    assert [*device.held] == [block], "the other slab is not held"
    del holds[0]
    assert [*device.held] == [block]
    del holds[0]
    assert not device.held


def test_a_graph_that_ends_twice_is_one_user(device: Device, patched: pytest.MonkeyPatch):
    """By close() and when it is collected. The other graphs of its pool keep the memory."""
    patched.setattr(recording, "free_later", pools.free_later)
    pool = GraphPool(0, 0)
    one, other = (recording.Resources(pool, 0, []) for _ in range(2))
    pool._free(pool._allocate(512, 1))
    for _ in range(2):
        one.release()
    assert pool.nbytes == 2 * MB == sum(device.held.values())
    for _ in range(2):
        other.release()
    assert pool.nbytes == 0 == len(device.held)


def test_an_interrupted_end_of_a_graph_is_whole(device: Device, patched: pytest.MonkeyPatch):
    patched.setattr(recording, "free_later", pools.free_later)
    pool, closed = GraphPool(0, 0), []

    def actions() -> list[Any]:
        signal.raise_signal(signal.SIGINT)
        return [lambda: closed.append("segment")]

    resources = recording.Resources(pool, 0, [SimpleNamespace(close_actions=actions)])
    pool._free(pool._allocate(512, 1))
    with pytest.raises(KeyboardInterrupt):
        resources.release()
    assert closed == ["segment"]
    assert not device.held
    resources.release()
    assert closed == ["segment"]


# ---- memory that peers map
def test_memory_stays_until_every_rank_has_dropped_the_graph():
    freed: list[int] = []
    descriptor, path = shared_files.create(marks_bytes(3))
    ranks = [Marks(os.dup(descriptor), rank, 3) for rank in range(3)]
    os.close(descriptor)
    shared_files.remove(path)
    mappings = Mappings()
    mappings.marks = ranks[0]
    serials = [mappings.use([], lambda number=number: freed.append(number)) for number in range(2)]
    mappings.drop(serials[0], [])
    ranks[1].set(serials[0])
    mappings.collect()
    assert not freed, "rank 2 has it mapped"
    ranks[2].set(serials[0])
    mappings.collect()
    assert freed == [0]


def test_a_slab_is_mapped_once_and_as_long_as_a_graph_uses_it(monkeypatch: pytest.MonkeyPatch):
    opened: list[bytes] = []
    closed: list[int] = []
    monkeypatch.setattr(driver, "open_memory", lambda handle: opened.append(handle) or 4096 * len(opened))
    monkeypatch.setattr(driver, "close_memory", closed.append)
    monkeypatch.setattr(driver_calls, "allocation_bytes", lambda address: MB)
    mappings, keys = Mappings(), [(1, 7), (1, 8)]
    for key in (*keys, keys[0]):
        mappings.open(key, b"handle", MB)
    assert [mappings.address(key) for key in keys] == [4096, 8192]
    serials = [mappings.use(used, lambda: None) for used in (keys, keys[:1])]
    mappings.drop(serials[0], keys)
    assert closed == [8192], "the other one is still used"
    mappings.drop(serials[1], keys[:1])
    assert closed == [8192, 4096]
    with pytest.raises(UnsupportedError, match="has 1048576 bytes here, not 1048577"):
        mappings.open(keys[0], b"handle", MB + 1)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slabs of (1, 0), (1, 1) ... are mapped at 0, 4096 ...: those that are unmapped."""
    addresses, closed = itertools.count(0, 4096), list[int]()
    monkeypatch.setattr(driver, "open_memory", lambda handle: next(addresses))
    monkeypatch.setattr(driver, "close_memory", closed.append)
    monkeypatch.setattr(driver_calls, "allocation_bytes", lambda address: MB)
    return closed


def test_a_graph_goes_while_another_one_is_registered(closed: list[int]):
    """What is mapped for the other one stays. The peers are told of the first one when its slabs are unmapped."""
    mappings, marked = Mappings(), list[int]()
    mappings.marks = cast("Marks", SimpleNamespace(set=marked.append, all_set=lambda serial: False))
    mappings.open((1, 0), b"", MB)
    old = mappings.use([(1, 0)])
    with mappings.holding():
        mappings.open((1, 1), b"", MB)
        mappings.drop(old, [(1, 0)])
        assert not closed
        assert not marked
        mappings.use([(1, 1)])
    assert (closed, marked) == ([0], [old])


def test_what_a_failed_registration_has_mapped(closed: list[int]):
    mappings = Mappings()
    with suppress(KeyError), mappings.holding():
        mappings.open((1, 0), b"", MB)
        raise KeyError
    assert closed == [0]


def test_a_graph_goes_while_others_slabs_are_unmapped(closed: list[int], monkeypatch: pytest.MonkeyPatch):
    mappings, keys = Mappings(), [(1, number) for number in range(3)]
    for key in keys:
        mappings.open(key, b"", MB)
    first, *others = mappings.use(keys[:2]), mappings.use(keys[2:])

    def close(address: int) -> None:
        closed.append(address)
        if others:
            mappings.drop(others.pop(), keys[2:])

    monkeypatch.setattr(driver, "close_memory", close)
    mappings.drop(first, keys[:2])
    assert closed == [0, 4096, 8192]


def test_no_rank_goes_on_with_a_registration_that_has_failed_on_one(monkeypatch: pytest.MonkeyPatch):
    graphs = DirectGraphs.__new__(DirectGraphs)
    monkeypatch.setattr(graphs, "_gather", lambda number, payload: [payload, b"", b"memory is short"])
    with pytest.raises(UnsupportedError, match="mapping failed on rank 2: memory is short"):
        graphs._confirm(1, None, "mapping")
    with pytest.raises(UnsupportedError, match="mapping failed on rank 0: ValueError: no room"):
        graphs._confirm(1, ValueError("no room"), "mapping")
