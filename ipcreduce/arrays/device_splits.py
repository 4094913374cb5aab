"""``allgather``, ``reduce_scatter`` and ``broadcast`` on arrays on a GPU, checked and brought into kernels' form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ..calls.addresses import addresses_of
from ..calls.request import Member, Moved, Request, unit_of
from ..cuda import torch_runtime
from ..dtypes import kind_name, op_name
from ..errors import ArgumentError, naming_member
from . import views
from .lists import check_apart
from .operands import PreparedCall, Site, Written, check_device, check_own_elements, check_writable, new_result
from .splits import BROADCAST, GATHER, SplitCall, Splitting, check_output, readable


class DeviceSplit:
    """The device arrays of an all-gather, reduce-scatter or broadcast, checked. It is a :class:`DeviceCall`."""

    def __init__(self, given: SplitCall, site: Site) -> None:
        self._call, self._site = given, site
        splitting = given.checked()
        self._split = splitting.split
        self._arrays: list[_Array] = []
        for index, (array, out) in enumerate(zip(given.arrays, given.outputs, strict=True)):
            with naming_member(index if given.is_list else None):
                self._arrays.append(_Array(given, splitting, array, out, site))
        if given.is_list and given.out is not None:
            check_apart([(one.source, one.target) for one in self._arrays])
        if not given.is_list:
            self._split = self._arrays[0].splitting.split
        self.given: Sequence[Any] = [*given.arrays, *(out for out in given.outputs if out is not None)]

    @property
    def request(self) -> Request:
        """The call as the ranks compare it. :raises ArgumentError: if dtype or op is wrong."""
        given, members = self._call, []
        op = op_name(given.op) if given.reduces else ""
        for index, one in enumerate(self._arrays):
            with naming_member(index if given.is_list else None):
                members.append(one.member)
                op = one.op
        return Request(op, tuple(members), is_list=given.is_list, sms=given.sms, split=self._split)

    def place(self, prepared: PreparedCall) -> tuple[Any, Any]:
        """Make the copies that kernels need. Returns the addresses of sources and destinations."""
        for one, wire_dtype in zip(self._arrays, prepared.wire_dtypes, strict=True):
            one.settle(wire_dtype, prepared.packed)
        if not self._call.is_list:
            return self._arrays[0].source_address, self._arrays[0].destination_address
        sources = addresses_of([one.source_address for one in self._arrays])
        return sources, addresses_of([one.destination_address for one in self._arrays])

    @property
    def held(self) -> Iterator[Any]:
        """The arrays that a recording has to keep, copies among them."""
        for one in self._arrays:
            yield from (one.source, one.destination, one.target)

    @property
    def written(self) -> Sequence[Written]:
        """The arrays that kernels write, each with the array into which it is copied then."""
        return [*chain.from_iterable(one.copies() for one in self._arrays)]

    @property
    def result(self) -> Any:
        """The array, or the list of arrays, that the call returns."""
        if not self._call.is_list:
            return self._arrays[0].result
        return [one.result for one in self._arrays] if self._call.out is None else self._call.out


class _Array:
    """One array of a call, and its output, as :class:`DeviceOperands` has them for an all-reduce.

    :ivar whole: the shape of the whole array. :ivar result: what the call returns for it.
    """

    def __init__(self, call: SplitCall, splitting: Splitting, array: Any, out: Any, site: Site) -> None:
        self._call, self._site = call, site
        moved, self._dtype = readable(call, array)
        source = views.view(moved, site.stream, not site.recorded)
        check_device(site.device, source, "array")
        self.splitting, self.whole, part = splitting.of(source)
        if not source.ndim and call.collective == GATHER:
            source = source.reshape(part)
        if call.collective == BROADCAST:
            self._take_in_place(call, array, source)
        elif out is None:
            form = self.whole if call.collective == GATHER else part
            with site.allocating():
                self.target, result = new_result(moved, form, source.dtype, site)
            self.result = torch_runtime.float8_of_bytes(result, array)
        else:
            self.target, self.result = self._output(out, source), out
        self.source, self.destination = source, self.target
        self._packed = False

    def _take_in_place(self, call: SplitCall, array: Any, source: Any) -> None:
        self.target, self.result = source, array
        if call.rank != self.splitting.split.root:
            check_writable(array, array, "array")
            check_own_elements(source, "array")

    def _output(self, out: Any, source: Any) -> Any:
        site, (given, _) = self._site, readable(self._call, out)
        if not views.is_device(given, "out"):
            raise ArgumentError(
                f"array lies on the GPU, but out is a {type(out).__qualname__}. Pass an array on the same GPU as out"
            )
        target = views.view(given, site.stream, not site.recorded)
        check_device(site.device, target, "out")
        check_output(self._call, self.splitting, self.whole, source, target)
        check_writable(out, out)
        return target

    @property
    def op(self) -> str:
        """One of ``dtypes.OPS``; "" where nothing is reduced."""
        return op_name(self._call.op, self.source.dtype) if self._call.reduces else ""

    @property
    def member(self) -> Member | Moved:
        """The array as the ranks compare it. :raises ArgumentError: if it cannot be reduced so."""
        if self._call.reduces:
            return Member(self.whole, kind_name(self.source.dtype, self.op))
        return Moved(self.whole, self._dtype or str(self.source.dtype), self.source.itemsize)

    def settle(self, wire_dtype: Any, packed: bool) -> None:
        """Make the copies that kernels need: contiguous ones, of dtype ``wire_dtype`` if one is given.

        :param packed: the parts lie one after the other, in place of their rows.
        """
        site, gathers = self._site, self._call.collective == GATHER
        self._packed = packed and self.splitting.split.rows(self.whole, 1, self.splitting.n).rows > 1
        with site.allocating():
            if self._packed and not gathers:
                self.source = self._pack(self.source, wire_dtype)
            elif wire_dtype is not None or not views.is_contiguous(self.source):
                self.source = views.contiguous_copy(self.source, site.stream, wire_dtype)
            if self._call.collective == BROADCAST:
                self.destination = self.source
            elif wire_dtype is not None or not views.is_contiguous(self.target) or (self._packed and gathers):
                dtype = self.target.dtype if wire_dtype is None else wire_dtype
                self.destination = views.empty(self.target.shape, dtype, site.stream, site.device)
        self._check_alignment()

    def _pack(self, source: Any, dtype: Any) -> Any:
        site, dtype = self._site, dtype or source.dtype
        packed = views.empty(source.shape, dtype, site.stream, site.device)
        for part, place in self._parts(packed, source):
            views.copy_into(part, place, site.stream)
        return packed

    def _parts(self, packed: Any, whole: Any) -> Iterator[tuple[Any, Any]]:
        """The part of each rank in an array where they lie one after the other, and in the whole array."""
        flat, begin = packed.reshape(-1), 0
        for rank in range(self.splitting.n):
            place = whole[self.splitting.place(self.whole, rank)]
            yield flat[begin : begin + place.size].reshape(place.shape), place
            begin += place.size

    def _check_alignment(self) -> None:
        unit = unit_of(self.source.itemsize)
        for address in (self.source_address, self.destination_address):
            if address % unit:
                raise ArgumentError(
                    f"address {address:#x} of array or out is no multiple of {unit}. Copy it to a new array first"
                )

    @property
    def source_address(self) -> int:
        """The address from which kernels read."""
        return views.pointer(self.source)

    @property
    def destination_address(self) -> int:
        """The address to which kernels write."""
        return views.pointer(self.destination)

    def copies(self) -> Iterator[Written]:
        """The copies from where kernels write to where the result belongs. They run after the kernels."""
        if self._packed and self._call.collective == GATHER:
            yield from (Written(place, part) for part, place in self._parts(self.destination, self.target))
        elif not (self._call.collective == BROADCAST and self._call.rank == self.splitting.split.root):
            yield Written(self.target, self.destination)
