"""``python -m tests.tools.sanitizers``: every kernel under compute-sanitizer, on ranks that share a GPU: a table.

The program is tests/gpu/sanitized.py. A line of the table is right if no rank's tool has found anything, all calls
were right, and all ended in time. The exit status is 1 if one is not, and 2 where the tool or a GPU is missing.

memcheck: accesses outside allocations, misaligned ones. racecheck: hazards in shared memory, where the kernels with
RMSNorm have the sums of a row. synccheck: barriers and warp functions that not all threads reach. initcheck: reads of
device memory that this process has not written.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tools import machine, processes

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
KERNELS = (
    "one_shot", "two_shot", "direct", "bulk", "split", "bulk_split", "spread", "fused_one_shot", "fused_two_shot",
    "rmsnorm", "verify", "limit",
)  # fmt: skip
FOUND = 9  # the tool's exit status if it has found something
# A tool's last line but for that of errors that were not printed. Racecheck's count is of hazards: errors and warnings.
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were not)", re.MULTILINE)
_CASES = re.compile(r": (\d+) cases, all right$", re.MULTILINE)
_SHOWN = 5  # lines of what a tool has found


def ranks_of(kernel: str) -> int:
    """The number of ranks: two, or the fewest that take the kernel."""
    return 3 if kernel == "spread" else 2


def command(tool: str, kernel: str, directory: Path) -> list[str]:
    """One rank: the tool, which writes to a file of its own in ``directory``, and the program."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    options += ["--log-file", str(directory / "%p.log")]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # CuPy asks for what it does not need
    return ["compute-sanitizer", *options, sys.executable, str(machine.ROOT / "tests/gpu/sanitized.py"), kernel]


def run(launcher: Sequence[str], tool: str, kernel: str, seconds: float) -> dict[str, Any]:
    """A line of the table: cases, errors, and ``problem``, which is empty if it is right.

    :param launcher: the words before the number of ranks.
    :param seconds: after which all ranks are killed.
    """
    row: dict[str, Any] = {"tool": tool, "kernel": kernel, "ranks": ranks_of(kernel)}
    row |= {"cases": 0, "errors": 0, "problem": "", "found": []}
    token = f"SANITIZERS_RUN={uuid.uuid4()}"
    environ = machine.environment() | dict([token.split("=")])
    environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as output:
        directory = Path(name)
        process = subprocess.Popen(
            [*launcher, "-n", str(row["ranks"]), *command(tool, kernel, directory)], cwd=machine.ROOT,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            row["problem"] = f"not done after {seconds:g} s"
        finally:
            processes.kill(token)
            process.wait()
        output.seek(0)
        text = output.read()
        logs = [path.read_text(errors="replace") for path in sorted(directory.glob("*.log"))]
    judge(row, process.returncode, text, logs)
    return row


def judge(row: dict[str, Any], status: int, text: str, logs: list[str]) -> None:
    """Fill in a line, from the launcher's exit status, what the program has printed, and each rank's log."""
    summaries = [int(count) for log in logs for count in _SUMMARY.findall(log)]
    row["errors"] = sum(summaries)
    row["cases"] = sum(map(int, _CASES.findall(text)))
    lines = [line.lstrip("= ") for log in logs for line in log.splitlines() if line.startswith("=")]
    if row["errors"]:
        row["found"] = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")][:_SHOWN]
    if row["problem"]:
        return
    if status and not (row["errors"] and row["cases"]):
        last = (text.strip().splitlines() or ["nothing printed"])[-1]
        row["problem"] = f"exit status {status}: {last}"
    elif len(summaries) != row["ranks"]:
        row["problem"] = f"{len(summaries)} summaries of the tool, expected {row['ranks']}"
    elif not row["cases"]:
        row["problem"] = "no calls were made"


def missing() -> str:
    """The reason for which nothing can be run here; "" if all is there."""
    if shutil.which("compute-sanitizer") is None:
        return "no compute-sanitizer on PATH: it comes with the CUDA toolkit"
    if not machine.cuda()[0]:
        return "no GPU"
    try:
        machine.mpirun(sys.executable)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        problem = row["problem"] or ("" if row["errors"] else "clean")
        print(f"{row['tool']:9} {row['kernel']:14} {row['cases']:6} {row['errors']:7}  {problem}", flush=True)
        for line in row["found"]:
            print(f"    {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.tools.sanitizers", description="Every kernel under compute-sanitizer.")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--seconds", type=float, default=600, help="for each line of the table (600)")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if reason := missing():
        print(f"the sanitizers cannot run here: {reason}")
        return 2
    launcher = machine.mpirun(sys.executable)
    print(f"{'tool':9} {'kernel':14} {'cases':>6} {'errors':>7}")
    rows = []
    for tool in options.tools:
        for kernel in options.kernels:
            rows.append(run(launcher, tool, kernel, options.seconds))
            show(rows[-1:])
    if options.json:
        from ipcreduce.bench import report

        version = machine.output_of("compute-sanitizer", "--version").strip().splitlines()[-1]
        head = report.header(["-m", "tests.tools.sanitizers"]) | {"compute-sanitizer": version}
        report.write_json(options.json, head | {"rows": rows})
    return int(any(row["errors"] or row["problem"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
