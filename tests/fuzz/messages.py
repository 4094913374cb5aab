"""``python -m tests.fuzz.messages``: random bytes where a rank reads what others have written. Needs no GPU.

Messages are changed by bits, bytes and words, cut, made longer, mixed up, or replaced; records of the control page also
get a checksum that fits. A reader may raise errors of the library only.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from ipcreduce.page import control_page
from tests.fuzz.targets import Target, targets

_EXTREMES = (b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0\0\0\x80", b"\1")


def changed(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """A message with faults."""
    new = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(new) + 1)
        kind = draw.randrange(8)
        if kind == 0 and at < len(new):
            new[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(new):
            new[at] = draw.randrange(256)
        elif kind == 2:
            extreme = draw.choice(_EXTREMES)
            new[at : at + len(extreme)] = extreme[: max(0, len(new) - at)]
        elif kind == 3:
            del new[at:]
        elif kind == 4:
            del new[at : at + draw.randrange(1, 9)]
        elif kind == 5:
            new[at:at] = draw.randbytes(draw.randrange(1, 40))
        elif kind == 6:
            other = draw.choice(others)
            new[at:] = other[at:]
        else:
            new[:] = draw.randbytes(draw.randrange(0, 200))
    return bytes(new)


def attack(target: Target, turns: int, seed: int) -> tuple[int, str]:
    """(errors of the library, the first thing that is wrong)."""
    draw, errors = random.Random(f"{target.name} {seed}"), 0
    for turn in range(turns):
        data = draw.choice(target.valid)
        data = changed(data, target.valid, draw) if turn >= 2 * len(target.valid) else target.valid[turn // 2]
        try:
            target.read(data)
        except target.may_raise:
            errors += 1
        except Exception as error:
            return errors, f"{target.name}, seed {seed}, turn {turn}: {error!r} from {data[:200].hex()}"
    return errors, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.messages", description=__doc__)
    parser.add_argument("--turns", type=int, default=20_000, help="of all targets together (20,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the table there, too")
    options = parser.parse_args()
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(control_page, "_RECORD_SECONDS", 0.0):
        found = targets(Path(directory))
        each = -(-options.turns // sum(target.share for target in found))
        with mock.patch.object(control_page.time, "sleep"):
            for target in found:
                began = time.monotonic()
                errors, problem = attack(target, each * target.share, options.seed)
                wrong += [problem] if problem else []
                rows.append({
                    "target": target.name, "messages": each * target.share, "errors of the library": errors,
                    "right": not problem, "seconds": round(time.monotonic() - began, 1),
                })  # fmt: skip
                print("; ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        from ipcreduce.bench import report

        report.write_json(options.json, report.header(sys.argv) | {"rows": rows})
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
