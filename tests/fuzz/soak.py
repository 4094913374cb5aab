"""``python -m tests.fuzz.soak``: communicators, graphs, pools and captures made and closed in random order, for long.

Prints what each process holds after the first tenth of the programs and at the end. Fails if that grows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import job, programs

# Growth that is allowed: allocators keep some of what was freed, and each size of array has its own blocks.
SLACK = {"host KB": 48 << 10, "GPU KB": 64 << 10, "mapped files": 40}


def soak(ranks: int, communicators: int, recordings: int, simulated: bool, first: int = 0) -> dict[str, Any]:
    """A row of the table: counts of what was made, and what the ranks held. "wrong" says what has grown."""
    running = job.Ranks(ranks, simulated)
    made: Counter[str] = Counter()
    held: list[list[dict[str, int]]] = []
    number, began = first, time.monotonic()
    while not held or made["communicators"] < communicators or made["recordings"] < recordings:
        steps = programs.program(number, ranks, simulated=simulated, longest=12, kinds=programs.MADE)
        for step in steps:  # the simulated device keeps memory for the largest launch of each stream
            step |= {"count": min(step["count"], 5000)} if "count" in step else {}
        share = min(made["communicators"] / communicators, made["recordings"] / recordings)
        last = share >= 1
        outcome = running.run(number, steps, measured=(len(held) == 0 and share > 0.1) or last)
        if outcome.wrong:
            return {"ranks": ranks, "wrong": f"program {number}: {outcome.wrong}"}
        _count(steps, made)
        if "held" in outcome.notes[0]:
            held.append([note["held"] for note in sorted(outcome.notes, key=lambda note: note["rank"])])
        number += 1
    outcome = running.run(number, [{"kind": "check", "slot": 0, "seed": 0}], measured=True)
    held.append([note["held"] for note in sorted(outcome.notes, key=lambda note: note["rank"])])
    running.end()
    row: dict[str, Any] = {"ranks": ranks, "made and closed": dict(made), "seconds": round(time.monotonic() - began)}
    row |= {"held at a tenth": held[0], "held at the end": held[-1], "wrong": grown(held[0], held[-1])}
    return row


def _count(steps: list[programs.Step], made: Counter[str]) -> None:
    open_ones = {0}
    for step in steps:
        slot = 1 if step["kind"] == "new" and step["slot"] == 0 else step["slot"]
        if step["kind"] == "new" or (step["kind"] == "close" and slot == 0):
            made["communicators"] += 1
            open_ones.add(slot)
        elif step["kind"] == "close":
            open_ones.discard(slot)
        elif slot in open_ones and step["kind"] in ("record", "capture"):
            made["recordings" if step["kind"] == "record" else "captures of others"] += 1


def grown(before: list[dict[str, int]], after: list[dict[str, int]]) -> str:
    """What has grown on some rank; "" for nothing."""
    found = []
    for rank, (first, last) in enumerate(zip(before, after, strict=True)):
        for name in sorted(first.keys() | last.keys()):
            if last.get(name, 0) > first.get(name, 0) + SLACK.get(name, 0):
                found.append(f"rank {rank}: {name} {first.get(name, 0)} to {last.get(name, 0)}")
    return "; ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.soak", description=__doc__)
    parser.add_argument("--communicators", type=int, default=100)
    parser.add_argument("--recordings", type=int, default=300)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--gpu", action="store_true", help="on the GPUs, which ranks may share")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    options = parser.parse_args()
    rows = [soak(ranks, options.communicators, options.recordings, not options.gpu) for ranks in options.ranks]
    for row in rows:
        print("\n".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    if options.json:
        from ipcreduce.bench import report

        report.write_json(options.json, report.header(sys.argv) | {"rows": rows})
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
