"""Make every mutant in a copy of the tree, and show what finds it: ``python -m tests.mutants``.

First each command has to pass without one. Exit code 1 if it does not, or if a mutant survives.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipcreduce.bench import report
from tests.mutants import Mutant, tables
from tests.mutants.trees import Tree
from tests.sim import faults
from tests.simulated import compiler

AT_A_TIME = 2
MAX_SECONDS = 600.0  # for a command without a mutant
SAME_RUNS = "pytest tests/sim/test_kernels.py::test_without_faults_the_same_runs_find_nothing"
SHOWN = 3000  # characters of an output
# In the output of a mutant that is no program any more: that something fails then shows nothing.
_NO_PROGRAM = re.compile(r"NameError|SyntaxError|ImportError|ModuleNotFoundError|UnboundLocalError|does not compile")


@dataclass(frozen=True)
class Result:
    """What became of one mutant. ``killed_by``: "" if it survives."""

    name: str
    file: str
    killed_by: str
    seconds: float
    output: str

    def row(self, name: int, file: int) -> str:
        """As a line of a table with columns of this width."""
        return f"{self.name:{name}}  {self.file:{file}}  {self.seconds:5.1f} s  {self.killed_by or 'SURVIVES'}"


def allowed(seconds: float) -> float:
    """The seconds after which a command hangs that takes ``seconds`` without a mutant."""
    return 15 + 10 * seconds


def judge(mutant: Mutant, tree: Tree, seconds: float) -> Result:
    """Make a mutant in ``tree``, and run its command there for up to ``seconds``."""
    with tree.changed(mutant):
        run = tree.run(mutant.command, seconds)
    by = mutant.command if run.status is not None else f"hang of {mutant.command}"
    fails = run.status != 0 and not _NO_PROGRAM.search(run.output)
    return Result(mutant.name, mutant.file, by if fails else "", round(run.seconds, 1), run.output)


def judge_fault(fault: faults.Fault) -> Result:
    """The same of a fault of tests/sim/faults.py, which makes a copy of the kernels itself."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        finding, output = faults.run(fault, Path(directory))
    by = f"tests/sim/faults.py: {finding}" if faults.is_caught(finding) else ""
    return Result(fault.name, file_of(fault), by, round(time.monotonic() - started, 1), output)


def stored(results: list[Result], seconds: int, at_a_time: int) -> dict[str, Any]:
    """The content of a result file."""
    table = [
        {"broken": one.name, "file": one.file, "killed by": one.killed_by, "seconds": one.seconds} for one in results
    ]
    header = report.header(["-m", "tests.mutants", "--at-a-time", str(at_a_time)])
    return header | {"mutants": len(table), "killed": killed(results), "seconds": seconds, "table": table}


def killed(results: list[Result]) -> int:
    return sum(bool(one.killed_by) for one in results)


def file_of(fault: faults.Fault) -> str:
    """The file of a fault, from the root of the tree."""
    return ("tests/simulated/include/" if (compiler.INCLUDE / fault.file).exists() else "kernels/") + fault.file


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="mutants with one of these in their name or file")
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME, help="commands that run at once (2)")
    parser.add_argument("--json", type=Path, help="where to write the table")
    options = parser.parse_args()

    def is_chosen(name: str, file: str) -> bool:
        return not options.only or any(words in f"{name} {file}" for words in options.only)

    mutants = [one for one in tables.MUTANTS if is_chosen(one.name, one.file)]
    of_kernels = [one for one in faults.FAULTS if is_chosen(one.name, file_of(one))]
    if not mutants and not of_kernels:
        parser.error(f"no mutant has {' or '.join(options.only)} in its name or file")
    commands = list(dict.fromkeys([*([SAME_RUNS] if of_kernels else []), *(one.command for one in mutants)]))
    started, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        own = threading.local()  # a tree for each thread

        def begin() -> None:
            own.tree = Tree(Path(folder, f"tree{threading.get_ident()}"))

        workers = ThreadPoolExecutor(options.at_a_time, initializer=begin)
        try:
            runs = dict(zip(commands, workers.map(lambda one: own.tree.run(one, MAX_SECONDS), commands), strict=True))
            for command, run in runs.items():
                if run.status != 0:
                    print(f"fails without a mutant: {command}\n{run.output[-SHOWN:]}")
            if any(run.status != 0 for run in runs.values()):
                return 1
            print(f"{len(commands)} commands pass without a mutant, {time.monotonic() - started:.0f} s", flush=True)

            def judge_one(one: Mutant | faults.Fault) -> Result:
                if isinstance(one, Mutant):
                    return judge(one, own.tree, allowed(runs[one.command].seconds))
                return judge_fault(one)

            everything = [*of_kernels, *mutants]
            width = max(len(one.name) for one in everything), max(len(one.file) for one in everything) + 8
            for result in workers.map(judge_one, everything):
                results.append(result)
                print(result.row(*width), flush=True)
                if not result.killed_by:
                    print(result.output[-SHOWN:], flush=True)
        finally:
            workers.shutdown(cancel_futures=True)
    seconds = round(time.monotonic() - started)
    print(f"{killed(results)} of {len(results)} mutants killed, {seconds} s")
    if options.json:
        report.write_json(options.json, stored(results, seconds, options.at_a_time))
    return int(killed(results) < len(results))


if __name__ == "__main__":
    sys.exit(main())
