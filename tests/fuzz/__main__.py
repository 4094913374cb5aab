"""``python -m tests.fuzz``: random programs on the simulated device (--gpu: on GPUs) until one fails or all are right.

The ranks live on from program to program. A program that fails is run alone, made shorter while it still fails, and
written to a script. With --deaths each program ends a rank, or stops it, and is a job of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import job, programs
from tests.fuzz.programs import Step

_TOLD = 500  # programs between two lines
_BEFORE = 30  # programs that may have led to a failure, if it does not come again alone


def search(options: argparse.Namespace, ranks: int, notes: list[dict[str, Any]], kinds: Counter[str]) -> str:
    """Run the programs on so many ranks; the script of one that fails, or ""."""
    running, done = None, []
    for number in range(options.first, options.first + options.programs):
        steps = programs.program(
            number, ranks, simulated=not options.gpu, death=options.deaths, kinds=kinds_of(options)
        )
        running = running or job.Ranks(ranks, not options.gpu)
        outcome = running.run(number, steps)
        kinds.update(step["kind"] for step in steps)
        notes += outcome.notes
        if outcome.wrong:
            print(f"\nprogram {number} on {ranks} ranks: {outcome.wrong}", flush=True)
            return explain(steps, done[-_BEFORE:], ranks, options, outcome.wrong)
        if options.deaths:
            running = None
        else:
            done.append(steps)
        ended = number - options.first + 1
        if ended % _TOLD == 0 and ended < options.programs:
            print(f"{ended} programs on {ranks} ranks so far", flush=True)
    if running:
        running.end()
    return ""


def kinds_of(options: argparse.Namespace) -> dict[str, int]:
    """How often each kind of step comes."""
    return programs.SUSPENDED if options.suspends else programs.WEIGHTS


def explain(steps: list[Step], before: list[list[Step]], ranks: int, options: argparse.Namespace, why: str) -> str:
    """The shortest script that still fails."""

    def fails(steps: list[Step]) -> bool:
        return any(job.run_alone(steps, ranks, not options.gpu).wrong for _ in range(options.tries))

    if not fails(steps):
        whole = [step for one in before for step in one] + steps
        if not fails(whole):
            return programs.script(steps, ranks, not options.gpu, f"did not fail again alone\n{why}")
        steps = whole
    return programs.script(programs.shrink(steps, fails), ranks, not options.gpu, why)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="for each number of ranks (300)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first (0)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 1, 4])
    parser.add_argument("--gpu", action="store_true", help="on the GPUs, which ranks may share")
    parser.add_argument("--deaths", action="store_true", help="each program ends or stops a rank")
    parser.add_argument("--suspends", action="store_true", help="most of them around suspend() and resume()")
    parser.add_argument("--tries", type=int, default=3, help="runs of a shorter program until it counts as right (3)")
    parser.add_argument("--script", type=Path, default=Path("fuzz_failure.py"), help="where one that fails is written")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        notes: list[dict[str, Any]] = []
        kinds: Counter[str] = Counter()
        began = time.monotonic()
        script = search(options, ranks, notes, kinds)
        seconds = time.monotonic() - began
        if script:
            options.script.write_text(script)
            print(f"written to {options.script}:\n{script}")
            return 1
        rows.append({
            "ranks": ranks, "programs": options.programs, "first seed": options.first,
            "steps": sum(kinds.values()), "of each kind": dict(sorted(kinds.items())), "seconds": round(seconds),
        })  # fmt: skip
        if options.deaths:
            rows[-1]["heard after, s"] = heard(notes)
        print(f"{options.programs} programs on {ranks} ranks, {sum(kinds.values())} steps: right, {seconds:.0f} s")
        for name, one in rows[-1].get("heard after, s", {}).items():
            print(f"    {name}: {one}")
    if options.json:
        from ipcreduce.bench import report

        report.write_json(options.json, report.header(sys.argv) | {"rows": rows})
    return 0


def heard(notes: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """When survivors heard of each kind of end."""
    found = {}
    for how in programs.DEATHS:
        seconds = sorted(note["seconds"] for note in notes if note.get("how") == how and "seconds" in note)
        if seconds:
            found[how] = {
                "survivors": len(seconds), "median": round(statistics.median(seconds), 3),
                "p99": round(seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))], 3),
                "most": round(seconds[-1], 3),
                "close() at most": round(max(note["close"] for note in notes if note.get("how") == how), 3),
            }  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
