"""The base of backends on GPUs: runs the all-reduces of one communicator on one GPU, one behind the other."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from .. import clock, process
from ..calls import faults
from ..calls.sequence import CallSequence
from ..cuda import cupy_runtime, driver, graph, streams
from ..cuda.contexts import using_relaxed
from ..errors import ArgumentError, IpcReduceError
from ..page.control_page import REFUSED, TOLD, Page
from ..types import Stream
from . import background
from .deferred_free import Action
from .fast_path import FastPath, Prepared, Ready
from .stream_order import StreamOrder

_END_CALLS_SECONDS, _GIVE_UP_SECONDS = 5.0, 0.9  # of close(): until calls that wait are ended, and until it goes on

Actions = Sequence[Action]


class Life:
    """The life of what recorded graphs hold of a backend. Once it has ended, these graphs cannot be launched.

    :ivar ended: set in any thread.
    :ivar replays: of the graphs that hold it.
    """

    def __init__(self) -> None:
        self.ended = False
        self.replays: weakref.WeakSet[Ready] = weakref.WeakSet()

    def end(self) -> None:
        """End it, and keep the graphs that hold it from the fast path."""
        self.ended = True
        for replay in self.replays:
            replay.argument = 0


class DeviceBackend(ABC):
    """A communicator's backend on one GPU.

    It is the :class:`ipcreduce.calls.backend.Backend` of a call sequence. Not thread-safe: the communicator's
    lock is held around every method.
    """

    name: ClassVar[str]  # of the backend

    def __init__(self, device: driver.DeviceInfo, context: int, page: Page, timeout: float) -> None:
        self.device, self.context, self.page, self._timeout = device, context, page, timeout
        self.rank, self.n = page.rank, page.n
        self.order = StreamOrder(context, self.captured_in_order())
        self.fast: FastPath | None = None
        self.life = Life()  # of what graphs hold that are recorded now
        self._recording_stream: Stream | None = None
        background.start()

    @staticmethod
    def captured_in_order() -> bool:
        """See :class:`StreamOrder`."""
        return False

    # ---- running
    @abstractmethod
    def open_fast_path(self, calls: CallSequence) -> FastPath:
        """The fast path for the calls of ``calls``, which is closed with the backend."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Lines of ``Communicator.describe``."""

    @abstractmethod
    def for_array(self, array: Any, op: Any) -> Prepared:
        """All that is known of an all-reduce before its addresses are. :raises ArgumentError: if dtype or op is wrong.

        :param array: a device array.
        :param op: as :func:`ipcreduce.dtypes.op_name` takes it.
        """

    @abstractmethod
    def start(self, prepared: Any, source: int, target: int, stream: Stream) -> None:
        """Put an all-reduce on ``stream``. See :meth:`run`."""

    def run(
        self, prepared: Prepared, source: int, target: int, stream: Stream, owner: Any, recorded: bool = False
    ) -> None:
        """Launch an all-reduce from address ``source`` to ``target`` (the same: in place) on ``stream``.

        :param owner: see :meth:`StreamOrder.launch`.
        :param recorded: ``stream`` is part of the capture of a recording.
        :raises CudaError: if a launch fails.
        """
        self.order.launch(partial(self.start, prepared, source, target), stream, owner, recorded=recorded)
        self.order.launched = self.page.calls.number[0]

    def launch_graph(self, executable: graph.Executable, stream: Stream, owner: Any) -> None:
        """Launch an executable graph on ``stream``, behind the last call.

        :raises CaptureError: if ``stream`` is being captured. :raises CudaError: if the launch fails.
        """
        self.order.launch(partial(cupy_runtime.launch, executable), stream, owner, capturable=False)
        self.order.launched = self.page.calls.number[0]

    def is_capturing(self, stream: Stream) -> bool:
        """True if ``stream`` is part of a capture: its work does not run yet."""
        return streams.capture_id(stream) != 0

    def use_context(self) -> None:
        """Make our context current in a thread that has none. :raises ArgumentError: if it has another one."""
        if not driver.current_context():
            driver.set_context(self.context)
        elif driver.current_context() != self.context:
            raise ArgumentError(f"record() needs the communicator's GPU {self.device.ordinal} to be the current one")

    def recording_stream(self) -> Stream:
        """The one stream of all recordings: graphs' pools keep their memory apart by stream."""
        if self._recording_stream is None:
            self._recording_stream = self.order.recording_stream = streams.create_stream()
        return self._recording_stream

    # ---- ends
    def drain(self) -> None:
        """Wait until this rank's eager calls have ended, at most for a call's time: other work behind may not end."""
        self.order.ends_by(clock.now() + self._timeout)

    def quiesce(self, deadline: float) -> None:
        """Wait until no work of ours runs, on any stream. The abort word is up, by which ours ends.

        :raises IpcReduceError: if the device is still busy at ``deadline``, on the clock of :mod:`ipcreduce.clock`.
        """
        if not background.Job(self.wait_for_device).wait(deadline - clock.now()):
            raise IpcReduceError(f"GPU {self.device.ordinal} is still busy, with something that is not ipcreduce's")
        self.order.forget()

    def wait_for_device(self) -> None:
        """Wait until nothing runs on the GPU in this context."""
        with using_relaxed(self.context):
            driver.synchronize()

    def offer(self) -> bytes:
        """See :meth:`ipcreduce.calls.backend.Backend.offer`."""
        return b""

    @abstractmethod
    def reset(self, offers: Sequence[bytes]) -> None:
        """See :meth:`ipcreduce.calls.backend.Backend.reset`."""

    def close(self, wait: float, free: Actions) -> None:
        """Part from the peers, waiting for them up to ``wait`` seconds, and free everything.

        It takes at most 6 s. What waits longer for the device is left to the end of the process, with a warning.

        :param free: actions that free further memory of ours, in the end.
        """
        job = background.Job(partial(self._close, clock.now() + process.at_most(wait), free))
        if not job.wait(process.at_most(_END_CALLS_SECONDS)):
            self.page.end_waits()
        if not job.wait(process.at_most(_GIVE_UP_SECONDS)):
            warnings.warn(
                f"rank {self.rank}: close() has given up waiting for GPU {self.device.ordinal}, where something runs "
                "that is not ipcreduce's. What the communicator holds is freed when that ends, or with this process",
                RuntimeWarning,
                stacklevel=3,
            )

    def _end_calls(self, deadline: float) -> bool:
        """Wait for our calls until ``deadline``, then end them. False if that was needed."""
        page = self.page
        if self.order.ends_by(deadline):
            return True
        if page.loss() is None:
            page.post_fault(REFUSED, page.calls.call_of(self.rank), faults.why_closed(page, self.rank))
        else:  # which ends all waits: a fault of this rank would come before it, as if it were the reason
            page.abort(TOLD)
        return False

    @abstractmethod
    def _close(self, deadline: float, free: Actions) -> None: ...

    def peers_have_left(self) -> bool:
        """True if no other process uses this communicator any more, nor our memory."""
        return all(self.page.has_unmapped(rank) for rank in range(self.n) if rank != self.rank)

    def own_resources(self) -> list[Action]:
        """Actions that give back the events and the stream of ours."""
        actions: list[Action] = [self.order.release]
        if self._recording_stream is not None:
            actions.append(partial(streams.destroy_stream, self._recording_stream))
        return actions
