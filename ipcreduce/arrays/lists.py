"""The arguments of a call on a list of arrays: the members, and their outputs, checked together.

The error messages here name neither rank nor call: the communicator adds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from .. import advice
from ..calls.addresses import addresses_of
from ..calls.request import Member, Request
from ..cuda import cupy_runtime, torch_runtime
from ..dtypes import list_kinds, op_name
from ..errors import ArgumentError, naming_member, reading
from ..texts import kind_of
from . import views
from .host_operands import Array, HostOperands, Part
from .operands import DeviceOperands, PreparedCall, Site

Members = Sequence[Any]


def is_list(array: Any) -> bool:
    """True for a list or a tuple, which a call takes as a list of arrays. No method of the object runs."""
    return issubclass(type(array), (list, tuple))


def outputs(arrays: Members, out: Any) -> Members:
    """The output of each member: None for a new array. :raises ArgumentError: if ``out`` is no list of that length."""
    if out is None:
        return [None] * len(arrays)
    if not is_list(out):
        raise ArgumentError(
            f"array is a list of {len(arrays)} arrays, but out is {kind_of(out)}. Pass a list of "
            f"{len(arrays)} arrays as out, or leave out= away for new ones"
        )
    with reading("out", out):
        given = [*out]
    if len(given) != len(arrays):
        raise ArgumentError(
            f"array is a list of {len(arrays)} arrays, but out is a list of {len(given)}. Pass an output for each array"
        )
    for index, output in enumerate(given):
        if output is None:
            raise ArgumentError(
                f"member {index} of the list: out is None. Pass an output for each array, or no out= for new ones"
            )
    return out


def on_device(arrays: Members) -> bool | None:
    """True if all members lie on a GPU, False if all lie on the host, None for an empty list.

    :raises ArgumentError: if a member is not an array, or if some lie on a GPU and some on the host.
    """
    places = []
    with reading("array", arrays):
        members = [*arrays]
    for index, array in enumerate(members):
        with naming_member(index):
            _check_is_array(array, arrays)
            places.append(views.is_device(array))
        if places[index] != places[0]:
            one, other = ("on the GPU", "on the host") if places[0] else ("on the host", "on the GPU")
            raise ArgumentError(
                f"member 0 of the list lies {one}, but member {index} {other}. Make a call for those on the GPU, and "
                "one for those on the host"
            )
    return places[0] if places else None


def _check_is_array(array: Any, arrays: Members) -> None:
    if array is None:
        raise ArgumentError("it is None, as the gradient of an unused parameter is. Leave it out on every rank")
    if issubclass(type(array), (*views.NUMBERS, list, tuple, str)):
        advised = advice.for_member(array, arrays)
        raise ArgumentError(f"it is {kind_of(array)}, and no array. {advised}")


def check_streams(arrays: Members, which: str = "the list has") -> None:
    """Check that the arrays' libraries have one current stream, which is the call's.

    :param which: the arrays, in a message.
    :raises ArgumentError: if they have not.
    """
    tensors = [array for array in arrays if not views.is_cupy(array) and torch_runtime.is_tensor(array)]
    if tensors and len(tensors) < len(arrays):
        of_torch = torch_runtime.stream_handle(tensors[0].get_device())
        if of_torch != cupy_runtime.stream_of()[0]:
            raise ArgumentError(
                f"{which} tensors of PyTorch and other arrays, and the two libraries have different current "
                "streams. Say by stream= on which one the call is to run, and let that one wait for the other"
            )


class ListCall(NamedTuple):
    """The arguments of ``allreduce(arrays, op, out=out)``, as the program gave them."""

    arrays: Members
    op: Any
    out: Any
    sms: int | None = None

    @property
    def first(self) -> Any:
        """The array whose library decides the current stream; None for an empty list."""
        return next(iter(self.arrays), None)

    def on_device(self) -> bool | None:
        """True if all members lie on a GPU, False if all lie on the host, None for an empty list."""
        return on_device(self.arrays)

    def check_streams(self) -> None:
        """Check that the members' libraries have one current stream. :raises ArgumentError: if not."""
        check_streams(self.arrays)


class DeviceList:
    """The device arrays of an all-reduce of a list, and their outputs, checked. It is a :class:`DeviceCall`."""

    def __init__(self, given: ListCall, site: Site) -> None:
        arrays, self._op, self._out, self._sms = given
        self.written: list[DeviceOperands] = []
        for index, (array, output) in enumerate(zip(arrays, outputs(arrays, given.out), strict=True)):
            with naming_member(index):
                self.written.append(DeviceOperands.of(array, output, site))
        if given.out is not None:
            check_apart([(used.given, used.target) for used in self.written])
        self.given: Sequence[Any] = [*arrays, *(given.out or ())]

    @property
    def request(self) -> Request:
        """The call as the ranks compare it. :raises ArgumentError: if a dtype or op is wrong."""
        sources = [used.source for used in self.written]
        if not sources or type(self._op) is not str:
            op_name(self._op)  # a wrong op is no fault of any member
        kinds = [kind for kind, _ in list_kinds([source.dtype for source in sources], self._op)]
        members = tuple(Member(source.shape, kind) for source, kind in zip(sources, kinds, strict=True))
        return Request(op_name(self._op), members, is_list=True, sms=self._sms)

    def place(self, prepared: PreparedCall) -> tuple[Any, Any]:
        """Make the copies that kernels need. Returns the addresses of all sources and of all destinations."""
        for used, wire_dtype in zip(self.written, prepared.wire_dtypes, strict=True):
            used.convert(wire_dtype)
        sources = addresses_of([used.source_address for used in self.written])
        return sources, addresses_of([used.destination_address for used in self.written])

    @property
    def held(self) -> Iterable[Any]:
        """The arrays that a recording has to keep."""
        return chain.from_iterable(used.held for used in self.written)

    @property
    def result(self) -> Any:
        """The list that the call returns."""
        return [used.result for used in self.written] if self._out is None else self._out


def check_apart(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Check the outputs of a list of device or host arrays.

    :param pairs: the source and the output of each member.
    :raises ArgumentError: if two outputs share memory, or an output and another member's source.
    """
    places = [_Place.of(target, index, True) for index, (_, target) in enumerate(pairs)]
    places += [_Place.of(source, index, False) for index, (source, target) in enumerate(pairs) if source is not target]
    written = (cluster for cluster in _clusters(places) if any(place.written for place in cluster))
    for one, other in chain.from_iterable(map(_close_pairs, written)):
        if one.member == other.member or not (one.written or other.written):
            continue
        if views.share_memory(one.array, other.array):
            outputs_first = sorted([(not one.written, one.member), (not other.written, other.member)])
            raise ArgumentError(_sharing(*outputs_first))


class _Place(NamedTuple):
    """The place of an array in memory: its first address, and the one past its last.

    :ivar step: the distance between rows of the array, if other arrays may lie in the gaps between them; else 0.
    :ivar width: the bytes of such a row, without the gap.
    """

    first: int
    past: int
    step: int
    width: int
    member: int
    written: bool
    array: Any

    @classmethod
    def of(cls, array: Any, member: int, written: bool) -> _Place:
        first, past = views.extent(array)
        strides = array.strides or (0,) * array.ndim
        step, steps = max(
            (abs(stride), size - 1) for stride, size in zip((0, *strides), (1, *array.shape), strict=True)
        )
        width = past - first - steps * step
        return cls(first, past, step if 0 < width < step else 0, width, member, written, array)

    @property
    def phases(self) -> Iterator[tuple[int, int, _Place]]:
        """The bytes of a step that the rows take, as one or two ranges: a row may wrap around the step's end."""
        begin = self.first % self.step
        yield begin, min(begin + self.width, self.step), self
        if begin + self.width > self.step:
            yield 0, begin + self.width - self.step, self


def _clusters(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Put the places that are not empty into groups. Places of two different groups share no address."""
    cluster: list[_Place] = []
    end = 0
    for place in sorted(places, key=attrgetter("first", "past")):
        if cluster and place.first >= end:
            yield cluster
            cluster = []
        if place.first < place.past:
            cluster.append(place)
            end = max(end, place.past)
    yield cluster


def _close_pairs(cluster: list[_Place]) -> Iterator[tuple[_Place, _Place]]:
    """The pairs that may have a byte in common. Two columns of a matrix have none, though their ranges overlap."""
    by_step: dict[int, list[_Place]] = {}
    for place in cluster:
        by_step.setdefault(place.step, []).append(place)
    for step, group in by_step.items():
        yield from _overlapping(chain.from_iterable(one.phases for one in group) if step else map(_span, group))
    if len(by_step) > 1:
        yield from (pair for pair in _overlapping(map(_span, cluster)) if pair[0].step != pair[1].step)


def _span(place: _Place) -> tuple[int, int, _Place]:
    return place.first, place.past, place


def _overlapping(spans: Iterable[tuple[int, int, _Place]]) -> Iterator[tuple[_Place, _Place]]:
    open_ones: list[tuple[int, int, _Place]] = []  # spans that end after the present one begins
    for span in sorted(spans, key=itemgetter(0, 1)):
        open_ones = [other for other in open_ones if other[1] > span[0]]
        yield from ((other[2], span[2]) for other in open_ones)
        open_ones.append(span)


def _sharing(output: tuple[bool, int], other: tuple[bool, int]) -> str:
    what = "array" if other[0] else "output"
    return (
        f"the output of member {output[1]} of the list shares memory with the {what} of member {other[1]}. Pass "
        "outputs that share no memory with anything but their own array"
    )


class HostList:
    """The host arrays of a list. Those of one dtype are copied one after the other, and reduced as one array."""

    def __init__(self, given: ListCall) -> None:
        arrays, op, self._out, sms = given
        self._members: list[HostOperands] = []
        for index, (array, output) in enumerate(zip(arrays, outputs(arrays, given.out), strict=True)):
            with naming_member(index):
                self._members.append(HostOperands(array, op, output))
        if given.out is not None:
            check_apart([(used.source, used.target) for used in self._members])
        members = tuple(Member(used.shape, used.kind) for used in self._members)
        self.request = Request(op_name(op), members, is_list=True, on_host=True, sms=sms)
        self._groups: dict[tuple[Any, str], list[HostOperands]] = {}  # by what is reduced together
        for used in self._members:
            self._groups.setdefault((used.source.dtype, used.op), []).append(used)

    def parts(self) -> Iterator[Part]:
        """The all-reduces to make: one for each dtype and op. An empty list has one of no elements."""
        for (_, op), members in self._groups.items():
            yield np.concatenate([used.source.reshape(-1) for used in members]), op, None
        if not self._groups:  # the call waits for the other ranks, too
            yield np.empty(0, np.uint8), "sum", None

    def result(self, reduced: Sequence[Array]) -> Any:
        """The list that the call returns, made of the reduced arrays."""
        results: dict[HostOperands, Any] = {}
        for flat, members in zip(reduced, self._groups.values(), strict=False):
            for used, end in zip(members, accumulate(used.source.size for used in members), strict=True):
                value = flat[end - used.source.size : end].reshape(used.source.shape)
                if used.target is None:
                    results[used] = used.result(value.copy())
                else:
                    used.target[...] = value
        return [results[used] for used in self._members] if self._out is None else self._out
