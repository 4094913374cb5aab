"""All-reduce of device arrays: orders the launches of calls behind each other, and runs them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from .. import lifetime
from ..coordination.control_page import HEAD_BYTES, REFUSED, Page
from ..coordination.watchdog import Watchdog
from ..cuda import cupy_runtime, driver, graph, streams
from ..cuda.contexts import within
from ..errors import ArgumentError, CudaError, IpcReduceError
from ..graphs.direct.mappings import Mappings
from . import background, plan
from .deferred_free import attempt, flush, forget, give_back_after
from .fast_path import Repeats
from .launches import IN, OUT, Launches, Prepared
from .stream_order import CallOrder
from .workspace import Workspace

_END_CALLS_SECONDS, _GIVE_UP_SECONDS = 5.0, 0.9  # of close(): until calls that wait are ended, and until it goes on
_registered_for_good: list[Page] = []  # still mapped: no later page may get addresses that cannot be registered


Recorder = Callable[[Prepared, plan.Step, int, int], None]  # of a launch: its call, step, source and target


class Engine:
    """What a communicator needs on one GPU. Made by :func:`ipcreduce.ipc.startup.start`.

    Not thread-safe: the communicator's lock is held around every method.
    """

    def __init__(
        self, device: driver.DeviceInfo, context: int, workspace: Workspace, page: Page, *,
        capability: tuple[int, int], timeout: float, algorithm: str | None,
    ) -> None:  # fmt: skip
        self.device, self.context, self.workspace, self.page = device, context, workspace, page
        self.rank, self.n = workspace.rank, workspace.n
        self.watchdog: Watchdog | None = None
        self.mappings = Mappings(page)
        control = driver.register_host(page.address, HEAD_BYTES)
        self.launches = Launches(
            context, workspace, control, capability=capability, timeout=timeout, algorithm=algorithm
        )
        try:
            self.order = CallOrder(context)
        except CudaError:
            self._unregister()
            raise
        self.launches.before_loading = lambda: self.order.ends_by(time.monotonic() + timeout)
        self.repeats = Repeats(device.ordinal, context, self.launches, self.order, page)
        self.packets = "packets arrive whole"  # until the start-up check says otherwise
        self._recording_stream = 0
        background.start()

    def describe(self) -> list[str]:
        """Lines for people: GPU, workspace, packets, plan."""
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
        self, prepared: Prepared, source: int, target: int, stream: int, owner: Any, recorder: Recorder | None = None
    ) -> None:
        """Launches an all-reduce from address ``source`` to ``target`` (the same: in place) on ``stream``.

        :param owner: see :meth:`CallOrder.behind`.
        :param recorder: is told of every launch.
        :raises CudaError: if a launch fails.
        """
        recorded = recorder is not None
        with nullcontext() if self._follows(stream) else self.order.behind(stream, owner, recorded=recorded):
            self._run(prepared, source, target, stream, recorder)

    def _run(self, prepared: Prepared, source: int, target: int, stream: int, recorder: Recorder | None) -> None:
        for launch, words, step in prepared.launches:
            words[IN], words[OUT] = source + step.offset, target + step.offset
            launch.run(stream)
            if recorder is not None:
                recorder(prepared, step, source, target)

    def launch_graph(self, executable: graph.Executable, stream: int, owner: Any) -> None:
        """Launches an executable graph on ``stream``, behind the last call.

        :raises CaptureError: if ``stream`` is being captured. :raises CudaError: if the launch fails.
        """
        with nullcontext() if self._follows(stream) else self.order.behind(stream, owner, capturable=False):
            cupy_runtime.launch(executable, stream)

    def _follows(self, stream: int) -> bool:
        """Whether a launch on ``stream`` comes behind the last eager call, with nothing else to do."""
        if stream != self.order.fast:
            return False
        try:
            return self.has_context() if stream < 2 else not self.is_capturing(stream)
        except CudaError:  # this thread has no context
            return False

    def is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` is part of a capture: its work does not run yet."""
        return streams.capture_id(stream) != 0

    def has_context(self) -> bool:
        """Whether ours is current: in another one the default stream's handle is that of another GPU's stream."""
        return driver.current_context() == self.context

    def use_context(self) -> None:
        """Makes our context current in a thread that has none. :raises ArgumentError: if it has another one."""
        if not driver.current_context():
            driver.set_context(self.context)
        elif driver.current_context() != self.context:
            raise ArgumentError(f"record() needs the communicator's GPU {self.device.ordinal} to be the current one")

    def recording_stream(self) -> int:
        """The one stream of all recordings: graphs' pools keep their memory apart by stream."""
        if not self._recording_stream:
            self._recording_stream = streams.create_stream()
        return self._recording_stream

    # ---- ends
    def quiesce(self, deadline: float) -> None:
        """Waits until no kernel of ours runs, on whatever stream: with the abort word up, ours end within 0.1 s.

        :raises IpcReduceError: if the device is still busy at ``deadline``, on ``time.monotonic()``'s clock.
        """
        if not background.Job(self._wait_for_device).wait(deadline - time.monotonic()):
            raise IpcReduceError(f"GPU {self.device.ordinal} is still busy, with something that is not ipcreduce's")
        self.order.forget()

    def _wait_for_device(self) -> None:
        with within(self.context):
            driver.synchronize()

    def reset(self) -> None:
        """After every rank's :meth:`quiesce`: empty slots, fresh epochs, no fault."""
        with within(self.context):
            self.workspace.reset()
        self.page.clear()

    def close(self, wait: float, *then: Callable[[], object]) -> None:
        """Unmaps the peers, waits up to ``wait`` seconds until they have unmapped us, and frees everything.

        Memory that a live peer still maps is freed later: see release.py. It takes at most 6 s. What waits longer for
        the device is left to the end of the process, with a warning.

        :param then: also frees something.
        """
        job = background.Job(partial(self._close, time.monotonic() + lifetime.at_most(wait), then))
        if not job.wait(lifetime.at_most(_END_CALLS_SECONDS)):
            self.end_waits()
        if not job.wait(lifetime.at_most(_GIVE_UP_SECONDS)):
            warnings.warn(
                f"rank {self.rank}: close() has given up waiting for GPU {self.device.ordinal}, where something runs "
                "that is not ipcreduce's. What the communicator holds is freed when that ends, or with this process",
                RuntimeWarning,
                stacklevel=3,
            )

    def end_waits(self) -> None:
        """Ends every wait of ours, and tells the peers that this rank has closed the communicator."""
        if not self.page.has_left(self.rank):
            self.page.lose(self.rank, "it closed the communicator")

    def _close(self, deadline: float, then: tuple[Callable[[], object], ...]) -> None:
        attempt(self.context, lambda: self._stop(deadline))
        forget(self.order)
        attempt(self.context, self.workspace.unmap_peers, self.mappings.unmap_all)
        self.page.leave()
        while not self._unmapped() and time.monotonic() < deadline:
            time.sleep(1e-3)
        self.release()
        leave = partial(driver.release_context, self.device.ordinal)
        give_back_after(self._unmapped, self.context, self.mappings.release_all, self.workspace.free, leave)
        for step in then:
            step()
        flush()

    def _unmapped(self) -> bool:
        """Whether no other process can reach our memory any more."""
        return all(self.page.has_unmapped(rank) for rank in range(self.n) if rank != self.rank)

    def _stop(self, deadline: float) -> None:
        """Waits for our kernels; those that wait for a peer beyond the deadline are ended."""
        if not self.order.ends_by(deadline):
            self.page.post(REFUSED, self.page.calls.call_of(self.rank), "it closed the communicator")
        self._wait_for_device()

    def release(self) -> None:
        """Gives back what only this process uses."""
        if self.watchdog is not None:
            self.watchdog.stop()
        steps: list[Callable[[], None]] = [self._unregister, self.order.release]
        if self._recording_stream:
            steps.append(partial(streams.destroy_stream, self._recording_stream))
        attempt(self.context, *steps, *self.repeats.destroy_steps(), *self.launches.unload_steps())

    def _unregister(self) -> None:
        try:
            driver.unregister_host(self.page.address)
        except CudaError:
            _registered_for_good.append(self.page)
            raise
