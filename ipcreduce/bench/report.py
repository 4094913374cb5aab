"""Output of a bench: a table, a JSON file, a plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ..cuda import driver
from ..errors import IpcReduceError, UnsupportedError, installing
from ..ranks.launchers import library
from . import output
from .collectives import ALLREDUCE, Collective

_PACKAGES = ("cuda-bindings", "cuda-core", "cupy-cuda13x", "cupy-cuda12x", "mpi4py", "numpy", "torch")
_GIT_SECONDS = 10.0
_MODES = {"graph": "in CUDA graphs", "eager": "eager calls"}  # for titles of a plot
_MARKED = (4, 64, *(1 << power for power in (10, 14, 18, 22, 26, 30)))  # bytes on its axis


def header(command: list[str]) -> dict[str, Any]:
    """The fields that every stored result begins with: machine, versions, date, commit and command. Needs MPI."""
    machine: dict[str, Any] = {"gpus": [], "processor": _processor(), "cores": len(os.sched_getaffinity(0))}
    with suppress(IpcReduceError):  # no driver
        gpus = [driver.device_info(ordinal).name for ordinal in range(driver.device_count())]
        machine |= {"gpus": gpus, "driver_cuda": "{}.{}".format(*driver.driver_version())}
    return {
        "machine": machine,
        "versions": {"python": platform.python_version(), "mpi": library(), **versions(_PACKAGES)},
        "date": datetime.date.today().isoformat(),
        **commit(Path(__file__).parent),
        "command": " ".join(command),
    }


def commit(folder: Path) -> dict[str, str]:
    """The checkout's last commit, as a field; none if the files of ``folder`` are in no checkout of git."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "."]
        subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=True)
        command[3:] = ["rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=True, text=True)
        return {"commit": found.stdout.strip()}
    return {}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of the packages that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return models[0] if models else platform.machine()  # Arm has no such line


def bus_gbps(nbytes: int, microseconds: float, ranks: int, of: Collective = ALLREDUCE) -> float:
    """Bus bandwidth in 1e9 bytes a second: of an all-reduce S/t * 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md)."""
    return nbytes / microseconds / 1e3 * of.bus(ranks)


def ranks_text(n: int) -> str:
    """Format a number of ranks, as "2 ranks"."""
    return f"{n} rank{'s' if n > 1 else ''}"


def size_text(nbytes: int) -> str:
    """Format a number of bytes, as "384 KB"."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """Format a plain text table whose cells are never cut: under mpirun and in logs there is no terminal width.

    :param right: True to align the cells to the right.
    """
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    texts = (
        [f"{cell:{'>' if right else '<'}{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in texts)


def progress(work: Sequence[int], mpi: Any) -> Iterator[int]:
    """Yield the sizes in ``work``. Rank 0 prints a line about each on stderr. Collective over ``mpi``.

    :raises IpcReduceError: on every rank, if the line cannot be written.
    """
    for number, nbytes in enumerate(work, 1):
        line = f"size {number} of {len(work)}: {size_text(nbytes)}"
        output.on_rank_0(partial(print, line, file=sys.stderr, flush=True), mpi)
        yield nbytes


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the rows of one mode as a table, without empty columns."""
    peers, own = (sorted({name for row in rows for name in row.get(of, {})}) for of in ("peers_us", "own_us"))
    columns = ["rows", "bytes", "algorithm", "us", "min", "p99", "bus GB/s", "host us", "limit us", *own, *peers]
    columns.append("best peer / us")
    cells = []
    for row in rows:
        best = min(row["peers_us"].values(), default=None)
        cells.append([
            str(row.get("rows", "")), size_text(row["bytes"]), row["algorithm"] or "",
            f"{row['ours_us']:.2f}", f"{row['ours_min_us']:.2f}", f"{row['ours_p99_us']:.2f}",
            f"{row['bus_GBps']:.1f}",
            "" if row["host_us"] is None else f"{row['host_us']:.2f}", f"{row['limit_us']:.2f}",
            *(f"{row['own_us'][name]:.2f}" if name in row["own_us"] else "" for name in own),
            *(f"{row['peers_us'][name]:.2f}" if name in row["peers_us"] else "" for name in peers),
            "" if best is None else f"{best / row['ours_us']:.2f}",
        ])  # fmt: skip
    used = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    shown = [[line[index] for index in used] for line in (columns, *cells)]
    print(f"{title}\n{table(shown[0], shown[1:], right=True)}\n")


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def require_matplotlib() -> Any:
    """Import pyplot with the Agg backend. :raises UnsupportedError: if Matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UnsupportedError(f"--plot needs matplotlib ({error}): {installing('plot')}") from None
    return pyplot


def why_not_drawn(path: Path) -> str:
    """The reason why a plot cannot be drawn into this file; "" if it can."""
    try:
        kinds = require_matplotlib().Figure().canvas.get_supported_filetypes()
    except UnsupportedError as error:
        return str(error)
    if path.suffix[1:].lower() in kinds:
        return ""
    return f"--plot cannot draw {path.name}. Name a file that ends in {', '.join(f'.{kind}' for kind in sorted(kinds))}"


def plot(path: Path, result: dict[str, Any], names: Mapping[str, str] | None = None, note: str = "") -> None:
    """Plot microseconds over bytes, log-log, one panel a mode: ipcreduce, its peers and the limit.

    :param names: of peers, for the legend; a peer that it lacks keeps its own.
    :param note: text that is put into a .png and that nobody sees.
    """
    pyplot = require_matplotlib()
    modes = sorted({row["mode"] for row in result["rows"]}, reverse=True)
    figure, panels = pyplot.subplots(1, len(modes), figsize=(4.6 * len(modes), 4), sharey=True, squeeze=False)
    for panel, mode in zip(panels[0], modes, strict=True):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        sizes = [row["bytes"] for row in rows]
        for number, name in enumerate(sorted({name for row in rows for name in row["peers_us"]})):
            points = [(row["bytes"], row["peers_us"][name]) for row in rows if name in row["peers_us"]]
            line = panel.plot(*zip(*points, strict=True), linewidth=1.5, label=(names or {}).get(name, name))[0]
            line.set_linestyle((0, (4, 4)) if number % 2 else "-")  # so that none hides the one below it
        panel.plot(sizes, [row["ours_us"] for row in rows], linewidth=3, color="black", label="ipcreduce")
        panel.plot(sizes, [row["limit_us"] for row in rows], linestyle="--", color="gray", label="limit")
        panel.set(xscale="log", yscale="log", title=f"{_MODES.get(mode, mode)}, {ranks_text(rows[0]['ranks'])}")
        marked = [size for size in _MARKED if min(sizes) <= size <= max(sizes)]
        panel.set_xticks(marked, list(map(size_text, marked)))
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(lambda us, _: f"{us:,g}")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("time in µs")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Comment": note} if note else None)
    pyplot.close(figure)
