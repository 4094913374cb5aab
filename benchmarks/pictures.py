"""``make pictures``: the pictures of README.md and docs/, drawn anew from the results in benchmarks/results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs import results
from ipcreduce.bench import report

NAMES = results.PEERS | {"torch_symm_two_shot": "symmetric memory, two shots"}  # a legend has no neighbouring column


def note(name: str) -> str:
    """What a picture says of the file that it was drawn from. A test compares."""
    return f"drawn from {hashlib.sha256((results.RESULTS / f'{name}.json').read_bytes()).hexdigest()}"


def timeline(path: Path, result: dict[str, Any], note: str) -> None:
    """Draw the buckets of one training step: a bar each, from the moment it is full until it is averaged."""
    pyplot = report.require_matplotlib()
    buckets, end = result["timeline_ms"]["buckets"], result["timeline_ms"]["end"]
    figure, panel = pyplot.subplots(figsize=(9.2, 3))
    starts, lengths = [full for full, _ in buckets], [averaged - full for full, averaged in buckets]
    numbers = range(1, len(buckets) + 1)
    panel.barh(numbers, lengths, left=starts, color="black", label="from full to averaged")
    panel.axvline(end, linestyle="--", color="gray", label="end of the step")
    panel.set(xlim=(0, None), xlabel="ms from the beginning of the step", ylabel="bucket", yticks=[*numbers][::5])
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.3)
    panel.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Comment": note})
    pyplot.close(figure)


def _bench(path: Path, result: dict[str, Any], note: str) -> None:
    report.plot(path, result, NAMES, note)


# Result files, each with a picture beside it, and what draws it
DRAWN: dict[str, Callable[[Path, dict[str, Any], str], None]] = {"bench-h200-x4": _bench, "overlap-h100-x2": timeline}


def main() -> None:
    for name, draw in DRAWN.items():
        path = results.RESULTS / f"{name}.png"
        draw(path, results.read(name), note(name))
        print(path)


if __name__ == "__main__":
    main()
