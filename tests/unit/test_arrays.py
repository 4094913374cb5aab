"""Telling arrays and streams of every kind, as far as that needs no CuPy."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from ipcreduce import arrays
from ipcreduce.errors import ArgumentError, UnsupportedError


class OnDevice:
    """What the arrays of other libraries show."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


class ByDlpack:
    def __init__(self, device_type: int) -> None:
        self.device_type = device_type

    def __dlpack__(self, **_: Any) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0


def test_where_an_array_lies():
    assert not arrays.is_device(np.ones(3))
    assert arrays.is_device(OnDevice())
    assert arrays.is_device(ByDlpack(2))  # kDLCUDA
    assert arrays.is_device(ByDlpack(13))  # kDLCUDAManaged
    for device_type in (1, 3, 10):  # the host, pinned, ROCm
        with pytest.raises(ArgumentError, match=f"ByDlpack on DLPack device type {device_type}.*move it to the GPU"):
            arrays.is_device(ByDlpack(device_type))
    for wrong in ([1.0], None, "text", 3, 3.0, np.float32(3), {}, memoryview(b"1234"), OnDevice, np.ndarray):
        with pytest.raises(ArgumentError, match="array must be a NumPy array, or a device array with"):
            arrays.is_device(wrong)


def test_cupy_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "_cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (
        arrays.available,
        arrays.current_device,
        arrays.current_stream,
        lambda: arrays.view(OnDevice(), 0),
        lambda: arrays.empty((3,), np.dtype("f4"), 0),
    ):
        with pytest.raises(UnsupportedError, match=r"CuPy is not installed .*pip install 'ipcreduce\[cuda13\]'"):
            call()


def test_streams_of_every_kind():
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    class Property:
        __cuda_stream__ = (0, 78)

    assert arrays.stream_handle(0) == 0
    assert arrays.stream_handle(1 << 47) == 1 << 47
    assert arrays.stream_handle(Protocol()) == 77
    assert arrays.stream_handle(Property()) == 78
    assert arrays.stream_handle(types.SimpleNamespace(ptr=79)) == 79  # CuPy's
    assert arrays.stream_handle(types.SimpleNamespace(cuda_stream=80)) == 80  # PyTorch's
    for wrong in (-1, True, 1.5, "0", b"0", [0], object(), types.SimpleNamespace(ptr="79")):
        with pytest.raises(ArgumentError, match="stream must be an int, a CuPy stream or an object with"):
            arrays.stream_handle(wrong)


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
    low, past = arrays.extent(array)
    assert (low, past) == np.lib.array_utils.byte_bounds(array) or (array.size == 0 and low == past)
