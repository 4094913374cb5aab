"""The operands of host calls: views of the caller's memory, and results of the caller's kind."""

from __future__ import annotations

import enum
import gc
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ipcreduce import dtypes
from ipcreduce.arrays import views
from ipcreduce.arrays.host_operands import HostOperands
from ipcreduce.arrays.maps import HostMap, Map, MapCall
from ipcreduce.errors import ArgumentError


def reduced(array: Any, op: Any = "sum", out: Any = None, ranks: int = 2) -> Any:
    """What that many ranks would get that all bring ``array``."""
    used = HostOperands(array, op, out)
    assert used.source.dtype in dtypes.DTYPES
    result = np.array(dtypes.reduce([used.source] * ranks, used.op), order="C")
    if used.target is not None:
        assert used.target.dtype == used.source.dtype
        used.target[...] = result
    return used.result(result)


class Tensor:
    """An array of another library on the host; before version 1, DLPack takes no options but a stream."""

    def __init__(self, array: np.ndarray, version: int = 1, device_type: int = 1) -> None:
        self.array, self.version, self.device_type, self.dtype = array, version, device_type, array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **options: Any) -> Any:
        if self.version:
            return self.array.__dlpack__(**options)
        if options.keys() - {"stream"}:
            raise TypeError("unknown option")
        return self.array.__dlpack__()


class OfTorch(Tensor):
    """Of a library whose arrays may be written, though capsules before version 1 do not say so."""

    __module__ = "torch"


# ---- numbers
@pytest.mark.parametrize(
    ("number", "op", "expected"),
    [
        (1.5, "sum", 3.0),
        (3, "sum", 6),
        (-3, "avg", -3),
        (True, "max", True),
        (False, "min", False),
        (1 + 2j, "sum", 2 + 4j),
        (1 + 2j, "mean", 1 + 2j),
        (np.float32(1.5), "prod", np.float32(2.25)),
        (np.float64(1.5), "sum", np.float64(3)),
        (np.uint8(200), "sum", np.uint8(144)),
        (np.bool_(True), "min", np.bool_(True)),
        (np.complex64(1j), "sum", np.complex64(2j)),
        (ml_dtypes.bfloat16(1.5), "sum", ml_dtypes.bfloat16(3)),
        ((1 << 63) - 1, "max", (1 << 63) - 1),
        (-(1 << 63), "min", -(1 << 63)),
        ((1 << 63) - 1, "sum", -2),  # as int64
    ],
)
def test_numbers(number: Any, op: str, expected: Any):
    found = reduced(number, op)
    assert type(found) is type(number) is type(expected)
    assert found == expected


def test_a_float_is_reduced_in_float64():
    assert reduced(0.1, ranks=3) == 0.1 + 0.1 + 0.1 != float(np.float32(0.1) * 3)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, pytest.param(10**5000, id="a very long one")])
def test_an_int_has_to_fit(number: int):
    with pytest.raises(ArgumentError, match=f"an int of {number.bit_length()} bits .*Pass float"):
        HostOperands(number, "sum", None)


def test_numbers_of_other_classes():
    class Level(enum.IntEnum):
        LOW = 3

    assert reduced(Level.LOW) == 6
    for wrong, name in ((np.longdouble(1), "float128"), (np.str_("1"), "<U1"), (np.datetime64("2020"), "datetime64")):
        with pytest.raises(ArgumentError, match=rf"dtype {name}.* cannot be reduced"):
            HostOperands(wrong, "sum", None)


def test_an_array_of_no_dimension_stays_one():
    for value in (1.5, 1j, np.float32(2)):
        found = reduced(np.array(value))
        assert type(found) is np.ndarray
        assert (found.shape, found.dtype, found) == ((), np.array(value).dtype, 2 * value)


# ---- bool and complex
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda a: a.copy(),
    "transposed": lambda a: a.copy().T,
    "every second, backwards": lambda a: np.repeat(a, 2, axis=1)[:, ::-2],
    "of no elements": lambda a: a[:, :0],
    "of no dimension": lambda a: a[0, :1].copy().reshape(()),
    "unaligned": lambda a: np.ndarray(a.shape, a.dtype, bytearray(b"\0" + a.tobytes()), 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["?", "F", "D"])
def test_views(dtype: str, layout: str):
    rng = np.random.default_rng(1)
    values = (rng.integers(0, 2, (3, 4)) if dtype == "?" else rng.integers(0, 9, (3, 4)) * (1 - 2j)).astype(dtype)
    array = LAYOUTS[layout](values)
    op = "max" if dtype == "?" else "sum"
    used = HostOperands(array, op, None)
    assert (used.kind, used.shape) == (array.dtype.name, array.shape)
    assert not array.size or np.shares_memory(used.source, array), "a copy"
    expected = array.copy() if dtype == "?" else array + array
    found = reduced(array, op)
    assert (found.dtype, found.shape, found.flags.c_contiguous) == (array.dtype, array.shape, True)
    assert np.array_equal(found, expected)
    if array.flags.writeable:
        assert reduced(array, op, array) is array
        assert np.array_equal(array, expected)


def test_the_average_of_complex_numbers():
    found = reduced(np.array([1 + 2j, complex(np.inf, 1)], "F"), "avg", ranks=3)
    assert found.tolist() == [1 + 2j, complex(np.inf, 1)]


# ---- tensors on the host
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("device_type", [1, 3])
@pytest.mark.parametrize("dtype", ["f4", "?", "F", "i8"])
def test_tensors(version: int, device_type: int, dtype: str):
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype)[:, ::2]
    kind = Tensor if version else OfTorch
    tensor, expected, op = kind(array, version, device_type), array + array, "max" if dtype == "?" else "sum"
    found = reduced(tensor, op)
    assert type(found) is np.ndarray
    assert np.array_equal(found, expected)
    target = kind(np.zeros((2, 4), dtype)[:, 1:3], version)
    for source in (array, tensor, array.copy(order="F")):
        target.array[...] = 0
        assert reduced(source, op, target) is target
        assert np.array_equal(target.array, expected)
    plain = np.zeros_like(array)
    assert reduced(tensor, op, plain) is plain
    assert reduced(tensor, op, tensor) is tensor
    assert np.array_equal(plain, array)


def test_a_tensors_memory_lives_as_long_as_its_view():
    class Memory(np.ndarray):
        pass

    for version in (0, 1):
        array = np.arange(3.0).view(Memory)
        alive, used = weakref.ref(array), HostOperands(Tensor(array, version), "sum", None)
        view = used.source
        del array, used
        gc.collect()
        assert alive() is not None
        assert view.tolist() == [0, 1, 2]
        del view
        gc.collect()
        assert alive() is None


def test_read_only_tensors():
    array = np.frombuffer(bytes(24))
    assert reduced(Tensor(array)).tolist() == [0, 0, 0]
    with pytest.raises(ArgumentError, match="out cannot be written: this Tensor is read-only"):
        reduced(np.zeros(3), "sum", Tensor(array))
    with pytest.raises(ArgumentError, match="a Tensor, does not give its memory: Cannot export readonly"):
        reduced(Tensor(array, version=0))


def test_an_out_that_does_not_say_that_it_may_be_written():
    """JAX's arrays are immutable, and their capsules have no version, and so no flag."""
    array = np.ones(3)
    tensor = Tensor(array, version=0)
    assert reduced(tensor).tolist() == [2, 2, 2]
    for source in (np.zeros(3), tensor):  # also in place
        words = (
            "out cannot be written: this Tensor is read-only, or does not say by DLPack 1.0 that it may be written. "
            "Pass a copy in NumPy or CuPy, or leave out= away"
        )
        with pytest.raises(ArgumentError, match=words):
            reduced(source, "sum", tensor)
    assert array.tolist() == [1, 1, 1]


def test_bfloat16_tensors_are_refused_with_advice():
    tensor = Tensor(np.zeros(3, ml_dtypes.bfloat16))
    for arguments, name in (((tensor,), "array"), ((np.zeros(3), "sum", tensor), "out")):
        with pytest.raises(ArgumentError, match=rf"{name} is a Tensor of bfloat16 on the host.*NumPy's view"):
            reduced(*arguments)


# ---- out
@pytest.mark.parametrize("number", [1, 1.0, True, 1j, np.float32(1)])
def test_a_number_has_no_out(number: Any):
    with pytest.raises(ArgumentError, match=r"cannot go into out, an ndarray\. .*numpy\.asarray"):
        HostOperands(number, "max" if number is True else "sum", np.zeros(()))
    with pytest.raises(ArgumentError, match="the result of a number is a number"):  # it would come back as it was
        HostOperands(number, "max" if number is True else "sum", number)
    with pytest.raises(ArgumentError, match=rf"array lies on the host, but out is an? {type(number).__name__}"):
        HostOperands(np.zeros(()), "sum", number)


@pytest.mark.parametrize("make", [np.asarray, Tensor])
def test_an_out_that_does_not_fit(make: Callable[[np.ndarray], Any]):
    array = np.zeros((2, 3), "F")
    for other in (np.zeros((2, 3, 2), "f4"), np.zeros((2, 3), "D"), np.zeros((3, 2), "F")):
        words = (
            rf"out has shape {re.escape(str(other.shape))} and dtype {other.dtype}, but array has shape \(2, 3\) and"
        )
        with pytest.raises(ArgumentError, match=words):
            HostOperands(array, "sum", make(other))
    with pytest.raises(ArgumentError, match="elements of out share memory"):
        HostOperands(array, "sum", make(np.lib.stride_tricks.as_strided(array.copy(), (2, 3), (0, 8))))


# ---- arrays whose memory is not their whole value
class WithUnit(np.ndarray):
    """As the quantities of astropy and unyt: 1 m and 1 km have the same memory."""

    def __array_ufunc__(self, *given: Any, **options: Any) -> Any:
        raise AssertionError


class OptedOut(np.ndarray):
    __array_ufunc__ = None


class HandsOn:
    """As pint's quantities: everything that it lacks is its array's."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)


class OfMetaclass(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name)


class HandsOnToo(HandsOn, metaclass=OfMetaclass):
    pass


@pytest.mark.parametrize("kind", [WithUnit, OptedOut])
def test_a_subclass_that_computes_in_its_own_way_is_refused(kind: type[np.ndarray]):
    array = np.ones(3).view(kind)
    words = f"is a .*{kind.__name__}, whose __array_ufunc__ is not ndarray's: .* units or a mask. Pass a plain array"
    with pytest.raises(ArgumentError, match=f"array {words}"):
        reduced(array)
    with pytest.raises(ArgumentError, match=f"out {words}"):
        reduced(np.ones(3), out=array)
    with pytest.raises(ArgumentError, match=f"the result of host= {words}"):
        HostMap(MapCall(np.ones(3), "sum", None, Map("v", host=lambda v: v.view(kind)))).result([np.ones(3)])
    assert (reduced(np.asarray(array)) == 2).all()


@pytest.mark.parametrize("kind", [HandsOn, HandsOnToo])
@pytest.mark.parametrize("held", [np.ones(3), Tensor(np.ones(3)), SimpleNamespace(__cuda_array_interface__={})])
def test_an_object_that_only_hands_on_protocols_is_refused(kind: type[HandsOn], held: Any):
    with pytest.raises(ArgumentError, match=r"array is a .*, which hands on the protocols of an array that it holds"):
        views.is_device(kind(held))
    with pytest.raises(ArgumentError, match=r"out is a .*, which hands on"):
        reduced(np.ones(3), out=kind(held))


def test_what_counts_as_a_plain_array_or_carries_its_own_protocol():
    for kind in (np.matrix, np.memmap, np.recarray, type("Named", (np.ndarray,), {})):
        array = np.ones((1, 3)).view(kind)
        result = reduced(array)
        assert type(result) is np.ndarray
        assert (result == 2).all()
    own = Tensor(np.ones(3))
    carrier = SimpleNamespace(__dlpack__=own.__dlpack__, __dlpack_device__=own.__dlpack_device__)
    assert not views.is_device(carrier)
    assert views.is_device(SimpleNamespace(__cuda_array_interface__={}))
    with pytest.raises(ArgumentError, match="has neither __dlpack__ nor __cuda_array_interface__"):
        views.is_device(SimpleNamespace(__cuda_array_interface__=None))
    with pytest.raises(ArgumentError, match="has neither"):
        views.is_device(Tensor)
