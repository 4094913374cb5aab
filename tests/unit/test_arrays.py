"""Telling arrays and streams of every kind, as far as that needs no CuPy."""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
import types
from typing import Any

import numpy as np
import pytest

from ipcreduce.arrays import locations, views
from ipcreduce.cuda import cupy_runtime, torch_runtime, torch_tensors
from ipcreduce.errors import ArgumentError, UnsupportedError
from tests.shared.capsules import capsule_of


class OnDevice:
    """What the arrays of other libraries show."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (0x900, False), "version": 3}  # noqa: RUF012


class ByDlpack:
    def __init__(self, device_type: int) -> None:
        self.device_type = device_type

    def __dlpack__(self, **_: Any) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0


def test_where_an_array_lies():
    assert not views.is_device(np.ones(3))
    assert views.is_device(OnDevice())
    assert views.is_device(ByDlpack(2))  # kDLCUDA
    assert views.is_device(ByDlpack(13))  # kDLCUDAManaged
    for device_type in (1, 3, 11):  # the host, pinned by CUDA, by ROCm
        assert not views.is_device(ByDlpack(device_type))
    for device_type in (7, 10):  # Vulkan, ROCm
        with pytest.raises(
            ArgumentError, match=f"ByDlpack, lies on DLPack device type {device_type}.*Move it to an NVIDIA GPU"
        ):
            views.is_device(ByDlpack(device_type))
    carrier = types.SimpleNamespace(__cuda_array_interface__=OnDevice.__cuda_array_interface__)
    assert views.is_device(carrier)
    carrier = types.SimpleNamespace(__dlpack__=ByDlpack(2).__dlpack__, __dlpack_device__=ByDlpack(2).__dlpack_device__)
    assert views.is_device(carrier)
    carrier.__dlpack_device__ = ByDlpack(1).__dlpack_device__
    assert not views.is_device(carrier)
    carrier.__dlpack_device__ = ByDlpack(10).__dlpack_device__
    with pytest.raises(
        ArgumentError, match=r"SimpleNamespace, lies on DLPack device type 10.*Move it to an NVIDIA GPU"
    ):
        views.is_device(carrier)
    for number in (True, 3, 3.0, 3j, np.float32(3), np.bool_(True)):
        assert not views.is_device(number)
    for wrong in ([1.0], None, "text", {}, memoryview(b"1234"), OnDevice, ByDlpack, np.ndarray):
        with pytest.raises(ArgumentError, match="which has neither __dlpack__ nor __cuda_array_interface__"):
            views.is_device(wrong)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


class Deleted(ByDlpack):
    """As JAX's arrays that are deleted, or lie on several GPUs. It does not tell its dtype either."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @property
    def dtype(self) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        raise self.error


@pytest.mark.parametrize(("error", "text"), [(BufferError("sharded."), "sharded. Pass an array"), (Mute(), "a Mute")])
def test_an_array_that_does_not_tell_where_it_lies(error: Exception, text: str):
    with pytest.raises(ArgumentError, match=f"array, a Deleted, does not give its memory: {text}") as caught:
        views.is_device(Deleted(error))
    assert caught.value.__cause__ is error
    with pytest.raises(ArgumentError, match="the Deleted does not give its address: "):
        locations.locate(Deleted(error))


def test_a_deleted_array_is_said_to_be_deleted():
    """As in test_jax.py, which needs JAX."""
    array = Deleted(TypeError("object of type 'NoneType' has no len()"))
    array.is_deleted = lambda: True
    with pytest.raises(ArgumentError, match="out, a Deleted, does not give its memory: it was deleted, or donated"):
        views.is_device(array, "out")
    array.is_deleted = lambda: False
    with pytest.raises(ArgumentError, match="NoneType"):
        views.is_device(array, "out")


class Tensor:
    """As PyTorch's: both protocols, of which the interface fails in ways of its own."""

    def __init__(self, interface: Any, capsule: Any = None) -> None:
        self.interface, self.capsule, self.dtype = interface, capsule, "torch.bfloat16"

    @property
    def __cuda_array_interface__(self) -> Any:
        if isinstance(self.interface, Exception):
            raise self.interface
        return self.interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        assert stream == -1  # no CUDA call
        if self.capsule is None:
            raise BufferError("requires grad")
        return self.capsule


class Exported:
    """DLPack only: of a NumPy array's memory, said to be on a device."""

    def __init__(self, array: np.ndarray, device_type: int = 2) -> None:
        self.array, self.device_type = array, device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, *, stream: int) -> Any:
        assert stream == -1
        return self.array.__dlpack__()


def interface(shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"shape": shape, "typestr": typestr, "data": (0x1000, False), "strides": strides, "version": 3}


def test_elements_that_share_memory():
    base = np.zeros(4000, np.uint8)
    shapes = (2, 3), (3, 2), (4, 1), (5,), (2, 2, 3), (0, 3), ()
    for itemsize, shape in itertools.product((1, 2, 4), shapes):
        for strides in itertools.product((-5, -2, 0, 1, 2, 3, 4, 6, 8, 12), repeat=len(shape)):
            array = np.ndarray(shape, f"V{itemsize}", base.data, 2000, strides)
            used = [
                2000 + sum(place * stride for place, stride in zip(places, strides, strict=True)) + byte
                for places in itertools.product(*map(range, shape))
                for byte in range(itemsize)
            ]
            assert views.has_shared_elements(array) == (len({*used}) < len(used)), (itemsize, shape, strides)


def test_large_arrays_are_not_looked_at_element_by_element():
    as_strided = np.lib.stride_tricks.as_strided
    base = np.zeros(1 << 20, np.float32)
    for shape, strides, shared in (
        ((1 << 19, 1 << 19), (4, 4), True),
        ((1 << 19, 1 << 19, 1 << 10), (4, 0, 1 << 30), True),
        ((1 << 40, 1 << 10), (1 << 12, 4), False),
    ):
        array = as_strided(base, shape, strides)
        assert views.has_shared_elements(array) == shared


def test_the_location_by_interface():
    assert locations.locate(OnDevice()) == (0x900, (3,), "float32", (4,))
    assert locations.locate(Tensor(interface((2, 3), "<f2"))) == (0x1000, (2, 3), "float16", (6, 2))
    assert locations.locate(Tensor(interface((2, 3), "<f8", (8, 16)))) == (0x1000, (2, 3), "float64", (8, 16))
    assert locations.locate(Tensor(interface((), "<i4"))) == (0x1000, (), "int32", ())
    assert locations.locate(Tensor(interface((4,), "<V2"))) == (0x1000, (4,), "bfloat16", (2,))
    assert locations.locate(Tensor(interface((4,), "|b1"))) == (0x1000, (4,), "bool", (1,))


@pytest.mark.parametrize("dtype", ["i1", "i8", "u2", "f2", "f4", "f8", "c8", "?"])
def test_the_location_by_dlpack(dtype: str):
    base = np.zeros((6, 8), dtype)
    for array in (base, base[1:, 2:], base[:, ::-2].T, base[2, 3:4].reshape(()), base[:0]):
        expected = array.ctypes.data, array.shape, array.dtype.name, array.strides
        assert locations.locate(Exported(array)) == expected
        assert locations.locate(Exported(array, 13)) == expected  # kDLCUDAManaged
        assert locations.locate(Exported(array, 1)) is None


@pytest.mark.parametrize(
    ("code", "bits", "name"), [(4, 16, "bfloat16"), (10, 8, "DLPack type 10, bits 8"), (2, 32, "float32")]
)
def test_dlpack_with_an_offset_and_no_strides(code: int, bits: int, name: str):
    shape = (ctypes.c_int64 * 2)(2, 3)
    head = struct.pack("=Q3i2BH3Q", 0x1000, 2, 0, 2, code, bits, 1, ctypes.addressof(shape), 0, 0x20)
    tensor = ctypes.create_string_buffer(head + bytes(16))  # a DLManagedTensor with no deleter
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(tensor), b"dltensor", None)
    size = bits // 8
    assert locations.locate(Tensor(KeyError(), capsule)) == (0x1020, (2, 3), name, (3 * size, size))


class Producer:
    """An array that gives :func:`capsule_of`; ``versions`` is False for one that knows none."""

    def __init__(self, versions: bool = True, **what: Any) -> None:
        self.versions, self.what = versions, what

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.what.get("device", 2), 0

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versions and "max_version" in options:
            raise TypeError("unknown option")
        return capsule_of(**self.what if self.versions else self.what | {"flags": None})


class OfTorch(Producer):
    __module__ = "torch.somewhere"


class BesideTorch(Producer):
    __module__ = "torchlike"


NOTHING = "does not give its memory: its elements have address 0, where nothing lies. Pass the array that holds them"


@pytest.mark.parametrize("versions", [True, False])
def test_an_address_of_0_is_refused(versions: bool, monkeypatch: pytest.MonkeyPatch):
    """Whatever library it comes from, and not for arrays of no elements."""
    for nothing in (
        Tensor(interface((2, 3), "<f2") | {"data": (0, False)}), Producer(versions, address=0),
        Producer(versions, address=0, shape=()),
        types.SimpleNamespace(__cuda_array_interface__=interface((1,), "<f2") | {"data": (0, True)}),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"the {type(nothing).__name__} {NOTHING}"):
            locations.locate(nothing)
    for fine in (Producer(versions, address=0, shape=(3, 0)), Tensor(interface((0,), "<f2") | {"data": (0, False)})):
        place = locations.locate(fine)
        assert place is not None
        assert place[0] == 0
    for shape in ((6,), ()):
        with pytest.raises(ArgumentError, match=f"array, a Producer, {NOTHING}"):
            views.host_view(Producer(versions, address=0, shape=shape, device=1))
    assert views.host_view(Producer(versions, address=0, shape=(2, 0), device=1)).shape == (2, 0)

    class Array:
        def __init__(self, address: int, size: int) -> None:
            self.data, self.shape, self.size = types.SimpleNamespace(ptr=address), (size,), size
            self.dtype, self.strides = np.dtype("f4"), (4,)

    monkeypatch.setattr(cupy_runtime, "cupy", types.SimpleNamespace(ndarray=Array))
    for read in (locations.locate, lambda array: views.view(array, 0)):
        with pytest.raises(ArgumentError, match=f"Array {NOTHING}"):
            read(Array(0, 1))
        read(Array(0, 0))
        read(Array(0x1000, 1))


def test_what_says_that_it_may_be_written():
    """DLPack's flags; before version 1 the library; the flag of ``__cuda_array_interface__`` comes first."""
    for kind, of_version_1, before in ((Producer, True, False), (OfTorch, True, True), (BesideTorch, True, False)):
        for flags, writable in ((0, of_version_1), (1, False), (2, False), (3, False), (4, True), (None, before)):
            made = kind(flags is not None, flags=flags)
            assert views.is_readonly(made) != writable, (kind, flags)
            memory = np.zeros(6, np.float32)
            view = views.host_view(
                kind(flags is not None, flags=flags, device=1, address=memory.ctypes.data, shape=(6,))
            )
            assert view.flags.writeable == writable, (kind, flags)
            assert np.shares_memory(view, memory)
            made.__cuda_array_interface__ = interface((3,), "<f4")
            assert not views.is_readonly(made)
            made.__cuda_array_interface__ |= {"data": (0x1000, True)}
            assert views.is_readonly(made)

    class NoTypestr(Producer):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("not for bfloat16")

    assert not views.is_readonly(NoTypestr())
    assert views.is_readonly(NoTypestr(flags=1))
    assert views.is_readonly(Producer(major=2))
    assert views.is_readonly(ByDlpack(2))


def test_the_location_by_a_capsule_of_version_1():
    assert locations.locate(Producer()) == (0x1000, (2, 3), "float32", (12, 4))
    assert locations.locate(Producer(flags=1)) == (0x1000, (2, 3), "float32", (12, 4))
    for read in (locations.locate, views.host_view):
        with pytest.raises(ArgumentError, match=r"its capsule is of DLPack 2\.0, and ipcreduce reads version 1"):
            read(Producer(major=2, device=2 if read is locations.locate else 1))


def test_the_location_by_dlpack_when_the_interface_fails():
    array = np.arange(3.0)
    assert locations.locate(Tensor(KeyError("float8"), array.__dlpack__())) == locations.locate(Exported(array))
    with pytest.raises(ArgumentError, match="Tensor does not give its address: requires grad"):
        locations.locate(Tensor(RuntimeError("no")))


def test_what_has_no_location():
    assert locations.locate(Tensor(AttributeError("on the host"), np.ones(1).__dlpack__())) is None
    for wrong in (np.ones(3), np.float32(3), [OnDevice()], None, "text", OnDevice, memoryview(b"1")):
        assert locations.locate(wrong) is None


def test_the_location_of_an_object_that_carries_its_interface():
    class Instance:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = interface((1,), "<f4")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    class OfNumpy(np.ndarray):
        pass

    assert locations.locate(Instance()) == (0x1000, (1,), "float32", (4,))
    host = np.ones(3).view(OfNumpy)
    host.__cuda_array_interface__ = interface((1,), "<f4")
    assert locations.locate(host) is None


def test_tensors_are_known_without_an_import(monkeypatch: pytest.MonkeyPatch):
    class Tensor(OnDevice):
        device, layout, is_quantized, requires_grad = types.SimpleNamespace(type="cuda"), "strided", False, False

        def __init__(self, neg: bool = False, conj: bool = False, **changes: Any) -> None:
            self.is_neg, self.is_conj = (lambda: neg), (lambda: conj)
            vars(self).update(changes)

    stream = types.SimpleNamespace(cuda_stream=0x51)
    torch = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)  # still at its import
    assert not torch_runtime.is_tensor(Tensor())
    torch.Tensor, torch.cuda = Tensor, types.SimpleNamespace(
        current_stream=lambda device: stream, is_available=lambda: True
    )  # fmt: skip
    torch.strided, torch.is_grad_enabled = "strided", lambda: True
    assert torch_runtime.is_tensor(Tensor())
    assert not torch_runtime.is_tensor(OnDevice())
    assert torch_runtime.current_stream(0) == (0x51, stream)
    for tensor, words in (
        (Tensor(neg=True), "resolve_neg"), (Tensor(conj=True), "resolve_conj"), (Tensor(layout="sparse"), "to_dense"),
        (Tensor(is_quantized=True), "dequantize"), (Tensor(requires_grad=True), "detach"),
        (Tensor(device=types.SimpleNamespace(type="meta")), "on the device meta"),
    ):  # fmt: skip
        assert words in torch_tensors.problem(tensor)
        with pytest.raises(ArgumentError, match=f"out .*{words}"):
            views.is_device(tensor, "out")
    assert torch_tensors.problem(Tensor()) == ""
    torch.is_grad_enabled = lambda: False
    assert torch_tensors.problem(Tensor(requires_grad=True)) == ""
    monkeypatch.delitem(sys.modules, "torch")
    assert not torch_runtime.is_tensor(Tensor())


def test_streams_of_pytorchs_pool_are_never_destroyed(monkeypatch: pytest.MonkeyPatch):
    class Stream:
        def __init__(self, stream_id: int) -> None:
            self.stream_id = stream_id

    class ExternalStream(Stream):
        pass

    cuda = types.SimpleNamespace(Stream=Stream)
    monkeypatch.setattr(torch_runtime, "torch", types.SimpleNamespace(cuda=cuda))
    kept = [torch_runtime.keeps(one) for one in (Stream(3), Stream(0x7F00), ExternalStream(3), 3, None)]
    assert kept == [True, False, False, False, False]


def test_the_location_of_a_cupy_array(monkeypatch: pytest.MonkeyPatch):
    """By its own attributes: its interface would look at the stream."""

    class Array:
        data, shape, dtype, strides = types.SimpleNamespace(ptr=0x1000), (2, 2), np.dtype("f2"), (4, 2)

        @property
        def __cuda_array_interface__(self) -> Any:
            raise AssertionError

    monkeypatch.setattr(cupy_runtime, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Array))  # by the user, not by us
    assert locations.locate(Array()) == (0x1000, (2, 2), "float16", (4, 2))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert locations.locate(OnDevice()) == (0x900, (3,), "float32", (4,))


def test_cupy_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cupy_runtime, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (
        cupy_runtime.load,
        cupy_runtime.current_device,
        cupy_runtime.stream_of,
        lambda: views.view(OnDevice(), 0),
        lambda: views.empty((3,), np.dtype("f4"), 0, 0),
    ):
        with pytest.raises(UnsupportedError, match=r"CuPy is not installed .*pip install '\.\[cuda13\]'"):
            call()


def test_streams_of_every_kind(monkeypatch: pytest.MonkeyPatch):
    class Stream:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

    class ExternalStream(Stream):
        pass

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    class Property:
        __cuda_stream__ = (0, 78)

    current, foreign = Stream(76), Stream(75)
    foreign._foreign_stream_ref = Protocol()  # as CuPy's from_external does
    cuda = types.SimpleNamespace(Stream=Stream, get_current_stream=lambda: current)
    monkeypatch.setattr(cupy_runtime, "cupy", types.SimpleNamespace(cuda=cuda))
    for stream, handle, kept in (
        (None, 76, True),
        (current, 76, True),
        (Stream(2), 2, False),  # another one in each thread
        (foreign, 75, False),
        (ExternalStream(75), 75, False),
        (1 << 47, 1 << 47, False),
        (0, 0, True),  # as long as the context
        (Protocol(), 77, False),
        (Property(), 78, False),
        (types.SimpleNamespace(cuda_stream=80), 80, False),  # PyTorch's
    ):
        found, owner = cupy_runtime.stream_of(stream)
        assert (found, cupy_runtime.keeps(owner, found)) == (handle, kept)
    for wrong in (-1, True, 1.5, "0", b"0", [0], object(), types.SimpleNamespace(ptr="79")):
        with pytest.raises(ArgumentError, match=r"which is no stream\. Pass an int, a CuPy stream or an object with"):
            cupy_runtime.stream_of(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a[::-1],
        lambda a: a[1::2, ::-3],
        lambda a: a.T,
        lambda a: a[:, :0],
        lambda a: a[2, 3, None],
        lambda a: np.broadcast_to(a[1], (4, 5, 8)),
        lambda a: a[2:3, 3].reshape(()),
    ],
)
def test_the_bytes_that_an_array_touches(make: Any):
    array = make(np.zeros((6, 8), np.float32)[1:].reshape(5, 8))
    low, past = views.extent(array)
    assert (low, past) == np.lib.array_utils.byte_bounds(array) or (array.size == 0 and low == past)
