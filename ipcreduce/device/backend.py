"""The base of the backends for GPUs. A backend runs one communicator's all-reduces on one GPU, one behind the other."""

from __future__ import annotations

import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from .. import clock, process
from ..calls import faults
from ..calls.backend import Backend
from ..calls.norm_shape import NormAddresses
from ..calls.sequence import CallSequence
from ..cuda import cupy_runtime, driver, graph, streams
from ..cuda.expressions import Expression
from ..errors import ArgumentError, IpcReduceError, PeerTimeoutError, report
from ..page.control_page import REFUSED, TOLD, Page
from ..ranks.exchange import Channel
from ..types import Stream
from . import background
from .deferred_free import Action, attempt, flush, untrack
from .fast_path import FastPath
from .known_calls import KnownCalls, Prepared, PreparedList, Ready
from .known_lists import KnownLists, Places, Start, addresses_of
from .known_maps import KnownMaps
from .known_norms import KnownNorms
from .maps import MapKernels, PreparedMap
from .norms import Norms, PreparedNorm
from .stream_order import StreamOrder

_ABORT_SECONDS, _GIVE_UP_SECONDS = 5.0, 0.9  # of close(): until waits are aborted, and from there until it gives up

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
        """End this life, and keep the graphs that hold it from the fast path."""
        self.ended = True
        for replay in self.replays:
            replay.argument = 0


class DeviceBackend(Backend):
    """A communicator's backend on one GPU.

    Not thread-safe: the communicator's lock is held around every method.
    """

    name: ClassVar[str]  # of the backend
    norms: Norms  # the calls with RMSNorm
    prepared: Mapping[tuple[Any, ...], Prepared]  # the calls of for_array() by shape, dtype and op; never replaced

    def __init__(
        self, device: driver.DeviceInfo, context: int, page: Page, timeout: float, captured_in_order: bool = False
    ) -> None:  # fmt: skip
        """:param captured_in_order: see :class:`StreamOrder`."""
        self.device, self.context, self.page, self._timeout = device, context, page, timeout
        self.rank, self.n = page.rank, page.n
        self.order = StreamOrder(context, captured_in_order)
        self.fast: FastPath | None = None
        self.known_lists: KnownLists | None = None  # with the fast path
        self.known_norms: KnownNorms | None = None  # so are these
        self.known_maps: KnownMaps | None = None
        # What the ranks map of each other: for each part of it, what unmaps the peers' and what frees this rank's.
        self.shared: list[tuple[Action, Action]] = []
        self.life = Life()  # of what graphs hold that are recorded now
        self.map_kernels = MapKernels(context, device.capability, lambda: self.order.ends_by(clock.now() + timeout))
        background.start()

    # ---- running
    def open_fast_path(self, calls: CallSequence) -> FastPath:
        """The fast path for the calls of ``calls``, which is closed with the backend."""
        known = KnownCalls(self.device.ordinal, self.order, self.prepared, self.make_ready)
        self.known_lists = KnownLists(self.device.ordinal, self.order, self.start_list, self.make_ready_list)
        known.find_list = self.known_lists.find
        self.known_maps = KnownMaps(self.device.ordinal, self.order, self.make_ready_map)
        known.find_map = self.known_maps.find
        self.known_norms = KnownNorms(
            self.device.ordinal, calls, self.order, self.norms.start, self.make_ready_norm
        )  # fmt: skip
        self.fast = FastPath(calls, self.device.ordinal, self.context, self.order, self.page, known)
        return self.fast

    @abstractmethod
    def make_ready(self, prepared: Any, source: int, target: int, again: bool) -> Ready:
        """The launch of a call of :attr:`prepared`, between two addresses. ``again``: they have come before."""

    @abstractmethod
    def describe(self) -> list[str]:
        """The backend's lines in ``Communicator.describe``."""

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

    @abstractmethod
    def for_list(self, arrays: Sequence[Any], op: Any) -> PreparedList:
        """Do the same as :meth:`for_array` for a list of device arrays. Errors name the member."""

    @abstractmethod
    def start_list(self, prepared: Any) -> Start:
        """The function that puts an all-reduce of a list on a stream, wherever the list's arrays lie."""

    @abstractmethod
    def make_ready_list(self, prepared: Any, places: Places) -> Ready:
        """The launch of a call on a list of arrays at places that have come before."""

    def run_list(
        self, prepared: PreparedList, sources: Sequence[int], targets: Sequence[int], stream: Stream, owner: Any,
        recorded: bool = False,
    ) -> None:  # fmt: skip
        """Do the same as :meth:`run` for a list of arrays. All its launches are one call."""
        places = addresses_of(sources), addresses_of(targets)
        self.order.launch(partial(self.start_list(prepared), places), stream, owner, recorded=recorded)
        self.order.launched = self.page.calls.number[0]

    def make_ready_norm(self, prepared: PreparedNorm, addresses: NormAddresses) -> Ready:
        """The launch of a call with RMSNorm, between addresses that have come before: see :meth:`make_ready`."""
        return self.norms.make_ready(prepared, addresses)

    def run_norm(
        self, prepared: PreparedNorm, addresses: NormAddresses, stream: Stream, owner: Any, recorded: bool = False
    ) -> None:  # fmt: skip
        """Do the same as :meth:`run` for an all-reduce with RMSNorm. All its launches are one call."""
        self.order.launch(partial(self.norms.start, prepared, addresses), stream, owner, recorded=recorded)
        self.order.launched = self.page.calls.number[0]

    def for_map(self, array: Any, op: Any, expression: Expression) -> PreparedMap:
        """Do the same as :meth:`for_array` for a call with an expression.

        It is applied by a kernel of its own, here. :raises ArgumentError: if the expression does not compile.
        """
        return self.map_kernels.prepare(array, op, expression, None if self.n == 1 else self.for_array(array, op))

    def run_map(
        self, prepared: PreparedMap, source: int, target: int, operands: Sequence[int], stream: Stream, owner: Any,
        recorded: bool = False,
    ) -> None:  # fmt: skip
        """Do the same as :meth:`run` for a call with an expression that is not preceded by another one."""
        self.order.launch(partial(prepared.run, source, target, operands), stream, owner, recorded=recorded)
        self.order.launched = self.page.calls.number[0]

    def make_ready_map(
        self, prepared: PreparedMap, source: int, target: int, operands: Sequence[int], again: bool
    ) -> Ready:  # fmt: skip
        """The launch of a call with an expression, between two addresses: see :meth:`make_ready`."""
        return Ready(prepared.what, self._start_map, (prepared, source, target, operands))

    def _start_map(self, argument: tuple[PreparedMap, int, int, Sequence[int]], stream: Stream) -> None:
        prepared, source, target, operands = argument
        if prepared.first is not None:
            self.start(prepared.first, source, target, stream)
            source = target
        prepared.run(source, target, operands, stream)

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
        """Make the communicator's context current in a thread without one. :raises ArgumentError: if it has another."""
        if not driver.current_context():
            driver.set_context(self.context)
        elif driver.current_context() != self.context:
            gpu = self.device.ordinal
            raise ArgumentError(f"record() was called while another GPU is current. Make GPU {gpu} current first")

    def recording_stream(self) -> Stream:
        """The one stream of all recordings. There is one, since the pools of graphs keep memory of streams apart."""
        if self.order.recording_stream is None:
            self.order.recording_stream = streams.create_stream()
        return self.order.recording_stream

    # ---- suspend and resume: the methods are called in this order, by :mod:`ipcreduce.suspension`
    @abstractmethod
    def check_suspendable(self) -> None:
        """Check that this backend can give memory back. :raises UnsupportedError: on every rank, if it cannot."""

    def prepare_suspension(self, seconds: float) -> None:
        """Wait for all work on the GPU, and get what :meth:`suspend` needs.

        :raises PeerTimeoutError: if the GPU is still busy after ``seconds``.
        :raises CudaError: if there is no memory.
        """
        self._wait_for_gpu(seconds)

    @abstractmethod
    def drop_prepared(self) -> None:
        """Give back what was prepared and not used. Idempotent."""

    @abstractmethod
    def suspend(self) -> None:
        """Give the memory back. Every rank has prepared for it. :raises CudaError: if that fails."""

    def prepare_resumption(self, seconds: float) -> None:
        """Do as :meth:`prepare_suspension`, for :meth:`resume`."""
        self._wait_for_gpu(seconds)

    @abstractmethod
    def resume(self, ranks: Channel, deadline: float) -> bool:
        """Get new memory in place of the old one. Collective.

        :returns: True if a graph of others was launched on this rank meanwhile.
        :raises IpcReduceError: if that fails.
        """

    def _wait_for_gpu(self, seconds: float) -> None:
        if not background.Job(self.order.wait_for_device).wait(seconds):
            happened = f"GPU {self.device.ordinal} was still busy after {seconds:g} s"
            raise PeerTimeoutError(report(self.rank, int(self.page.calls.number[0]), happened, "Let its work end."))
        self.order.reset()

    # ---- ends
    def drain(self) -> None:
        """Wait until this rank's eager calls have ended, but not beyond ``timeout``: work behind them may never end."""
        self.order.ends_by(clock.now() + self._timeout)

    def quiesce(self, deadline: float) -> None:
        """Wait until no call runs any more, on any stream. The abort word is up, which ends the calls' waits.

        :raises IpcReduceError: if the device is still busy at ``deadline``, on the clock of :mod:`ipcreduce.clock`.
        """
        if not background.Job(self.order.wait_for_device).wait(deadline - clock.now()):
            raise IpcReduceError(
                f"GPU {self.device.ordinal} is still busy with other work than ipcreduce's. Let that work end"
            )
        self.order.reset()

    def close(self, wait: float, free: Actions) -> None:
        """Part from the peers, waiting for them up to ``wait`` seconds, and free everything.

        It takes at most 6 s. What the device still uses then is freed later, or when the process ends, with a warning.

        :param free: actions that free further memory of this rank, at the end.
        """
        job = background.Job(partial(self._close, clock.now() + process.at_most(wait), free))
        if not job.wait(process.at_most(_ABORT_SECONDS)):
            self.page.abort_at_close()
        if not job.wait(process.at_most(_GIVE_UP_SECONDS)):
            warnings.warn(
                f"rank {self.rank}: close() has given up waiting for GPU {self.device.ordinal}, where other work than "
                "ipcreduce's runs. The communicator's memory is freed when that work ends, or when this process ends",
                RuntimeWarning,
                stacklevel=3,
            )

    def _abort_calls(self, deadline: float) -> bool:
        """Wait for this rank's calls until ``deadline``, then abort their waits. False if that was needed."""
        page = self.page
        if self.order.ends_by(deadline):
            return True
        if page.loss() is None:
            page.post_fault(REFUSED, page.calls.call_of(self.rank), faults.why_closed(page, self.rank))
        else:  # the loss is the reason, and aborts all waits; a fault of this rank would be told in its place
            page.abort(TOLD)
        return False

    def _close(self, deadline: float, free: Actions) -> None:
        attempt(self.context, lambda: self._abort_calls(deadline), self.order.wait_for_device)
        untrack(self.order)
        attempt(self.context, *(unmap for unmap, _ in self.shared))
        self.page.leave()
        while not self.peers_have_left() and clock.now() < deadline:
            time.sleep(1e-3)
        self.end()
        for action in free:
            action()
        flush()
        # The rest may wait for the garbage collector. The page may not: a mapping of Python's holds a descriptor.
        self.fast = self.known_norms = None
        self.page = Page.alone(0, 1)

    @abstractmethod
    def end(self) -> None:
        """Free everything of this backend, or let it be freed later. The peers have left, or have not come in time."""

    def peers_have_left(self) -> bool:
        """True if no other process uses this communicator, or this rank's memory, any more."""
        return have_left(self.page)


def have_left(page: Page) -> bool:
    """True if no other rank uses anything of this rank's any more."""
    return all(page.has_unmapped(rank) for rank in range(page.n) if rank != page.rank)
