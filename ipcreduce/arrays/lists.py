"""The arguments of a call on a list of arrays: the members, and their outputs, checked together.

The error messages here name neither rank nor call: the communicator adds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import advice
from ..cuda import cupy_runtime, torch_runtime
from ..errors import ArgumentError, naming_member
from ..types import Stream
from . import views
from .host_operands import HostOperands
from .operands import Allocating, DeviceOperands

Members = Sequence[Any]
_Reach = tuple[tuple[int, int], int, bool]  # first and past address, member, and whether it is an output


def is_list(array: Any) -> bool:
    """True for a list or a tuple, which a call takes as a list of arrays."""
    return isinstance(array, (list, tuple))


def outputs(arrays: Members, out: Any) -> Members:
    """The output of each member: None for a new array. :raises ArgumentError: if ``out`` is no list of that length."""
    if out is None:
        return [None] * len(arrays)
    if not is_list(out):
        raise ArgumentError(
            f"array is a list of {len(arrays)} arrays, but out is a {type(out).__qualname__}. Pass a list of "
            f"{len(arrays)} arrays as out, or leave out= away for new ones"
        )
    if len(out) != len(arrays):
        raise ArgumentError(
            f"array is a list of {len(arrays)} arrays, but out is a list of {len(out)}. Pass an output for each array"
        )
    for index, output in enumerate(out):
        if output is None:
            raise ArgumentError(
                f"member {index} of the list: out is None. Pass an output for each array, or no out= for new ones"
            )
    return out


def on_device(arrays: Members) -> bool | None:
    """True if all members lie on a GPU, False if all lie on the host, None for an empty list.

    :raises ArgumentError: if a member is no array, or if some lie on a GPU and some on the host.
    """
    places = []
    for index, array in enumerate(arrays):
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
    if isinstance(array, (*views.NUMBERS, list, tuple, str)):
        advised = advice.for_member(array, arrays)
        raise ArgumentError(f"it is a {type(array).__qualname__}, and no array. {advised}")


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


class DeviceLists:
    """The arrays of a device all-reduce of a list: a :class:`DeviceOperands` for each member."""

    def __init__(
        self, arrays: Members, out: Any, stream: Stream, device: int, *, ordered: bool, allocating: Allocating
    ) -> None:  # fmt: skip
        """Take the arguments of ``allreduce(arrays, out=out)``: see :meth:`DeviceOperands.of`.

        :raises ArgumentError: if an argument is wrong. Nothing is written then.
        """
        self._out = out
        self.members: list[DeviceOperands] = []
        for index, (array, output) in enumerate(zip(arrays, outputs(arrays, out), strict=True)):
            with naming_member(index):
                self.members.append(
                    DeviceOperands.of(array, output, stream, device, ordered=ordered, allocating=allocating)
                )
        if out is not None:
            check_apart([(used.given, used.target) for used in self.members])

    @property
    def sources(self) -> list[Any]:
        """The arrays that kernels read."""
        return [used.source for used in self.members]

    @property
    def result(self) -> Any:
        """The result of the call: the caller's ``out``, or a list of new arrays."""
        return [used.result for used in self.members] if self._out is None else self._out


def check_apart(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Check the outputs of a list of device or host arrays.

    :param pairs: the source and the output of each member.
    :raises ArgumentError: if two outputs share memory, or an output and another member's source.
    """
    reach = [(views.extent(target), index, True) for index, (_, target) in enumerate(pairs)]
    reach += [
        (views.extent(source), index, False) for index, (source, target) in enumerate(pairs) if source is not target
    ]
    open_ones: list[_Reach] = []  # that may reach beyond the beginning of the one at hand
    for (first, past), index, written in sorted(reach):
        if first == past:
            continue
        open_ones = [other for other in open_ones if other[0][1] > first]
        for _, other, other_written in open_ones:
            if other == index or not (written or other_written):
                continue
            if views.share_memory(pairs[other][other_written], pairs[index][written]):
                outputs_first = sorted([(not written, index), (not other_written, other)])
                raise ArgumentError(_sharing(*outputs_first))
        open_ones.append(((first, past), index, written))


def _sharing(output: tuple[bool, int], other: tuple[bool, int]) -> str:
    what = "array" if other[0] else "output"
    return (
        f"the output of member {output[1]} of the list shares memory with the {what} of member {other[1]}. Pass "
        "outputs that share no memory with anything but their own array"
    )


class HostLists:
    """The arrays of a host all-reduce of a list: a :class:`HostOperands` for each member."""

    def __init__(self, arrays: Members, op: Any, out: Any) -> None:
        """Take the arguments of ``allreduce(arrays, op, out=out)``. :raises ArgumentError: if one is wrong."""
        self._out = out
        self.members: list[HostOperands] = []
        for index, (array, output) in enumerate(zip(arrays, outputs(arrays, out), strict=True)):
            with naming_member(index):
                self.members.append(HostOperands(array, op, output))
        if out is not None:
            check_apart([(used.source, used.target) for used in self.members])

    def by_dtype(self) -> list[tuple[str, list[HostOperands]]]:
        """The members of each dtype, and the op by which they are reduced together."""
        groups: dict[tuple[Any, str], list[HostOperands]] = {}
        for used in self.members:
            groups.setdefault((used.source.dtype, used.op), []).append(used)
        return [(op, members) for (_, op), members in groups.items()]

    def results(self, reduced: Sequence[np.ndarray[Any, Any]]) -> Any:
        """The result of the call: the caller's ``out``, filled, or a list of new arrays.

        :param reduced: the result of each member, in memory of ours.
        """
        for used, value in zip(self.members, reduced, strict=True):
            if used.target is not None:
                used.target[...] = value
        if self._out is not None:
            return self._out
        return [used.result(value.copy()) for used, value in zip(self.members, reduced, strict=True)]
