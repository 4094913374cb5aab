"""Tables of ``benchmarks/results``, for the documents: ``python docs/results.py`` prints them.

``docs/conf.py`` puts the table of runs into ``validation.md``. The others are pasted into README.md and
``performance.md``; a test compares them with the files. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
SIZES = (16, *(1 << power for power in (10, 14, 16, 18, 20, 22, 24, 26, 28, 30)))  # bytes
README_SIZES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 24, 1 << 28)
PEERS = {
    "nccl": "CuPy's NCCL",
    "torch_nccl": "PyTorch NCCL",
    "torch_symm_one_shot": "symmetric memory, one shot",
    "torch_symm_two_shot": "two shots",
}
_PACKAGES = ("cuda-bindings", "cupy-cuda12x", "cupy-cuda13x", "torch")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def read(name: str) -> dict[str, Any]:
    """A result file, by its name without the ending."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- figures
def size_text(nbytes: int) -> str:
    for unit, text in ((30, "GB"), (20, "MB"), (10, "KB")):
        if nbytes >= 1 << unit:
            return f"{nbytes >> unit} {text}"
    return f"{nbytes} B"


def us_text(us: float | None) -> str:
    """Microseconds, to three digits."""
    return "–" if us is None else f"{us:,.0f}" if us >= 999.5 else f"{us:#.3g}".rstrip(".")


def bench_table(ranks: int, mode: str = "graph", sizes: Sequence[int] = SIZES, gpu: str = "h200") -> str:
    """Times of the last bench over so many GPUs; ``mode`` "eager" has the host's time in place of the limit."""
    second = ("limit", "limit_us") if mode == "graph" else ("of which host", "host_us")
    rows = {row["bytes"]: row for row in read(f"bench-{gpu}-x{ranks}")["rows"] if row["mode"] == mode}
    return table(
        ["bytes", "ipcreduce", second[0], *PEERS.values()],
        (
            [
                size_text(nbytes),
                *(us_text(us) for us in (rows[nbytes]["ours_us"], rows[nbytes][second[1]])),
                *(us_text(rows[nbytes]["peers_us"].get(peer)) for peer in PEERS),
            ]
            for nbytes in sizes
        ),
    )


def readme_table() -> str:
    """Times in graphs over 4 H200, beside NCCL and the faster of PyTorch's symmetric-memory kernels."""
    rows = {row["bytes"]: row for row in read("bench-h200-x4")["rows"] if row["mode"] == "graph"}
    lines = []
    for nbytes in README_SIZES:
        row, peers = rows[nbytes], rows[nbytes]["peers_us"]
        symmetric = min(us for name, us in peers.items() if name.startswith("torch_symm"))
        times = row["ours_us"], row["limit_us"], peers["nccl"], symmetric
        lines.append([size_text(nbytes), *map(us_text, times)])
    return table(["bytes", "ipcreduce", "limit", "NCCL", "symmetric memory"], lines)


def ratio_table() -> str:
    """The range of each kind of ratio in the last figures, over 2 and over 4 GPUs."""
    kinds: dict[str, dict[str, list[float]]] = {}
    machines = {"2 × H200": "h200-x2", "4 × H200": "h200-x4", "2 × H100": "h100-x2"}
    for machine, name in (*machines.items(), ("2 × H100", "long-h100-x2")):
        for row in read(f"figures-{name}")["rows"]:
            kind = _kind(row["what"])
            if kind:
                kinds.setdefault(kind, {}).setdefault(machine, []).append(row["ratio"])
    return table(
        ["time of", *machines],
        ([kind, *(_range(found.get(machine, [])) for machine in machines)] for kind, found in kinds.items()),
    )


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"


def _kind(what: str) -> str:
    """The row of :func:`ratio_table` for a row of a figures file; "" for none."""
    if what.startswith("list, "):
        return "lists of arrays of 1 KB, against one array of the same bytes"
    dtype = what.partition(" of ")[2]
    if dtype in _FLOATS:
        return "" if what == "sum of bfloat16" else "floats and their ops, against bfloat16 sum"
    if dtype:
        return "integers and their ops, against bfloat16 sum"
    return {
        "ragged": "ragged lengths, against plain ones",
        "misaligned": "misaligned arrays, against aligned ones",
        "in place": "in place, against a second array",
        "direct against staged": "direct kernels, against staged ones",
        "block, programmatic against plain": "a transformer's block with programmatic launch, against without",
        "block against NCCL": "a transformer's block, against NCCL",
        "waits that end": "waits that end, against waits without a deadline",
    }.get(what, "")


def llama_table(machine: str = "h200-x2") -> str:
    """Times of a step of ``mpi_examples/llama_torch.py``, by way and batch."""
    times: dict[str, dict[int, float]] = {}
    for row in read(f"llama-{machine}")["rows"]:
        times.setdefault(row["way"], {})[row["batch"]] = row["us"]
    batches = sorted(next(iter(times.values())))
    header = ["a step by", *(f"batch {batch}" for batch in batches)]
    return table(header, ([way, *(us_text(found[batch]) for batch in batches)] for way, found in times.items()))


def list_table(machine: str = "h100-x2") -> str:
    """Times of lists of arrays in graphs, beside one array of the same bytes and NCCL's group."""
    columns = {"one call": "graph", "one array": "graph, one array", "NCCL's group": "graph, NCCL's group"}
    lines = []
    for row in read(f"lists-{machine}")["rows"]:
        ratio = row["graph"] / row["graph, one array"]
        lines.append([row["list"], row["dtype"], *(us_text(row[key]) for key in columns.values()), f"{ratio:.2f}"])
    return table(["arrays", "dtype", *columns, "ratio to one array"], lines)


def list_host_table() -> str:
    """The host's time of such calls in bfloat16, beside NCCL's group and PyTorch's all_reduce_coalesced."""
    columns = {
        "one array": "one array", "known arrays": "known", "new arrays": "new", "NCCL's group": "NCCL's group",
        "one tensor": "one tensor", "known tensors": "tensors, known", "new tensors": "tensors, new",
        "all_reduce_coalesced": "all_reduce_coalesced, new",
    }  # fmt: skip
    rows = [row for row in read("lists-h200-x2")["rows"] if row["dtype"] == "bfloat16"]
    return table(
        ["arrays", *columns],
        ([row["list"], *(us_text(row[f"host, {key}, least"]) for key in columns.values())] for row in rows),
    )


NORM_ROWS = (1, 8, 32, 64, 256)


def norm_table(machine: str = "h200-x2") -> str:
    """Times of all-reduces with RMSNorm, in graphs: alone, and between two matrix products of PyTorch."""
    content = read(f"fused-{machine}")
    chained = {(row["hidden"], row["rows"]): row for row in content["chain"]}
    ways = "all-reduce", "fused", "pair"
    lines = []
    for row in content["table"]:
        if row["rows"] in NORM_ROWS:
            other = chained.get((row["hidden"], row["rows"]), {})
            cells = [us_text(one.get(way)) for one in (row, other) for way in ways]
            lines.append([str(row["hidden"]), str(row["rows"]), *cells])
    lines.sort(key=lambda line: (int(line[0]), int(line[1])))
    return table(["hidden", "rows", *ways, *(f"chain: {way}" for way in ways)], lines)


_NORM_PEERS = {"FlashInfer": "fused-peers-h200-x2", "SGLang": "fused-peers-sglang-h200-x2"}


def norm_peer_table(peer: str) -> str:
    """Times of the same call and of a peer's, which has one shape or another: the fastest. See norm_table()."""
    ways = "fused", peer
    lines = []
    for row in sorted(read(_NORM_PEERS[peer])["peers"], key=lambda row: (row["hidden"], row["rows"])):
        both = row["alone"], row["chained"]
        best = (min(us for name, us in one.items() if name.startswith(peer)) for one in both)
        pairs = ((one["fused"], us) for one, us in zip(both, best, strict=True))
        lines.append([str(row["hidden"]), str(row["rows"]), *(us_text(us) for pair in pairs for us in pair)])
    return table(["hidden", "rows", *ways, *(f"chain: {way}" for way in ways)], lines)


def norm_fp8_table(machine: str = "h200-x2") -> str:
    """Times of the same calls with quantised results, in graphs."""
    kinds = {"fused": "no e4m3", "given": "a given scale", "token": "a scale a row", "group": "a scale every 128"}
    rows = [row for row in read(f"fused-{machine}")["fp8"] if row["rows"] in NORM_ROWS]
    rows.sort(key=lambda row: (row["hidden"], row["rows"]))
    lines = ([str(row["hidden"]), str(row["rows"]), *(us_text(row[kind]) for kind in kinds)] for row in rows)
    return table(["hidden", "rows", *kinds.values()], lines)


def overlap_table() -> str:
    """Times of a training step by ``benchmarks/overlap.py``, in milliseconds."""
    of_a = {run["tokens"]: run for run in read("overlap-ways-h200-x2")["runs"]}  # of 2,048 tokens the last run
    steps = {f"{tokens:,}, 2 × H200, A": of_a[tokens] for tokens in (8192, 4096, 2048)}
    for tokens, name in (("8,192", ""), ("4,096", "-tokens4096"), ("2,048", "-tokens2048")):
        steps[f"{tokens}, 2 × H200, B"] = read(f"overlap-h200-x2{name}")
    steps["2,048, 4 × H200"] = read("overlap-h200-x4")
    ways = {
        "alone": "alone", "unreduced": "unreduced", "8 blocks": "sms=8", "no limit": "sms=None",
        "behind": "one call behind the pass", "NCCL": "NCCL overlapped",
    }  # fmt: skip
    lines = []
    for name, step in steps.items():
        times = step["ms_of_step"]
        lines.append([name, *(f"{times[way]:.2f}" if way in times else "" for way in ways.values())])
    return table(["tokens, GPUs, machine", *ways], lines)


def beside_table() -> str:
    """Costs of all-reduces beside matrix products by ``benchmarks/beside.py``, in milliseconds."""
    rows = read("beside-h200-x2")["rows"]
    ways = [way for way in rows[0]["ms"] if way not in ("products", "sms=16")]
    header = [text for way in ways for text in (f"{way}: alone", "cost")]
    lines = []
    for row in rows:
        times = [f"{row['ms'][way][of]:.2f}" for way in ways for of in ("alone", "cost")]
        lines.append([f"{row['tokens']:,}", size_text(row["bytes"]), *times])
    return table(["tokens", "bytes", *header], lines)


HOST_SIZES = (4, *(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28)))


def host_table(mpi: str = "openmpi") -> str:
    """NumPy arrays of float32, against that MPI's Allreduce: us and ratio for sum, over 2 and 4 ranks."""
    columns = []
    for ranks in (2, 4):
        rows = read(f"host-{mpi}-ranks{ranks}")["rows"]
        columns.append({row["bytes"]: row for row in rows if (row["dtype"], row["op"]) == ("float32", "sum")})
    header = [text for ranks in (2, 4) for text in (f"{ranks} ranks", "MPI", "ratio")]
    lines = []
    for nbytes in HOST_SIZES:
        times = [(column[nbytes]["ours_us"], column[nbytes]["mpi_us"]) for column in columns]
        lines.append([size_text(nbytes), *(t for a, b in times for t in (us_text(a), us_text(b), f"{a / b:.2f}"))])
    return table(["bytes", *header], lines)


# ---- runs
def run_table() -> str:
    """Every result file: when, with which code, on what, what was run, and how it ended. The latest first."""
    runs = [(json.loads(path.read_text()), path.name) for path in sorted(RESULTS.glob("*.json"))]
    runs.sort(key=lambda run: run[0]["date"], reverse=True)
    return table(
        ["date", "commit", "GPUs", "ranks", "run", "result", "with", "file"],
        (
            [
                content["date"],
                content["commit"],
                _gpus(content),
                str(_ranks(content) or "–"),
                *_run(content),
                _software(content),
                f"`{name}`",
            ]
            for content, name in runs
        ),
    )


def _gpus(content: dict[str, Any]) -> str:
    gpus = content["machine"]["gpus"]
    used = min(len(gpus), _ranks(content))
    shared = f", {content['sharing']}" if "sharing" in content else ""
    return f"{used} × {gpus[0].removeprefix('NVIDIA ')}{shared}" if gpus else "none"


def _ranks(content: dict[str, Any]) -> int:
    rows = content.get("rows") or [{}]
    return int(content.get("ranks") or rows[0].get("ranks") or len(content["machine"]["gpus"]))


def _scenarios(content: dict[str, Any]) -> str:
    parts = [f"{len(content['right'])} right"]
    if "replays of one graph, all right" in content:
        parts.append(f"{content['replays of one graph, all right']:,} replays of one graph")
    closed = "held before and after "
    parts += [f"{key.removeprefix(closed)} closed" for key in content if key.startswith(closed)]
    return ", ".join(parts)


def _run(content: dict[str, Any]) -> tuple[str, str]:
    """The command in words, and the result."""
    rows = content.get("rows") or [{}]
    for key, told in _RUNS.items():
        if key in content or key in rows[0]:
            return told(content, rows)
    return f"`{content['command']}`", "see the file"


def _total(rows: Rows, key: str) -> int:
    return sum(row[key] for row in rows)


def _over(content: dict[str, Any], rows: Rows) -> str:
    """The backend, where it is not our kernels, and how many hosts were pretended."""
    found = rows[0] | content
    hosts = found.get("hosts", 1)
    return (", NCCL" if found.get("backend") == "nccl" else "") + (f", {hosts} pretended hosts" if hosts > 1 else "")


def _scenarios_of(content: dict[str, Any]) -> str:
    forced = content.get("forced algorithm")
    of_graphs = "scenarios" + (" of graphs" if "tests.graphs" in content["command"] else "")
    return of_graphs + (f', `algorithm="{forced}"`' if forced else "")


def _fuzzed(content: dict[str, Any], rows: Rows) -> tuple[str, str]:
    programs = "programs, each with the end of a rank" if "heard after, s" in rows[0] else "random programs"
    ranks = ", ".join(str(ranks) for ranks in sorted({row["ranks"] for row in rows}))
    return f"{programs} on {ranks} ranks, `make fuzz`", f"{_total(rows, 'programs'):,} right"


def _soaked(content: dict[str, Any], rows: Rows) -> tuple[str, str]:
    made = rows[0]["made and closed"]
    counts = ", ".join(f"{count:,} {name}" for name, count in made.items())
    return "soak, `make fuzz`", f"{counts} made and closed: {rows[0]['wrong'] or 'nothing has grown'}"


def _swept_more(content: dict[str, Any], rows: Rows) -> tuple[str, str]:
    counted = content["counted"]
    if "pair" in counted:
        what = f"sweep of all-reduces with RMSNorm, {content['cases']} cases{_over(content, rows)}"
        return what, f"{counted['rows']:,} rows right, by every kernel and by the pair"
    what = f"sweep of lists, {content['cases']} cases{_over(content, rows)}"
    return what, f"{counted['calls']:,} calls on {counted['members']:,} arrays right"


_BEFORE_TIMING = "results right before each timing"
_NORM_PARTS = "table", "fp8", "chain", "shapes", "eager"
_RUNS: dict[str, Callable[[dict[str, Any], Rows], tuple[str, str]]] = {  # by a key of the content or of its first row
    "tool": lambda _, rows: (
        "compute-sanitizer, `make sanitizers`",
        f"{len(rows)} runs of a tool on a kernel, {sum(row['errors'] + bool(row['problem']) for row in rows)} errors",
    ),
    "target": lambda _, rows: (
        "random bytes, `make fuzz`",
        f"{_total(rows, 'messages'):,} messages to {len(rows)} readers, {_total(rows, 'right')} readers right",
    ),
    "kind": lambda content, rows: (
        f"ranks that fail, `make failures`{_over(content, rows)}",
        f"{_total(rows, 'right')} of {_total(rows, 'turns')} turns right",
    ),
    "arch": lambda _, rows: (
        f"machine code for {len(rows)} targets, `make sass`",
        f"{_total(rows, 'kernels')} kernels, {sum(len(row['problems']) for row in rows)} problems",
    ),
    "kinds": lambda content, rows: (
        f"sweep of the kinds {', '.join(content['kinds'])}, {content['cases']} cases{_over(content, rows)}",
        f"{content['calls']:,} calls right",
    ),
    "programs": _fuzzed,
    "made and closed": _soaked,
    "epoch at the start": lambda _, rows: (
        "replays from before the epoch's wrap to after, `tests/gpu/wrap.py`",
        f"{_total(rows, 'all-reduces'):,} all-reduces, {_total(rows, 'samples')} replays' results looked at and right",
    ),
    "mutants": lambda content, _: (
        "deliberate faults, `make mutants`",
        f"{content['killed']} of {content['mutants']} found by a test",
    ),
    "breaks": lambda content, _: (
        "`make models`",
        f"{content['models']} searches without an error, {content['breaks']} breaks found",
    ),
    "expressions": lambda content, rows: (
        f"sweep of expressions, {content['expressions']} cases{_over(content, rows)}",
        f"{content['calls']:,} calls right",
    ),
    "expression": lambda _, rows: ("expressions, `benchmarks/maps.py`", f"{_BEFORE_TIMING}; {len(rows)} rows"),
    "first": _swept_more,
    "chain": lambda content, _: (
        "all-reduces with RMSNorm, `benchmarks/fused.py`",
        f"{_BEFORE_TIMING}; {sum(map(len, (content.get(part, ()) for part in _NORM_PARTS)))} rows",
    ),
    "peers": lambda content, _: (
        "all-reduces with RMSNorm beside another library's, `benchmarks/fused.py`",
        f"results compared with NumPy's before they are timed; {len(content['peers'])} shapes",
    ),
    "cases": lambda content, rows: (
        f"sweep, {content['cases']} cases{_over(content, rows)}",
        f"{content['calls']:,} calls right",
    ),
    "list": lambda _, rows: ("lists of arrays, `benchmarks/lists.py`", f"{_BEFORE_TIMING}; {len(rows)} rows"),
    "right": lambda content, rows: (_scenarios_of(content) + _over(content, rows), _scenarios(content)),
    "prototype_us": lambda _, rows: ("times beside the prototypes", f"{len(rows)} rows"),
    "before": lambda content, rows: (
        f"`benchmarks.host`, the library at {content['before']}",
        f"{_BEFORE_TIMING}; {len(rows)} rows",
    ),
    "demo": lambda *_: ("`make demo`'s program, in turns with 832abcc", "results right each time; times in the file"),
    "copy_GB_per_s": lambda _, rows: ("`benchmarks.host`, against MPI", f"{_BEFORE_TIMING}; {len(rows)} rows"),
    "way": lambda _, rows: ("`mpi_examples/llama_torch.py`", f"the unsplit model's tokens; {len(rows)} times"),
    "device": lambda content, rows: (
        f"`benchmarks.over_nccl`, beside plain NCCL{_over(content, rows)}",
        f"{len(rows)} rows; times only",
    ),
    "limit": lambda content, rows: (
        f"`python -m ipcreduce bench`{_over(content, rows)}",
        f"{_BEFORE_TIMING}; {len(rows)} rows",
    ),
    "startup": lambda _, rows: ("`benchmarks.figures`", f"{len(rows)} ratios; times only"),
    "timeline_ms": lambda content, _: (
        "a training step with and without overlap, `benchmarks/overlap.py`",
        f"{_BEFORE_TIMING}; {len(content['ms_of_step'])} times and a timeline",
    ),
    "tokens": lambda _, rows: ("`benchmarks/beside.py`", f"{_BEFORE_TIMING}; {len(rows)} rows"),
    "us": lambda *_: ("host times beside PyTorch, `benchmarks.torch_host`", "times only"),
}


def _software(content: dict[str, Any]) -> str:
    versions = content["versions"]
    return ", ".join(f"{name} {versions[name]}" for name in _PACKAGES if name in versions)


def main() -> None:
    """Print all of them."""
    figures = [bench_table(n, mode) for n in (4, 2) for mode in ("graph", "eager")]
    figures += [bench_table(2, mode, gpu="h100") for mode in ("graph", "eager")]
    norms = [one(machine) for machine in ("h200-x2", "h200-x4") for one in (norm_table, norm_fp8_table)]
    norms += map(norm_peer_table, _NORM_PEERS)
    lists = list_table(), list_table("h200-x4"), list_host_table(), beside_table(), overlap_table(), *norms
    others = ratio_table(), llama_table(), llama_table("h200-x4"), host_table(), run_table()
    for text in (readme_table(), *figures, *lists, *others):
        print(text, end="\n\n")


if __name__ == "__main__":
    main()
