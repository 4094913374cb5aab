"""How long the tests take: the longest go first, and their processor time has a limit.

``python -m tests.tools.times`` compares the last ``make test`` with tests/times.json. The exit code is 1 if it took a
fifth more processor time. With ``--keep`` the last run becomes the kept one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEPT = Path("tests/times.json")
LAST = Path("build/times.json")
TESTS = Path("build/test_seconds.json")  # each test's seconds, from tests.tools.progress
MAX = 1.2  # times the kept processor time
LEAST_SECONDS = 0.5  # of a test that is listed
_WORK = 50_000
_SECONDS_BETWEEN_SAMPLES = 10.0


def read(path: Path) -> dict[str, Any]:
    """A file of times; an empty one if there is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        content = {}
    return {"processor seconds": 0.0, "unit seconds": 0.0, "tests": {}} | content


@contextmanager
def noted() -> Iterator[None]:
    """Note the block's run of the tests as the last one: its time, that of all its processes, and each test's."""
    TESTS.unlink(missing_ok=True)
    before, started = _children_seconds(), time.monotonic()
    units, ended = [unit_seconds()], threading.Event()

    def sample() -> None:
        while not ended.wait(_SECONDS_BETWEEN_SAMPLES):
            units.append(unit_seconds())

    sampling = threading.Thread(target=sample, daemon=True)
    sampling.start()
    yield
    ended.set()
    sampling.join()
    spent, took = _children_seconds() - before, time.monotonic() - started
    if not TESTS.exists():  # not all the tests ran
        return
    tests: dict[str, float] = json.loads(TESTS.read_text())
    longest = sorted(tests.items(), key=lambda one: -one[1])
    content = {
        "processor seconds": round(spent, 1),
        "unit seconds": round(statistics.mean(units), 5),
        "seconds": round(took, 1),
        "tests": {name: round(seconds, 1) for name, seconds in longest if seconds >= LEAST_SECONDS},
    }
    LAST.parent.mkdir(exist_ok=True)
    LAST.write_text(json.dumps(content, indent=1) + "\n")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def unit_seconds() -> float:
    """The processor seconds of a fixed piece of work: the unit in which times of different machines are compared.

    It is measured again and again while the tests run, since a processor that others use too is slower for both.
    """
    started, digest = time.thread_time(), b""
    for number in range(_WORK):
        digest = hashlib.sha256(digest + str(number).encode()).digest()
    return time.thread_time() - started


def expected(seconds: float) -> str:
    """The line before tests whose kept times have this sum: by the kept run, and the pace of this machine."""
    kept = read(KEPT)
    work = sum(kept["tests"].values())
    if not work or not kept["unit seconds"]:
        return "nothing is known of their time on this machine"
    took = kept.get("seconds", 0.0) * seconds / work * unit_seconds() / kept["unit seconds"]
    return f"they take about {max(1, round(took / 60))} min at the pace of this machine"


def verdict(last: dict[str, Any], kept: dict[str, Any]) -> tuple[str, int]:
    """The line that compares two runs, and the exit code."""
    if not last["unit seconds"]:
        return "no whole run of make test is known here", 1
    if not kept["unit seconds"]:
        return f"{KEPT} is missing: keep the last run with --keep", 1
    allowed = kept["processor seconds"] * last["unit seconds"] / kept["unit seconds"] * MAX
    spent = last["processor seconds"]
    said = f"the tests took {spent:.0f} s of processor time; allowed are {allowed:.0f} s, {MAX:g} times the kept ones"
    if spent <= allowed:
        return said, 0
    return f"{said}. Make them quicker, or keep the new times: python -m tests.tools.times --keep", 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.times", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="take the last run as the kept one")
    if parser.parse_args().keep:
        KEPT.write_text(LAST.read_text())
    said, status = verdict(read(LAST), read(KEPT))
    print(said)
    return status


if __name__ == "__main__":
    sys.exit(main())
