"""Calls with RMSNorm and new results that have come before, with stand-ins for CuPy and the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ipcreduce.arrays.norms import FP8, NormCall
from ipcreduce.calls.addresses import NormAddresses
from ipcreduce.calls.request import NormShape, with_norm
from ipcreduce.device import launch_cache
from ipcreduce.device.hits import norms as hits
from ipcreduce.device.launch_cache import MISS, LaunchCache
from ipcreduce.device.prepared import BoundLaunch, OwnStep, Prepared
from ipcreduce.errors import ArgumentError
from tests.shared.streams import CURRENT, OTHER, Streams

FORM = 4, 256
NBYTES = 4 * 256 * 2


class Array:
    """Memory of the simplest kind. ``address``: 0 for an array that is not plain."""

    def __init__(self, address: int, shape: tuple[int, ...] = FORM, dtype: str = "bfloat16") -> None:
        self.address, self.shape, self.dtype, self.nbytes = address, shape, dtype, NBYTES


class Library(Streams):
    """CuPy's place. ``free``: the addresses of new arrays, one after the other."""

    def __init__(self) -> None:
        self.cupy, self.free, self.made = SimpleNamespace(ndarray=Array), list(range(1 << 20, 2 << 20, 1 << 14)), 0

    def plain(self, array: Any, device: int) -> Any:
        assert device == 0
        return (array.address, array.shape, array.dtype) if array.address else None

    def empty_like(self, array: Any, device: int) -> tuple[Any, int]:
        return self.empty(array, array.shape, array.dtype, device)

    def empty(self, like: Any, shape: Any, dtype: Any, device: int) -> tuple[Any, int]:
        if not self.free:
            raise MemoryError
        self.made += 1
        made = Array(self.free.pop(0), shape, dtype)
        return made, made.address


class Calls:
    """A launch cache and its calls. ``log``: the addresses of launches, with the way of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.log = Library(), []
        monkeypatch.setattr(hits, "cupy_runtime", self.library)
        monkeypatch.setattr(launch_cache, "cupy_runtime", self.library)
        self.state: Any = "ON_STREAM"
        order: Any = SimpleNamespace(quick=lambda stream: self.state)
        self.cache = LaunchCache(0, order, self._bind)
        self.norms = hits.NormHits(self.cache)
        self.cache.kinds[NormCall] = self.norms

    def _bind(self, prepared: Prepared, addresses: NormAddresses) -> BoundLaunch:
        self.log.append(("made", "kept"))
        return BoundLaunch(
            prepared.fingerprint, lambda argument, stream: self.log.append(("kept", argument, stream)), addresses
        )

    def insert(self, given: tuple[Any, ...], alignment: int = 16, plain: Any = None) -> None:
        how = given[7]
        scales = "" if how is None else "token" if how.scale is None else "given"
        shape = NormShape(4, 256, "bfloat16", 1e-6, 0.0, True, scales=scales, keeps_y=not scales)
        request, start = with_norm(FORM, shape), lambda addresses, stream: self.log.append(("once", addresses, stream))
        prepared = Prepared(
            request=request, fingerprint=request.fingerprint, kernels="", nbytes=NBYTES, steps=(OwnStep(start),),
            alignment=alignment, hands_on=plain is not None,
        )  # fmt: skip
        result: Any = Array(64), Array(64)
        if scales:
            kept = Array(64, (4, 1), "float32") if scales == "token" else how.scale
            result = Array(64, dtype="e4m3"), kept, Array(64)
        self.cache.insert_form(NormCall(*given), result, prepared)

    def lookup(self, given: tuple[Any, ...], stream: Any = None) -> Any:
        return self.norms.lookup(given, None, given, stream)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def arguments(x: Any = None, **change: Any) -> tuple[Any, ...]:
    every = {
        "x": x or Array(0x1000), "weight": Array(0x3000, (256,)), "eps": 1e-6, "residual": Array(0x4000), "out": None,
        "residual_out": None, "weight_bias": 0.0, "quantize": None, "quant_out": None, "scales_out": None,
    }  # fmt: skip
    return tuple((every | change).values())


def test_the_third_launch_at_a_place_is_kept(calls: Calls):
    calls.insert(arguments())
    places = NormAddresses(0x1000, 0x3000, 0x4000, 0x10000, 0x20000, 0, 0)
    for turn, (made, way) in enumerate(((None, "once"), ("kept", "kept"), (None, "kept"), (None, "kept"))):
        calls.library.free = [0x10000, 0x20000]
        calls.log.clear()
        bound, ((out, total), _), _ = calls.lookup(arguments())
        assert (out.address, total.address) == (0x10000, 0x20000)
        bound.launch(bound.argument, CURRENT)
        assert calls.log == [("made", made)] * (made is not None) + [(way, places, CURRENT)], turn
    calls.library.free = [0x20000, 0x10000]
    bound, *_ = calls.lookup(arguments())
    calls.log.clear()
    bound.launch(bound.argument, CURRENT)
    assert calls.log == [("once", NormAddresses(0x1000, 0x3000, 0x4000, 0x20000, 0x10000, 0, 0), CURRENT)]


def test_a_capture(calls: Calls):
    calls.insert(arguments())
    calls.state = None
    assert calls.lookup(arguments()) == MISS
    assert not calls.library.made
    calls.state = "ON_STREAM"
    assert calls.lookup(arguments())[0] is not None


def test_another_stream(calls: Calls):
    calls.insert(arguments())
    assert calls.lookup(arguments(), CURRENT)[0] is not None
    made = calls.library.made
    assert calls.lookup(arguments(), OTHER) == MISS
    with pytest.raises(ArgumentError, match="no stream"):
        calls.lookup(arguments(), "fast")
    assert calls.library.made == made


@pytest.mark.parametrize(
    "change",
    [
        {"x": Array(0x1000, (2, 512))}, {"x": Array(0x1000, dtype="float16")}, {"eps": 1e-5}, {"weight_bias": 1.0},
        {"weight_bias": 0}, {"residual": None}, {"x": Array(0x1008)}, {"residual": Array(0)}, {"out": Array(0x8000)},
        {"quantize": FP8(per="token")}, {"quantize": FP8(per=128, column_major=True)},
    ],
)  # fmt: skip
def test_other_calls(calls: Calls, change: dict[str, Any]):
    calls.insert(arguments())
    assert calls.lookup(arguments(**change)) == MISS


def test_memory_that_is_short(calls: Calls):
    calls.insert(arguments())
    calls.library.free = [0x10000]
    with pytest.raises(MemoryError):
        calls.lookup(arguments())


def test_outputs_that_share_memory(calls: Calls):
    x, residual = Array(0x1000), Array(0x4000)
    calls.insert(arguments(x, residual=residual, out=Array(0x8000)))
    for address in (0x8000, 0x1000, 0x1000 + NBYTES):
        assert calls.lookup(arguments(x, residual=residual, out=Array(address)))[0] is not None, address
    for address in (0x4000, 0x1000 + NBYTES - 16, 0x1000 - NBYTES + 16, 0x3000, 0x4000 + NBYTES - 16):
        assert calls.lookup(arguments(x, residual=residual, out=Array(address))) == MISS, address


def test_what_a_pair_hands_on_has_memory(calls: Calls):
    """It lies in y, which is not returned, but has to live until the launch."""
    residual, plain = Array(0x4000), "an all-reduce"
    change = {"residual": residual, "residual_out": residual, "quantize": FP8(per="token")}
    calls.insert(arguments(**change), alignment=2, plain=plain)
    bound, ((numbers, scales, total), y), _ = calls.lookup(arguments(**change))
    assert (numbers.dtype, scales.shape, scales.dtype, total) == ("e4m3", (4, 1), "float32", residual)
    bound.launch(bound.argument, CURRENT)
    assert calls.log[-1][1] == NormAddresses(
        0x1000, 0x3000, 0x4000, y.address, 0x4000, numbers.address, scales.address
    )  # fmt: skip


def test_a_given_scale_is_returned(calls: Calls):
    scale = Array(0x9000, (1,), "float32")
    change = {"quantize": FP8(scale=scale)}
    calls.insert(arguments(**change))
    bound, ((_, found, _), _), _ = calls.lookup(arguments(**change))
    assert found is scale
    assert bound.argument.scales == 0x9000
    moved = {"quantize": FP8(scale=Array(0x9002, (1,), "float32"))}
    assert calls.lookup(arguments(**moved)) == MISS


def test_tables_are_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_cache, "_MAX", 2)
    for eps in (1e-3, 1e-4, 1e-5):
        calls.insert(arguments(eps=eps))
        for _ in range(3):
            bound, *_ = calls.lookup(arguments(eps=eps))
            bound.launch(bound.argument, CURRENT)
    assert calls.lookup(arguments(eps=1e-3)) == MISS
    assert max(len(calls.cache.forms), len(calls.cache.places)) <= 2
