"""A user's element-wise expression after an all-reduce: its description, and its operands in a call.

The error messages here name neither rank nor call: the communicator adds both.
"""

from __future__ import annotations

import keyword
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..calls.addresses import MapAddresses
from ..calls.request import Member, Request
from ..cuda import torch_runtime
from ..cuda.expressions import Expression, Operand
from ..dtypes import BFLOAT16, DTYPES, VIEWS, kind_name, op_name
from ..errors import ArgumentError, UnsupportedError, reading
from ..float_state import in_standard_state
from ..texts import kind_of, printable, shown, text_of
from . import views
from .host_operands import Array, HostOperands, Part, as_numpy
from .operands import DeviceOperands, PreparedCall, Site, check_device

_MAX_OPERANDS = 32
NUMBERS = (bool, int, float, np.generic)
_WANTED = "Let it return an array of the shape of v"
_HALVES = "float16", "bfloat16"
_PACK = {"float32": struct.Struct("<f").pack, "float64": struct.Struct("<d").pack, "int64": struct.Struct("<q").pack}
# The words of C++ that are no words of Python, the macros of kernels/, and what their headers may define.
_CPP = """
alignas alignof and_eq asm auto bitand bitor bool case catch char char16_t char32_t char8_t co_await co_return co_yield
compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast enum
explicit export extern float friend goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq
private protected public register reinterpret_cast requires short signed sizeof static static_assert static_cast struct
switch template this thread_local throw true false typedef typeid typename union unsigned using virtual void volatile
wchar_t xor xor_eq
"""
_RESERVED = frozenset([
    "v", *_CPP.split(), *(word.lower() for word in keyword.kwlist),
    "CLUSTER_KERNEL", "DEVICE", "DEVICE_NOINLINE", "KERNEL", "KERNEL_ARGS", "LARGE_SHARED", "MAP_ELEMENT", "NULL",
    "OPERAND", "SHARED",
])  # fmt: skip
_RESERVED_FORMS = re.compile(r"__|IPCREDUCE|_[A-Z]|operand_|operandtype_")  # at the beginning of a name


class Map:
    """An element-wise expression for the result of an all-reduce: ``comm.allreduce(x, then=Map("v * s", s=2))``.

    It cannot be changed. It can be copied, and pickled if ``host`` can.

    :param expression: C++ in the names of the operands and ``v``, the reduced element. ``v`` is rounded as the result
        of a plain all-reduce is, and then a float; for float64 and integers it has their own type. The value is
        converted to the dtype of the array once. The expression is code of your program, and is compiled as it stands:
        never make it of text that others send.
    :param host: the same for NumPy arrays, as a function ``host(v, **operands)`` that returns an array. float16 and
        bfloat16 come as float32. None: a call on NumPy arrays raises :class:`UnsupportedError`.
    :param operands: by name, a number; or an array of the shape of the array that is reduced, or of its last dimension.
        A number of Python's has the type of ``v``, or int64 or float64 where ``v`` is an integer. One of NumPy's has
        its own dtype. A new number compiles nothing. Elements of float16 and bfloat16 are floats in the expression.
    :raises ArgumentError: if a name cannot be one of C++, or there are more than 32 operands.
    """

    __slots__ = "__weakref__", "_expression", "_host", "_key", "_operands", "_values"

    def __init__(self, expression: str, /, *, host: Callable[..., Any] | None = None, **operands: Any) -> None:
        if not issubclass(type(expression), str) or not str.strip(expression):
            raise ArgumentError(f'the expression is {shown(expression)}. Pass C++ in a str, such as "v * s + a"')
        expression = str.__str__(expression)  # of no subclass, whose methods may be its own
        if "\0" in expression or (not expression.isascii() and printable(expression) != expression):
            raise ArgumentError(f"the expression is {shown(expression)}, with a NUL or no UTF-8. Pass other characters")
        if host is not None and not callable(host):
            raise ArgumentError(f"host is {kind_of(host)}. Pass a function of v and the operands")
        if len(operands) > _MAX_OPERANDS:
            raise ArgumentError(f"there are {len(operands)} operands. An expression has at most {_MAX_OPERANDS}")
        for name in operands:
            _check_name(name)
        self._expression, self._host = expression, host
        self._operands = operands
        self._values = tuple(operands.values())
        self._key = expression, tuple(operands), tuple(map(type, self._values))  # the launch cache looks calls up by it

    @property
    def expression(self) -> str:
        """The expression, as it is compiled."""
        return self._expression

    @property
    def host(self) -> Callable[..., Any] | None:
        """The function for NumPy arrays, or None."""
        return self._host

    @property
    def operands(self) -> Mapping[str, Any]:
        """The operands by name."""
        return MappingProxyType(self._operands)

    def __repr__(self) -> str:
        return f"Map({', '.join([repr(self.expression), *self.operands])})"


@lru_cache(1024)  # a program may make a Map for each call
def _check_name(name: str) -> None:
    if not re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name):
        raise ArgumentError(f"the operand {name!r} has a name that C++ does not know. Use a-z, A-Z, 0-9 and _")
    if name in _RESERVED or _RESERVED_FORMS.match(name):
        why = "v is the reduced element" if name == "v" else f"{name} is a word of C++, or of the kernels"
        raise ArgumentError(f"an operand cannot have the name {name}, because {why}. Use another name")


def check_call(array: Any, out: Any, then: Any) -> None:
    """Check that a call can have an expression. :raises IpcReduceError: if not."""
    if not issubclass(type(then), Map):
        raise ArgumentError(f"then is {shown(then)}, which is no ipcreduce.Map. Pass then=ipcreduce.Map(...)")
    if issubclass(type(array), (list, tuple)):
        raise UnsupportedError("a list of arrays cannot have then=. Make a call for each array")
    for one in (array, out, *then.operands.values()):
        if torch_runtime.is_tensor(one) and one.requires_grad and torch_runtime.torch.is_grad_enabled():
            raise UnsupportedError(
                "a call with then= has no gradient, and a tensor requires grad. Pass tensor.detach(), or call within "
                "torch.no_grad()"
            )


def _check_dtype(kind: str) -> None:
    """:raises ArgumentError: for an array that is reduced as one of another dtype."""
    if kind in VIEWS:
        numbers, ops = VIEWS[kind][0], ', with op "max" for "any" and "min" for "all"' * (kind == "bool")
        raise ArgumentError(
            f'then= takes arrays of numbers, and the array\'s dtype is {kind}. Pass array.view("{numbers}"), or '
            f"tensor.view(torch.{numbers}){ops}"
        )


def _extent(name: str, shape: tuple[int, ...], of: tuple[int, ...]) -> str:
    """The kind of an operand: "full" (shape ``of``) or "row" (last axis of it). :raises ArgumentError: if neither."""
    if shape == of:
        return "full"
    if of and shape == of[-1:]:
        return "row"
    choice = f"{of} or {of[-1:]}" if len(of) > 1 else f"{of}"
    raise ArgumentError(f"the operand {name} has shape {shape}, and array has {of}. Pass a number, or shape {choice}")


def _element(name: str, dtype: np.dtype[Any]) -> str:
    found = DTYPES.get(dtype)
    if found is None:
        raise ArgumentError(f"the operand {name} has dtype {dtype}. The dtypes are {', '.join(DTYPES.values())}")
    return found


def _number(name: str, value: Any, kind: str) -> np.ndarray[Any, Any]:
    """A number as the kernels take it, for an array of dtype ``kind``."""
    if isinstance(value, np.generic):
        dtype = np.asarray(value).dtype
        of = "uint8" if dtype.kind == "b" else _element(name, dtype)
        of = "float32" if of in _HALVES else of
    elif kind.startswith("float") or kind == "bfloat16":
        of = "float64" if kind == "float64" else "float32"
    else:
        of = "float64" if isinstance(value, float) else "int64"
    try:
        with reading(f"the operand {name}", value, OverflowError), np.errstate(all="ignore"):
            return np.asarray(value).astype(of) if isinstance(value, np.generic) else np.array(value, of)
    except OverflowError:
        raise ArgumentError(f"the operand {name} does not fit into {of}. Pass a smaller number") from None


def pack_of(kind: type, dtype: str) -> Callable[[Any], bytes]:
    """A function with the bytes of :func:`_number` for numbers of type ``kind`` that kernels take as ``dtype``.

    It is for repeated calls, and takes a tenth of the time. It raises OverflowError or struct.error for numbers that
    :func:`_number` may still take.
    """
    if not issubclass(kind, np.generic):
        return _PACK[dtype]
    return _packed_half if np.dtype(kind) in (np.float16, BFLOAT16) else np.generic.tobytes


def _packed_half(value: np.generic) -> bytes:
    return value.astype(np.float32).tobytes()


class MapCall(NamedTuple):
    """The arguments of ``allreduce(array, op, out=out, then=then)``, as they are given."""

    array: Any
    op: Any
    out: Any
    then: Any
    sms: int | None = None

    @property
    def first(self) -> Any:
        """The array whose library decides the current stream."""
        return self.array

    def on_device(self) -> bool:
        """True if the array lies on a GPU. :raises IpcReduceError: if a call cannot have such arguments."""
        check_call(self.array, self.out, self.then)
        return views.is_device(self.array)

    def check_streams(self) -> None:
        """Do nothing: the call runs on the current stream of the array's library."""


class DeviceMap:
    """The device arrays of an all-reduce with an expression, checked. It is a :class:`DeviceCall`."""

    def __init__(self, given: MapCall, site: Site) -> None:
        self._used, self._op, then = DeviceOperands.of(given.array, given.out, site), given.op, given.then
        self._sms = given.sms
        used, self.written, self.result = self._used, (self._used,), self._used.result
        self.given: Sequence[Any] = [given.array, given.out, *then.operands.values()]
        kind = DTYPES.get(used.source.dtype)
        _check_dtype(used.source.dtype.name if kind is None else kind)
        assert kind is not None
        operands: list[Operand] = []
        self.held: list[Any] = [*used.held]
        self._words: list[int] = []  # by operand, the address of its array, or the bits of its number
        self._arrays: list[Any] = []  # the operands that kernels read: contiguous, and on the call's GPU
        for name, value in then.operands.items():
            if issubclass(type(value), NUMBERS):
                number = _number(name, value, kind)
                operands.append(Operand(name, number.dtype.name, "scalar"))
                self._words.append(int.from_bytes(number.tobytes(), "little"))
                continue
            whole = view = _device_view(name, value, used, given.out is not None)
            operands.append(Operand(name, _element(name, view.dtype), _extent(name, view.shape, used.source.shape)))
            if not views.is_contiguous(view):
                view = site.copied(view)
            if views.pointer(view) % view.itemsize:
                raise ArgumentError(
                    f"the address of the operand {name} is no multiple of its itemsize. Copy it to a new array first"
                )
            self._arrays.append(view)
            self._words.append(views.pointer(view))
            self.held += whole, view
        self._expression = Expression(then.expression, tuple(operands))

    @property
    def request(self) -> Request:
        """The call as the ranks compare it. :raises ArgumentError: if dtype or op is wrong."""
        source = self._used.source
        op = op_name(self._op, source.dtype)
        return Request(op, (Member(source.shape, kind_name(source.dtype, op)),), self._expression, sms=self._sms)

    def place(self, prepared: PreparedCall) -> MapAddresses:
        """Make the copies that kernels need. Returns the addresses of arrays, and the numbers."""
        used, site, wire_dtype = self._used, self._used.site, prepared.wire_dtypes[0]
        source, reduced, between = used.source_address, used.destination_address, used.destination_address
        with site.allocating():
            if prepared.hands_on and any(views.overlap(one, used.destination) for one in self._arrays):
                # The all-reduce must not overwrite operands that are read after it: its result goes into a new array.
                made = views.empty(used.source.shape, used.source.dtype, site.stream, site.device)
                reduced = between = self._hold(made)
            if wire_dtype is not None:
                source = reduced = self._hold(site.copied(used.source, wire_dtype))
        return MapAddresses(source, used.destination_address, tuple(self._words), reduced, between)

    def _hold(self, array: Any) -> int:
        self.held.append(array)
        return views.pointer(array)


def _device_view(name: str, value: Any, used: DeviceOperands, written: bool) -> Any:
    """The CuPy array over an operand, with shape and dtype as given."""
    what = f"the operand {name}"
    if not views.is_device(value, what):
        raise ArgumentError(f"{what} lies on the host, and array on the GPU. Pass a number, or an array on that GPU")
    view: Any = views.view(value, used.site.stream, not used.site.recorded)
    check_device(used.site.device, view, what)
    same = view.shape == used.target.shape and views.same_elements(view, used.target)
    if written and not same and views.share_memory(view, used.target):
        raise ArgumentError(
            f"{what} shares memory with out, which the call would write before it has read all of that. Pass a copy, "
            "or out itself"
        )
    return view


class HostMap:
    """The NumPy arrays of an all-reduce with an expression, checked. It is a :class:`HostCall`."""

    def __init__(self, given: MapCall) -> None:
        self._used = used = HostOperands(given.array, given.op, given.out)
        then = given.then
        _check_dtype(used.kind)
        if then.host is None:
            raise UnsupportedError(
                "the expression of then= is compiled for GPUs, and array lies on the host. Pass the same as a Python "
                "function, Map(..., host=lambda v, a: v + a), or pass an array on a GPU"
            )
        self._host = then.host
        self._values: dict[str, Any] = {}
        operands = []
        for name, value in then.operands.items():
            if issubclass(type(value), NUMBERS):
                operands.append(Operand(name, _number(name, value, used.kind).dtype.name, "scalar"))
                self._values[name] = value
                continue
            if views.is_device(value, f"the operand {name}"):
                raise ArgumentError(f"the operand {name} lies on a GPU, and array on the host. Pass a NumPy array")
            array = as_numpy(value, f"the operand {name}")
            operands.append(Operand(name, _element(name, array.dtype), _extent(name, array.shape, used.shape)))
            self._values[name] = _widened(array)
        expression = Expression(then.expression, tuple(operands))
        self.request = Request(used.op, (Member(used.shape, used.kind),), expression, on_host=True, sms=given.sms)

    def parts(self) -> list[Part]:
        """The one all-reduce to make. Its result goes into a new array, to which the program's function is applied."""
        return [(self._used.source, self._used.op, None)]

    def result(self, reduced: Sequence[Array]) -> Any:
        """The value that the call returns. :raises ArgumentError: if the program's function returns another shape."""
        used, value = self._used, self._apply(reduced[0])
        if used.target is not None:
            used.target[...] = value
        return used.result(value)

    @in_standard_state  # the function of the program, too
    def _apply(self, reduced: Array) -> Array:
        value = self._host(_widened(reduced), **self._values)
        try:
            value = as_numpy(value, "the result of host=") if isinstance(value, np.ndarray) else np.asarray(value)
            with np.errstate(all="ignore"):
                same = value.dtype == reduced.dtype
                found = np.array(value, reduced.dtype, order="C") if same else value.astype(reduced.dtype)
        except ArgumentError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"host of then= has returned no array of numbers: {text_of(error)}. {_WANTED}"
            ) from error
        if value.shape != reduced.shape:
            raise ArgumentError(f"host of then= has returned shape {value.shape} for shape {reduced.shape}. {_WANTED}")
        return found


def _widened(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float32) if array.dtype in (np.float16, BFLOAT16) else array
