"""The kinds of calls: the class of their arrays on a GPU, and on the host, by the class of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .device_norms import DeviceNorm
from .device_splits import DeviceSplit
from .host_norms import HostNorm
from .host_operands import HostCall
from .host_splits import HostSplit
from .lists import DeviceList, HostList, ListCall
from .maps import DeviceMap, HostMap, MapCall
from .norms import NormCall
from .operands import DeviceCall, Site
from .plain import DevicePlain, HostPlain, PlainCall
from .splits import SplitCall

# Each takes the arguments, and on a GPU also the Site. It raises ArgumentError if an argument is wrong.
DEVICE: dict[type, Callable[[Any, Site], DeviceCall]] = {
    PlainCall: DevicePlain, ListCall: DeviceList, MapCall: DeviceMap, NormCall: DeviceNorm, SplitCall: DeviceSplit,
}  # fmt: skip
HOST: dict[type, Callable[[Any], HostCall]] = {
    PlainCall: HostPlain, ListCall: HostList, MapCall: HostMap, NormCall: HostNorm, SplitCall: HostSplit,
}  # fmt: skip
