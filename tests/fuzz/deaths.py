"""The end of one rank, and what the others hear of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from ipcreduce import Graph, IpcReduceError, PeerFailedError, PeerLostError
from tests.fuzz import faults
from tests.fuzz.programs import Step
from tests.shared import alarm, clock
from tests.shared.bounds import HANG
from tests.tools import pauses

if TYPE_CHECKING:
    from tests.fuzz.rank import Player

_SIMULATED = cupy.__name__ != "cupy"
# Of communicators with a rank that is stopped. On the simulated device the others' clocks pass it; GPUs wait for it.
_TIMEOUT_SECONDS = HANG if _SIMULATED else 10.0
_LEFT = "it left suspend()", "it left resume()", "cannot go on with the others"
_SUSPENDED_SECONDS = 0.004  # at most; the end may come meanwhile


class Heard(Exception):
    """What this rank has heard; the end of a program."""

    def __init__(self, notes: dict[str, Any]) -> None:
        super().__init__(str(notes))
        self.notes = notes


class _Ended(BaseException):
    """The victim's own exception."""


def run(player: Player, step: Step) -> None:
    """Make calls and replays until the victim ends. :raises Heard: on the others, with what was not right."""
    how, victim = step["how"], step["rank"]
    if how == "stopped" or step["algorithm"]:
        player.lose(0)
        player.comms[0] = player.new_communicator(step["algorithm"], _TIMEOUT_SECONDS)
    comm = player.comms[0]
    at = player.group.allgather  # a moment that all share
    source = cupy.full((600,), player.rank + 1, np.float32)
    graph = Graph(comm)
    with graph.record():
        result = comm.allreduce(source) * 2
    order = np.random.default_rng(step["seed"])  # before the end may come: NumPy's import loses exceptions
    pids = at(str(os.getpid()).encode())
    begun = time.monotonic()
    if player.rank == victim:
        _prepare(how, step["delay"])
    notes: dict[str, Any] = {"how": how}
    suspends = step["suspends"] if faults.can_suspend(comm, True) else 0
    total = player.size * (player.size + 1) // 2
    passing = contextlib.nullcontext()
    if how == "stopped" and _SIMULATED and player.rank != victim:
        passing = clock.passing(_TIMEOUT_SECONDS + 1, lambda: pauses.state(int(pids[victim])) == "T")
    try:
        with passing:
            while True:
                if order.random() < suspends:
                    comm.suspend(pools=bool(order.random() < 0.5))
                    time.sleep(order.random() * _SUSPENDED_SECONDS)
                    comm.resume()
                which, part = order.random(), source[: int(order.integers(1, 600))]
                if which < 0.4:
                    graph.replay()
                    found, due = result, 2 * total
                elif which < 0.6:
                    found, due = comm.allreduce(part), total
                elif which < 0.75:
                    found, due = comm.reduce_scatter(comm.allgather(part)), player.size * (player.rank + 1)
                else:
                    root = int(order.integers(player.size))
                    found, due = comm.broadcast(part + 0, root), root + 1
                comm.synchronize()
                if not (cupy.asnumpy(found) == due).all():
                    raise AssertionError(f"{cupy.asnumpy(found)[:4]}, expected {due}")
    except IpcReduceError as error:
        notes |= {"seconds": time.monotonic() - begun - step["delay"], "error": f"{type(error).__name__}: {error}"}
        found_error: IpcReduceError = error
    if how == "stopped":
        Path(step["heard"], str(player.rank)).touch()
    notes["wrong"] = _problem(player, how, victim, found_error, comm, source)
    if how == "stopped" and not notes["wrong"]:
        notes["wrong"] = _goes_on(player, comm, source)
    began = time.monotonic()
    comm.close()
    notes["close"] = time.monotonic() - began
    if notes["close"] > HANG:
        notes["wrong"] += f" close() took {notes['close']:.1f} s"
    if not (cupy.asnumpy(cupy.ones(3) + 1) == 2).all():  # raises if the context has an error
        notes["wrong"] += " the GPU computes wrongly"
    raise Heard(notes)


def _prepare(how: str, delay: float) -> None:
    def act() -> None:
        if how in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        elif how == "exited":
            raise SystemExit(0)
        else:
            raise _Ended("of the program")

    if how in ("killed", "stopped"):  # in the middle of whatever the main thread does
        threading.Timer(delay, act).start()
    else:
        alarm.call_later(delay, act)


def _left(victim: int, text: str) -> bool:
    """True if the ranks parted for the victim's sake, where suspend() and resume() cannot go back any more."""
    causes = f"rank {victim} did not call within", f"rank {victim} raised an error ("
    return any(words in text for words in _LEFT) and any(words in text for words in causes)


def _is_late(text: str, victim: int) -> bool:
    """True if the error says that the victim is late, or by a clock that was moved, some other rank too.

    The clocks of all survivors pass the timeout at once. Whoever has not come to the others' step yet is late then, and
    may be the only one that is named: the victim may have come to that step before it was stopped.
    """
    who = r"\d+" if _SIMULATED else str(victim)
    return re.search(f"rank {who} did not call within", text) is not None


def _problem(player: Player, how: str, victim: int, error: IpcReduceError, comm: Any, source: Any) -> str:
    """What is not right in the error that this rank got; "" if all is."""
    name, text = type(error).__name__, str(error)
    if how == "stopped":
        fits = name == "PeerTimeoutError" and _is_late(text, victim)
        if name == "PeerLostError":
            fits = _left(victim, text) or (any(words in text for words in _LEFT) and _is_late(text, victim))
        return "" if fits or player.rank == victim else f"{name}: {text}"
    if isinstance(error, PeerFailedError) and f"rank {victim} raised an error (" in text and how != "killed":
        try:  # within a call; then the rank is gone
            comm.resume()
            comm.allreduce(source)
            comm.synchronize()
            return "a call without the rank that has ended worked"
        except IpcReduceError as later:
            error, name, text = later, type(later).__name__, str(later)
    gone = f"rank {victim} is gone", f"waited in vain for rank {victim} to make a call"
    fits = any(words in text for words in gone) or _left(victim, text)
    return "" if name == "PeerLostError" and fits else f"{name}: {text}"


def _goes_on(player: Player, comm: Any, source: Any) -> str:
    """After a pause of one rank all go on together."""
    last = ""
    for _ in range(3 * player.size + 3):
        try:
            comm.resume()
            comm.allreduce(source)
            comm.synchronize()
        except IpcReduceError as error:
            last = f"{type(error).__name__}: {error}"
            if isinstance(error, PeerLostError) and any(words in str(error) for words in _LEFT):
                return ""
        else:
            return ""
    return f"does not go on: {last}"
