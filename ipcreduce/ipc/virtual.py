"""Workspaces in CUDA's virtual memory, which travels to the peers as file descriptors.

Unlike memory behind an IPC handle, such memory can be taken away and put back at the same addresses. Where a rank
cannot take part, all ranks use IPC handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cuda import driver, virtual_memory
from ..cuda.virtual_memory import Range
from ..device.deferred_free import attempt
from ..errors import UnsupportedError
from ..options import Options
from ..ranks import exchange
from ..ranks.descriptors import handed_over
from ..ranks.exchange import Agreed, Channel, Ranks
from . import p2p_check
from .workspace import EMPTY, EPOCHS_BYTES, Workspace

_STOPPED = 0xFFFFFFFF  # an epoch of EMPTY bytes


class VirtualWorkspace(Workspace):
    """A workspace at reserved addresses. When it is freed, its memory stays as long as a peer has it mapped."""

    where = "virtual memory"

    def __init__(self, rank: int, n: int, nbytes: int, area_bytes: int, ordinal: int) -> None:
        """Reserve addresses, and allocate memory of the GPU ``ordinal`` there. :raises CudaError: if that fails."""
        self._ordinal, self._piece = ordinal, virtual_memory.rounded(ordinal, 1)
        self._own = Range(ordinal, virtual_memory.rounded(ordinal, nbytes + area_bytes))
        self._there: list[Range] = []  # the peers', in the order of ``peers``
        self._is_suspended = False
        try:
            super().__init__(rank, n, nbytes, area_bytes)
        except BaseException:
            self.free()
            raise

    @property
    def mapped_bytes(self) -> int:
        """The bytes of memory, which are whole pieces."""
        return self._own.nbytes

    def _allocate(self) -> int:
        self._own.attach(virtual_memory.create(self._ordinal, self._own.nbytes))
        return self._own.address

    def descriptor(self) -> int:
        """A new file descriptor by which peers map this workspace. The caller closes it."""
        return self._own.export()

    def _map(self, handle: Any) -> tuple[int, Callable[[], None]]:
        """Map one peer's workspace. Returns its address here, and what unmaps it. ``handle``: its descriptor."""
        there = Range.over(self._ordinal, self._own.nbytes, lambda: virtual_memory.import_descriptor(handle))
        self._there.append(there)
        return there.address, there.close

    def reset(self) -> None:
        """Empty every slot and reset the epochs, unless the workspace is suspended: then there are none."""
        if not self._is_suspended:
            super().reset()

    # ---- memory that is given back. Each method may raise CudaError.
    def prepare(self, suspended: bool) -> None:
        """Create the memory for :meth:`suspend`, or this rank's for :meth:`resume`."""
        nbytes = self._piece if suspended else self._own.nbytes
        self._own.prepare(virtual_memory.create(self._ordinal, nbytes, exportable=not suspended))

    def prepare_peers(self, descriptors: Sequence[int]) -> None:
        """Import the peers' new memory for :meth:`resume`. :param descriptors: by rank."""
        for i, there in enumerate(self._there, 1):
            there.prepare(virtual_memory.import_descriptor(descriptors[(self.rank + i) % self.n]))

    def drop_prepared(self) -> None:
        """Release what was prepared and is not mapped. Idempotent."""
        for one in (self._own, *self._there):
            one.drop_prepared()

    def suspend(self) -> None:
        """Give all memory back but one piece, in place of the epochs, and keep the addresses.

        No kernel of this rank may be running. Another library's graph may launch one later. In the piece every epoch
        is that of an abandoned wait. So that kernel neither waits nor sends, and touches nothing else of any workspace.
        """
        self._is_suspended = True
        self._own.swap(self._piece)
        driver.fill(self._own.address, EMPTY, EPOCHS_BYTES)
        for there in self._there:
            there.detach()

    def was_used(self) -> bool:
        """True if a kernel has run since :meth:`suspend`. It has counted an epoch."""
        epoch = np.zeros(1, np.uint32)
        driver.copy_to_host(epoch, self._own.address)
        return bool(epoch[0] != _STOPPED)

    def resume(self) -> None:
        """Map the new memory of all ranks where their old one was, and empty this rank's."""
        for one in (self._own, *self._there):
            one.swap()
        self._is_suspended = False
        self.reset()

    def free(self) -> None:
        """Free the memory and its addresses. Idempotent."""
        self.address = 0
        self._own.close()


def hand_over(ranks: Channel, workspace: VirtualWorkspace, deadline: float) -> None:
    """Give the new memory of a suspended workspace to all ranks, each of which has prepared its own. Collective.

    :raises Agreed: on every rank, if one cannot. :raises IpcReduceError: if a rank does not come.
    """
    with (
        handed_over(ranks, workspace.descriptor, workspace.mapped_bytes, deadline, "workspaces") as descriptors,
        exchange.step(ranks, deadline, "importing the peers' workspaces"),
    ):
        workspace.prepare_peers(descriptors)


def start(
    ranks: Ranks, options: Options, area_bytes: int, ordinal: int, context: int, devices: np.ndarray[Any, Any],
    deadline: float,
) -> tuple[Workspace | None, str]:  # fmt: skip
    """Make this rank's workspace in virtual memory, and map those of the peers. Collective.

    :param area_bytes: see :class:`Workspace`.
    :param devices: every rank's exchange.DEVICE record.
    :returns: the workspace, and ""; or None, and the reason, the same on every rank, if one of them cannot or
        ``IPCREDUCE_MEMORY`` says otherwise. None and "" if there is only one rank.
    """
    if ranks.size == 1:
        return None, ""
    if not options.virtual:
        return None, "IPCREDUCE_MEMORY is ipc"
    workspace = None
    try:
        with exchange.step(ranks, deadline, "allocating workspaces in virtual memory"):
            if missing := virtual_memory.missing(ordinal):
                raise UnsupportedError(missing)
            workspace = VirtualWorkspace(ranks.rank, ranks.size, options.workspace, area_bytes, ordinal)
        with (
            handed_over(ranks, workspace.descriptor, workspace.mapped_bytes, deadline, "workspaces") as descriptors,
            exchange.step(ranks, deadline, "mapping the peers' workspaces"),
        ):
            p2p_check.check_access(ranks.rank, devices)
            workspace.map_peers(descriptors)
        return workspace, ""
    except BaseException as error:
        if workspace is not None:
            attempt(context, workspace.unmap_peers, workspace.free)
        if isinstance(error, Agreed):
            return None, str(error)
        raise
