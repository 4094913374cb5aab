"""Calls on one array that have come before, with stand-ins for CuPy and the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.arrays.plain import PlainCall
from ipcreduce.calls import request
from ipcreduce.device import launch_cache
from ipcreduce.device.hits import plain as hits
from ipcreduce.device.launch_cache import MISS, LaunchCache, Limited
from ipcreduce.device.prepared import BoundLaunch, OwnStep, Prepared
from tests.shared.streams import CURRENT, OTHER
from tests.unit.test_hits_maps import NBYTES, OUT, Array, Library, X


class Plain(Library):
    """CuPy's place."""

    def can_be_cached(self, dtype: Any) -> bool:
        return True


class Calls:
    """A launch cache and its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library = Plain()
        monkeypatch.setattr(hits, "cupy_runtime", self.library)
        monkeypatch.setattr(launch_cache, "cupy_runtime", self.library)
        order: Any = SimpleNamespace(quick=lambda stream: "ON_STREAM")
        lists: Any = None
        cache = LaunchCache(0, order, lambda one, at: BoundLaunch(one.fingerprint, print, at))
        self.plain = cache.kinds[PlainCall] = hits.PlainHits(cache, lists)
        of = request.plain(X.shape, "float16", "sum")
        prepared = Prepared(request=of, fingerprint=of.fingerprint, kernels="", nbytes=NBYTES, steps=(OwnStep(print),))
        cache.insert_form(PlainCall(X, "sum", OUT), None, prepared)

    def lookup(self, x: Any, out: Any, stream: Any = None) -> Any:
        return self.plain.lookup(x, "sum", out, stream)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_memory_that_is_shared_or_misaligned(calls: Calls):
    """The slow path makes a copy, or raises an error in a call."""
    for x, out, hit in (
        (0x1000, 0x1000, True), (0x1000, 0x4000, True), (0x1002, 0x4002, True), (0x1000, 0x1000 + NBYTES, True),
        (0x1000, 0x1000 + NBYTES - 2, False), (0x1000, 0x1000 - NBYTES + 2, False), (0x1001, 0x1001, False),
        (0x1001, 0x4000, False), (0x1000, 0x4001, False),
    ):  # fmt: skip
        for _ in range(2):
            assert (calls.lookup(Array(x), Array(out))[0] is not None) is hit, (x, out)


def test_calls_with_a_limit_of_blocks_are_others(calls: Calls):
    assert calls.plain.lookup(X, Limited("sum", 3), OUT, None) == MISS
    of = request.plain(X.shape, "float16", "sum", sms=3)
    prepared = Prepared(request=of, fingerprint=of.fingerprint, kernels="", nbytes=NBYTES, steps=(OwnStep(print),))
    calls.plain._cache.insert_form(PlainCall(X, "sum", OUT, 3), None, prepared)
    for _ in range(3):
        assert calls.plain.lookup(X, Limited("sum", 3), OUT, None)[0].fingerprint is of.fingerprint
        assert calls.lookup(X, OUT)[0].fingerprint is not of.fingerprint
    assert calls.plain.lookup(X, Limited("sum", 4), OUT, None) == MISS
    assert calls.plain.lookup(X, ("sum", 3), OUT, None) == MISS, "a caller's op"


def test_streams(calls: Calls):
    for _ in range(3):
        assert calls.lookup(X, OUT)[2] == CURRENT
        assert calls.lookup(X, OUT, OTHER)[2] == OTHER
        assert calls.lookup(X, None, OTHER) == MISS


def test_new_results(calls: Calls):
    """They come to places in turn, and to new ones when the call is cached."""
    for free in (2, 3, 2, 3, 4, 5, 4, 2, 3, 5):
        calls.library.free = free << 16
        bound, result, _ = calls.lookup(X, None)
        assert bound.argument == (X.address, result.address) == (X.address, free << 16)
