"""``python -m tests.tools.pauses -- COMMAND...`` runs a command and pauses random ranks of its tests meanwhile.

Each pause stops one process (SIGSTOP) for 0.1 to 5 s, as a machine may that has other things to do, and lets it go on
(SIGCONT). Ranks are the processes that run Python and have TEST_RUN_OF_IPCREDUCE in their environment, and so neither
pytest nor a launcher. No test may tell the difference. ``--seed`` chooses other pauses; ``--every`` says how many
seconds lie between two on the average, in which all run. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tests.tools import machine, processes

_OWNER = "PAUSES_OF_IPCREDUCE"  # in the environment of the command, and so of its ranks: this process
_SHORTEST, _LONGEST = 0.1, 5.0  # seconds, of a pause
_POLL_SECONDS = 0.02


def ranks(owner: int) -> list[int]:
    """The ranks of the command, whoever their parent is."""
    return [int(process.name) for process in processes.marked(f"{_OWNER}={owner}") if _is_rank(process)]


def _is_rank(process: Path) -> bool:
    with contextlib.suppress(OSError):  # gone meanwhile
        of_tests = any(word.startswith(f"{machine.TOKEN}=".encode()) for word in processes.words(process))
        return of_tests and Path(os.readlink(process / "exe")).name.startswith("python")
    return False


def state(pid: int) -> str:
    """A letter for what a process does, ``T`` if it is stopped; "" if it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


class Pauses:
    """Stops and continues ranks until it is over."""

    def __init__(self, owner: int, seed: int, every: float) -> None:
        self.counts: Counter[int] = Counter()  # of pauses, by process
        self.seconds = 0.0  # of pauses, together
        self._owner, self._random, self._every = owner, random.Random(seed), every
        self._stopped: dict[int, float] = {}  # until when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Let all go on."""
        self._over.set()
        self._thread.join()
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)

    def _run(self) -> None:
        due = time.monotonic() + self._random.expovariate(1 / self._every)
        while not self._over.wait(_POLL_SECONDS):
            now = time.monotonic()
            for pid in [pid for pid, until in self._stopped.items() if until <= now]:
                del self._stopped[pid]
                _signal(pid, signal.SIGCONT)
            if now < due:
                continue
            due = now + self._random.expovariate(1 / self._every)
            found = [pid for pid in ranks(self._owner) if pid not in self._stopped and state(pid) not in ("T", "Z", "")]
            if found:  # a rank that a test has stopped itself is left to the test
                pid, seconds = self._random.choice(found), self._random.uniform(_SHORTEST, _LONGEST)
                if _signal(pid, signal.SIGSTOP):
                    self._stopped[pid] = now + seconds
                    due += seconds  # all run for a while, or nothing would come to an end within a test's bound
                    self.counts[pid] += 1
                    self.seconds += seconds


def _signal(pid: int, which: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, which)
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.pauses", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two pauses, on the average")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    command = subprocess.Popen(options.command, env={**os.environ, _OWNER: str(os.getpid())})
    pauses = Pauses(os.getpid(), options.seed, options.every)
    pauses.start()
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    try:
        status = command.wait()
    except KeyboardInterrupt:
        status = command.wait()
    finally:
        pauses.end()
    print(
        f"{pauses.counts.total()} pauses of {len(pauses.counts)} ranks, {pauses.seconds:.0f} s together, "
        f"seed {options.seed}; the command has ended with {status}",
        flush=True,
    )
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
