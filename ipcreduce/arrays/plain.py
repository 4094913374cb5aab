"""The arguments of ``allreduce(array, op, out=out)`` on one array, and the arrays made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..calls import request
from ..calls.request import Request
from ..dtypes import kind_name, op_name
from . import views
from .host_operands import Array, HostOperands, Part
from .operands import DeviceOperands, PreparedCall, Site


class PlainCall(NamedTuple):
    """The arguments, as the program gave them."""

    array: Any
    op: Any
    out: Any
    sms: int | None = None

    @property
    def first(self) -> Any:
        """The array whose library decides the current stream."""
        return self.array

    def on_device(self) -> bool:
        """True if it lies on a GPU. :raises ArgumentError: if it is not an array."""
        return views.is_device(self.array)

    def check_streams(self) -> None:
        """Do nothing: one array has one current stream."""


class DevicePlain:
    """One device array of an all-reduce, and its output, checked. It is a :class:`DeviceCall`."""

    def __init__(self, given: PlainCall, site: Site) -> None:
        self.given: Sequence[Any] = given.array, given.out
        self._used, self._op, self._sms = DeviceOperands.of(given.array, given.out, site), given.op, given.sms
        self.written, self.result = (self._used,), self._used.result

    @property
    def request(self) -> Request:
        """The call as the ranks compare it. :raises ArgumentError: if dtype or op is wrong."""
        source = self._used.source
        op = op_name(self._op, source.dtype)
        return request.plain(source.shape, kind_name(source.dtype, op), op, sms=self._sms)

    def place(self, prepared: PreparedCall) -> tuple[int, int]:
        """Make the copy that kernels need, if one is needed. Returns the addresses (source, target)."""
        used = self._used
        used.convert(prepared.wire_dtypes[0])
        return used.source_address, used.destination_address

    @property
    def held(self) -> tuple[Any, ...]:
        """The arrays that a recording has to keep."""
        return self._used.held


class HostPlain:
    """One host array of an all-reduce, and its output, checked. It is a :class:`HostCall`."""

    def __init__(self, given: PlainCall) -> None:
        self._used = used = HostOperands(given.array, given.op, given.out)
        self.request = request.plain(used.shape, used.kind, used.op, on_host=True, sms=given.sms)

    def parts(self) -> list[Part]:
        """The one all-reduce to make: array, op, and the array for the result."""
        return [(self._used.source, self._used.op, self._used.target)]

    def result(self, reduced: Sequence[Array]) -> Any:
        """The value that the call returns, made of the reduced array."""
        return self._used.result(reduced[0])
