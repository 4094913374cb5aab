"""The memory of graphs without a GPU: blocks never overlap, are used again by their stream only, and all go back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipcreduce.cuda import driver
from ipcreduce.graphs import pool as pools
from ipcreduce.graphs.pool import GraphPool

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
        patch.setattr(pools, "give_back", lambda context, *steps: [step() for step in steps])
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
