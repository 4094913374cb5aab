"""The base of the backends for GPUs. A backend runs one communicator's all-reduces on one GPU, one after the other."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from .. import clock, process
from ..calls import faults
from ..calls.backend import Backend
from ..calls.request import Request
from ..calls.sequence import CallSequence
from ..cuda import current_streams, driver, streams
from ..cuda.contexts import using
from ..errors import ArgumentError, IpcReduceError, PeerTimeoutError, Reach, report
from ..interrupts import uninterrupted
from ..originals import time
from ..page.control_page import REFUSED, TOLD, Page
from ..ranks.exchange import Channel
from ..types import Stream
from . import background, epilogues
from .deferred_free import Action, attempt, flush, untrack
from .fast_path import FastPath
from .kernels import Kernels
from .launch_cache import LaunchCache
from .prepared import BoundLaunch, Prepared, keep
from .stream_order import StreamOrder

_MAX_PREPARED = 2048  # calls, of which lists have up to 32 KB of arguments for each launch
_ABORT_SECONDS, _GIVE_UP_SECONDS = 5.0, 0.9  # of close(): until waits are aborted, and from there until it gives up

Actions = Sequence[Action]


class Validity:
    """The validity of what recorded graphs hold of a backend. Once it has ended, these graphs cannot be launched.

    :ivar ended: set in any thread.
    :ivar replays: of the graphs that hold it.
    """

    def __init__(self) -> None:
        self.ended = False
        self.replays: weakref.WeakSet[BoundLaunch] = weakref.WeakSet()

    def end(self) -> None:
        """End it, and keep the graphs that hold it from the fast path."""
        self.ended = True
        for replay in self.replays:
            replay.argument = 0


class DeviceBackend(Backend):
    """A communicator's backend on one GPU.

    Not thread-safe: the communicator's lock is held around every method.
    """

    name: ClassVar[str]  # of the backend
    kernels: Kernels

    def __init__(
        self, device: driver.DeviceInfo, context: int, page: Page, timeout: float, captured_in_order: bool = False
    ) -> None:  # fmt: skip
        """:param captured_in_order: see :class:`StreamOrder`."""
        self.device, self.context, self.page, self._timeout = device, context, page, timeout
        self.rank, self.n = page.rank, page.n
        self.order = StreamOrder(context, captured_in_order)
        self.fast: FastPath | None = None
        self.launch_cache: LaunchCache | None = None  # of the fast path
        self._prepared: dict[Request, Prepared] = {}
        # What the ranks map of each other: for each part of it, what unmaps the peers' and what frees this rank's.
        self.shared: list[tuple[Action, Action]] = []
        self.validity = Validity()  # of what graphs hold that are recorded now
        self._ending: background.Job | None = None
        background.start()

    # ---- running
    def open_fast_path(self, calls: CallSequence) -> FastPath:
        """The fast path for the calls of ``calls``, which is closed with the backend."""
        self.launch_cache = LaunchCache(self.device.ordinal, self.order, self.bind)
        self.fast = FastPath(calls, self.device.ordinal, self.context, self.order, self.page, self.launch_cache)
        return self.fast

    @abstractmethod
    def describe(self) -> list[str]:
        """The backend's lines in ``Communicator.describe``."""

    def prepare(self, request: Request) -> Prepared:
        """Plan a call and compile its kernels: all that does not depend on the addresses of its arrays.

        :raises IpcReduceError: if a kernel does not compile; ArgumentError for a wrong expression.
        :raises CudaError: if it does not load.
        """
        found = self._prepared.get(request)
        if found is None:
            found = self.prepare_whole(request)
            if found is None:
                plain = None if self.n == 1 else self.prepare(request.without_epilogue())
                found = epilogues.behind(plain, request, self.kernels, self.device.ordinal)
            keep(self._prepared, request, found, _MAX_PREPARED)
        return found

    @abstractmethod
    def prepare_whole(self, request: Request) -> Prepared | None:
        """Prepare a call that needs no kernel after the all-reduce; None for others. See :meth:`prepare`."""

    def bind(self, prepared: Prepared, addresses: Any) -> BoundLaunch:
        """Make a launch with fixed addresses, for a call that is repeated."""
        return prepared.bind(addresses)

    def run(
        self, start: Callable[[Stream], Any], stream: Stream, owner: Any, *, recorded: bool = False,
        capturable: bool = True,
    ) -> None:  # fmt: skip
        """Launch a call by ``start(stream)``: see :meth:`StreamOrder.launch`. NCCL's guard watches it from then on.

        :raises CudaError: if a launch fails.
        """
        self.order.launch(start, stream, owner, recorded=recorded, capturable=capturable)
        self.order.launched = self.page.calls.number[0]

    def is_capturing(self, stream: Stream) -> bool:
        """True if ``stream`` is part of a capture: its work does not run yet."""
        return streams.capture_id(stream) != 0

    def check_not_captured(self, what: str, kind: type[IpcReduceError]) -> None:
        """Check that no current stream is being captured, for the method ``what``. :raises: ``kind``, if one is."""
        with using(self.context):
            if any(map(self.is_capturing, current_streams.streams(self.device.ordinal))):
                text = f"{what} was called while the current stream is being captured. End that capture first"
                raise kind(text, reach=Reach.CAPTURED)

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
            with uninterrupted():
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
        """Wait for all work on the GPU, and get what :meth:`resume` needs. Errors: see :meth:`prepare_suspension`."""
        self._wait_for_gpu(seconds)

    def hand_over(self, ranks: Channel, deadline: float) -> None:
        """Give what was prepared to the peers, for :meth:`resume`. Collective. Nothing changes if it fails.

        :raises Agreed: on every rank, if one cannot. :raises IpcReduceError: if a rank does not come.
        """

    @abstractmethod
    def resume(self, deadline: float) -> bool:
        """Get new memory in place of the old one. Every rank has prepared for it, and NCCL's wait for each other.

        :returns: True if a graph of another library was launched on this rank meanwhile.
        :raises IpcReduceError: if that fails.
        """

    def _wait_for_gpu(self, seconds: float) -> None:
        if not background.Job(self.order.wait_for_device).wait(seconds):
            happened = f"GPU {self.device.ordinal} was still busy after {seconds:g} s"
            raise PeerTimeoutError(report(self.rank, int(self.page.calls.number[0]), happened, "Let its work end."))
        self.order.reset()

    # ---- ends
    def drain(self) -> None:
        """Wait until this rank's eager calls have ended, but not beyond ``timeout``: work after them may never end."""
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

    def right(self, number: int) -> int:
        """The last right call up to ``number``: after a kernel without data, the last one that was waited for."""
        return min(number, self.order.right) if self.page.ended_without_data else number

    def close(self, wait: float, free: Actions) -> None:
        """Part from the peers, waiting for them up to ``wait`` seconds, and free everything.

        It takes at most 6 s. What the device still uses then is freed later, or when the process ends, with a warning.
        After an interrupt in this method, a further call waits for what the first one has begun.

        :param free: actions that free further memory of this rank, at the end.
        """
        if self._ending is None:
            self._ending = background.Job(partial(self._close, clock.now() + process.at_most(wait), free))
        job = self._ending
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
        while not have_left(self.page) and clock.now() < deadline:
            time.sleep(1e-3)
        self.end()
        for action in free:
            action()
        flush()
        # The rest may wait for the garbage collector. The page, which is shared memory, may not.
        self.fast = self.launch_cache = None
        self.page = Page.alone(0, 1)

    @abstractmethod
    def end(self) -> None:
        """Free everything of this backend, or let it be freed later. The peers have left, or have not come in time."""


def have_left(page: Page) -> bool:
    """True if no other rank uses the communicator, or anything of this rank's, any more."""
    return all(page.has_unmapped(rank) for rank in range(page.n) if rank != page.rank)
