"""Functions of the CUDA driver that only the registration of graphs needs. Handles are plain ints."""

from __future__ import annotations

from ...cuda.driver import Launch, call


def set_kernel(node: int, launch: Launch) -> None:
    """Replace the launch of a kernel node. Executables that were instantiated before are not affected."""
    call("cuGraphKernelNodeSetParams", node, launch.node_params())


def allocation_bytes(address: int) -> int:
    """The size of the allocation at ``address``, made or mapped by this process."""
    return int(call("cuMemGetAddressRange", address)[1])
