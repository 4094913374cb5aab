"""The tables of runs of ``benchmarks.serving.run``, and what of them is kept. Standard library only.

    python -m benchmarks.serving.table OUT [--json benchmarks/results/serving-h100-x2.json]

A decode step has two parts: its time by the host's clock, and what the device's kernels took of it. Of several runs of
a name the median counts, and the spread is that of the runs' medians; of one run it is that of its windows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.names import ENGINES, TRIALS, Name

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept = keep([json.loads(path.read_text()) for path in sorted(args.out.glob("*-layers-*.json"))])
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    for text in tables(kept):
        print(text, end="\n\n")


def keep(runs: list[Run]) -> Run:
    """What a document needs of the runs, in the form of all results: machine, versions, date, command, rows."""
    first = next((run for run in runs if run.get("workers")), None)
    if first is None:
        sys.exit("no engine has started; the logs beside the results say why")
    measured = sorted((run for run in runs if not is_trial(run)), key=order)
    groups = [list(group) for _, group in itertools.groupby(measured, key=order)]
    return {
        "machine": {"gpus": [worker["gpu"] for worker in first["workers"]], **first["machine"]},
        "versions": first["versions"],
        "date": first["date"],
        "command": f"benchmarks/serving/run.py {' '.join(dict.fromkeys(run['name'] for run in runs))}",
        "rows": [row(group, reference(group[-1], runs)) for group in groups],
        "trials": [
            {key: run[key] for key in ("name", "layers", "start_s", "facts", "after") if key in run}
            for run in sorted(runs, key=order)
            if is_trial(run)
        ],
    }


def is_trial(run: Run) -> bool:
    return Name.of(run["name"]).mode in TRIALS


def order(run: Run) -> tuple[int, int, str]:
    return run["layers"], ENGINES.index(Name.of(run["name"]).engine), run["name"]


def reference(run: Run, runs: list[Run]) -> Run | None:
    """The run of the server's own all-reduce in the same mode, with which tokens and logprobs are compared.

    It is that of the same turn, if there is one: compiled kernels may differ from turn to turn.
    """
    mode = Name.of(run["name"]).mode
    name = str(Name("stock", "graphs" if mode == "alone" else mode))
    found = [one for one in runs if one["name"] == name and one["layers"] == run["layers"]]
    return next((one for one in found if one.get("turn") == run.get("turn")), found[0] if found else None)


def row(runs: list[Run], stock: Run | None) -> Run:
    """Runs of one name, shortened. Of two workers' times the lesser counts: the other includes a wait for its peer.

    Of the starts the fastest counts: the first compiles.
    """
    run = runs[-1]
    found: Run = {"name": run["name"], "layers": run["layers"], "runs": len(runs)}
    found["whole"] = all("after" in one for one in runs)
    found |= {key: run[key] for key in ("import_s", "shutdown_s", "after") if key in run}
    if starts := [one["start_s"] for one in runs if "start_s" in one]:
        found["start_s"] = min(starts)
    if workers := run.get("workers_at_end"):
        found["seat"], found["used_mb"] = workers[0]["seat"], max(worker["used_mb"] for worker in workers)
    found["decode"] = {
        batch: step([one["decode"][batch] for one in runs if batch in one.get("decode", {})], run["layers"])
        for batch in dict.fromkeys(batch for one in runs for batch in one.get("decode", {}))
    }
    if times := [worker for one in runs for worker in one.get("allreduce_us", [])]:
        found["allreduce_us"] = {size: min(worker[size] for worker in times) for size in times[0]}
    found["prefill_us"] = {
        length: spread([one["prefill_us"][length] for one in runs if length in one.get("prefill_us", {})])
        for length in dict.fromkeys(length for one in runs for length in one.get("prefill_us", {}))
    }
    if stock and "tokens" in stock and "tokens" in run:
        found["compared"] = {count: compare(run, stock, count) for count in run["tokens"]}
    return found


def spread(times: list[list[float]]) -> list[float]:
    """[median, least, most] of the runs' medians, or of the one run's times."""
    counted = times[0] if len(times) == 1 else [statistics.median(one) for one in times]
    return [statistics.median(counted), min(counted), max(counted)]


def step(measured: list[Run], layers: int) -> Run:
    """A decode step: its time by the host's clock, and the device's. A pass has an all-reduce for the embedding too."""
    found: Run = {"us": spread([one["step_us"] for one in measured])}
    seen = [parts for one in measured if (parts := device(one["device"], layers))]
    if seen:
        found |= {key: statistics.median(one[key] for one in seen) for key in seen[0]}
    return found


def device(workers: list[Run], layers: int) -> Run | None:
    """Of a step: the device's time, that of its all-reduces, its all-gathers; None if no all-reduce was seen."""
    seen = [one for one in workers if one.get("allreduces")]
    if not seen:
        return None
    least = min(seen, key=lambda one: one["allreduce_us"] / one["allreduces"])
    steps = least["allreduces"] / (2 * layers + 1)
    return {
        "device_us": round(least["all_us"] / steps, 1),
        "allreduce_us": round(least["allreduce_us"] / steps, 1),
        "allgather_us": round(min(one.get("allgather_us", 0) for one in seen) / steps, 1),
        "part": round(least["allreduce_us"] / least["all_us"], 4),
    }


def compare(run: Run, stock: Run, count: str) -> Run:
    """How many sequences have equal tokens, and equal logprobs; the largest difference before tokens differ."""
    tokens = list(zip(run["tokens"][count], stock["tokens"][count], strict=True))
    logprobs = list(zip(run["logprobs"][count], stock["logprobs"][count], strict=True))
    largest = 0.0
    for (mine, theirs), (ours, others) in zip(tokens, logprobs, strict=True):
        for token, other, one, two in zip(mine, theirs, ours, others, strict=True):
            if token != other:
                break
            largest = max(largest, abs(one - two))
    return {
        "sequences": len(tokens),
        "same_tokens": sum(mine == theirs for mine, theirs in tokens),
        "same_logprobs": sum(ours == others for ours, others in logprobs),
        "largest_difference": largest,
    }


def tables(kept: Run) -> list[str]:
    """In Markdown: steps, the device's part, layers, all-reduces, the rest, and the trials, for the documents."""
    rows = kept["rows"]
    made = step_table(rows), layer_table(rows), allreduce_table(rows), rest_table(rows), trial_table(kept["trials"])
    return [text for text in made if text]


def step_table(rows: list[Run]) -> str:
    """Decode steps, a line for each engine: the median with the half of its spread, and what of it is all-reduce."""
    batches = all_batches(rows)
    lines = []
    for one in rows:
        cells = []
        for batch in batches:
            found = one["decode"].get(batch)
            cells.append("–" if found is None else f"{us(found['us'])}, {part(found)}")
        lines.append([one["name"], str(one["layers"]), str(one["runs"]), *cells])
    return markdown(["engine", "layers", "runs", *(f"batch {batch}" for batch in batches)], lines) if batches else ""


def us(times: list[float]) -> str:
    median, least, most = times
    return f"{median:,.0f} ± {(most - least) / 2:,.0f}"


def part(found: Run) -> str:
    if "part" not in found:
        return "no all-reduce was seen"
    times = f"device {found['device_us']:,.0f}, all-reduce {found['allreduce_us']:,.0f} ({found['part']:.1%})"
    return f"{times}, all-gather {found['allgather_us']:,.1f}"


def layer_table(rows: list[Run]) -> str:
    """What one more layer adds to a decode step, and what a step has besides, by runs of two and more counts of layers.

    With a count between the least and the most, the largest distance of its step from their line is the third figure.
    """
    lines, batches = [], all_batches(rows)
    for name in dict.fromkeys(one["name"] for one in rows):
        by_layers = {one["layers"]: one["decode"] for one in rows if one["name"] == name}
        if len(by_layers) > 1:
            cells = [line(times_by_layers(by_layers, batch)) for batch in batches]
            lines.append([name, ", ".join(map(str, by_layers)), *cells])
    header = ["engine", "layers", *(f"batch {batch}: a layer, the rest" for batch in batches)]
    return markdown(header, lines) if lines else ""


def all_batches(rows: list[Run]) -> list[str]:
    return sorted({batch for one in rows for batch in one["decode"]}, key=int)


def times_by_layers(by_layers: dict[int, Run], batch: str) -> dict[int, float]:
    return {layers: decode[batch]["us"][0] for layers, decode in by_layers.items() if batch in decode}


def line(times: dict[int, float]) -> str:
    if len(times) < 2:
        return "–"
    least, most = min(times), max(times)
    slope = (times[most] - times[least]) / (most - least)
    rest = times[least] - slope * least
    off = [abs(rest + slope * layers - us) for layers, us in times.items() if least < layers < most]
    return f"{slope:.0f}, {rest:.0f}" + (f", off {max(off):.0f}" if off else "")


def allreduce_table(rows: list[Run]) -> str:
    """One all-reduce through vLLM's dispatch, by tokens."""
    sizes = sorted({size for one in rows for size in one.get("allreduce_us", {})}, key=int)
    lines = [
        [one["name"], str(one["layers"]), *(f"{one['allreduce_us'][size]:.1f}" for size in sizes)]
        for one in rows
        if "allreduce_us" in one
    ]
    return markdown(["engine", "layers", *(f"tokens: {size}" for size in sizes)], lines) if lines else ""


def rest_table(rows: list[Run]) -> str:
    """Start, end, memory, prefill, and the comparison with vLLM's own."""
    lengths = sorted({length for one in rows for length in one["prefill_us"]}, key=int)
    lines = []
    for one in rows:
        same = [
            f"{found['same_tokens']} and {found['same_logprobs']} of {found['sequences']}, "
            f"{found['largest_difference']:.2g}"
            for found in one.get("compared", {}).values()
        ]
        prefill = [us(one["prefill_us"][length]) if length in one["prefill_us"] else "–" for length in lengths]
        after = one.get("after")
        left = f"{after['status']}, {after['processes']} and {len(after['shared'])}" if after else "not whole"
        seconds = [str(one.get(key, "–")) for key in ("start_s", "shutdown_s")]
        memory = str(one.get("used_mb", "–"))
        served = " and ".join(f"{count:,}" for count in after["served"]) if after else ""
        lines.append([one["name"], str(one["layers"]), *seconds, memory, *prefill, "; ".join(same), served, left])
    header = ["engine", "layers", "start, s", "end, s", "memory, MB", *(f"prefill of {one}, µs" for one in lengths)]
    header += ["same tokens and logprobs, largest difference", "calls served", "end, processes and files left"]
    return markdown(header, lines)


def trial_table(trials: list[Run]) -> str:
    """What was seen in trials, a line for each fact."""
    lines = []
    for one in trials:
        facts = dict(one.get("facts", {}))
        if after := one.get("after"):
            facts["end, processes left, files left"] = [after["status"], after["processes"], after["shared"]]
        lines += [[one["name"], what, json.dumps(seen)] for what, seen in facts.items()] or [[one["name"], "–", "–"]]
    return markdown(["trial", "what", "seen"], lines) if lines else ""


def markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


if __name__ == "__main__":
    main()
