"""The links between the ranks' GPUs, as far as the driver tells: access, and in which form packets go over them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from ..coordination import exchange
from ..cuda import driver
from ..errors import UnsupportedError
from . import plan

VERDICT = exchange.struct(8, ("halves", "<u4"), ("links", "u1", (plan.MAX_RANKS, plan.MAX_RANKS)))
_UNKNOWN, _LOCAL, _PCIE = 0, 1, 2  # VERDICT's links; local: NVLink, or the same GPU


def _ordinals() -> dict[bytes, int]:
    """The GPUs that this process sees, by uuid."""
    return {driver.device_info(ordinal).uuid: ordinal for ordinal in range(driver.device_count())}


def check_access(rank: int, devices: np.ndarray[Any, Any]) -> None:
    """:raises UnsupportedError: naming the first pair for which the driver reports no P2P access.

    A peer's GPU that is not visible here is left to the start-up test of the links.
    """
    ordinals = _ordinals()
    own = ordinals[devices["uuid"][rank].tobytes()]
    for peer, uuid in enumerate(devices["uuid"]):
        other = ordinals.get(uuid.tobytes(), own)
        if other != own and not driver.can_access_peer(own, other):
            raise UnsupportedError(
                f"no P2P access between GPU {own} of rank {rank} and GPU {other} of rank {peer} "
                "(see nvidia-smi topo -p2p w)"
            )


def seen(devices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The kind of each link from rank to rank, between any two GPUs that this process sees."""
    links, ordinals = np.full((plan.MAX_RANKS, plan.MAX_RANKS), _UNKNOWN, np.uint8), _ordinals()
    uuids = [uuid.tobytes() for uuid in devices["uuid"]]
    for a, b in permutations(range(len(uuids)), 2):
        if uuids[a] == uuids[b]:
            links[a, b] = _LOCAL
        elif uuids[a] in ordinals and uuids[b] in ordinals:
            local = driver.native_atomics(ordinals[uuids[a]], ordinals[uuids[b]])
            links[a, b] = _LOCAL if local else _PCIE
    return links


def packets(everyone: np.ndarray[Any, Any]) -> tuple[bool, str]:
    """Whether packets may go whole, by every rank's VERDICT, and a line about it for people.

    PCIe promises no more than 8 bytes at a time, so there they go in halves, though an idle link be seen to keep them
    whole. NVLink has kept them whole wherever it was tried. Of two GPUs that no process sees both, as with
    CUDA_VISIBLE_DEVICES of one GPU a rank, the driver tells nothing: there the start-up test alone decides.
    """
    n, links = len(everyone), everyone["links"].max(axis=0)  # what one rank has seen, all know
    pairs = [
        (int(a), int(b)) for kind in (_PCIE, _UNKNOWN) for a, b in permutations(range(n), 2) if links[a, b] == kind
    ]
    if everyone["halves"].any():
        return False, "packets arrive in halves of 8 bytes"
    if not pairs:
        return True, "packets arrive whole"
    a, b = pairs[0]
    if links[a, b] == _PCIE:
        return False, f"packets go in halves of 8 bytes: PCIe between the GPUs of rank {a} and rank {b}"
    return True, (
        f"packets arrive whole, in the start-up test: no process sees the GPUs of both rank {a} and rank {b}, to ask "
        "the driver for NVLink"
    )
