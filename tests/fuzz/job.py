"""Ranks that are forked from this process, run programs one by one, and are watched."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.shared.bounds import HANG

from .programs import Step

_SECONDS = 4 * HANG  # for one program, for which kernels may have to be built; the library's own waits are shorter


@dataclass
class Outcome:
    """A program's end on all ranks."""

    number: int
    wrong: str = ""  # "" if all is right
    notes: list[dict[str, Any]] = field(default_factory=list)  # of the ranks that have said something


class Pipes:
    """A group (see ``ipcreduce.Group``) of processes that were forked with one socket for each pair."""

    def __init__(self, rank: int, sockets: list[list[socket.socket | None]]) -> None:
        self.rank, self.size = rank, len(sockets)
        self._peers = {peer: one for peer, one in enumerate(sockets[rank]) if one is not None}
        for other, row in enumerate(sockets):
            for one in row if other != rank else ():
                if one is not None:
                    one.close()

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``. :raises EOFError: if a rank has ended."""
        message = len(data).to_bytes(4, "little") + data
        for peer in self._peers.values():
            peer.sendall(message)
        return [data if rank == self.rank else self._receive(self._peers[rank]) for rank in range(self.size)]

    def _receive(self, peer: socket.socket) -> bytes:
        return self._exactly(peer, int.from_bytes(self._exactly(peer, 4), "little"))

    def _exactly(self, peer: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = peer.recv(nbytes - len(data))
            if not part:
                raise EOFError("a rank has ended")
            data += part
        return data


def prepare(ranks: int, simulated: bool) -> None:
    """What all ranks share is imported here, before they are forked. Nothing of it touches a GPU."""
    os.environ.setdefault("IPCREDUCE_WORKSPACE_MB", "1")  # small, so that long messages go in segments
    if simulated and "tests.simulated.machine" not in sys.modules:
        os.environ["SIM_DEVICES"] = str(ranks)
        from tests import simulated

        simulated.install()
    from tests.fuzz import rank  # noqa: F401


class Ranks:
    """So many processes, which wait for programs."""

    def __init__(self, ranks: int, simulated: bool) -> None:
        prepare(ranks, simulated)
        os.environ["SIM_DEVICES"] = str(ranks)
        self.size, self._simulated = ranks, simulated
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (the ranks write there; end() closes it)
        between: list[list[socket.socket | None]] = [[None] * ranks for _ in range(ranks)]
        for low in range(ranks):
            for high in range(low + 1, ranks):
                between[low][high], between[high][low] = socket.socketpair()
        ends = [socket.socketpair() for _ in range(ranks)]
        sys.stdout.flush()
        self.pids = [self._fork(rank, between, ends) for rank in range(ranks)]
        self._ends = [ours for ours, theirs in ends]
        self._unread = [b""] * ranks
        for one in [*(one for row in between for one in row), *(theirs for _, theirs in ends)]:
            if one is not None:
                one.close()

    def _fork(self, rank: int, between: Any, ends: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.dup2(self._log.fileno(), 2)
            faulthandler.register(signal.SIGUSR1, file=self._log, all_threads=True, chain=False)
            for other, (ours, theirs) in enumerate(ends):
                ours.close()
                if other != rank:
                    theirs.close()
            from tests.fuzz.rank import live

            live(Pipes(rank, between), ends[rank][1], self._simulated)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def run(self, number: int, steps: Sequence[Step], measured: bool = False) -> Outcome:
        """One program on all ranks; one that goes wrong ends them.

        :param measured: the notes are to have what each rank holds then.
        """
        outcome = Outcome(number)
        death = steps[-1] if steps and steps[-1]["kind"] == "death" else None
        if death and death["how"] == "stopped":
            self._heard = tempfile.TemporaryDirectory()
            steps = [*steps[:-1], death | {"heard": self._heard.name}]  # by files there, of each other rank
        line = json.dumps({"number": number, "steps": list(steps), "measured": measured}).encode() + b"\n"
        due = set(range(self.size)) - ({death["rank"]} if death and death["how"] != "stopped" else set())
        try:
            for end in self._ends:
                end.sendall(line)
            self._await(due, outcome, death)
        except ConnectionError:
            outcome.wrong = "a rank had ended before"
        wrong = [f"rank {note['rank']}: {note['wrong']}" for note in outcome.notes if note["wrong"]]
        outcome.wrong = "\n".join([outcome.wrong, *wrong]).strip()
        if outcome.wrong or death:
            self.end(outcome if outcome.wrong else None)
        return outcome

    def _await(self, due: set[int], outcome: Outcome, death: Step | None) -> None:
        until = time.monotonic() + _SECONDS
        stopped = death["rank"] if death and death["how"] == "stopped" else None
        while due:
            if stopped is not None and len(os.listdir(self._heard.name)) == self.size - 1:  # all others have heard
                os.kill(self.pids[stopped], signal.SIGCONT)
                stopped = None
            ready = select.select([self._ends[rank] for rank in due], [], [], 0.05)[0]
            for rank in [rank for rank in due if self._ends[rank] in ready]:
                part = b""
                with suppress(ConnectionError):  # it ended with a program unread
                    part = self._ends[rank].recv(1 << 16)
                self._unread[rank] += part
                if self._unread[rank].endswith(b"\n"):
                    outcome.notes.append(json.loads(self._unread[rank]))
                    self._unread[rank] = b""
                    due.discard(rank)
                elif not part:
                    outcome.wrong += f"rank {rank} has ended\n"
                    due.discard(rank)
            if time.monotonic() > until:
                outcome.wrong += f"hang: no word of ranks {sorted(due)} within {_SECONDS:g} s\n"
                for rank in due:
                    os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(0.5)
                return

    def end(self, outcome: Outcome | None = None) -> None:
        """Ends the processes; an outcome gets what they have written."""
        for end in self._ends:
            end.close()
        deadline = time.monotonic() + (0.5 if outcome else 10.0)
        left = set(self.pids)
        while left:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            if left and time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                left = set()
            time.sleep(1e-3)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-6000:]
        self._log.close()
        if outcome is not None and said:
            outcome.wrong += "\n" + said


def alone(steps: Sequence[Step], *, ranks: int, simulated: bool) -> None:
    """Run one program in fresh ranks, and exit: 0 if all is right."""
    outcome = run_alone(steps, ranks, simulated)
    print(outcome.wrong or "all right")
    sys.exit(1 if outcome.wrong else 0)


def run_alone(steps: Sequence[Step], ranks: int, simulated: bool) -> Outcome:
    """One program in fresh ranks."""
    job = Ranks(ranks, simulated)
    outcome = job.run(0, steps)
    if not outcome.wrong and not (steps and steps[-1]["kind"] == "death"):
        job.end()
    return outcome
