"""The calls on device arrays: from the caller's arrays to a backend, and back."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from .arrays import kinds, operands, views
from .arrays.operands import DeviceCall, Site
from .calls.sequence import CallSequence
from .cuda.contexts import using
from .device.backend import DeviceBackend
from .errors import UnsupportedError
from .graphs.breaks import check_task
from .graphs.session import GraphSession


class DeviceReducer:
    """The calls on device arrays of one communicator. Its lock is held around every method.

    :param backend: None without GPUs, for this ``reason``.
    :param sync: each call is waited for.
    """

    def __init__(
        self, calls: CallSequence, backend: DeviceBackend | None, reason: str, session: GraphSession, sync: bool
    ) -> None:  # fmt: skip
        self._calls, self._backend, self._reason, self._session, self._sync = calls, backend, reason, session, sync

    def call(self, given: Any, stream: Any) -> Any:
        """Make one call of any kind.

        :param given: its arguments: a :class:`PlainCall`, say.
        :raises UnsupportedError: without a GPU.
        :raises CaptureError: while another asyncio task of this thread records.
        :raises IpcReduceError: see :meth:`ipcreduce.Communicator.allreduce`.
        """
        backend = self._backend
        if stream is None:
            given.check_streams()
        if backend is None:
            raise UnsupportedError(f"device arrays need backend ipc or nccl: {self._reason}. Pass NumPy arrays here")
        check_task()
        site = self._site(backend, given.first, stream)
        with using(backend.context):  # the thread may have another one, or none
            used: DeviceCall = kinds.DEVICE[type(given)](given, site)
            prepared = backend.prepare(used.request)
            addresses = used.place(prepared)
        if site.recorded:
            prepared = self._session.note(prepared, *used.held)
        else:
            self._calls.enter(prepared.fingerprint, site.stream)
        try:
            backend.run(partial(prepared.start, addresses), site.stream, site.owner, recorded=site.recorded)
            if backend.launch_cache is not None and not site.recorded:
                backend.launch_cache.insert_form(given, used.result, prepared)
            self._end(backend, site, used)
        finally:  # behind an error, too, as what is launched by then uses them
            if not site.recorded and not all(map(views.is_cupy, used.given)):
                with using(backend.context):
                    operands.note_uses(used.given, site.stream, site.owner)  # a new result is of that stream
        return used.result

    def _site(self, backend: DeviceBackend, first: Any, stream: Any) -> Site:
        """:raises ArgumentError: if ``stream`` is not a stream."""
        recording = self._calls.recording
        handle, owner = operands.stream_of(first, stream)
        recorded = recording is not None and recording.captures(handle)
        allocating = nullcontext if recorded else partial(self._session.allocating, handle)
        follow = partial(backend.order.precede, handle, recorded)
        return Site(handle, owner, backend.device.ordinal, recorded, allocating, follow)

    def _end(self, backend: DeviceBackend, site: Site, used: DeviceCall) -> None:
        """Write the results through to the caller's arrays."""
        stream = site.stream
        copied = [one for one in used.written if one.destination is not one.target]
        for one in copied:
            views.copy_into(one.target, one.destination, stream)
        if copied:
            backend.order.extend(stream)
        if site.recorded:
            self._calls.withdraw()  # recorded, not executed: launching its segment counts as the call
        elif self._sync and not backend.is_capturing(stream):
            self._session.wait(stream)

    def close(self) -> None:
        """Let go of the backend. There are no more calls."""
        self._backend = None
