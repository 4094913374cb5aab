"""Workspaces in CUDA's virtual memory, which travels to the peers as file descriptors. Off by default.

Unlike memory behind an IPC handle, such memory can be taken away and put back at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..cuda import virtual_memory
from ..cuda.virtual_memory import Range
from ..device.deferred_free import attempt
from ..errors import CudaError, UnsupportedError
from ..options import Options
from ..ranks import exchange
from ..ranks.descriptors import handed_over
from ..ranks.exchange import Agreed, Ranks
from . import links
from .workspace import Workspace


class VirtualWorkspace(Workspace):
    """A workspace at reserved addresses. When it is freed, its memory stays as long as a peer has it mapped."""

    where = "virtual memory"

    def __init__(self, rank: int, n: int, nbytes: int, ordinal: int) -> None:
        """Do as :class:`Workspace`, in memory of the GPU ``ordinal``. :raises CudaError: if that fails."""
        self._ordinal = ordinal
        self._own = Range(ordinal, virtual_memory.rounded(ordinal, nbytes))
        super().__init__(rank, n, nbytes)

    @property
    def mapped_bytes(self) -> int:
        """The bytes of memory, which are whole pieces."""
        return self._own.nbytes

    def _allocate(self) -> int:
        try:
            self._own.attach(virtual_memory.create(self._ordinal, self._own.nbytes))
        except CudaError:
            self.free()
            raise
        return self._own.address

    def descriptor(self) -> int:
        """A new file descriptor by which peers map this workspace. The caller closes it."""
        return self._own.export()

    def _map(self, handle: Any) -> tuple[int, Callable[[], None]]:
        """See :meth:`Workspace._map`. :param handle: a descriptor, which stays the caller's."""
        there = Range(self._ordinal, self._own.nbytes)
        try:
            there.attach(virtual_memory.import_descriptor(handle))
        except CudaError:
            there.close()
            raise
        return there.address, there.close

    def free(self) -> None:
        """Free the memory and its addresses. Idempotent."""
        self.address = 0
        self._own.close()


def start(
    ranks: Ranks, options: Options, ordinal: int, context: int, devices: np.ndarray[Any, Any], deadline: float
) -> tuple[Workspace | None, str]:
    """Make this rank's workspace in virtual memory, and map those of the peers. Collective.

    :param devices: every rank's exchange.DEVICE record.
    :returns: the workspace, and ""; or None, and the reason, the same on every rank, if one of them cannot. None and ""
        if virtual memory was not asked for, or if there is only one rank.
    """
    if not options.virtual or ranks.size == 1:
        return None, ""
    workspace = None
    try:
        with exchange.step(ranks, deadline, "allocating workspaces in virtual memory"):
            if missing := virtual_memory.missing(ordinal):
                raise UnsupportedError(missing)
            workspace = VirtualWorkspace(ranks.rank, ranks.size, options.workspace, ordinal)
        with (
            handed_over(ranks, workspace.descriptor, workspace.mapped_bytes, deadline, "workspaces") as descriptors,
            exchange.step(ranks, deadline, "mapping the peers' workspaces"),
        ):
            links.check_access(ranks.rank, devices)
            workspace.map_peers(descriptors)
        return workspace, ""
    except BaseException as error:
        if workspace is not None:
            attempt(context, workspace.unmap_peers, workspace.free)
        if isinstance(error, Agreed):
            return None, str(error)
        raise
