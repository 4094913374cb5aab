"""``allgather``, ``reduce_scatter`` and ``broadcast`` on arrays on a GPU, checked and brought into kernels' form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ..calls.addresses import addresses_of
from ..calls.request import Request, Split, unit_of
from ..cuda import torch_runtime
from ..dtypes import op_name
from ..errors import ArgumentError, naming_member
from . import views
from .operands import PreparedCall, Site, Written, check_device, check_writable, new_result, view_of_out
from .splits import SplitCall, Splitting, readable


class DeviceSplit:
    """The device arrays of an all-gather, reduce-scatter or broadcast, checked. It is a :class:`DeviceCall`."""

    def __init__(self, given: SplitCall, site: Site) -> None:
        self._call = given
        self._arrays, self._split = given.checked(partial(_Array, site))
        self.given: Sequence[Any] = [*given.arrays, *(out for out in given.outputs if out is not None)]

    @property
    def request(self) -> Request:
        """The call as the ranks compare it. :raises ArgumentError: if dtype or op is wrong."""
        given, members = self._call, []
        op = op_name(given.op) if given.collective.reduces else ""
        for index, one in enumerate(self._arrays):
            with naming_member(index if given.is_list else None):
                op, member = one.splitting.compared()
                members.append(member)
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
            yield from (one.splitting.source, one.source, one.destination, one.target)

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

    :ivar result: what the call returns for it.
    """

    def __init__(self, site: Site, call: SplitCall, split: Split, array: Any, out: Any) -> None:
        self._collective, self._site, self._packed = call.collective, site, False
        moved, dtype = readable(call, array)
        view = views.view(moved, site.stream, not site.recorded)
        check_device(site.device, view, "array")
        self.splitting = Splitting.of(call, split, view, dtype)
        source = self.source = self.splitting.source
        if call.collective.rooted:
            self.target, self.result = source, array
            self.splitting.check_in_place(array, array)
        elif out is None:
            with site.allocating():
                self.target, result = new_result(moved, self.splitting.result, source.dtype, site)
            self.result = torch_runtime.float8_of_bytes(result, array)
        else:
            self.target, self.result = self._output(out), out
        self.destination = self.target

    def _output(self, out: Any) -> Any:
        target = view_of_out(readable(self.splitting.call, out)[0], self._site)
        self.splitting.check_output(target)
        check_writable(out, out)
        return target

    def settle(self, wire_dtype: Any, packed: bool) -> None:
        """Make the copies that kernels need: contiguous ones, of dtype ``wire_dtype`` if one is given.

        :param packed: the parts lie one after the other, in place of their rows.
        """
        site, splitting, gathers = self._site, self.splitting, self._collective.gathers
        self._packed = packed and splitting.split.rows(splitting.whole, 1, splitting.call.n).rows > 1
        with site.allocating():
            if self._packed and not gathers:
                site.follow()
                joined = views.empty(self.source.shape, wire_dtype or self.source.dtype, site.stream, site.device)
                for part, place in self._parts(joined, self.source):
                    views.copy_into(part, place, site.stream)
                self.source = joined
            elif wire_dtype is not None or not views.is_contiguous(self.source):
                self.source = site.copied(self.source, wire_dtype)
            if self._collective.rooted:
                self.destination = self.source
            elif wire_dtype is not None or not views.is_contiguous(self.target) or (self._packed and gathers):
                dtype = self.target.dtype if wire_dtype is None else wire_dtype
                self.destination = views.empty(self.target.shape, dtype, site.stream, site.device)
        self._check_alignment()

    def _parts(self, packed: Any, whole: Any) -> Iterator[tuple[Any, Any]]:
        """The part of each rank in an array where they lie one after the other, and in the whole array."""
        flat, begin = packed.reshape(-1), 0
        for place in self.splitting.places:
            part = whole[place]
            yield flat[begin : begin + part.size].reshape(part.shape), part
            begin += part.size

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
        if self._packed and self._collective.gathers:
            yield from (Written(place, part) for part, place in self._parts(self.destination, self.target))
        elif not (self._collective.rooted and self.splitting.call.rank == self.splitting.split.root):
            yield Written(self.target, self.destination)
