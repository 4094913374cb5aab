"""make demo, make test, make check: sets up what is needed, then runs it. Standard library only."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests import machine

DEMO = ["mpi_examples/train_digits.py"]
LEAST_COVERAGE = 85
# Their branches are reached on a GPU only: they are counted apart.
GPU_MODULES = "ipcreduce/cuda/driver.py,ipcreduce/cuda/streams.py,ipcreduce/arrays.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.run", description=__doc__)
    parser.add_argument("what", choices=["demo", "test", "check"])
    parser.add_argument("--venv", type=Path, help="make and use this; without it, this python is used")
    args = parser.parse_args()
    os.chdir(machine.ROOT)
    extras = {"examples"} if args.what == "demo" else {"examples", "test"}
    python = set_up(args.venv.absolute(), extras) if args.venv else sys.executable
    return {"demo": demo, "test": test, "check": check}[args.what](python)


def set_up(venv: Path, extras: set[str]) -> str:
    """An environment with this package and the extras, and with those that fit this machine; its python."""
    python = venv / "bin" / "python"
    extras = extras | fitting_extras(python)
    stamp = venv / "ipcreduce.json"
    source = hashlib.sha256(Path("pyproject.toml").read_bytes()).hexdigest()
    try:
        done = json.loads(stamp.read_text())
    except (OSError, ValueError):
        done = {"source": "", "extras": []}
    if python.exists() and done["source"] == source and extras <= set(done["extras"]):
        return str(python)
    extras |= set(done["extras"])
    print(f"setting up {venv}: {', '.join(sorted(extras))} (the first time takes minutes)", flush=True)
    own_pip = importlib.util.find_spec("ensurepip") is not None  # Debian has it in a package of its own
    pip = [python, "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", python]
    if not python.exists():
        run(sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), venv)
    run(*pip, "install", "--quiet", "--editable", f".[{','.join(sorted(extras))}]")
    stamp.write_text(json.dumps({"source": source, "extras": sorted(extras)}))
    return str(python)


def fitting_extras(python: Path) -> set[str]:
    """The CUDA extra for the driver's generation, if there is a GPU; an MPI, if there is none."""
    gpus, generation = machine.cuda()
    extras = set()
    if gpus and generation < 12:
        print(f"left out: the GPUs, whose driver is for CUDA {generation}; CUDA 12 is the oldest that works")
    elif gpus:
        extras.add(f"cuda{min(generation, 13)}")
    if machine.find_mpirun(str(python)) is None:
        extras.add("mpi")
    return extras


def demo(python: str) -> int:
    try:
        command = machine.mpirun(python)
    except RuntimeError as error:
        print(f"the demo needs an MPI: {error}", file=sys.stderr)
        return 1
    return run(*command, "-n", "4", python, *DEMO, check=False)


def check(python: str) -> int:
    tools = (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    return max(run(python, "-m", *tool, check=False) for tool in tools)


def test(python: str) -> int:
    left_out = machine.left_out(python)
    if os.environ.get("CI") and left_out.keys() - {"gpu"}:
        print(f"CI may leave out no tier but gpu: {left_out}", file=sys.stderr)
        return 1
    probe = "import coverage; assert coverage.version_info >= (7, 10)"
    if left_out.keys() - {"gpu"} or run(python, "-c", probe, check=False, stderr=subprocess.DEVNULL):
        return run(python, "-m", "pytest", check=False)
    coverage = [python, "-m", "coverage"]
    run(*coverage, "erase")
    status = run(*coverage, "run", "-m", "pytest", check=False)
    run(*coverage, "combine", "--quiet")
    for left in Path().glob(".coverage.*"):  # of a process that was killed while it wrote
        left.unlink()
    report = [*coverage, "report", "--format=total"]
    without, only = f"--omit={GPU_MODULES}", f"--include={GPU_MODULES}"
    rest, gpu = (machine.output_of(*report, modules).split()[-1] for modules in (without, only))
    print(f"branch coverage {rest} %, at least {LEAST_COVERAGE} %; of the modules that need a GPU {gpu} %")
    if int(rest) < LEAST_COVERAGE:
        run(*coverage, "report", without, check=False)
        return 1
    return status


def run(*command: str | Path, check: bool = True, stderr: int | None = None) -> int:
    """A command's exit code, run in this tree's environment; if check is set, only 0 lets us go on."""
    status = subprocess.run(command, env=machine.environment(), stderr=stderr).returncode
    if check and status:
        sys.exit(f"exit code {status}: {shlex.join(map(str, command))}")
    return status


if __name__ == "__main__":
    sys.exit(main())
