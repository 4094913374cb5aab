"""``make pictures``: the pictures of README.md and docs/, drawn anew from the results in benchmarks/results."""

from __future__ import annotations

import hashlib

from docs import results
from ipcreduce.bench import report

DRAWN = ("bench-h200-x2", "bench-h200-x4")  # result files, each with a picture beside it
NAMES = results.PEERS | {"torch_symm_two_shot": "symmetric memory, two shots"}  # a legend has no neighbouring column


def note(name: str) -> str:
    """What a picture says of the file that it was drawn from. A test compares."""
    return f"drawn from {hashlib.sha256((results.RESULTS / f'{name}.json').read_bytes()).hexdigest()}"


def main() -> None:
    for name in DRAWN:
        path = results.RESULTS / f"{name}.png"
        report.plot(path, results.read(name), NAMES, note(name))
        print(path)


if __name__ == "__main__":
    main()
