"""The links between the ranks' GPUs, as the driver describes them: P2P access, and whether packets arrive whole."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from ..cuda import driver
from ..errors import UnsupportedError
from ..ranks import exchange
from . import plan

VERDICT = exchange.struct(exchange.Kind.LINKS, ("split", "<u4"), ("links", "u1", (plan.MAX_RANKS, plan.MAX_RANKS)))
_UNKNOWN, _LOCAL, _PCIE = 0, 1, 2  # values of VERDICT's ``links``. _LOCAL stands for NVLink, and for one GPU of both


def _ordinals() -> dict[bytes, int]:
    """The ordinals of the GPUs visible to this process, by uuid."""
    return {driver.device_info(ordinal).uuid: ordinal for ordinal in range(driver.device_count())}


def check_access(rank: int, devices: np.ndarray[Any, Any]) -> None:
    """Check the P2P access from this rank's GPU to those of all ranks.

    A GPU that this process does not see is not checked here: the start-up test of the links tries it.

    :raises UnsupportedError: if the driver reports no access for a pair of GPUs. The message names the first one.
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
    """The kind of each link, as uint8 of shape (MAX_RANKS, MAX_RANKS): known between GPUs that this process sees."""
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
    """Decide from every rank's VERDICT whether packets are sent whole. Returns the decision and its reason.

    PCIe guarantees 8 bytes at a time, so packets go in halves there, even if the link kept them whole in the start-up
    test. NVLink has kept them whole in every test. If no process sees both GPUs of a pair, as with
    CUDA_VISIBLE_DEVICES of one GPU for each rank, the driver describes no link, and the start-up test alone decides.
    """
    n, links = len(everyone), everyone["links"].max(axis=0)  # the union of all ranks' knowledge
    pairs = [
        (int(a), int(b)) for kind in (_PCIE, _UNKNOWN) for a, b in permutations(range(n), 2) if links[a, b] == kind
    ]
    if everyone["split"].any():
        return False, "packets arrive in halves of 8 bytes"
    if not pairs:
        return True, "packets arrive whole"
    a, b = pairs[0]
    if links[a, b] == _PCIE:
        return False, f"packets go in halves of 8 bytes: PCIe between the GPUs of rank {a} and rank {b}"
    return True, (
        f"packets arrive whole in the start-up test. No process sees the GPUs of both rank {a} and rank {b}, so the "
        "driver could not be asked for NVLink"
    )
