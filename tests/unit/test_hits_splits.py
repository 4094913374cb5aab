"""All-gathers, reduce-scatters and broadcasts that have come before, with stand-ins for CuPy and the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce.arrays.splits import SplitCall, SplitKey
from ipcreduce.calls.request import BROADCAST, GATHER, SCATTER, Collective, Member, Moved, Request, Split
from ipcreduce.device import launch_cache
from ipcreduce.device.hits import splits as hits
from ipcreduce.device.hits.lists import ListHits
from ipcreduce.device.launch_cache import MISS, LaunchCache
from ipcreduce.device.prepared import BoundLaunch, OwnStep, Prepared
from tests.shared.streams import CURRENT, OTHER
from tests.unit.test_hits_maps import Array
from tests.unit.test_hits_maps import Library as Maps

RANK, N = 1, 2
PART, WHOLE = (4, 6), (8, 6)  # float16, so 48 and 96 bytes
NBYTES, OFFSET = 96, 48
SHAPES = {GATHER: (PART, WHOLE), SCATTER: (WHOLE, PART), BROADCAST: (WHOLE, WHOLE)}


class Library(Maps):
    """CuPy's place."""

    def can_be_cached(self, dtype: Any) -> bool:
        return True

    def empty(self, array: Any, shape: Any, dtype: Any, device: int) -> tuple[Any, int]:
        return Array(self.free, shape, dtype), self.free


class Calls:
    """A memory of one call, with an output unless it is a broadcast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, collective: Collective, axis: int = 0, **change: Any) -> None:
        self.library, self.collective = Library(), collective
        for module in (launch_cache, hits):
            monkeypatch.setattr(module, "cupy_runtime", self.library)
        order: Any = SimpleNamespace(quick=lambda stream: "ON_STREAM")
        self.cache = LaunchCache(0, order, lambda one, at: BoundLaunch(one.fingerprint, print, at))
        self.hits = self.cache.kinds[SplitCall] = hits.SplitHits(self.cache, ListHits(self.cache), RANK, N)
        self.shapes = SHAPES[collective]
        if axis:
            self.shapes = tuple(shape[::-1] for shape in self.shapes)  # type: ignore[assignment]
        self.op = "sum" if collective == SCATTER else None
        self.key: SplitKey = (collective, self.op, axis, None, 0, None)
        x, out = self.arrays(1 << 12, 1 << 16)
        whole = self.shapes[0] if collective == SCATTER else self.shapes[1]
        member: Any = Member(whole, "float16") if self.op else Moved(whole, "float16", 2)
        request = Request(self.op or "", (member,), split=Split(collective, axis, root=0))
        prepared = Prepared(
            request=request, fingerprint=request.fingerprint, kernels="", nbytes=NBYTES, steps=(OwnStep(print),),
            wire_dtypes=(None,),
        )  # fmt: skip
        self.cache.insert_form(self.given(x, out or x), out or x, prepared)

    def given(self, x: Any, out: Any) -> SplitCall:
        return SplitCall(x, out, self.key, RANK, N)

    def changed(self, **change: Any) -> SplitKey:
        names = "collective", "op", "axis", "sizes", "root", "sms"
        return tuple({**dict(zip(names, self.key, strict=True)), **change}.values())  # type: ignore[return-value]

    def arrays(self, source: int, target: int) -> tuple[Array, Array | None]:
        one, other = self.shapes
        return Array(source, one), None if self.collective == BROADCAST else Array(target, other)

    def lookup(self, x: Any, out: Any, stream: Any = None, **change: Any) -> Any:
        return self.hits.lookup(x, self.changed(**change), x if self.collective == BROADCAST else out, stream)

    def is_hit(self, x: Any, out: Any, **change: Any) -> bool:
        return self.lookup(x, out, **change)[0] is not None


@pytest.fixture(params=SHAPES)
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Calls:
    return Calls(monkeypatch, request.param)


def test_again_and_again(calls: Calls):
    """From the third time on it is the same launch, for these objects and for others in their places."""
    x, out = calls.arrays(0x1000, 0x4000)
    target = 0x1000 if out is None else 0x4000
    found = [calls.lookup(x, out) for _ in range(5)]
    for bound, result, stream in found:
        assert bound.argument == (0x1000, target)
        assert (result is x if out is None else result is out) and stream == CURRENT  # noqa: PT018
    assert found[1][0] is found[2][0] is found[4][0]
    assert found[2][0] is calls.lookup(*calls.arrays(0x1000, 0x4000))[0]
    assert calls.lookup(x, out, OTHER)[2] == OTHER


def test_arrays_that_have_moved_or_another_shape(calls: Calls):
    x, out = calls.arrays(0x1000, 0x4000)
    for _ in range(3):
        assert calls.is_hit(x, out)
    x.shape = (x.shape[0] // 2, 12)
    assert not calls.is_hit(x, out), "its shape was set"
    x.shape = calls.shapes[0]
    assert calls.is_hit(x, out)
    if out is not None:
        out.shape = out.shape[::-1]
        assert not calls.is_hit(x, out)
        assert not calls.is_hit(x, Array(0x4000, (3, 3)))
        assert not calls.is_hit(x, Array(0x4000, calls.shapes[1], np.float32))
        assert not calls.is_hit(x, Array(0, calls.shapes[1])), "it is not plain"
    assert not calls.is_hit(Array(0x1000, (5, 5)), calls.arrays(0, 0x4000)[1])
    assert not calls.is_hit(Array(0x1000, calls.shapes[0], np.float32), calls.arrays(0, 0x4000)[1])
    assert not calls.is_hit(Array(0, calls.shapes[0]), calls.arrays(0, 0x4000)[1])
    other = Array(0x2000, calls.shapes[0])
    assert calls.lookup(other, out and Array(0x4000, calls.shapes[1]))[0].argument[0] == 0x2000


def test_other_arguments_are_other_calls(calls: Calls):
    x, out = calls.arrays(0x1000, 0x4000)
    for change in ({"axis": 1}, {"sizes": (3, 5)}, {"sizes": (4, 4)}, {"root": 1}, {"sms": 3}, {"op": "max"}):
        for _ in range(3):
            assert calls.is_hit(x, out)
            assert not calls.is_hit(x, out, **change), change


def test_arguments_of_no_simple_type(calls: Calls):
    """They may compare as they like, or change. The usual way checks them."""
    for change in (
        {"axis": True}, {"axis": np.int64(0)}, {"axis": 0.0}, {"sizes": np.array([4, 4])}, {"sizes": (4.0, 4)},
        {"sizes": (True, 4)}, {"root": False}, {"sms": 2.0}, {"op": np.add},
    ):  # fmt: skip
        assert calls.lookup(*calls.arrays(0x1000, 0x4000), **change) == MISS, change
    assert calls.hits.lookup([], calls.key, None, None) == MISS


def test_new_results(calls: Calls):
    """They come to places in turn; on another stream than the current one, memory is not made here."""
    x = calls.arrays(0x1000, 0)[0]
    if calls.collective == BROADCAST:
        return
    for free in (2, 3, 2, 3, 4, 2, 3):
        calls.library.free = free << 16
        bound, result, _ = calls.lookup(x, None)
        assert bound.argument == (0x1000, result.address) == (0x1000, free << 16)
        assert result.shape == calls.shapes[1]
    assert calls.lookup(x, None, OTHER) == MISS


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("collective", [GATHER, SCATTER])
def test_memory_that_is_shared_or_misaligned(monkeypatch: pytest.MonkeyPatch, collective: Collective, axis: int):
    """This rank's own place is allowed, if it has no gaps. The usual way makes copies, or raises an error in a call."""
    calls = Calls(monkeypatch, collective, axis)
    part, base = NBYTES - OFFSET, 0x1000
    for at, hit in (
        (base + OFFSET, axis == 0), (base - part, True), (base + NBYTES, True), (base, False), (base + 2, False),
        (base - 2, False), (base + OFFSET - 2, False), (base + OFFSET + 2, False), (base + NBYTES - 2, False),
        (base - part + 2, False), (base - 1, False), (0x4000, True), (0x4001, False),
    ):  # fmt: skip
        source, target = (at, base) if collective == GATHER else (base, at)
        for _ in range(3):
            assert calls.is_hit(*calls.arrays(source, target)) is hit, (hex(at), axis)


def test_the_byte_before_an_array_is_no_place(monkeypatch: pytest.MonkeyPatch):
    """Of a rank whose part has gaps, there is none."""
    calls = Calls(monkeypatch, GATHER, axis=1)
    extent = calls.hits._extent(Split(GATHER, 1), Moved((4, 12), "int8", 1))
    layout = hits._Layout((4, 12), *extent, 1, True)
    assert extent[:2] == (24, 48)
    for at in (*range(0x1000 - 23, 0x1000 + 48),):
        assert layout.settle((at, 0x1000), False) is None
    assert layout.settle((0x1000 - 24, 0x1000), False) is not None


def test_what_is_not_inserted(monkeypatch: pytest.MonkeyPatch):
    """Calls on nothing, and calls whose arrays were copied."""
    calls = Calls(monkeypatch, GATHER)
    x, out = calls.arrays(0x1000, 0x4000)
    given = calls.given(x, out)
    request = Request("", (Moved(WHOLE, "float16", 2),), split=Split(GATHER))
    for change in ({"nbytes": 0}, {"packed": True}):
        prepared = Prepared(**{
            "request": request, "fingerprint": request.fingerprint, "kernels": "", "nbytes": NBYTES, "steps": (),
            "wire_dtypes": (None,),
        } | change)  # fmt: skip
        assert calls.hits.form_of(given, out, prepared) is None
