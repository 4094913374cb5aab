"""``python -m tests.tools.failures``: ranks that are killed, stopped, exit or raise at random; what the others hear.

Host ranks, or with --backend nccl ranks that share the GPUs, among plain processes, since mpirun ends the others when
one dies. Each turn is a job of its own. Its
victim is another rank, and its moment random, between or within all-reduces of 8 B to 8 MB. A turn is right if every
survivor gets the right error, which names the victim, and if close() returns; and where the victim
was only stopped, if the ranks then go on together. Prints a table with the times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.shared import alarm, clock
from tests.shared.bounds import HANG
from tests.tools import machine, pauses, processes

SIZES = (1, 100, 10_000, 100_000, 1_000_000)
# The errors that may reach a survivor, with words about the victim.
LOST = "PeerLostError", "rank {victim} is gone: its process has ended"
ENDED = "PeerLostError", "rank {victim} is gone: its program ended, after its call"
RAISED = "PeerLostError", "rank {victim} is gone: its program ended with RuntimeError: of the program,"
EXPECTED = {
    "killed": [LOST],
    "exited": [ENDED, ("PeerFailedError", "rank {victim} raised an error (SystemExit")],  # within a call
    "raised": [RAISED, ("PeerFailedError", "rank {victim} raised an error (RuntimeError: of the program")],  # the same
    "stopped": [("PeerTimeoutError", "rank {victim} did not call within")],  # whose timeout the survivors' clocks pass
}
# Where MPI carries the data. Which of them a rank hears depends on how far it has come.
_RAISED = "PeerLostError", "cannot go on with the others (PeerFailedError: "
HALFWAY = {
    "exited": [("PeerLostError", "rank {victim} is gone: it left call"), _RAISED],
    "raised": [("PeerLostError", "halfway (RuntimeError: of the program)"), _RAISED],
}
# Of a rank that was stopped while MPI or NCCL carried the data: they do not tell which, and MPI's communicator is lost.
IN_THE_DATA = [
    ("PeerLostError", "some did not come in time"), ("PeerLostError", "halfway"), ("PeerTimeoutError", "in call"),
]  # fmt: skip
KINDS = tuple(EXPECTED)


# ---- one rank
def rank_program(directory: str, rank: int, size: int, kind: str, seed: int, hosts: int, backend: str) -> None:
    machine.pretend_hosts(rank, size, hosts)
    import numpy as np

    from ipcreduce import Communicator, IpcReduceError
    from tests.shared.by_files import ByFiles

    if backend == "nccl":
        import cupy as xp

        xp.cuda.Device(rank % xp.cuda.runtime.getDeviceCount()).use()
    else:
        xp = np

    moment, numbers = random.Random(seed), np.random.default_rng(seed)
    victim, delay = seed % size, moment.uniform(0.05, 0.4)
    comm = Communicator(ByFiles(directory, str(rank), str(size)), backend=backend)

    def reduce(count: int) -> bool:
        """Reduce an array; True if the result is right."""
        result = comm.allreduce(xp.full(count, rank + 1.0))
        comm.synchronize()  # has the error, if there is one
        return bool((result == total).all())

    total = size * (size + 1) // 2
    for count in SIZES if backend == "nccl" else ():  # NCCL loads kernels and makes links in the first calls
        assert reduce(count), "wrong data"
    if rank == victim:
        prepare(kind, delay, Path(directory))
    notes: dict[str, Any] = {}
    heard = [Path(directory) / f"heard{other}" for other in range(size) if other != victim]

    def up() -> bool:
        """The time of this rank is: the victim may have been stopped within a call, for which it has as much."""
        return all(file.exists() for file in heard) if rank == victim else is_stopped(Path(directory))

    try:
        with clock.passing(121.0, up) if kind == "stopped" else nullcontext():
            while True:
                assert reduce(int(numbers.choice(SIZES))), "wrong data"
    except IpcReduceError as error:
        notes = {"at": time.monotonic(), "error": type(error).__name__, "text": str(error)}
    if notes["error"] == "PeerFailedError":  # the next call waits for a rank that has left the program by now
        try:
            reduce(3)
        except IpcReduceError as error:
            notes |= {"at": time.monotonic(), "next": f"{type(error).__name__}: {error}"}
    if kind == "stopped":
        (Path(directory) / f"heard{rank}").touch()
        for _ in range(3 * size):
            try:
                notes["goes on"] = reduce(1000)
                break
            except IpcReduceError as error:
                notes["last"] = f"{type(error).__name__}: {error}"
    started = time.monotonic()
    comm.close()
    notes["close"] = time.monotonic() - started
    print(json.dumps(notes), flush=True)


def is_stopped(directory: Path) -> bool:
    """True once the victim has stopped itself."""
    at = directory / "at"
    return at.exists() and pauses.state(int(at.read_text().split()[1])) == "T"


def prepare(kind: str, delay: float, directory: Path) -> None:
    """Let this process do it ``delay`` seconds from now."""

    def act() -> None:
        (directory / "partial").write_text(f"{time.monotonic()} {os.getpid()}")
        (directory / "partial").rename(directory / "at")
        if kind in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        elif kind == "exited":
            sys.exit(0)
        else:
            raise RuntimeError("of the program")

    if kind in ("killed", "stopped"):  # in the middle of whatever the main thread does
        threading.Timer(delay, act).start()
    else:
        alarm.call_later(delay, act)


# ---- all of them
def turn(kind: str, size: int, seed: int, hosts: int = 1, backend: str = "host") -> dict[str, Any]:
    """One job, on so many pretended hosts. ``wrong`` says what was not right in it; "" for nothing."""
    victim = seed % size
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.tools.failures", "--rank", directory]
        ranks = [
            subprocess.Popen(
                [*command, *map(str, (rank, size, kind, seed, hosts, backend))], cwd=machine.ROOT,
                env=machine.ranks_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        outputs: list[str] = []
        try:
            if kind == "stopped":
                heard = [Path(directory) / f"heard{rank}" for rank in range(size) if rank != victim]
                until = time.monotonic() + HANG
                while not all(file.exists() for file in heard) and time.monotonic() < until:
                    if all(process.poll() is not None for process in ranks):  # none of them has come so far
                        break
                    time.sleep(0.01)
                ranks[victim].send_signal(signal.SIGCONT)
            outputs = [process.communicate(timeout=HANG)[0] for process in ranks]
            acted = float((Path(directory) / "at").read_text().split()[0])
        except (subprocess.TimeoutExpired, OSError) as error:
            said = "\n".join([f"{kind}, {size} ranks, seed {seed}: {error}", *(one[-1000:] for one in outputs)])
            return {"wrong": said, "seconds": []}
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            processes.remove_left()
    seconds, wrong = [], []
    for rank in range(size):
        if rank == victim:
            continue
        try:
            notes = json.loads(outputs[rank].splitlines()[-1])
            seconds.append(notes["at"] - acted)
            wrong += problems(kind, victim, notes, seconds[-1], hosts, backend)
        except (ValueError, IndexError, KeyError):
            wrong.append(outputs[rank][-1000:])
    what = f"{kind}, {size} ranks on {hosts} host(s), seed {seed}"
    return {"wrong": "; ".join(f"{what}: {one}" for one in wrong), "seconds": seconds}


def problems(
    kind: str, victim: int, notes: dict[str, Any], seconds: float, hosts: int, backend: str = "host"
) -> list[str]:
    """What is not right in a survivor's notes."""
    errors = EXPECTED[kind]
    if kind == "stopped" and (hosts > 1 or backend == "nccl"):
        errors = [*errors, *IN_THE_DATA]
    if kind in HALFWAY and hosts > 1:
        errors = [*errors, *HALFWAY[kind]]
    if kind == "stopped" and has_come(victim, notes["text"]):
        errors = [*errors, ("PeerTimeoutError", "did not call within")]
    found = []
    if not any(notes["error"] == name and words.format(victim=victim) in notes["text"] for name, words in errors):
        found.append(f"got {notes['error']}: {notes['text']}")
    if notes["error"] == "PeerFailedError" and not notes.get("next", "").startswith(
        "PeerLostError"
    ):  # perhaps by others
        found.append(f"got then {notes.get('next')}")
    if seconds > HANG:
        found.append(f"heard after {seconds:.2f} s")
    if notes["close"] > HANG:
        found.append(f"close() took {notes['close']:.1f} s")
    lost = hosts > 1 and backend == "host" and "PeerLostError" in notes.get("last", "")
    if kind == "stopped" and not notes.get("goes on") and not lost:
        found.append(f"did not go on: {notes.get('last')}")
    return found


def has_come(rank: int, text: str) -> bool:
    """True if the error says that ``rank`` is in the call in which others wait.

    A rank may be stopped there. The clocks of the others pass the timeout at once, so whoever has not come to that call
    by then is late as well, and may be the only one that is named.
    """
    there = re.findall(r"Ranks? ([\d, ]+) (?:is|are) in call", text)
    return any(str(rank) in ranks.split(", ") for ranks in there)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.failures", description=__doc__)
    parser.add_argument("--turns", type=int, default=20, help="of each kind, for each number of ranks (20)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first turn (0)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hosts", type=int, default=1, help="pretended ones, which share no memory (1)")
    parser.add_argument("--backend", choices=["host", "nccl"], default="host", help="of the communicator (host)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--rank", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        directory, rank, size, kind, seed, hosts, backend = args.rank
        rank_program(directory, int(rank), int(size), kind, int(seed), int(hosts), backend)
        return 0
    rows, wrong = [], []
    print(f"{'':10} {'ranks':>5} {'turns':>5} {'right':>5} {'heard after, s: median':>23} {'most':>6}")
    for kind in args.kinds:
        for size in args.ranks:
            seeds = range(args.first, args.first + args.turns)
            turns = [turn(kind, size, seed, args.hosts, args.backend) for seed in seeds]
            seconds = [one for each in turns for one in each["seconds"]] or [float("nan")]
            wrong += [each["wrong"] for each in turns if each["wrong"]]
            right = sum(not each["wrong"] for each in turns)
            row = {
                "kind": kind,
                "hosts": args.hosts,
                "backend": args.backend,
                "ranks": size,
                "turns": len(turns),
                "right": right,
            }
            row |= {"median_s": round(statistics.median(seconds), 3), "most_s": round(max(seconds), 3)}
            rows.append(row)
            print(
                f"{kind:10} {size:5} {len(turns):5} {right:5} {row['median_s']:23.3f} {row['most_s']:6.3f}", flush=True
            )
    if args.json:
        from ipcreduce.bench import report

        report.write_json(args.json, report.header(sys.argv) | {"rows": rows})
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
