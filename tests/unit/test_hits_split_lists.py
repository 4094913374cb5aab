"""Lists of arrays that are split, which have come before, with stand-ins for both libraries and the launches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce.arrays.splits import SplitCall, SplitKey
from ipcreduce.calls.addresses import pairs_of
from ipcreduce.calls.request import BROADCAST, GATHER, SCATTER, Collective, Member, Moved, Request, Split
from ipcreduce.cuda import cupy_runtime, torch_lists, torch_runtime
from ipcreduce.device.hits import splits as hits
from ipcreduce.device.hits.lists import ListHits
from ipcreduce.device.launch_cache import MISS, LaunchCache
from ipcreduce.device.prepared import BoundLaunch, OwnStep, Prepared
from tests.unit import test_hits_arrays
from tests.unit.test_hits_arrays import CURRENT, OTHER, TURNS, Array, Tensor, replace_by_namesake

RANK, N = 1, 2
libraries = test_hits_arrays.libraries  # the fixture, which every test here has
Shape = tuple[int, ...]
PARTS: list[tuple[Shape, str]] = [((4, 6), "f4"), ((2,), "i1"), ((1, 3, 4), "f2")]


def whole_of(shape: Shape, axis: int) -> Shape:
    axis %= len(shape)
    return (*shape[:axis], shape[axis] * N, *shape[axis + 1 :])


class Calls:
    """The memory of a call on a list, whose members are 4 KB apart."""

    def __init__(self, collective: Collective, axis: int = 0, parts: list[tuple[Shape, str]] | None = None) -> None:
        order: Any = SimpleNamespace(quick=lambda stream: "ON_STREAM")
        self.cache = LaunchCache(0, order, lambda prepared, places: BoundLaunch(prepared.fingerprint, print, places))
        self.lists = ListHits(self.cache)
        self.hits = self.cache.kinds[SplitCall] = hits.SplitHits(self.cache, self.lists, RANK, N)
        self.collective, self.parts = collective, PARTS if parts is None else parts
        self.wholes = [whole_of(shape, axis) for shape, _ in self.parts]
        self.op = "sum" if collective == SCATTER else None
        self.key: SplitKey = (collective, self.op, axis, None, 0, None)

    @property
    def in_place(self) -> bool:
        return self.collective == BROADCAST

    def arrays(self, source: int = 1 << 20, target: int = 1 << 21) -> tuple[list[Any], list[Any]]:
        """Arrays, and those for the results."""
        shapes = [shape for shape, _ in self.parts], self.wholes
        ofs = (0, 1) if self.collective == GATHER else (1, 0)
        ones, others = (
            [Array(shape, first + 4096 * at, np.dtype(dtype)) for at, (shape, (_, dtype)) in enumerate(
                zip(shapes[of], self.parts, strict=True)
            )]
            for of, first in zip(ofs, (source, target), strict=True)
        )  # fmt: skip
        return (ones, ones) if self.in_place else (ones, others)

    def insert(self, arrays: Sequence[Any], out: Sequence[Any]) -> None:
        members: list[Any] = [
            Member(whole, np.dtype(dtype).name) if self.op else Moved(whole, dtype, np.dtype(dtype).itemsize)
            for whole, (_, dtype) in zip(self.wholes, self.parts, strict=True)
        ]
        split = Split(self.collective, self.key[2], root=0)
        request = Request(self.op or "", tuple(members), is_list=True, split=split)
        prepared = Prepared(
            request=request, fingerprint=request.fingerprint, kernels="", nbytes=request.nbytes,
            steps=(OwnStep(print),), wire_dtypes=(None,) * len(members),
        )  # fmt: skip
        self.cache.insert_form(SplitCall(arrays, out, self.key, RANK, N), out, prepared)

    def lookup(self, arrays: Any, out: Any, stream: Any = None, **change: Any) -> Any:
        names = "collective", "op", "axis", "sizes", "root", "sms"
        key: Any = tuple({**dict(zip(names, self.key, strict=True)), **change}.values())
        return self.hits.lookup(arrays, key, out, stream)

    def places(self, arrays: Any, out: Any, **change: Any) -> list[tuple[int, int]] | None:
        """Source and target of each member in the launch that is found; None if the usual way has to be taken."""
        bound, result, stream = self.lookup(arrays, out, **change)
        if bound is None:
            assert (bound, result, stream) == MISS
            return None
        assert result is out
        return [*pairs_of(bound.argument)]


def due(arrays: Sequence[Any], out: Sequence[Any]) -> list[tuple[int, int]]:
    return [(one.place.ptr, to.place.ptr) for one, to in zip(arrays, out, strict=True)]


@pytest.fixture(params=[(GATHER, 0), (GATHER, -1), (SCATTER, 0), (SCATTER, -1), (BROADCAST, 0)])
def calls(request: pytest.FixtureRequest) -> Calls:
    made = Calls(*request.param)
    made.insert(*made.arrays())
    return made


def test_again_and_again(calls: Calls):
    """From the third time on it is the same launch, and no array is asked where it lies."""
    arrays, out = calls.arrays()
    found = [calls.lookup(arrays, out) for _ in range(TURNS)]
    assert found[1][0] is found[2][0] is found[-1][0]
    assert calls.places(arrays, out) == due(arrays, out)
    before = Array.looks
    for _ in range(3):
        assert calls.lookup(arrays, out)[0] is found[1][0]
        assert calls.lookup(arrays, out, OTHER)[2] == OTHER
        copies = [*arrays]
        assert calls.lookup(copies, copies if calls.in_place else tuple(out))[2] == CURRENT
    assert Array.looks == before
    for first in (1 << 22, 1 << 23):
        others = calls.arrays(first, first + (1 << 16))
        assert calls.places(*others) == due(*others), "others of that form"


def test_other_arguments_are_other_calls(calls: Calls):
    arrays, out = calls.arrays()
    for _ in range(TURNS):
        assert calls.places(arrays, out) is not None
    for change in ({"axis": 1}, {"sizes": (3, 5)}, {"root": 1}, {"sms": 3}, {"op": "max"}, {"axis": np.int64(0)}):
        assert calls.places(arrays, out, **change) is None, change
    assert calls.places(arrays[:2], out[:2]) is None
    assert calls.places([], []) is None


@pytest.mark.parametrize("at", range(len(PARTS)))
def test_members_that_are_others(calls: Calls, at: int):
    """Another dtype or shape of one of them, in the arrays or the outputs, also after they are cached."""
    for turns in (1, TURNS):
        pair = calls.arrays(turns << 20, turns << 24)
        for _ in range(turns):
            assert calls.places(*pair) is not None
        for side in range(1 if calls.in_place else 2):
            mine = pair[side]
            before, place = mine[at], mine[at].place.ptr
            for other in (
                Array(before.shape, place, np.dtype("u4") if before.dtype != np.dtype("u4") else np.dtype("f4")),
                Array((*before.shape, 1), place, before.dtype), Array((before.size + 1,), place, before.dtype),
                Array(before.shape, place, before.dtype, device=1), Array(before.shape, 0, before.dtype), None,
            ):  # fmt: skip
                mine[at] = other
                assert calls.places(*pair) is None, (side, other)
            mine[at] = Array(before.shape, 1 << 25, before.dtype)
            assert calls.places(*pair) == due(*pair)
            mine[at] = before
            before.shape = (before.size, 1)
            assert calls.places(*pair) is None, "its shape was set"
            before.shape = calls.arrays()[side][at].shape
            assert calls.places(*pair) == due(*pair)


@pytest.mark.parametrize("at", range(len(PARTS)))
def test_a_cached_array_dies(monkeypatch: pytest.MonkeyPatch, calls: Calls, at: int):
    """Another one may have its id then, and other memory."""
    for side in range(1 if calls.in_place else 2):
        pair = calls.arrays((1 << 20) + (side << 16), (1 << 21) + (side << 16))
        for _ in range(TURNS):
            assert calls.places(*pair) is not None
        replace_by_namesake(monkeypatch, pair[side], at)
        assert calls.places(*pair) == due(*pair)


def test_results_that_are_no_outputs(calls: Calls):
    """The usual way tells what is wrong. Arrays are outputs of the same call if shapes are the same."""
    arrays, out = calls.arrays()
    for turns in (0, TURNS):
        for _ in range(turns):
            assert calls.places(arrays, out) is not None
        if not calls.in_place:
            assert calls.places(arrays, arrays) is None, "an all-gather would write behind them"
        for wrong in (out[:2], [*out, out[0]], out[::-1], (), out[0], iter(out), [*out[:2], None]):
            assert calls.places(arrays, wrong) is None


def test_new_results(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    """Of the right shapes. On another stream than the current one, memory is not made here."""
    if calls.in_place:
        return
    arrays, out = calls.arrays()

    def empty(like: Any, shape: Shape, dtype: Any, device: int) -> tuple[Any, int]:
        made = Array(shape, (1 << 26) + 4096 * len(every), dtype)
        every.append(made)
        return made, made.place.ptr

    monkeypatch.setattr(cupy_runtime, "empty", empty)
    for turn in range(TURNS):
        every: list[Any] = []
        bound, results, stream = calls.lookup(arrays, None)
        assert [*results] == every and stream == CURRENT  # noqa: PT018
        assert [*pairs_of(bound.argument)] == due(arrays, every), turn
        assert [(one.shape, one.dtype) for one in every] == [(one.shape, one.dtype) for one in out]
    assert calls.lookup(arrays, None, OTHER) == MISS
    calls.cache._order = SimpleNamespace(quick=lambda stream: None)  # type: ignore[assignment]
    assert calls.lookup(arrays, None) == MISS, "memory of a capture goes its own way"


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("collective", [GATHER, SCATTER])
def test_memory_that_is_shared_or_misaligned(collective: Collective, axis: int):
    """This rank's own place is allowed, if it has no gaps. The usual way makes copies, or raises an error in a call."""
    calls = Calls(collective, axis, [((4, 6), "f2"), ((4, 6), "i1")])
    calls.insert(*calls.arrays())
    base, part, nbytes = 1 << 21, 48, 96
    for at, hit in (
        (base + part, axis == 0), (base - part, True), (base + nbytes, True), (base, False), (base + part + 2, False),
        (base + part - 2, False), (base - part + 2, False), (base + nbytes - 2, False), (1 << 24 | 1, False),
        (1 << 24 | 2, True), ((1 << 21) + 4096, False), ((1 << 21) + 4096 + 24, False),
    ):  # fmt: skip
        parts, wholes = calls.arrays() if collective == GATHER else calls.arrays()[::-1]
        parts[0].place.ptr, parts[1].place.ptr = at, 1 << 26
        wholes[0].place.ptr, wholes[1].place.ptr = base, base + 4096
        pair = (parts, wholes) if collective == GATHER else (wholes, parts)
        for _ in range(3):
            assert (calls.places(*pair) is not None) is hit, (hex(at), axis)


def test_outputs_of_a_broadcast_that_share_memory():
    calls = Calls(BROADCAST)
    calls.insert(*calls.arrays())
    for offset, hit in ((4096, True), (192, True), (191, False), (0, False)):
        arrays, out = calls.arrays()
        arrays[1].place.ptr = arrays[0].place.ptr + offset
        for _ in range(3):
            assert (calls.places(arrays, out) is not None) is hit, offset


def test_tensors_whose_memory_changes():
    """That of the arrays, or that of the outputs."""
    for collective in (GATHER, BROADCAST):
        for changed in (0, 1):
            calls = Calls(collective, 0, [((6,), "f4")] * 3)
            tensors, out = ([Tensor(first + 4096 * at) for at in range(3)] for first in (1 << 20, 1 << 21))
            pair = (tensors, tensors if calls.in_place else out)
            for one in out:
                one.shape = (12,)
            calls.insert(*pair)
            for at in (0, 1 << 22, 1 << 23):
                pair[changed][1].at = at or pair[changed][1].at
                places = [(one.at, to.at) for one, to in zip(*pair, strict=True)]
                for _ in range(TURNS):
                    assert calls.places(*pair) == places
            assert calls.lookup(*pair, OTHER)[2] == OTHER
            assert calls.lookup(*pair, CURRENT) == MISS, "PyTorch has to be told of another stream"


def test_what_is_not_inserted(monkeypatch: pytest.MonkeyPatch):
    """Dtypes that NumPy lacks, arrays of other libraries, arrays with gaps, and empty lists."""
    calls = Calls(GATHER)
    arrays, out = calls.arrays()
    calls.insert([object(), *arrays[1:]], out)
    calls.insert(arrays, [object(), *out[1:]])
    out[1]._c_contiguous = False
    calls.insert(arrays, out)
    calls.insert([], [])
    assert not calls.cache.forms
    monkeypatch.setattr(torch_runtime, "dtype_of", lambda dtype: None)
    monkeypatch.setattr(torch_lists, "reader", test_hits_arrays.reader_of_tensors)
    calls = Calls(BROADCAST, 0, [((6,), "f4")] * 2)
    tensors = [Tensor(4096), Tensor(8192)]
    calls.insert(tensors, tensors)
    assert not calls.cache.forms
