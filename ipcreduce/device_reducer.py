"""The all-reduces of device arrays, of one array or of a list: from the caller's arrays to a backend, and back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from .arrays import lists, maps, operands, views
from .arrays.device_norms import DeviceNorm, Output
from .arrays.norms import NormArguments
from .arrays.operands import Allocating, DeviceOperands
from .calls.sequence import CallSequence
from .cuda.contexts import using
from .device.backend import DeviceBackend
from .device.known_calls import Prepared, PreparedList
from .device.maps import PreparedMap
from .errors import UnsupportedError
from .graphs.breaks import check_task
from .graphs.session import GraphSession
from .types import Stream


@dataclass(frozen=True)
class _Place:
    """Where a call runs. ``recorded``: it is captured in the open recording, and runs when its segment is launched."""

    backend: DeviceBackend
    stream: Stream
    owner: Any  # of the stream
    recorded: bool
    allocating: Allocating


class DeviceReducer:
    """The all-reduces of device arrays of one communicator. Its lock is held around every method.

    :param backend: None without GPUs, for this ``reason``.
    :param sync: each call is waited for.
    """

    def __init__(
        self, calls: CallSequence, backend: DeviceBackend | None, reason: str, session: GraphSession, sync: bool
    ) -> None:  # fmt: skip
        self._calls, self._backend, self._reason, self._session, self._sync = calls, backend, reason, session, sync

    def allreduce(self, array: Any, op: Any, out: Any, stream: Any) -> Any:
        """One call: see :meth:`ipcreduce.Communicator.allreduce`."""
        place = self._place(array, stream)
        backend, stream = place.backend, place.stream
        with using(backend.context):  # the thread may have another one, or none
            used = DeviceOperands.of(
                array, out, stream, backend.device.ordinal, ordered=not place.recorded, allocating=place.allocating
            )
        prepared: Prepared = backend.for_array(used.source, op)
        if prepared.through is not None:
            used.convert(prepared.through, place.allocating)
        if place.recorded:
            prepared = self._session.note(prepared, used.source, used.destination, used.target)
        else:
            self._calls.enter(prepared.what, stream)
        if backend.n == 1:
            self._copy(place, [used])
        else:
            backend.run(prepared, used.source_address, used.destination_address, stream, place.owner, place.recorded)
        self._end(place, [used], array, out)
        return used.result

    def allreduce_list(self, arrays: Sequence[Any], op: Any, out: Any, stream: Any) -> Any:
        """One call on a list of arrays: see :meth:`ipcreduce.Communicator.allreduce`."""
        if stream is None:
            lists.check_streams(arrays)
        place = self._place(arrays[0] if arrays else None, stream)
        backend, stream = place.backend, place.stream
        with using(backend.context):
            used = lists.DeviceLists(
                arrays, out, stream, backend.device.ordinal, ordered=not place.recorded, allocating=place.allocating
            )
        members = used.members
        prepared: PreparedList = backend.for_list([one.source for one in members], op)
        for one, through in zip(members, prepared.through, strict=True):
            if through is not None:
                one.convert(through, place.allocating)
        if place.recorded:
            arrays_used = chain.from_iterable((one.source, one.destination, one.target) for one in members)
            self._session.note_list(prepared, *arrays_used)
        else:
            self._calls.enter(prepared.what, stream)
        if backend.n == 1:
            self._copy(place, members)
        else:
            sources, targets = [one.source_address for one in members], [one.destination_address for one in members]
            backend.run_list(prepared, sources, targets, stream, place.owner, place.recorded)
            if backend.known_lists is not None and not place.recorded:
                backend.known_lists.learn(arrays, op, prepared)
        self._end(place, members, *arrays, *(out or ()))
        return used.result

    def allreduce_rmsnorm(self, given: NormArguments, stream: Any) -> tuple[Any, ...]:
        """One call: see :meth:`ipcreduce.Communicator.allreduce_rmsnorm`."""
        arrays = list(given.arrays().values())
        if stream is None:
            lists.check_streams(arrays, "the arguments are")
        place = self._place(given.x, stream)
        backend, stream = place.backend, place.stream
        with using(backend.context):
            used = DeviceNorm(given, stream, backend.device.ordinal, ordered=not place.recorded)
        prepared = backend.norms.prepare(used.form, used.shape)
        with using(backend.context), place.allocating():
            addresses = used.place(prepared.alignment, prepared.needs_out(used.in_place))
        if place.recorded:
            self._session.note_list(prepared, *used.held)
        else:
            self._calls.enter(prepared.what, stream)
        backend.run_norm(prepared, addresses, stream, place.owner, place.recorded)
        if backend.known_norms is not None and not place.recorded and used.is_as_given:
            if used.is_plain:
                backend.known_norms.learn(given, prepared, addresses)
            else:
                backend.known_norms.learn_new(given, prepared, used.results)
        self._end(place, used.outputs, *arrays)
        return used.result

    def allreduce_then(self, array: Any, op: Any, out: Any, stream: Any, then: maps.Map) -> Any:
        """One call with an expression: see :meth:`ipcreduce.Communicator.allreduce`."""
        place = self._place(array, stream)
        backend, stream, device = place.backend, place.stream, place.backend.device.ordinal
        with using(backend.context):
            ordered, allocating = not place.recorded, place.allocating
            used = DeviceOperands.of(array, out, stream, device, ordered=ordered, allocating=allocating)
            mapped = maps.DeviceMap(
                then, used, device, ordered=ordered, allocating=allocating, written=out is not None
            )  # fmt: skip
        prepared = backend.for_map(used.source, op, mapped.expression)
        if place.recorded:
            self._session.note_list(prepared, used.source, used.destination, used.target, *mapped.arrays)
        else:
            self._calls.enter(prepared.what, stream)
        if prepared.first is not None:
            self._reduce_first(place, prepared, prepared.first, used, mapped)
        else:
            addresses = used.source_address, used.destination_address, mapped.words
            backend.run_map(prepared, *addresses, stream, place.owner, place.recorded)
        if backend.known_maps is not None and not place.recorded:
            backend.known_maps.learn(array, op, out, then, prepared, mapped.expression)
        self._end(place, [used], array, out, *then.operands.values())
        return used.result

    def _reduce_first(
        self, place: _Place, prepared: PreparedMap, first: Prepared, used: DeviceOperands, mapped: maps.DeviceMap
    ) -> None:
        """Make a call whose expression has a kernel of its own, behind the all-reduce ``first``."""
        backend, stream, dtype = place.backend, place.stream, used.source.dtype
        source, reduced = used.source, used.destination
        with using(backend.context):
            if first.through is not None:
                with place.allocating():
                    source = reduced = views.contiguous_copy(source, stream, first.through)
            elif any(views.overlap(one, reduced) for one in mapped.arrays):  # they are read after the all-reduce
                with place.allocating():
                    reduced = views.empty(source.shape, dtype, stream, backend.device.ordinal)
        addresses = views.pointer(source), views.pointer(reduced)
        backend.run(first, *addresses, stream, place.owner, place.recorded)
        with using(backend.context):
            if first.through is not None:
                with place.allocating():
                    reduced = views.contiguous_copy(reduced, stream, dtype)
            prepared.run(views.pointer(reduced), used.destination_address, mapped.words, stream)
        backend.order.extend(stream)

    def _place(self, first: Any, stream: Any) -> _Place:
        """:raises UnsupportedError: without a GPU. :raises ArgumentError: if ``stream`` is no stream.

        :raises CaptureError: while another asyncio task of this thread records.
        """
        if self._backend is None:
            raise UnsupportedError(f"device arrays need backend ipc or nccl: {self._reason}. Pass NumPy arrays here")
        check_task()
        recording = self._calls.recording
        handle, owner = operands.stream_of(first, stream)
        recorded = recording is not None and recording.captures(handle)
        allocating = nullcontext if recorded else partial(self._session.allocating, handle)
        return _Place(self._backend, handle, owner, recorded, allocating)

    def _copy(self, place: _Place, members: Sequence[DeviceOperands]) -> None:
        """Make the call of a world of one rank."""

        def copy(stream: Stream) -> None:
            for used in members:
                views.copy_into(used.destination, used.source, stream)

        place.backend.order.launch(copy, place.stream, place.owner, recorded=place.recorded)

    def _end(self, place: _Place, members: Sequence[DeviceOperands | Output], *given: Any) -> None:
        """Write the results through to the caller's arrays, and note that the call uses these."""
        backend, stream = place.backend, place.stream
        copied = [used for used in members if used.destination is not used.target]
        for used in copied:
            views.copy_into(used.target, used.destination, stream)
        if copied:
            backend.order.extend(stream)
        if not place.recorded and not all(map(views.is_cupy, given)):
            with using(backend.context):
                operands.note_uses(given, stream, place.owner)  # a new result is of that stream
        if place.recorded:
            self._calls.withdraw()  # recorded, not executed: launching its segment counts as the call
        elif self._sync and not backend.is_capturing(stream):
            self._session.wait(stream)

    def close(self) -> None:
        """Let go of the backend. There are no more calls."""
        self._backend = None
