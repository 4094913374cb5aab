"""The call ``allgather``, ``reduce_scatter`` or ``broadcast``, on arrays or lists of them."""

from __future__ import annotations

from .device_splits import DeviceSplit
from .host_splits import HostSplit
from .operands import Site
from .splits import SplitArguments


class SplitCall(SplitArguments):
    """The arguments, as the program gave them."""

    def for_device(self, site: Site) -> DeviceSplit:
        """Take it as a call on a GPU. :raises ArgumentError: if an argument is wrong."""
        return DeviceSplit(self, site)

    def for_host(self) -> HostSplit:
        """Take it as a call on the host. :raises ArgumentError: if an argument is wrong."""
        return HostSplit(self)
