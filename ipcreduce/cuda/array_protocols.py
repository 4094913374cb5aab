"""Address, shape, dtype and strides of device arrays, by ``__cuda_array_interface__`` and DLPack.

No data is copied and no CUDA function is called. An array may have a protocol through its type or in its own
``__dict__``. Both are read in the way of ``object`` and ``type``, so that no ``__getattribute__`` runs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ArgumentError, Location
from ..texts import text_of

Locate = Callable[[Any], "Location | None"]
PROTOCOLS = "__cuda_array_interface__", "__dlpack__", "__dlpack_device__"
NO_MEMORY = "its elements have address 0, where nothing lies. Pass the array that holds them, or a copy"
_VERSIONED = b"dltensor_versioned"
_NOT_TO_BE_WRITTEN = 1 | 2  # DLPack's flags for a read-only array, and for a copy, whose original nothing would reach
_MUTABLE = "torch", "cupy", "numba"  # libraries whose arrays can all be written
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def no_memory(kind: type) -> str:
    """The error message for an array of this type whose elements have address 0."""
    return f"the {kind.__qualname__} does not give its memory: {NO_MEMORY}"


def namespaces(kind: type) -> list[Mapping[str, Any]]:
    """The ``__dict__`` of a class and of each base class, in method resolution order."""
    mro, namespace = (type.__dict__[name].__get__ for name in ("__mro__", "__dict__"))
    return [namespace(base) for base in mro(kind)]


def attributes(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    """A function that returns the ``__dict__`` of an object of this type; None if they have none, or are types."""
    for namespace in namespaces(kind) if not issubclass(kind, type) else ():
        if type(namespace.get("__dict__")) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return namespace["__dict__"].__get__
    return None


def has(array: Any, name: str) -> bool:
    """True if an array has this member of a protocol through its type, or in its own ``__dict__``; False for types.

    What ``__getattr__`` hands on does not count: it is another object's, which may be no more than a part of the value.
    """
    if getattr(type(array), name, None) is not None:
        return True
    own = attributes(type(array))
    return own is not None and dict.get(own(array), name) is not None


def carried(kind: type, own: dict[str, Any]) -> Locate | None:
    """:func:`locator` for an object with the attributes ``own``; None if they contain no protocol."""
    get = dict.get  # a dict's subclass may have a get() of its own. A protocol of None means that this is not an array
    names = [name for name in PROTOCOLS if get(own, name) is not None]
    return locator(kind, names) if names else None


def locator(kind: type, own: Collection[str] = ()) -> Locate | None:
    """A function that returns the location of an array of this type; None for NumPy's arrays, and for other types.

    The function returns None for an array that is not on an NVIDIA GPU. It raises ``ArgumentError`` for an array that
    does not give its address. If an array has both protocols, DLPack is tried when the interface fails.

    :param own: names of the object's own attributes, in addition to those of its type.
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
        raise ArgumentError(f"the {kind.__qualname__} does not give its address: {text_of(refusal)}") from refusal

    return locate


def interface_dtype(array: Any, interface: dict[str, Any]) -> np.dtype[Any]:
    """The dtype of an array with this interface, whose typestr for bfloat16 is that of two opaque bytes."""
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
    managed = capsule(stream=-1)  # -1: the producer does not synchronise
    tensor, _ = _tensor_of(managed)
    # DLTensor: data, device type and id, ndim, dtype code, bits and lanes, shape, strides, byte offset
    data, _, _, ndim, code, bits, lanes, *pointers, offset = struct.unpack("=Q3i2BH3Q", ctypes.string_at(tensor, 48))
    shape, strides = (tuple((ctypes.c_int64 * ndim).from_address(at)) if at else () for at in pointers)
    strides = tuple(n * bits * lanes // 8 for n in strides) or _dense(shape, bits * lanes // 8)
    kind = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}.get(code, f"DLPack type {code}, bits ")
    return data + offset, shape, "bool" if code == 6 else f"{kind}{bits}", strides


def _tensor_of(capsule: Any) -> tuple[int, int | None]:
    """The address of a capsule's DLTensor, and its flags, which are None before DLPack's version 1."""
    if not _is_valid(capsule, _VERSIONED):
        return _pointer(capsule, b"dltensor"), None
    managed = _pointer(capsule, _VERSIONED)
    # DLManagedTensorVersioned: major and minor version, context, deleter, flags, DLTensor
    major, minor, _, _, flags = struct.unpack("=2I3Q", ctypes.string_at(managed, 32))
    if major != 1:
        raise BufferError(f"its capsule is of DLPack {major}.{minor}, and ipcreduce reads version 1")
    return managed + 32, flags


def _is_mutable(array: Any, flags: int | None) -> bool:
    """True if an array that has given a capsule with these flags may be written."""
    if flags is not None:
        return not flags & _NOT_TO_BE_WRITTEN
    return any(base.__module__.partition(".")[0] in _MUTABLE for base in type(array).__mro__)


def is_readonly(array: Any) -> bool:
    """True if the protocols of a device array forbid writing, or do not say that they allow it."""
    interface = None
    with suppress(Exception):  # AttributeError, or any other error for a dtype without a typestr
        interface = array.__cuda_array_interface__
    if interface is not None:
        return bool(interface["data"][1])
    try:
        try:
            capsule = array.__dlpack__(stream=-1, max_version=(1, 0))
        except TypeError:  # this library does not know DLPack's versions
            capsule = array.__dlpack__(stream=-1)
        return not _is_mutable(array, _tensor_of(capsule)[1])
    except Exception:  # each library raises errors of its own
        return True


class _Exporter:
    """A host array that remembers the flags of the DLPack capsule which it gives."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.flags: int | None = None

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        tensor, self.flags = _tensor_of(capsule)
        data, _, _, ndim, _, shape = struct.unpack("=Q3iIQ", ctypes.string_at(tensor, 32))
        if not data and all((ctypes.c_int64 * ndim).from_address(shape) if ndim else ()):
            raise BufferError(NO_MEMORY)  # NumPy would allocate memory, of any content
        return capsule


def host_view(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array over the memory of a host array, by DLPack. It is read-only if the array's library says so.

    NumPy itself makes the view of a capsule before version 1 read-only.
    """
    exporter = _Exporter(array)
    view = np.from_dlpack(exporter)
    mutable = _is_mutable(array, exporter.flags)
    if view.flags.writeable and not mutable:
        view.flags.writeable = False
    elif mutable and not view.flags.writeable:
        interface = view.__array_interface__
        interface["data"] = interface["data"][0], False
        view = np.asarray(types.SimpleNamespace(__array_interface__=interface, owner=view))
    return view


@functools.lru_cache
def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
