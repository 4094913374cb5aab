"""Address, shape, dtype and strides of device arrays, by ``__cuda_array_interface__`` and DLPack.

No data is copied and no CUDA function is called. Attributes are read as ``object`` and ``type`` read them, so that no
``__getattribute__`` of a type or metaclass runs. An array has a protocol through its type or in its own ``__dict__``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ArgumentError, Location

Locate = Callable[[Any], "Location | None"]
PROTOCOLS = "__cuda_array_interface__", "__dlpack__", "__dlpack_device__"


def namespaces(kind: type) -> list[Mapping[str, Any]]:
    """The ``__dict__`` of a class and of each base class, in method resolution order."""
    mro, namespace = (type.__dict__[name].__get__ for name in ("__mro__", "__dict__"))
    return [namespace(base) for base in mro(kind)]


def attributes(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    """A function that returns the ``__dict__`` of an object of this type; None if objects have none, or are types."""
    for namespace in namespaces(kind) if not issubclass(kind, type) else ():
        if type(namespace.get("__dict__")) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            get: Callable[[Any], dict[str, Any]] = namespace["__dict__"].__get__
            return get
    return None


def carried(kind: type, own: dict[str, Any]) -> Locate | None:
    """:func:`locator` for an object with the attributes ``own``; None if none of the protocols is among them."""
    get = dict.get  # runs no code of a dict subclass. An attribute of None means that the object is no array
    names = [name for name in PROTOCOLS if get(own, name) is not None]
    return locator(kind, names) if names else None


def locator(kind: type, own: Collection[str] = ()) -> Locate | None:
    """A function that returns the location of an array of this type; None if the type is not an array's, or NumPy's.

    The function returns None for an array that is not on an NVIDIA GPU. It raises ``ArgumentError`` for an array that
    does not give its address. If an array has both protocols, DLPack is tried when the interface fails.

    :param own: names of the object's own attributes, besides its type's.
    """
    found = [*namespaces(kind), own]
    interface, *dlpack = (any(name in names for names in found) for name in PROTOCOLS)
    readers = [_by_interface] * interface + [_by_dlpack] * all(dlpack)
    if issubclass(kind, np.ndarray) or not readers:
        return None

    def locate(array: Any) -> Location | None:
        for read in readers:  # DLPack has dtypes without a typestr, such as float8
            try:
                return read(array)
            except AttributeError:  # raised by PyTorch for a tensor on the host
                return None
            except Exception as error:
                refusal = error
        raise ArgumentError(f"the {kind.__qualname__} does not give its address: {refusal}") from refusal

    return locate


def interface_dtype(array: Any, interface: dict[str, Any]) -> np.dtype[Any]:
    """The dtype of an array with this interface, in which bfloat16 appears as two opaque bytes."""
    typestr = interface["typestr"]
    bfloat16 = typestr[1:] == "V2" and "bfloat16" in str(getattr(array, "dtype", ""))
    return np.dtype(ml_dtypes.bfloat16 if bfloat16 else typestr)


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The dtype's name, cached: NumPy takes 2 us to build it each time."""
    return dtype.name


def _by_interface(array: Any) -> Location:
    interface = object.__getattribute__(array, "__cuda_array_interface__")
    dtype, shape, strides = interface_dtype(array, interface), tuple(interface["shape"]), interface.get("strides")
    strides = _dense(shape, dtype.itemsize) if strides is None else tuple(strides)
    return interface["data"][0], shape, dtype_name(dtype), strides


def _by_dlpack(array: Any) -> Location | None:
    capsule, device = (object.__getattribute__(array, name) for name in PROTOCOLS[1:])
    if device()[0] not in (2, 13):  # kDLCUDA, kDLCUDAManaged
        return None
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    managed = capsule(stream=-1)  # -1: the producer does not synchronise
    tensor = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(managed, b"dltensor")
    # DLTensor: data, device type and id, ndim, dtype code, bits and lanes, shape, strides, byte offset
    data, _, _, ndim, code, bits, lanes, *pointers, offset = struct.unpack("=Q3i2BH3Q", ctypes.string_at(tensor, 48))
    shape, strides = (tuple((ctypes.c_int64 * ndim).from_address(at)) if at else () for at in pointers)
    strides = tuple(n * bits * lanes // 8 for n in strides) or _dense(shape, bits * lanes // 8)
    kind = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}.get(code, f"DLPack type {code}, bits ")
    return data + offset, shape, "bool" if code == 6 else f"{kind}{bits}", strides


class _Exporter:
    """An array on the host, which keeps the capsule that it gives."""

    def __init__(self, array: Any) -> None:
        self._array, self.capsule = array, None

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.capsule = self._array.__dlpack__(**options)
        return self.capsule


def host_view(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array over the memory of an array on the host, by DLPack.

    Before its version 1, DLPack does not export read-only memory. NumPy makes the view of such a capsule read-only.
    """
    exporter = _Exporter(array)
    view = np.from_dlpack(exporter)
    valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
    is_valid = valid(("PyCapsule_IsValid", ctypes.pythonapi))
    if not view.flags.writeable and is_valid(exporter.capsule, b"used_dltensor"):
        interface = view.__array_interface__
        writable = types.SimpleNamespace(__array_interface__=interface | {"data": (interface["data"][0], False)})
        writable.owner = view
        view = np.asarray(writable)
    return view


@functools.lru_cache
def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
