"""Steps in which one rank commits a fault; each ends when calls work again."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ipcreduce import (
    ArgumentError,
    Graph,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    RankMismatchError,
    UnsupportedError,
)  # fmt: skip
from tests.fuzz.bodies import Wrong, expect_error
from tests.fuzz.programs import Step
from tests.shared import alarm

if TYPE_CHECKING:
    from tests.fuzz.rank import Player

_SETTLING = 6  # calls after a fault until one works


class Boom(Exception):
    """Raised by a program of ours."""


def refuse(player: Player, comm: Any, step: Step) -> None:
    """One rank gives an argument that cannot be, in a call or in a recording."""
    source = ones(100)

    def bad() -> None:
        if step["how"] == "op":
            comm.allreduce(source, "mode")
        elif step["how"] == "dtype":
            comm.allreduce(cupy.zeros(3, np.complex64), "prod")
        elif step["how"] == "axis":
            comm.allgather(source, axis=1)
        elif step["how"] == "sizes":
            comm.reduce_scatter(source, sizes=[1] * player.size)
        elif step["how"] == "root":
            comm.broadcast(source, player.size)
        else:
            comm.allreduce(source, out=cupy.zeros(7, np.float32))

    def good() -> None:
        comm.allreduce(source)
        comm.synchronize()

    def recorded(call: Callable[[], None]) -> None:
        with Graph(comm) as graph, graph.record():
            comm.allreduce(source)
            call()

    errors: list[type[BaseException]] = [ArgumentError, UnsupportedError]
    if step["where"] == "record":
        _one_fails(player, step, lambda: recorded(bad), lambda: recorded(lambda: None), errors)
    else:
        _one_fails(player, step, bad, good, errors)


def mismatch(player: Player, comm: Any, step: Step) -> None:
    """One rank's call is another one."""
    mine = player.rank == step["rank"]
    count = 101 if mine and step["how"] == "count" else 100
    dtype = np.int32 if mine and step["how"] == "dtype" else np.float32
    op = "max" if mine and step["how"] == "op" else "sum"

    def call() -> None:
        source, how = cupy.ones(count, dtype), step["how"]
        if how == "root":
            comm.broadcast(source, int(mine))
        elif how == "sizes":
            comm.reduce_scatter(source, sizes=[100 - mine, *[0] * (player.size - 2), int(mine)])
        elif how == "collective" and mine:
            comm.broadcast(source, 0)
        else:
            comm.allreduce(source, op)
        comm.synchronize()

    expect_error(player.text, [RankMismatchError], "is not the same on every rank", call)
    settle(player, step["slot"])


def raise_in_record(player: Player, comm: Any, step: Step) -> None:
    """The program of one rank raises in the body of a recording."""
    source, graph = ones(50), Graph(comm)

    def record() -> None:
        with graph.record():
            for turn in range(3):
                if turn == step["behind"] and player.rank == step["rank"]:
                    raise Boom
                comm.allreduce(source)

    _one_fails(player, step, record, record, [Boom])
    if graph.state != "failed":
        raise Wrong(f"{player.text}: the graph is {graph.state}")


def interrupt(player: Player, comm: Any, step: Step) -> None:
    """The program is interrupted on one rank, within calls or between them, and raises out of what it does."""
    source, mine = ones(200), player.rank == step["rank"]
    sizes = [200, *[0] * (player.size - 1)]

    def act() -> None:
        raise KeyboardInterrupt

    suspends = step["suspends"] and can_suspend(comm, step["pools"])

    def calls() -> None:
        for _ in range(step["calls"]):
            if suspends:
                comm.suspend(pools=step["pools"])
                comm.resume()
            result = comm.allreduce(source)
            part = comm.reduce_scatter(result, "max", sizes=sizes)
            comm.broadcast(comm.allgather(part, sizes=sizes, out=result), 0)
        comm.synchronize()
        player.later(result, np.full(200, player.size, np.float32), player.streams[0])

    interrupted = False
    try:
        try:
            if mine:
                alarm.call_later(step["delay"], act)
            calls()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted = True
    except IpcReduceError as error:
        _named(player, error, step["rank"])
    settle(player, step["slot"], by=step["rank"], interrupted=interrupted)


def driver_fault(player: Player, comm: Any, step: Step) -> None:
    """A driver call of one rank fails."""
    from tests.simulated import driver

    source, mine = ones(300), player.rank == step["rank"]
    recorded = player.graphs.get((step["slot"], 0))
    what = step["what"]
    if (what == "replay" and recorded is None) or (what == "suspend" and not can_suspend(comm, step["pools"])):
        what = "reduce"

    def calls() -> None:
        if what == "reduce":
            comm.allreduce(source * 2)
        elif what == "split":
            comm.broadcast(comm.reduce_scatter(comm.allgather(source * 2)), 0)
        elif what == "replay":
            assert recorded is not None
            recorded.graph.replay()
        elif what == "suspend":
            comm.suspend(pools=step["pools"])
            comm.resume()
        else:
            with Graph(comm) as graph, graph.record():
                comm.allreduce(comm.allreduce(source) * 2)
        comm.synchronize()

    player.check()
    player.streams[0].synchronize()
    failed = False
    try:
        if mine:
            driver.fault_at(step["call"])
        calls()
    except (IpcReduceError, cupy.cuda.runtime.CUDARuntimeError) as error:
        failed = True
        if not mine:
            _named(player, error, step["rank"])
    finally:
        driver.fault_at(0)
    if any(player.meet(failed)):
        settle(player, step["slot"], by=step["rank"])


def can_suspend(comm: Any, pools: bool) -> bool:
    """True if this communicator can give its memory back, with the pools of its graphs or without."""
    return comm.size == 1 or (comm.backend == "ipc" and "of workspace in virtual memory" in comm.describe())


def ones(count: int) -> Any:
    """Float32 ones on the GPU."""
    return cupy.ones(count, np.float32)


def _one_fails(
    player: Player, step: Step, bad: Callable[[], None], good: Callable[[], None], errors: list[type[BaseException]]
) -> None:
    """``bad`` on one rank, ``good`` on the others, which hear of it; then calls work again."""
    if player.rank == step["rank"]:
        expect_error(player.text, errors, "", bad)
    else:
        expect_error(player.text, [PeerFailedError], f"rank {step['rank']} ", good)
    settle(player, step["slot"])


def _named(player: Player, error: BaseException, culprit: int) -> None:
    """:raises Wrong: if a peer's error does not say which rank it was."""
    kinds = PeerFailedError, PeerLostError, UnsupportedError  # the last by resume(), on every rank
    if not isinstance(error, kinds) or not re.search(rf"rank {culprit}\b", str(error)):
        raise Wrong(f"{player.text}: {error!r}, expected one that names rank {culprit}") from error


def settle(player: Player, slot: int, by: int | None = None, interrupted: bool = False) -> None:
    """Go on after a fault: at once after one told to all, ``by`` a rank in the midst of something soon.

    No rank waits for another between two tries: one may have raised the error in an earlier call, and is in the
    clean-up by now, where it waits for the others' next calls.

    :param interrupted: perhaps between two calls, of which the others do not know: the next is refused.
    """
    comm = player.comms[slot]
    for turn in range(_SETTLING if by is not None else 1):
        state = "works"
        try:
            comm.resume()  # a fault may have come while it was suspended
            result = comm.allreduce(ones(5), "mode" if interrupted and not turn else "sum")
            comm.synchronize()
            if not (cupy.asnumpy(result) == player.size).all():
                raise Wrong(f"{player.text}: wrong after a fault: {result}")
        except IpcReduceError as error:
            if by is None:
                raise Wrong(f"{player.text}: does not go on: {error!r}") from error
            if player.rank != by:
                _named(player, error, by)
            state = "lost" if isinstance(error, PeerLostError) else "failed"
        if state != "failed":
            break
    states = player.meet(state)
    if "failed" in states:
        raise Wrong(f"{player.text}: no call has worked since; the last {states}")
    if "lost" in states:
        player.lose(slot)
        player.comms[slot] = player.new_communicator()


STEPS: dict[str, Callable[[Player, Any, Step], None]] = {
    "refuse": refuse, "mismatch": mismatch, "raise in record": raise_in_record, "interrupt": interrupt,
    "driver fault": driver_fault,
}  # fmt: skip
