"""Calls with an expression that have come before, with stand-ins for CuPy and the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ipcreduce import Map
from ipcreduce.arrays import maps
from ipcreduce.arrays.maps import MapCall
from ipcreduce.calls.addresses import MapAddresses
from ipcreduce.calls.request import Member, Request
from ipcreduce.cuda.expressions import Expression, Operand
from ipcreduce.device import launch_cache
from ipcreduce.device.hits import maps as hits
from ipcreduce.device.launch_cache import MISS, LaunchCache
from ipcreduce.device.prepared import BoundLaunch, OwnStep, Prepared
from ipcreduce.errors import ArgumentError
from tests.shared.streams import CURRENT, OTHER, Streams

FORM = 4, 256
NBYTES = 4 * 256 * 2
WHAT: Any = "what"


class Array:
    """Memory of the simplest kind. ``address``: 0 for an array that is not plain."""

    def __init__(self, address: int, shape: tuple[int, ...] = FORM, dtype: Any = np.float16) -> None:
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize


class Library(Streams):
    """CuPy's place. ``free``: the address of new arrays."""

    def __init__(self) -> None:
        self.cupy, self.free, self.made = SimpleNamespace(ndarray=Array), 1 << 20, 0

    def plain(self, array: Any, device: int) -> Any:
        assert device == 0
        return (array.address, array.shape, array.dtype) if type(array) is Array and array.address else None

    def dtype_of(self, dtype: Any) -> Any:
        return dtype

    def empty_like(self, array: Any, device: int) -> tuple[Any, int]:
        self.made += 1
        return Array(self.free), self.free


class Calls:
    """A launch cache and its calls. ``made``: source, target, and words of each launch that was made to be kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.state = Library(), "ON_STREAM"
        self.made: list[Any] = []
        monkeypatch.setattr(hits, "cupy_runtime", self.library)
        monkeypatch.setattr(launch_cache, "cupy_runtime", self.library)
        order: Any = SimpleNamespace(quick=lambda stream: self.state)
        self.cache = LaunchCache(0, order, self._bind)
        self.maps = hits.MapHits(self.cache)
        self.cache.kinds[MapCall] = self.maps

    def _bind(self, prepared: Prepared, addresses: MapAddresses) -> BoundLaunch:
        self.made.append(addresses[:3])
        return BoundLaunch(prepared.fingerprint, print, addresses)

    def insert(self, x: Array, out: Any, then: Map, first: Any = None, op: str = "sum") -> None:
        operands = []
        for name, value in then.operands.items():
            if isinstance(value, Array):
                operands.append(Operand(name, value.dtype.name, "full" if value.shape == x.shape else "row"))
            else:
                operands.append(Operand(name, maps._number(name, value, x.dtype.name).dtype.name, "scalar"))
        expression = Expression(then.expression, tuple(operands))
        prepared = Prepared(
            request=Request(op, (Member(x.shape, x.dtype.name),), expression), fingerprint=WHAT, kernels="",
            nbytes=x.nbytes, steps=(OwnStep(print),), wire_dtypes=(None if first is None else first.wire_dtype,),
            hands_on=first is not None,
        )  # fmt: skip
        self.cache.insert_form(MapCall(x, op, out, then), None, prepared)

    def lookup(self, x: Any, out: Any, then: Map, stream: Any = None, op: str = "sum") -> Any:
        return self.maps.lookup(x, (op, then), out, stream)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


X, OUT, ROW = Array(0x1000), Array(0x4000), Array(0x8000, (256,))


def number(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def then(s: Any = 2.0, a: Any = ROW, text: str = "v * s + a") -> Map:
    return Map(text, s=s, a=a)


def test_the_third_launch_at_a_place_is_kept(calls: Calls):
    one, words = then(), (number(2), 0x8000)
    calls.insert(X, OUT, one)
    for turn in range(4):
        bound, result, stream = calls.lookup(X, OUT, one)
        assert (bound.argument[:3], result, stream) == ((0x1000, 0x4000, words), OUT, CURRENT), turn
    assert calls.made == [(0x1000, 0x4000, words)]
    assert calls.lookup(X, OUT, then())[0] is calls.lookup(Array(0x1000), Array(0x4000), then())[0]
    assert len(calls.made) == 1


def test_new_results(calls: Calls):
    one = then()
    calls.insert(X, None, one)
    for turn in range(6):
        calls.library.free = 0x20000 + turn % 2 * 0x10000
        bound, result, _ = calls.lookup(X, None, one)
        assert bound.argument[1] == result.address == calls.library.free
    assert len(calls.made) == 2
    for calls.library.free in (0x40000, 0x50000, 0x40000):  # of a call that is cached by now
        bound, *_ = calls.lookup(X, None, one)
        assert bound.argument[1] == calls.library.free
    calls.state = None  # type: ignore[assignment]
    made = calls.library.made
    assert calls.lookup(X, None, one) == MISS
    assert calls.lookup(X, None, then()) == MISS
    assert calls.library.made == made


def test_other_numbers_and_addresses(calls: Calls):
    calls.insert(X, OUT, then())
    for value in (3.0, -0.5, float("inf"), 1e-46):
        bound, *_ = calls.lookup(X, OUT, then(value))
        assert bound.argument[2] == (number(value), 0x8000)
    for x, out, a in ((0x1800, 0x4000, 0x8000), (0x1800, 0x4800, 0x8000), (0x1800, 0x4800, 0x8002)):
        bound, *_ = calls.lookup(Array(x), Array(out), then(a=Array(a, (256,))))
        assert bound.argument[:3] == (x, out, (number(2), a))
    assert calls.lookup(X, OUT, then(1e300)) == MISS


def test_other_calls(calls: Calls):
    calls.insert(X, OUT, then())
    assert calls.lookup(X, OUT, then())[0]
    for change in (
        {"text": "v*s + a"}, {"s": 2}, {"s": np.float32(2)}, {"a": 2.0}, {"a": Array(0x8000)},
        {"a": Array(0x8000, (256,), np.int16)}, {"a": Array(0, (256,))}, {"a": np.zeros(256, np.float16)},
    ):  # fmt: skip
        assert calls.lookup(X, OUT, then(**change)) == MISS, change
    assert calls.lookup(X, OUT, Map("v * s + a", a=ROW, s=2.0)) == MISS  # the order of the operands
    assert calls.lookup(X, OUT, then(), op="max") == MISS
    for x, out in (
        (Array(0x1000, (2, 512)), Array(0x4000, (2, 512))), (X, Array(0x4000, (2, 512))),
        (X, Array(0x4000, dtype=np.int16)), (Array(0x1000, dtype=np.int16), Array(0x4000, dtype=np.int16)),
        (Array(0), OUT), (X, Array(0)), ([X], [OUT]),
    ):  # fmt: skip
        assert calls.lookup(x, out, then()) == MISS


def test_an_op_that_is_no_str(calls: Calls):
    """An op of MPI cannot be hashed, and a subclass of str may compare as it likes: these take the slow path."""
    one = then()
    calls.insert(X, OUT, one)
    for op in (["sum"], np.str_("sum"), np.ones(2), None):
        assert calls.lookup(X, OUT, one, op=op) == MISS  # type: ignore[arg-type]
    assert calls.lookup(X, OUT, one) != MISS


def test_an_object_that_has_changed_or_died(calls: Calls):
    one, x, out, row = then(), Array(0x1000), Array(0x4000), Array(0x8000, (256,))
    calls.insert(x, out, one)
    one = then(a=row)
    for array in (x, out, row):
        for _ in range(3):
            assert calls.lookup(x, out, one)[0]
        form = array.shape
        array.shape = (128, 2)
        assert calls.lookup(x, out, one) == MISS
        array.shape = form
    assert len(calls.cache.objects) == 1
    del one
    assert not calls.cache.objects, "the Map has died"


def test_memory_that_is_shared(calls: Calls):
    """The slow path makes a copy, or raises an error in a call."""
    calls.insert(X, OUT, then(a=Array(0x8000)))
    for x, out, a, hit in (
        (0x1000, 0x1000, 0x8000, True), (0x1000, 0x1000, 0x1000, True), (0x1000, 0x4000, 0x1000, True),
        (0x1000, 0x4000, 0x4000, True), (0x1000, 0x1000 + NBYTES, 0x4000, True),
        (0x1000, 0x1000 + NBYTES - 2, 0x4000, False),
        (0x1000, 0x1000 - NBYTES + 2, 0x4000, False), (0x1000, 0x4000, 0x4002, False), (0x1000, 0x4000, 0x3FFE, False),
        (0x1000, 0x4000, 0x4000 + NBYTES, True), (0x1000, 0x4000, 0x4000 - NBYTES, True),
        (0x1001, 0x4000, 0x8000, False),
        (0x1000, 0x4001, 0x8000, False), (0x1000, 0x4000, 0x8001, False),
    ):  # fmt: skip
        given = Array(x), Array(out), then(a=Array(a))
        assert (calls.lookup(*given)[0] is not None) is hit, (x, out, a)
    for a in (Array(0x8000, dtype=np.int16), ROW):  # neither has the elements of the output
        calls.insert(X, OUT, then(a=a))
        assert calls.lookup(X, OUT, then(a=a))[0]
        assert calls.lookup(X, OUT, then(a=Array(0x4000, a.shape, a.dtype))) == MISS


def test_behind_an_all_reduce_of_its_own(calls: Calls):
    """The second kernel reads the operands when the first one has written the output."""
    calls.insert(X, OUT, then(a=Array(0x8000)), first=SimpleNamespace(wire_dtype=None))
    assert calls.lookup(X, OUT, then(a=X))[0]
    assert calls.lookup(X, OUT, then(a=OUT)) == MISS
    calls.insert(X, OUT, then(text="v"), first=SimpleNamespace(wire_dtype=np.dtype(np.int32)))
    assert calls.lookup(X, OUT, then(text="v")) == MISS


def test_streams(calls: Calls):
    one = then()
    calls.insert(X, OUT, one)
    for _ in range(3):
        assert calls.lookup(X, OUT, one, OTHER)[2] == OTHER
        assert calls.lookup(X, None, one, OTHER) == MISS
        with pytest.raises(ArgumentError):
            calls.lookup(X, OUT, one, "fast")


def test_short_lived_maps_are_not_kept(calls: Calls):
    calls.insert(X, OUT, then())
    for value in range(50):
        assert calls.lookup(X, OUT, then(float(value)))[0]
    assert not calls.cache.objects


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int32"])
def test_numbers_are_packed_as_the_usual_way_does(kind: str):
    values = [
        0, -3, 2**40, True, 0.1, -0.0, 1e-42, 3e38, 1e-320, float("inf"), float("nan"), 16777217,
        *(np.dtype(name).type(3) for name in ("int8", "uint64", "int64", "float16", "float32", "float64", "bool")),
        ml_dtypes.bfloat16(1.5),
    ]  # fmt: skip
    for value in values:
        wanted = maps._number("s", value, kind)
        assert maps.pack_of(type(value), wanted.dtype.name)(value) == wanted.tobytes(), value


def test_an_expression_cannot_be_changed():
    one = then()
    for name in ("expression", "operands", "host"):
        with pytest.raises(AttributeError):
            setattr(one, name, None)
    with pytest.raises(TypeError):
        one.operands["s"] = 3  # type: ignore[index]


def test_tables_are_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_cache, "_MAX", 3)
    every = [then(text=f"v + {number}") for number in range(8)]
    for one in every:
        calls.insert(X, OUT, one)
        for _ in range(3):
            assert calls.lookup(X, OUT, one)[0]
    assert calls.lookup(X, OUT, every[0]) == MISS
    for table in (calls.cache.forms, calls.cache.objects, calls.cache.places):
        assert len(table) <= 3
