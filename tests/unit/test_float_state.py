"""Sums and norms of host arrays in a thread that rounds in another way, or flushes denormals."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipcreduce import Map
from ipcreduce.arrays.maps import HostMap, MapCall
from ipcreduce.arrays.rmsnorm import normalise
from ipcreduce.calls.request import NormShape
from ipcreduce.dtypes import BFLOAT16, reduce
from ipcreduce.errors import UnsupportedError
from tests.shared import float_states

pytestmark = pytest.mark.skipif(not float_states.NAMES, reason="the place of this processor's state is not known here")
# By dtype: the unsigned type of its size, the bits of 1, and a half of the last bit of 1 as a number.
KINDS: dict[Any, tuple[Any, int, float]] = {
    np.float16: (np.uint16, 0x3C00, 2.0**-11), BFLOAT16: (np.uint16, 0x3F80, 2.0**-8),
    np.float32: (np.uint32, 0x3F800000, 2.0**-24), np.float64: (np.uint64, 0x3FF << 52, 2.0**-53),
}  # fmt: skip


@pytest.fixture(params=float_states.NAMES)
def state(request: pytest.FixtureRequest) -> Any:
    """In whose block the thread has one of the states, which it has behind each call, too."""

    def checked(call: Any) -> Any:
        with float_states.state(request.param):
            before = float_states.word().value
            found = call()
            assert (float_states.word().value ^ before) & ~0x3F == 0, "but for the marks of what has happened"
        return found

    return checked


@pytest.mark.parametrize("dtype", KINDS)
def test_sums(state: Any, dtype: Any):
    bits, one, half = KINDS[dtype]
    denormals = [np.array([1, 2, 5], bits).view(dtype), np.array([2, 3, 6], bits).view(dtype)]  # their bits add up
    assert state(lambda: reduce(denormals, "sum")).view(bits).tolist() == [3, 5, 11]
    assert state(lambda: reduce(denormals, "max")).view(bits).tolist() == [2, 3, 6]
    some = np.array([1, -1, 1, -1], dtype), np.array([half / 2, -half / 2, half * 1.5, -half * 1.5], dtype)
    signs = [0, 1 << (8 * np.dtype(dtype).itemsize - 1)] * 2
    assert (state(lambda: reduce(some, "sum")).view(bits) - np.array(signs, bits)).tolist() == [
        one,
        one,
        one + 1,
        one + 1,
    ]


def test_an_average(state: Any):
    values = [np.array([4], np.uint32).view(np.float32)] * 2  # their sum is 8 of the last bit
    assert state(lambda: reduce(values, "avg")).view(np.uint32).tolist() == [4]


def test_norms(state: Any):
    """Of a row of denormals, whose squares are 0, and of one whose values are not rounded in the standard way only."""
    shape = NormShape(rows=2, hidden=3, dtype="float32", eps=0.0, weight_bias=0.0, residual=True)
    tiny, third, weight = 2.0**-140, np.float32(1 / 3), np.ones(3, np.float32)
    rows = np.array([[tiny] * 3, [third] * 3], np.float32)
    more = np.array([[tiny] * 3, [2.0**-27] * 3], np.float32)  # a quarter of the last bit of a third, and less
    found = state(lambda: normalise(shape, rows, weight, more, None))
    assert found.residual_out.tolist() == [[2 * tiny] * 3, [float(third)] * 3]
    assert np.isposinf(found.y[0]).all()


def test_an_expression(state: Any):
    """Also within the function of the program."""
    mapped = HostMap(MapCall(np.ones(2, np.float32), "sum", None, Map("v + v", host=lambda v: v + v)))
    reduced = np.array([1, 3], np.uint32).view(np.float32)
    assert state(lambda: mapped.result([reduced])).view(np.uint32).tolist() == [2, 6]


def test_a_state_that_cannot_be_changed(monkeypatch: pytest.MonkeyPatch):
    """As by a C library that leaves some bits as they are. Nothing wrong is given back."""
    values = [np.array([1], np.uint32).view(np.float32)] * 2
    still = SimpleNamespace(fegetenv=lambda environment: 0, fesetenv=lambda environment: 0)
    with float_states.state("as -ffast-math"):
        monkeypatch.setattr(ctypes, "PyDLL", lambda name: still)
        with pytest.raises(UnsupportedError, match="flushes denormals to zero, and the C library cannot change that"):
            reduce(values, "sum")
        monkeypatch.undo()
