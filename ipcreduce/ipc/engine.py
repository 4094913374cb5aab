"""The backend "ipc": runs the all-reduces of one communicator on one GPU, one behind the other."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import lifetime
from ..coordination.calls import CallSequence
from ..coordination.control_page import REFUSED, Page
from ..cuda import cupy_runtime, driver, graph, streams
from ..cuda.contexts import using_relaxed
from ..errors import ArgumentError, CudaError, IpcReduceError
from ..handles import Stream
from . import background, plan
from .deferred_free import Action, attempt, flush, forget, give_back_after
from .fast_path import FastPath
from .launches import IN, OUT, Launches, PreparedCall
from .stream_order import StreamOrder
from .workspace import Workspace

_END_CALLS_SECONDS, _GIVE_UP_SECONDS = 5.0, 0.9  # of close(): until calls that wait are ended, and until it goes on
_registered_for_good: list[Page] = []  # still mapped: no later page may get addresses that cannot be registered

Actions = Sequence[Action]
Recorder = Callable[[PreparedCall, plan.LaunchPlan, int, int], None]  # of a launch: its call, part, source and target


class Engine:
    """A communicator's backend on one GPU, made by :func:`ipcreduce.ipc.startup.start`.

    It is the :class:`ipcreduce.coordination.backend.Engine` of a call sequence. Not thread-safe: the communicator's
    lock is held around every method.
    """

    def __init__(
        self, device: driver.DeviceInfo, context: int, workspace: Workspace, page: Page, *,
        capability: tuple[int, int], timeout: float, algorithm: str | None,
    ) -> None:  # fmt: skip
        self.device, self.context, self.workspace, self.page = device, context, workspace, page
        self.rank, self.n = workspace.rank, workspace.n
        control = driver.register_host(page.address, page.head_bytes)
        self.launches = Launches(
            context, workspace, control, capability=capability, timeout=timeout, algorithm=algorithm
        )
        try:
            self.order = StreamOrder(context)
        except CudaError:
            self._unregister()
            raise
        self.launches.before_loading = lambda: self.order.ends_by(time.monotonic() + timeout)
        self.fast: FastPath | None = None
        self.packets = "packets arrive whole"  # until the start-up check says otherwise
        self._recording_stream: Stream | None = None
        background.start()

    def open_fast_path(self, calls: CallSequence) -> FastPath:
        """The fast path for the calls of ``calls``, which is closed with the engine."""
        self.fast = FastPath(calls, self.device.ordinal, self.context, self.launches, self.order, self.page)
        return self.fast

    def describe(self) -> list[str]:
        """Lines of ``Communicator.describe``: GPU, workspace, packets, plan."""
        launches = self.launches
        lines = [
            f"GPU {self.device.ordinal}: {self.device.name}, {self.workspace.nbytes >> 20} MB of workspace",
            self.packets,
            f"plan: tuned, {len(launches.table)} choices" if launches.table else "plan: default, not tuned",
        ]
        if launches.sharing > 1:
            most = plan.most_blocks(launches.resident, launches.sharing)
            lines.append(f"plan: {launches.sharing} ranks on a GPU, so at most {most} blocks a launch")
        return lines

    # ---- running
    def run(
        self, prepared: PreparedCall, source: int, target: int, stream: Stream, owner: Any,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        """Launch an all-reduce from address ``source`` to ``target`` (the same: in place) on ``stream``.

        :param owner: see :meth:`StreamOrder.launch`.
        :param recorder: called for every launch, in a recording.
        :raises CudaError: if a launch fails.
        """

        def start(stream: Stream) -> None:
            for launch, words, part in prepared.launches:
                words[IN], words[OUT] = source + part.offset, target + part.offset
                launch.run(stream)
                if recorder is not None:
                    recorder(prepared, part, source, target)

        self.order.launch(start, stream, owner, recorded=recorder is not None)

    def launch_graph(self, executable: graph.Executable, stream: Stream, owner: Any) -> None:
        """Launch an executable graph on ``stream``, behind the last call.

        :raises CaptureError: if ``stream`` is being captured. :raises CudaError: if the launch fails.
        """
        self.order.launch(partial(cupy_runtime.launch, executable), stream, owner, capturable=False)

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
            self._recording_stream = streams.create_stream()
        return self._recording_stream

    # ---- ends
    def drain(self) -> None:
        """Wait until this rank's eager calls have ended."""
        self.order.ends_by(math.inf)

    def quiesce(self, deadline: float) -> None:
        """Wait until no kernel of ours runs, on any stream: with the abort word up, ours end within 0.1 s.

        :raises IpcReduceError: if the device is still busy at ``deadline``, on ``time.monotonic()``'s clock.
        """
        if not background.Job(self._wait_for_device).wait(deadline - time.monotonic()):
            raise IpcReduceError(f"GPU {self.device.ordinal} is still busy, with something that is not ipcreduce's")
        self.order.forget()

    def _wait_for_device(self) -> None:
        with using_relaxed(self.context):
            driver.synchronize()

    def reset(self) -> None:
        """After every rank's :meth:`quiesce`: empty slots, fresh epochs."""
        with using_relaxed(self.context):
            self.workspace.reset()

    def close(self, wait: float, unmap: Actions, unmapped: Actions, free: Actions) -> None:
        """Unmap the peers, wait up to ``wait`` seconds until they have unmapped us, and free everything.

        Memory that a live peer still maps is freed later: see deferred_free.py. It takes at most 6 s. What waits longer
        for the device is left to the end of the process, with a warning.

        :param unmap: actions that unmap further memory of peers.
        :param unmapped: actions for once no peer has our memory mapped.
        :param free: actions that free further memory of ours, in the end.
        """
        job = background.Job(partial(self._close, time.monotonic() + lifetime.at_most(wait), unmap, unmapped, free))
        if not job.wait(lifetime.at_most(_END_CALLS_SECONDS)):
            self.page.end_waits()
        if not job.wait(lifetime.at_most(_GIVE_UP_SECONDS)):
            warnings.warn(
                f"rank {self.rank}: close() has given up waiting for GPU {self.device.ordinal}, where something runs "
                "that is not ipcreduce's. What the communicator holds is freed when that ends, or with this process",
                RuntimeWarning,
                stacklevel=3,
            )

    def _close(self, deadline: float, unmap: Actions, unmapped: Actions, free: Actions) -> None:
        attempt(self.context, lambda: self._stop(deadline))
        forget(self.order)
        attempt(self.context, self.workspace.unmap_peers, *unmap)
        self.page.leave()
        while not self._unmapped() and time.monotonic() < deadline:
            time.sleep(1e-3)
        self.release()
        leave = partial(driver.release_context, self.device.ordinal)
        give_back_after(self._unmapped, self.context, *unmapped, self.workspace.free, leave)
        for action in free:
            action()
        flush()

    def _unmapped(self) -> bool:
        """True if no other process can reach our memory any more."""
        return all(self.page.has_unmapped(rank) for rank in range(self.n) if rank != self.rank)

    def _stop(self, deadline: float) -> None:
        """Wait for our kernels, and end those that wait for a peer beyond the deadline."""
        if not self.order.ends_by(deadline):
            self.page.post_fault(REFUSED, self.page.calls.call_of(self.rank), "it closed the communicator")
        self._wait_for_device()

    def release(self) -> None:
        """Give back the resources that only this process uses."""
        actions: list[Action] = [self._unregister, self.order.release]
        if self._recording_stream is not None:
            actions.append(partial(streams.destroy_stream, self._recording_stream))
        if self.fast is not None:
            actions += self.fast.destroy_actions()
        attempt(self.context, *actions, *self.launches.unload_actions())

    def _unregister(self) -> None:
        try:
            driver.unregister_host(self.page.address)
        except CudaError:
            _registered_for_good.append(self.page)
            raise
