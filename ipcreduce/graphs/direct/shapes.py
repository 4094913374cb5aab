"""The launches of the direct kernel, as pure functions of values that all ranks share."""

from __future__ import annotations

from ...ipc.plan import KB, PACKET_BYTES, RESIDENT, LaunchPlan, most_blocks

ALGORITHM = "direct"


def direct(step: LaunchPlan, n: int, resident: int = RESIDENT, sharing: int = 1) -> LaunchPlan:
    """The direct launch that replaces a staged one, once the peers have mapped the output.

    It is never the default: over 2 and 4 H200 staged launches are as fast or faster at every size (NOTES.md).
    """
    width, resident = -(-step.nbytes // PACKET_BYTES // n), min(resident, most_blocks(resident, sharing))
    grid, block = (resident, 512) if n == 2 and width > 256 * KB else (-(-resident // 2), 256)  # in tiles
    return LaunchPlan(ALGORITHM, step.offset, step.nbytes, min(grid, -(-width // block)), block, depth(n))


def depth(n: int) -> int:
    """The number of columns that a thread takes at a time."""
    return 4 if n == 2 else 1
