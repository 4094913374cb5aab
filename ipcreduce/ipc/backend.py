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
        if (sharing := launches.gpus.sharing) > 1:
            lines.append(f"plan: {sharing} ranks on a GPU, so at most {launches.gpus.most_blocks} blocks a launch")
            lines.append('to spread the ranks over all GPUs, pass device="auto"')
        return lines

    # ---- running
    def prepare_whole(self, request: Request) -> Prepared | None:
        """The launches of a call; None if the epilogue needs a kernel of its own. See :meth:`Launches.prepare`."""
        return self.launches.prepare(request)

    def bind(self, prepared: Prepared, addresses: Any) -> BoundLaunch:
        """Make a launch with fixed addresses, for a call that is repeated: as a graph, where that is faster."""
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
        """Check that workspaces are in virtual memory: on all ranks or on none. :raises UnsupportedError: if not."""
        self._virtual()

    def prepare_suspension(self, seconds: float) -> None:
        """Wait for all work on the GPU, and create the memory that stays. :raises IpcReduceError: if that fails."""
        super().prepare_suspension(seconds)
        with using_relaxed(self.context), uninterrupted():
            self._virtual().prepare(suspended=True)

    def drop_prepared(self) -> None:
        """Release memory that was prepared and not mapped. Idempotent."""
        attempt(self.context, self._virtual().drop_prepared)

    def suspend(self) -> None:
        """Give the workspace's memory back. :raises CudaError: if that fails."""
        with using_relaxed(self.context), uninterrupted():
            self._virtual().suspend()

    def prepare_resumption(self, seconds: float) -> None:
        """Note if a kernel has run meanwhile, and create this rank's new memory. :raises IpcReduceError: on failure."""
        super().prepare_resumption(seconds)
        with using_relaxed(self.context), uninterrupted():
            self._used = self._virtual().was_used()
            self._virtual().prepare(suspended=False)

    def hand_over(self, ranks: Channel, deadline: float) -> None:
        """Exchange the new memory with the peers. Collective. :raises IpcReduceError: on every rank, if one fails."""
        with using_relaxed(self.context):
            virtual.hand_over(ranks, self._virtual(), deadline)

    def resume(self, deadline: float) -> bool:
        """Map the new memory. True if a foreign graph was launched meanwhile. :raises CudaError: if mapping fails."""
        with using_relaxed(self.context), uninterrupted():
            self._virtual().resume()
        return self._used

    # ---- ends
    def right(self, number: int) -> int:
        """The last call up to ``number`` that was right here, found by the epoch of the first kernel without data.

        Each kernel since has advanced the epoch by one. With other libraries' graphs, not all kernels belong to calls.
        """
        first = self.page.ended_without_data
        if not first or self.order.shared:
            return super().right(number)
        epoch = np.zeros(1, np.uint32)
        with using_relaxed(self.context):
            driver.copy_to_host(epoch, self.workspace.address)
        kernels = (int(epoch[0]) - first + 1) % (1 << 32)  # the first without data, and those after it
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
        """Free everything of this rank: what peers have mapped as soon as they have left."""
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
