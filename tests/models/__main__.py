"""Search the models of the protocols with Spin, and see that it finds each deliberate break. Standard library only.

``--json FILE`` stores the table. Exit code 1: a model is wrong, a search did not end, or a break was not found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.table import BREAKS, SEARCHES, Search

HERE = Path(__file__).resolve().parent
MEGABYTES = 1800  # for the states of one search; two run at a time
DEPTH = 2_000_000
SECONDS = 300
MISSING = "spin is not installed: apt-get install spin"
MISSING_COMPILER = "no gcc, which compiles what spin writes: apt-get install gcc"


@dataclass(frozen=True)
class Result:
    """The end of one search."""

    search: Search
    found: str  # the error that Spin has found; "" if it has searched all states and found none
    states: int
    seconds: float
    complete: bool

    @property
    def right(self) -> bool:
        return bool(self.found) if self.search.broken else self.complete and not self.found

    @property
    def text(self) -> str:
        if self.found:
            return self.found
        return "no error" if self.complete else "the search did not end"


def missing() -> str | None:
    """Why no model can be searched here; None if it can."""
    if shutil.which("spin") is None:
        return MISSING
    return None if shutil.which("gcc") else MISSING_COMPILER


def search(one: Search) -> Result:
    """Search a model in a folder of its own. :raises RuntimeError: if it is no valid model."""
    with tempfile.TemporaryDirectory(prefix="ipcreduce-models-") as folder:
        for path in HERE.glob("*.pml"):
            shutil.copy(path, folder)
        _build(one, folder)
        started = time.monotonic()
        try:
            said = _run(folder, "./pan", f"-m{DEPTH}", "-w23", "-n", limit=SECONDS)
        except subprocess.TimeoutExpired:
            return Result(one, "", 0, SECONDS, False)
        seconds = time.monotonic() - started
    error = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    states = re.search(r"(\d+) states, stored", said)
    ended = re.search(r"errors: 0$", said, re.MULTILINE)
    cut = re.search(r"max search depth too small|reached -DMEMLIM|out of memory|Search not completed", said)
    if states is None:
        raise RuntimeError(f"{one}: pan said\n{said}")
    return Result(one, _in_words(error[1]) if error else "", int(states[1]), seconds, ended is not None and cut is None)


def _in_words(error: str) -> str:
    """Pan's error: "assertion on" the first variable in it, or a deadlock."""
    if error == "invalid end state":
        return "a wait that does not end"
    name = re.search(r"[a-z_]{3,}", error.removeprefix("assertion violated"))
    return f"assertion on {name[0]}" if name and error.startswith("assertion violated") else error


def _build(one: Search, folder: str) -> None:
    said = _run(folder, "spin", "-a", *one.definitions, f"{one.model}.pml")
    if "Error" in said or not (Path(folder) / "pan.c").exists():
        raise RuntimeError(f"{one}: spin said\n{said}")
    # Every model ends or goes round by itself: what is left to find are wrong states, so cycles need no bookkeeping.
    level = "-O1" if one.broken else "-O2"
    said = _run(folder, "gcc", level, "-w", "-DSAFETY", f"-DMEMLIM={MEGABYTES}", "-o", "pan", "pan.c", limit=120)
    if not (Path(folder) / "pan").exists():
        raise RuntimeError(f"{one}: gcc said\n{said}")


def _run(folder: str, *command: str, limit: float = 60) -> str:
    ran = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, check=False
    )
    return ran.stdout


def results(searches: Sequence[Search], workers: int) -> Iterator[Result]:
    """Each search's result, in their order; ``workers`` run at a time."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(search, searches)


def line(result: Result) -> str:
    one = result.search
    options = " ".join(text for text in one.options if not text.startswith(("FAULTS=", "DEATH=")))
    faults = f"{one.faults}{'; ' if options else ''}{options}"
    what = f"{one.model}, {one.broken}" if one.broken else one.model
    verdict = result.text if result.right else f"WRONG: {result.text}"
    return f"{what:36} {one.n}  {faults:26} {result.states:>11,} {result.seconds:7.1f}  {verdict}"


def header() -> dict[str, Any]:
    """The fields that every stored result begins with."""
    models = [text.partition(":")[2].strip() for text in _cpuinfo() if text.startswith("model name")]
    spin = subprocess.run(["spin", "-V"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {
        "machine": {"gpus": [], "processor": (models or [platform.machine()])[0], "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "spin": spin.split()[2]},
        "date": time.strftime("%Y-%m-%d"),
        "command": "-m tests.models",
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def as_row(result: Result) -> dict[str, Any]:
    one = result.search
    return {
        "model": one.model, "ranks": one.n, "faults": one.faults, "options": list(one.options), "break": one.broken,
        "states": result.states, "seconds": round(result.seconds, 2), "result": result.text, "right": result.right,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.models", description=__doc__)
    parser.add_argument("--json", type=Path, help="store the table here")
    args = parser.parse_args()
    why = missing()
    if why:
        print(why, file=sys.stderr)
        return 1
    print(f"{'model, break':36} n  {'faults; options':26} {'states':>11} {'seconds':>7}  result", flush=True)
    found = []
    started = time.monotonic()
    for result in results((*SEARCHES, *BREAKS), 2):
        found.append(result)
        print(line(result), flush=True)
    wrong = [result for result in found if not result.right]
    searched = f"{len(SEARCHES)} searches to the end, {len(BREAKS)} breaks"
    print(f"{searched}, {len(wrong)} wrong, {time.monotonic() - started:.0f} s")
    if args.json:
        content = header() | {"models": len(SEARCHES), "breaks": len(BREAKS), "rows": [as_row(one) for one in found]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
