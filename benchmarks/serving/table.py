"""The tables of runs of ``benchmarks.serving.run``, and what of them is kept. Standard library only.

    python -m benchmarks.serving.table OUT [--json benchmarks/results/serving-h100-x2.json]

A decode step has two parts: its time by the host's clock, and what the device's kernels took of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.names import ENGINES, Name

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept = keep([json.loads(path.read_text()) for path in sorted(args.out.glob("*-layers.json"))])
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    for text in tables(kept["rows"]):
        print(text, end="\n\n")


def keep(runs: list[Run]) -> Run:
    """What a document needs of the runs, in the form of all results: machine, versions, date, command, rows."""
    first = next((run for run in runs if run.get("workers")), None)
    if first is None:
        sys.exit("no engine has started; the logs beside the results say why")
    return {
        "machine": {"gpus": [worker["gpu"] for worker in first["workers"]], **first["machine"]},
        "versions": first["versions"],
        "date": first["date"],
        "command": f"benchmarks/serving/run.py {' '.join(dict.fromkeys(run['name'] for run in runs))}",
        "rows": [row(run, reference(run, runs)) for run in sorted(runs, key=order)],
    }


def order(run: Run) -> tuple[int, int, str]:
    return run["layers"], ENGINES.index(Name.of(run["name"]).engine), run["name"]


def reference(run: Run, runs: list[Run]) -> Run | None:
    """The run of vLLM's own all-reduce in the same mode, with which tokens and logprobs are compared."""
    name = str(Name("stock", Name.of(run["name"]).mode))
    return next((one for one in runs if one["name"] == name and one["layers"] == run["layers"]), None)


def row(run: Run, stock: Run | None) -> Run:
    """One run, shortened. Of two workers' times the lesser counts: the other includes a wait for its peer."""
    found: Run = {"name": run["name"], "layers": run["layers"], "whole": "after" in run}
    found |= {key: run[key] for key in ("import_s", "start_s", "shutdown_s", "after") if key in run}
    if workers := run.get("workers_at_end"):
        found["seat"], found["used_mb"] = workers[0]["seat"], max(worker["used_mb"] for worker in workers)
    found["decode"] = {batch: step(one, run["layers"]) for batch, one in run.get("decode", {}).items()}
    if times := run.get("allreduce_us"):
        found["allreduce_us"] = {size: min(worker[size] for worker in times) for size in times[0]}
    found["prefill_us"] = {length: spread(times) for length, times in run.get("prefill_us", {}).items()}
    if stock and "tokens" in stock and "tokens" in run:
        found["compared"] = {count: compare(run, stock, count) for count in run["tokens"]}
    return found


def spread(times: list[float]) -> list[float]:
    """[median, least, most]"""
    return [statistics.median(times), min(times), max(times)]


def step(measured: Run, layers: int) -> Run:
    """A decode step: its time by the host's clock, and the device's. A pass has an all-reduce for the embedding too."""
    found: Run = {"us": spread(measured["step_us"])}
    device = [one for one in measured["device"] if one.get("allreduces")]
    if device:
        least = min(device, key=lambda one: one["allreduce_us"] / one["allreduces"])
        steps = least["allreduces"] / (2 * layers + 1)
        found["device_us"] = round(least["all_us"] / steps, 1)
        found["allreduce_us"] = round(least["allreduce_us"] / steps, 1)
        found["part"] = round(least["allreduce_us"] / least["all_us"], 4)
    return found


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


def tables(rows: list[Run]) -> list[str]:
    """In Markdown: steps, the device's part, all-reduces, and the rest, for the documents."""
    return [text for text in (step_table(rows), allreduce_table(rows), rest_table(rows)) if text]


def step_table(rows: list[Run]) -> str:
    """Decode steps, a line for each engine: the median with the half of its spread, and what of it is all-reduce."""
    batches = sorted({batch for one in rows for batch in one["decode"]}, key=int)
    lines = []
    for one in rows:
        cells = []
        for batch in batches:
            found = one["decode"].get(batch)
            cells.append("–" if found is None else f"{us(found['us'])}, {part(found)}")
        lines.append([one["name"], str(one["layers"]), *cells])
    return markdown(["engine", "layers", *(f"batch {batch}" for batch in batches)], lines) if batches else ""


def us(times: list[float]) -> str:
    median, least, most = times
    return f"{median:,.0f} ± {(most - least) / 2:,.0f}"


def part(found: Run) -> str:
    if "part" not in found:
        return "no all-reduce was seen"
    return f"device {found['device_us']:,.0f}, all-reduce {found['allreduce_us']:,.0f} ({found['part']:.1%})"


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


def markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


if __name__ == "__main__":
    main()
