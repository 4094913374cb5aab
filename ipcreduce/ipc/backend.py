"""The backend "ipc": kernels that write into the memory of the other ranks' GPUs on the same host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..calls.request import Request
from ..cuda import driver
from ..cuda.contexts import using_relaxed
from ..device.backend import DeviceBackend, have_left
from ..device.deferred_free import Action, attempt, free_after
from ..device.prepared import BoundLaunch, Prepared
from ..errors import CudaError, Reach, UnsupportedError
from ..interrupts import uninterrupted
from ..page.control_page import Page
from ..ranks.exchange import Channel
from . import plan, virtual
from .kernel_graphs import KernelGraphs
from .launches import Launches
from .virtual import VirtualWorkspace
from .workspace import Workspace

# Pages that the driver did not unregister. They stay mapped, so that no later page gets their addresses: the driver
# could not register these again.
_registered_for_good: list[Page] = []
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED


class IpcBackend(DeviceBackend):
    """The backend of ranks whose GPUs reach each other's memory. :func:`ipcreduce.ipc.peers.start` makes it.

    If that fails, the control page may be registered with the driver: see :func:`unregister`.
    If a live peer still maps this rank's memory in close(), the memory is freed later: see deferred_free.py.
    """

    name = "ipc"

    def __init__(
        self, device: driver.DeviceInfo, context: int, workspace: Workspace, page: Page, *,
        capability: tuple[int, int], timeout: float, algorithm: str | None,
    ) -> None:  # fmt: skip
        self.workspace = workspace
        control = driver.register_host(page.address, page.head_bytes)
        super().__init__(device, context, page, timeout)
        self.shared.append((workspace.unmap_peers, workspace.free))
        self.launches = Launches(
            context, workspace, control, capability=capability, timeout=timeout, algorithm=algorithm,
            before_loading=self.drain,
        )  # fmt: skip
        self.kernels, self._graphs = self.launches.kernels, KernelGraphs(context)
        self.not_virtual = ""  # why the workspace is not in virtual memory
        self._used = False  # a kernel has run while it was suspended
        self.packets = "packets arrive whole"  # until the start-up check says otherwise

    def describe(self) -> list[str]:
        """Lines about the GPU, the workspace, the packets and the plan."""
        launches, where, area = self.launches, self.workspace.where, self.workspace.area_bytes
        lines = [
            f"GPU {self.device.ordinal}: {self.device.name}, {self.workspace.nbytes >> 20} MB of workspace"
            + (f" in {where}" if where else "")
            + (f", and {area / plan.MB:g} MB for sms=" if area else ""),
            self.packets,
            f"plan: tuned, {len(launches.table)} choices" if launches.table else "plan: default, not tuned",
        ]
        if launches.norm_table:
            hidden = ", ".join(map(str, dict.fromkeys(choice.hidden for choice in launches.norm_table)))
            lines.append(f"plan: tuned for RMSNorm of hidden size {hidden}")
        if self.not_virtual:
            lines.append(f"workspace: behind IPC handles, not in virtual memory: {self.not_virtual}")
        if launches.sharing > 1:
            most = plan.most_blocks(launches.resident, launches.sharing)
            lines.append(f"plan: {launches.sharing} ranks on a GPU, so at most {most} blocks a launch")
            lines.append('to spread the ranks over all GPUs, pass device="auto"')
        return lines

    # ---- running
    def prepare_whole(self, request: Request) -> Prepared | None:
        """See :meth:`Launches.prepare`."""
        return self.launches.prepare(request)

    def bind(self, prepared: Prepared, addresses: Any) -> BoundLaunch:
        """See :meth:`KernelGraphs.make`."""
        return self._graphs.make(prepared, addresses) or prepared.bind(addresses)

    # ---- suspend and resume
    def _virtual(self) -> VirtualWorkspace:
        workspace = self.workspace
        if isinstance(workspace, VirtualWorkspace):
            return workspace
        happened = f"only virtual memory can be given back, and the workspace is behind IPC handles: {self.not_virtual}"
        raise UnsupportedError(f"rank {self.rank}, suspend(): {happened}", reach=Reach.ALL)

    @property
    def is_virtual(self) -> bool:
        """True if the workspace is in virtual memory, on every rank."""
        return isinstance(self.workspace, VirtualWorkspace)

    def check_suspendable(self) -> None:
        """See :meth:`DeviceBackend.check_suspendable`. The ranks have agreed at start-up where workspaces are."""
        self._virtual()

    def prepare_suspension(self, seconds: float) -> None:
        """See :meth:`DeviceBackend.prepare_suspension`."""
        super().prepare_suspension(seconds)
        with using_relaxed(self.context), uninterrupted():
            self._virtual().prepare(suspended=True)

    def drop_prepared(self) -> None:
        """See :meth:`DeviceBackend.drop_prepared`."""
        attempt(self.context, self._virtual().drop_prepared)

    def suspend(self) -> None:
        """See :meth:`DeviceBackend.suspend`."""
        with using_relaxed(self.context), uninterrupted():
            self._virtual().suspend()

    def prepare_resumption(self, seconds: float) -> None:
        """See :meth:`DeviceBackend.prepare_resumption`."""
        super().prepare_resumption(seconds)
        with using_relaxed(self.context), uninterrupted():
            self._used = self._virtual().was_used()
            self._virtual().prepare(suspended=False)

    def hand_over(self, ranks: Channel, deadline: float) -> None:
        """See :meth:`DeviceBackend.hand_over`."""
        with using_relaxed(self.context):
            virtual.hand_over(ranks, self._virtual(), deadline)

    def resume(self, deadline: float) -> bool:
        """See :meth:`DeviceBackend.resume`."""
        with using_relaxed(self.context), uninterrupted():
            self._virtual().resume()
        return self._used

    # ---- ends
    def right(self, number: int) -> int:
        """See :class:`DeviceBackend`. The call is found by the epoch of the first kernel that has ended without data.

        Each kernel has advanced the epochs by one since. With graphs of others these are not only those of calls.
        """
        first = self.page.ended_without_data
        if not first or self.order.shared:
            return super().right(number)
        epoch = np.zeros(1, np.uint32)
        with using_relaxed(self.context):
            driver.copy_to_host(epoch, self.workspace.address)
        kernels = (int(epoch[0]) - first + 1) % (1 << 32)  # the first without data, and those behind it
        for call, fingerprint in self.page.calls.latest(self.order.launched):
            kernels -= fingerprint.operations
            if kernels <= 0:
                return min(number, max(call - 1, self.order.right))
        return super().right(number)

    def reset(self, offers: Sequence[bytes]) -> None:
        """Empty the slots and reset the epochs. Every rank must have called :meth:`quiesce`."""
        with using_relaxed(self.context):
            self.workspace.reset()

    def end(self) -> None:
        """See :class:`DeviceBackend`."""
        self.release()
        shared, self.shared = self.shared, []
        leave = partial(driver.release_context, self.device.ordinal)
        free_after(partial(have_left, self.page), self.context, *(free for _, free in reversed(shared)), leave)

    def release(self) -> None:
        """Free the resources that no other process uses."""
        actions: list[Action] = [partial(unregister, self.page), self.order.close, *self._graphs.close_actions()]
        attempt(self.context, *actions, *self.kernels.release_actions())


def unregister(page: Page) -> None:
    """Undo the registration of the page with the driver, if there is one."""
    try:
        driver.unregister_host(page.address)
    except CudaError as error:
        if error.code != _NOT_REGISTERED:
            _registered_for_good.append(page)
        raise
