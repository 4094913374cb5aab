"""Programs: lists of steps, the same on every rank, from a seed; and shorter ones that fail as a long one did.

A step is a dict of numbers, texts and lists, so that a program can be written down. ``kind`` says which; ``late`` has
the ranks that come late to it, with seconds. In a step with a fault ``rank`` is the rank that commits it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Step = dict[str, Any]

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int32", "uint8", "int8", "int16", "int64", "uint16", "uint32", "uint64")
OPS = ("sum", "prod", "min", "max", "avg")
COUNTS = (1, 2, 3, 7, 16, 33, 100, 257, 1000, 5000)
LARGE = 70_000
LAYOUTS = ("plain", "offset", "strided", "rows")
OUTS = ("new", "same", "array", "strided", "empty")
COLLECTIVES = ("allgather", "reduce_scatter", "broadcast")
OTHERS = ("bool", "complex64", "complex128")  # moved, as all of the above, and not reduced
ON_HOST = ("float8_e4m3fn", "i4,i2")  # CuPy has no such arrays
SPLITTING = ("gather", "columns", "in place", "split lists")  # in a recording: an all-gather, a reduce-scatter
STREAMS = 3  # the legacy one, and two that do not wait for it
DEATHS = ("killed", "exited", "raised", "stopped")
_LATE_SECONDS = 0.004

# How often each kind of step comes. Faults of driver calls are the simulated device's.
WEIGHTS = {
    "reduce": 10, "reduce list": 4, "reduce norm": 3, "split": 12, "record": 3, "replay": 6, "capture": 2, "launch": 3,
    "threads": 1, "new": 1, "suspend": 4,
    "close": 1, "close graph": 1, "refuse": 1, "mismatch": 1, "raise in record": 1, "interrupt": 1, "driver fault": 1,
    "check": 1,
}  # fmt: skip
# Of a soak: what is made and closed, again and again.
MADE = {
    "new": 4, "close": 3, "record": 10, "replay": 3, "close graph": 6, "capture": 2, "reduce": 2, "refuse": 1,
    "suspend": 2,
}  # fmt: skip
MEANWHILE = ("refused", "again", "launch", "launch", "other", "drop")  # what comes while suspended
MEMORIES = ("vmm", "vmm", "ipc")
# Of programs around suspend(): several communicators and graphs, and faults meanwhile.
SUSPENDED = {
    "new": 4, "suspend": 10, "record": 6, "replay": 2, "capture": 3, "launch": 1, "reduce": 1, "close": 1,
    "close graph": 1, "interrupt": 2, "driver fault": 2, "refuse": 1,
}  # fmt: skip
FAULTS = {"refuse", "mismatch", "raise in record", "interrupt", "driver fault"}


def program(
    seed: int, ranks: int, *, simulated: bool, longest: int = 10, death: bool = False, kinds: dict[str, int] = WEIGHTS
) -> list[Step]:
    """The steps that this seed gives; with ``death`` the last one ends or stops a rank."""
    draw = random.Random(f"{seed} {ranks} {death}")
    weights = {kind: weight for kind, weight in kinds.items() if simulated or kind != "driver fault"}
    if ranks == 1:
        weights = {kind: weight for kind, weight in weights.items() if kind not in ("mismatch", "raise in record")}
    kinds = draw.choices([*weights], [*weights.values()], k=draw.randint(1, longest))
    steps = [_step(draw, kind, ranks) for kind in kinds]
    if death:
        how = draw.choices(DEATHS, (3, 2, 2, 1))[0]
        steps.append({"kind": "death", "how": how, "rank": draw.randrange(ranks), "delay": draw.uniform(0, 0.06)})
        steps[-1] |= {
            "seed": draw.randrange(1 << 30),
            "slot": 0,
            "suspends": draw.choice((0, 0.3, 0.9)),
            "algorithm": draw.choice((None, None, "direct")),
        }
    return steps


def _step(draw: random.Random, kind: str, ranks: int) -> Step:
    step: Step = {"kind": kind, "slot": draw.choice((0, 0, 0, 1)), "seed": draw.randrange(1 << 30)}
    if draw.random() < 0.3:
        step["late"] = {str(draw.randrange(ranks)): round(draw.uniform(0, _LATE_SECONDS), 4)}
    step["stream"] = draw.choice((0, 0, 1, 2))
    if kind in FAULTS or kind == "suspend":
        step["rank"] = draw.randrange(ranks)
    return step | _DETAILS.get(kind, lambda draw: {})(draw)


def _reduce(draw: random.Random) -> Step:
    large = draw.random() < 0.03
    return {
        "dtype": draw.choice(FLOATS if large or draw.random() < 0.6 else INTEGERS),
        "count": LARGE if large else 0 if draw.random() < 0.02 else draw.choice(COUNTS),
        "op": draw.choice(OPS), "special": draw.random() < 0.2,
        "layout": draw.choice(LAYOUTS), "out": draw.choice(OUTS), "by": draw.choice(("method", "function", "stream")),
    }  # fmt: skip


def _body(draw: random.Random, breaks: bool) -> list[list[Any]]:
    kinds = ["reduce", "reduce", "into", "list", "scale", "add", "temporary", *SPLITTING, "uneven", "broadcast"]
    kinds += ["break", "reducing break", "broadcasting break"] * (3 * breaks)  # of few kinds, each step has to be often
    with_op = "reduce", "into", "list", "reducing break", *SPLITTING
    return [
        [kind, draw.choice(("sum", "max", "min", "avg")) if kind in with_op else draw.randint(1, 3)]
        for kind in draw.choices(kinds, k=draw.randint(1, 5))
    ]


def _array(draw: random.Random) -> Step:
    return {"dtype": draw.choice(("float32", "int32")), "count": draw.choice(COUNTS)}


def _reduce_list(draw: random.Random) -> Step:
    several = [draw.choice(FLOATS + INTEGERS) for _ in range(draw.choice((1, 1, 3)))]
    count = draw.choice((0, 40, 170) if draw.random() < 0.1 else (1, 2, 5, 12))
    members = [
        [draw.choice(several), 0 if draw.random() < 0.05 else draw.choice(COUNTS[:-2] if count < 100 else (1, 2, 3)),
         draw.choice(LAYOUTS)]
        for _ in range(count)
    ]  # fmt: skip
    return {
        "members": members, "op": draw.choice(OPS), "special": draw.random() < 0.2, "calls": draw.choice((1, 1, 1, 3)),
        "out": draw.choice(("new", "same", "array", "strided")), "by": draw.choice(("method", "function", "stream")),
    }  # fmt: skip


def _reduce_norm(draw: random.Random) -> Step:
    hidden = draw.choice((1, 7, 100, 128, 256, 384, 1024, 2880))
    return {
        "dtype": draw.choice(("float32", "float16", "bfloat16", "bfloat16")), "hidden": hidden,
        "count": hidden * draw.choice((1, 2, 3, 5, 17, 40)), "special": draw.random() < 0.2,
        "scales": draw.choice(("", "", "given", "token", "group") if hidden % 128 == 0 else ("", "token")),
        "layout": draw.choice(LAYOUTS), "residual": draw.random() < 0.8, "in_place": draw.random() < 0.5,
        "calls": draw.choice((1, 1, 3)),
    }  # fmt: skip


def _split(draw: random.Random) -> Step:
    collective, on_host = draw.choice(COLLECTIVES), draw.random() < 0.15
    dtypes = FLOATS + INTEGERS + (() if collective == "reduce_scatter" else OTHERS + ON_HOST * on_host)
    count, dimensions = draw.choice((1, 1, 1, 1, 2, 5, 40) if draw.random() < 0.95 else (0, 220)), draw.randint(1, 3)
    large = count == 1 and draw.random() < 0.03
    members = [
        [draw.choice(dtypes), LARGE if large else draw.choice((0, 1, 2, 3, 7, 33, 257 if count < 6 else 5)),
         [draw.choice((1, 1, 2) if large or count > 5 else (0, 1, 2, 3, 4, 8, 65)) for _ in range(dimensions - 1)]]
        for _ in range(count)
    ]  # fmt: skip
    return {
        "collective": collective, "host": on_host, "members": members, "is_list": count != 1 or draw.random() < 0.2,
        "axis": draw.randrange(-dimensions, dimensions), "op": draw.choice(OPS), "special": draw.random() < 0.2,
        "sizes": None if large or draw.random() < 0.5 else [draw.choice((0, 0, 1, 2, 7, 40)) for _ in range(8)],
        "root": draw.randrange(8), "calls": draw.choice((1, 1, 3)), "by": draw.choice(("method", "function", "stream")),
        "sms": draw.choice((None, None, None, 1, 3)),
        "layout": draw.choice(("plain", "plain", "offset", "strided", "turned")),
        "out": draw.choice(("new", "array", "strided", "in place")),
    }  # fmt: skip


def _suspend(draw: random.Random) -> Step:
    return {
        "pools": draw.random() < 0.5, "times": draw.choice((1, 1, 2)), "timeout": draw.choice((None, 60.0)),
        "meanwhile": draw.choices(MEANWHILE, k=draw.randint(0, 3)), "graph": draw.randrange(2),
        "everywhere": draw.random() < 0.5, "both": draw.random() < 0.5, "closed": draw.random() < 0.15,
        "memory": draw.choice(MEMORIES),
    }  # fmt: skip


_DETAILS: dict[str, Callable[[random.Random], Step]] = {
    "reduce": _reduce,
    "reduce list": _reduce_list,
    "reduce norm": _reduce_norm,
    "split": _split,
    "record": lambda draw: _array(draw) | {
        "body": _body(draw, breaks=True), "graph": draw.randrange(3), "shares": draw.random() < 0.3,
        "breaks": draw.random() < 0.9, "within_capture": draw.random() < 0.2,
        "check": draw.choice(("first", "always", "never")),
    },
    "replay": lambda draw: {"graph": draw.randrange(3), "times": draw.choice((1, 1, 2, 5))},
    "capture": lambda draw: _array(draw) | {"body": _body(draw, breaks=False), "graph": draw.randrange(2)},
    "launch": lambda draw: {"graph": draw.randrange(2), "times": draw.choice((1, 1, 3))},
    "close graph": lambda draw: {"graph": draw.randrange(3), "dropped": draw.random() < 0.5},
    "threads": lambda draw: {"calls": draw.randint(1, 4)},
    "new": lambda draw: {
        "algorithm": draw.choice((None, None, "one_shot", "two_shot", "direct")), "memory": draw.choice(MEMORIES),
    },
    "close": lambda draw: {"memory": draw.choice(MEMORIES)},
    "suspend": _suspend,
    "refuse": lambda draw: {
        "how": draw.choice(("op", "dtype", "out", "axis", "sizes", "root")), "where": draw.choice(("call", "record")),
    },
    "mismatch": lambda draw: {"how": draw.choice(("count", "dtype", "op", "collective", "sizes", "root"))},
    "raise in record": lambda draw: {"behind": draw.randint(0, 2)},
    "interrupt": lambda draw: {
        "delay": draw.uniform(0.0005, 0.02), "calls": draw.randint(2, 12), "suspends": draw.random() < 0.4,
        "pools": draw.random() < 0.5,
    },
    "driver fault": lambda draw: {
        "call": draw.randint(1, 40), "what": draw.choice(("reduce", "split", "record", "replay", "suspend")),
        "pools": draw.random() < 0.5,
    },
}  # fmt: skip


def shrink(steps: Sequence[Step], fails: Callable[[list[Step]], bool], tries: int = 60) -> list[Step]:
    """The least program that fails, of those that some tries find: first without steps, then with simpler ones."""
    least = list(steps)
    size = max(1, len(least) // 2)
    while True:
        begin = 0
        while begin < len(least) and tries > 0:
            shorter = least[:begin] + least[begin + size :]
            tries -= 1
            if shorter and fails(shorter):
                least = shorter
            else:
                begin += size
        if size == 1 or tries <= 0:
            break
        size = max(1, size // 2)
    index = 0
    while index < len(least) and tries > 0:
        for simpler in _simpler(least[index]):
            tries -= 1
            changed = [*least[:index], simpler, *least[index + 1 :]]
            if fails(changed):
                least = changed
                break  # and look at what is still not plain in it
        else:
            index += 1
    return least


_PLAIN = {
    "stream": 0, "late": {}, "layout": "plain", "out": "new", "by": "method", "special": False, "dtype": "float32",
    "count": 1, "shares": False, "within_capture": False, "times": 1, "algorithm": None, "slot": 0, "pools": False,
    "memory": "vmm", "closed": False, "everywhere": True, "both": False, "suspends": 0, "calls": 1, "sizes": None,
    "axis": 0, "host": False, "sms": None,
}  # fmt: skip


def _simpler(step: Step) -> list[Step]:
    """The step with one property at its plainest, each in turn."""
    found = [step | {name: plain} for name, plain in _PLAIN.items() if name in step and step[name] != plain]
    if len(step.get("body", ())) > 1:
        found += [step | {"body": [*step["body"][:at], *step["body"][at + 1 :]]} for at in range(len(step["body"]))]
    if step.get("meanwhile"):
        found += [
            step | {"meanwhile": [*step["meanwhile"][:at], *step["meanwhile"][at + 1 :]]}
            for at in range(len(step["meanwhile"]))
        ]
    if len(step.get("members", ())) > 1:
        half = len(step["members"]) // 2
        found += [step | {"members": part} for part in (step["members"][:half], step["members"][half:])]
    return found


def script(steps: Sequence[Step], ranks: int, simulated: bool, why: str) -> str:
    """A program that runs these steps alone."""
    lines = "\n".join(f"    {step!r}," for step in steps)
    said = "\n".join(f"# {line}" for line in why.splitlines()[:12])
    return (
        f'"""Run in the project\'s root: python THIS_FILE"""\n{said}\nfrom tests.fuzz import job\n\n'
        f"STEPS = [\n{lines}\n]\n\njob.alone(STEPS, ranks={ranks}, simulated={simulated})\n"
    )
