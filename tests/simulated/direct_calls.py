"""Stands for ipcreduce/graphs/direct/driver_calls.py."""

from __future__ import annotations

from . import machine
from .driver import Launch, api
from .driver_streams import captured_nodes


@api("cuGraphKernelNodeSetParams")
def set_kernel(node: int, launch: Launch) -> None:
    captured_nodes[node].work = launch.work()


@api("cuMemGetAddressRange")
def allocation_bytes(address: int) -> int:
    return machine.block_at(address, 1).nbytes
