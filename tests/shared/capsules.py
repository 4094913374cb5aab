"""DLPack's capsules, of every version, made by hand."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

_kept: list[Any] = []  # what capsules point to


def capsule_of(
    address: int = 0x1000, shape: tuple[int, ...] = (2, 3), flags: int | None = 0, device: int = 2, major: int = 1
) -> Any:  # fmt: skip
    """A DLPack capsule of float32 elements, without a deleter; of a version before 1 if ``flags`` is None."""
    lengths = (ctypes.c_int64 * len(shape))(*shape)
    head = b"" if flags is None else struct.pack("=2I3Q", major, 0, 0, 0, flags)
    head += struct.pack("=Q3i2BH3Q", address, device, 0, len(shape), 2, 32, 1, ctypes.addressof(lengths), 0, 0)
    tensor = ctypes.create_string_buffer(head + bytes(16))
    name = b"dltensor" if flags is None else b"dltensor_versioned"
    _kept.append((lengths, tensor, name))
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(tensor), name, None)
