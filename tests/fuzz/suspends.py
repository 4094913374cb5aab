"""Steps in which a communicator gives its memory back for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ipcreduce import Graph, GraphStateError, PeerFailedError, UnsupportedError
from tests.fuzz import faults
from tests.fuzz.bodies import expect_error
from tests.fuzz.programs import SPLITTING, Step

if TYPE_CHECKING:
    from tests.fuzz.rank import Player

_REFUSED = "the communicator is suspended"
_LAUNCHED = "was launched while it was suspended"
# The parts of a body in which a capture by others exchanges data.
_EXCHANGING = ("reduce", "into", "list", *SPLITTING, "uneven", "broadcast")


def suspend(player: Player, comm: Any, step: Step) -> None:
    """Suspend, do what the step says meanwhile, resume, and replay the communicator's graphs."""
    slot, pools = step["slot"], step["pools"]
    if not faults.can_suspend(comm, pools):
        expect_error(player.text, [UnsupportedError], "suspend(", lambda: comm.suspend(pools=pools))
        return
    for _ in range(step["times"]):
        comm.suspend(pools=pools, timeout=step["timeout"])
        launched = False
        for what in step["meanwhile"]:
            launched |= bool(_MEANWHILE[what](player, comm, step))
        if step["closed"]:
            player.replace({"slot": slot, "kind": "close", "memory": step["memory"]})
            return
        _resume(player, comm, step, launched)
        for key in sorted(key for key in player.graphs if key[0] == slot):
            recorded = player.graphs[key]
            player.play(recorded, step | {"times": 1}, recorded.graph.replay)


def _resume(player: Player, comm: Any, step: Step, launched: bool) -> None:
    if launched:
        expect_error(player.text, [GraphStateError], _LAUNCHED, comm.resume)
    else:
        comm.resume()
    everyone = player.meet(launched)  # no rank goes on before all have told
    if any(everyone):
        if not launched:
            call = lambda: comm.allreduce(cupy.ones(3, np.float32))  # noqa: E731
            expect_error(player.text, [PeerFailedError], f"rank {everyone.index(True)} ", call)
        faults.settle(player, step["slot"])


# ---- what a program does while suspended; True if a graph of others was launched
def _refused(player: Player, comm: Any, step: Step) -> None:
    if player.size == 1:  # there is nothing to suspend
        return
    source = cupy.ones(3, np.float32)
    calls: list[Callable[[], object]] = [
        lambda: comm.allreduce(source), lambda: comm.allreduce([source]), lambda: comm.allreduce(np.ones(3)),
        comm.synchronize, lambda: comm.empty(3), Graph(comm).record().__enter__,
    ]  # fmt: skip
    calls += [one.graph.replay for (slot, _), one in player.graphs.items() if slot == step["slot"]]
    for call in calls:
        expect_error(player.text, [GraphStateError], _REFUSED, call)


def _again(player: Player, comm: Any, step: Step) -> None:
    comm.suspend(pools=not step["pools"])


def _launch(player: Player, comm: Any, step: Step) -> bool:
    """On one rank or on all, a graph that CuPy has captured."""
    recorded = player.captures.get((step["slot"], step["graph"]))
    if recorded is None or (not step["everywhere"] and player.rank != step["rank"]):
        return False
    stream = player.streams[step["stream"]]
    with stream:
        player.follow(stream)
        recorded.graph.launch(stream)
    player.used(stream)
    return player.size > 1 and any(kind in _EXCHANGING for kind, _ in recorded.body)


def _other(player: Player, comm: Any, step: Step) -> None:
    """The other communicator goes on: with calls, replays, and a suspend of its own."""
    slot = 1 - step["slot"]
    other = player.comms.get(slot)
    if other is None:
        return
    result = other.allreduce(cupy.full((50,), player.rank + 1, np.int32))
    player.later(result, np.full(50, player.size * (player.size + 1) // 2, np.int32), player.streams[0])
    if step["both"] and faults.can_suspend(other, True):
        other.suspend(pools=True)
        other.resume()
    for key in sorted(key for key in player.graphs if key[0] == slot):
        recorded = player.graphs[key]
        player.play(recorded, step | {"times": 1}, recorded.graph.replay)


def _drop(player: Player, comm: Any, step: Step) -> None:
    recorded = player.let_go(player.graphs, (step["slot"], step["graph"]))
    if recorded is not None and step["both"]:
        recorded.graph.close()


_MEANWHILE: dict[str, Callable[[Any, Any, Step], bool | None]] = {
    "refused": _refused, "again": _again, "launch": _launch, "other": _other, "drop": _drop,
}  # fmt: skip
