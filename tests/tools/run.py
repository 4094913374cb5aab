"""The targets of make: set up what each needs, then run it. Standard library only."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tools import heartbeat, machine, processes, release, times

DEMO = ["mpi_examples/train_digits.py"]
LEAST_COVERAGE = 85
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
TEST_OPTIONS = ["--quiet", "-p", "tests.tools.progress", "--durations=5"]
QUICK_SCENARIOS = (  # one of each file
    "wrong_options", "closed_early", "refused_and_closed", "threads_after_a_fault", "captured_after_a_fault",
    "threads_with_another_device", "after_a_wait", "of_no_dimension",
)  # fmt: skip
SERVED = {  # runs of vLLM, by what else is asked of them
    ("ours", "ours-alone", "fused", "flashinfer", "stock", "nccl"): ("--layers", "8,16", "--turns", "3"),
    ("ours-piecewise", "ours-eager", "stock-piecewise", "stock-eager", "ours-spawn"): ("--layers", "8"),
    tuple(f"{engine}-invariant" for engine in ("ours", "fused", "nccl")): ("--layers", "8"),
    tuple(f"ours-{trial}" for trial in ("restarts", "pair", "sleep", "server", "killed")): ("--layers", "2"),
}  # fmt: skip
QUICK_PROGRAMS = (
    ("tests.sim.scenarios", *QUICK_SCENARIOS),
    ("tests.graphs", "--sim", "--first"),
    ("tests.matrix", "ipc", "--sim", "--way", "cached"),
    ("tests.simulated", "tests/gpu/scenarios.py", "--first"),
    ("tests.sim.documents", "--first"),
)
SWEPT = 400  # random calls
NO_CUDA = ({"docs"}, {"release"})  # the extras of those targets that need neither CUDA nor MPI
# Their branches are reached on a GPU only: they are counted apart.
GPU_MODULES = "ipcreduce/cuda/driver.py,ipcreduce/cuda/streams.py,ipcreduce/arrays/views.py"
# One of each, for the generation of CUDA that is asked for.
TEST_EXTRAS = {12: "test-cuda12", 13: "test"}
CUDA_EXTRAS = {12: "cuda12", 13: "cuda13"}
# What the tests compile and call with, whatever else is installed.
TOOLKIT = """
from cuda import bindings
from cuda.bindings import nvrtc
print("bindings", bindings.__version__, "NVRTC", "{1}.{2}".format(*nvrtc.nvrtcVersion()))
"""


def main() -> int:
    commands = {
        "demo": demo, "quick": quick, "test": test, "test-cuda12": test_cuda12, "coverage": coverage,
        "failures": failures, "fuzz": fuzz, "mutants": mutants,
        "models": models, "sanitizers": sanitizers, "sass": sass, "serving": serving,
        "serve-vllm": serve_vllm, "check": check, "pictures": pictures, "docs": docs, "release": release.release,
    }  # fmt: skip
    parser = argparse.ArgumentParser(prog="tests.tools.run", description=__doc__)
    parser.add_argument("what", choices=[*commands, "test-pythons"])
    parser.add_argument("--venv", type=Path, help="make and use this; without it, this python is used")
    args = parser.parse_args()
    os.chdir(machine.ROOT)
    if args.what == "test-pythons":
        return test_pythons(args.venv)
    if args.what == "release":
        release.version_of_the_tree(machine.ROOT)  # before minutes go into an environment
    python = sys.executable
    if args.venv:
        generation = 12 if args.what == "test-cuda12" else fitting_generation()
        own = {"demo": {"examples"}, "docs": {"docs"}, "release": {"release"}}
        python = set_up(args.venv.absolute(), own.get(args.what, {"examples", TEST_EXTRAS[generation]}), generation)
    try:
        return commands[args.what](python)
    finally:
        processes.remove_left()  # of ranks that the launcher has ended


def fitting_generation() -> int:
    """The generation of CUDA for this machine's driver; the newest where there is no GPU."""
    gpus, generation = machine.cuda()
    return 12 if gpus and generation <= 12 else 13


def set_up(venv: Path, extras: set[str], generation: int, base: str = sys.executable) -> str:
    """The python of an environment with this package, the extras, and what this machine can use of CUDA and MPI."""
    python = venv / "bin" / "python"
    if extras not in NO_CUDA:
        extras = extras | fitting_extras(python, generation)
    stamp = venv / "ipcreduce.json"
    try:
        done = json.loads(stamp.read_text())
    except (OSError, ValueError):
        done = {"source": "", "extras": []}
    if python.exists() and done["source"] == digest_of_the_install() and extras <= set(done["extras"]):
        return str(python)
    extras |= set(done["extras"]) - {*TEST_EXTRAS.values(), *CUDA_EXTRAS.values()}  # these exclude each other
    print(f"setting up {venv}: {', '.join(sorted(extras))} (the first time takes minutes)", flush=True)
    with heartbeat.told("setting up"):
        # Debian packs it apart.
        own_pip = not run(base, "-c", "import ensurepip", check=False, stderr=subprocess.DEVNULL)
        pip = [python, "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", python]
        if not python.exists():
            run(base, "-m", "venv", *([] if own_pip else ["--without-pip"]), venv)
        run(*pip, "install", "--quiet", "--editable", f".[{','.join(sorted(extras))}]")
    stamp.write_text(json.dumps({"source": digest_of_the_install(), "extras": sorted(extras)}))
    return str(python)


def digest_of_the_install() -> str:
    """Changes with all that an editable install keeps: the metadata, and the links to the package's files."""
    sources = [path for folder in ("ipcreduce", "kernels") for path in Path(folder).rglob("*.*")]
    links = Path("build").glob("__editable__*")
    names = sorted(str(path) for path in [*sources, *links] if path.suffix != ".pyc")
    return hashlib.sha256(Path("pyproject.toml").read_bytes() + "\0".join(names).encode()).hexdigest()


def fitting_extras(python: Path, generation: int) -> set[str]:
    """The CUDA extra of this generation, if there is a GPU; an MPI, if there is none."""
    gpus, newest = machine.cuda()
    extras = set()
    if gpus and newest < 12:
        print(f"left out: the GPUs, whose driver is for CUDA {newest}; CUDA 12 is the oldest that works")
    elif gpus:
        extras.add(CUDA_EXTRAS[generation])
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


def failures(python: str) -> int:
    return run(python, "-m", "tests.tools.failures", check=False)


def models(python: str) -> int:
    return run(python, "-m", "tests.models", check=False)


def fuzz(python: str) -> int:
    """On the GPUs if there are any."""
    times = int(os.environ.get("FUZZ", "1"))
    where = ["--gpu", "--ranks", "2"] if machine.cuda()[0] else []
    commands = (
        ["tests.fuzz", "--programs", 300 * times, *where],
        ["tests.fuzz", "--deaths", "--programs", 30 * times, *(where or ["--ranks", "2", "3", "4"])],
        ["tests.fuzz.soak", "--communicators", 50 * times, "--recordings", 150 * times, *where],
        ["tests.fuzz.messages", "--turns", 50_000 * times],
    )
    status = max([run(python, "-m", *map(str, command), check=False) for command in commands])
    ranks = [*machine.mpirun(python), "-n", *(("2", python) if where else ("3", python, "-m", "tests.simulated"))]
    return max(
        status, run(*ranks, "tests/gpu/sweep.py", "--cases", str(SWEPT * times), "--largest", "6000", check=False)
    )


def mutants(python: str) -> int:
    missing = [reason for tier, reason in left_out(python).items() if tier != "gpu"]
    if missing:
        print(f"the mutants need the tiers mpi and sim: {missing[0]}", file=sys.stderr)
        return 1
    return run(python, "-m", "tests.mutants", check=False)


def sanitizers(python: str) -> int:
    return run(python, "-m", "tests.tools.sanitizers", check=False)


def sass(python: str) -> int:
    return run(python, "-m", "tests.tools.sass", check=False)


def serving(python: str) -> int:
    os.environ["TEST_SERVING"] = "1"
    return run(python, "-m", "pytest", "-q", "-rP", "tests/unit/test_serving_contracts.py", check=False)


def serve_vllm(python: str) -> int:
    """Archives for a machine with two GPUs; where it is this one, also the engines and their tables."""
    folder, out = Path("build/serving"), Path("build/serving-results")
    run(python, "-m", "benchmarks.serving.prepare", folder)
    words = [python, "-m", "benchmarks.serving.run", out, "--archives", folder, "--total", "3600"]
    commands = [[*words, *names, *options] for names, options in SERVED.items()]
    table = [python, "-m", "benchmarks.serving.table", out]
    if machine.cuda()[0] < 2:
        print("On a machine with two GPUs, with this tree and the archives in it, run:")
        print(*(shlex.join(["python3", *map(str, words[1:])]) for words in (*commands, table)), sep="\n")
        return 0
    status = max([run(*command, check=False) for command in commands])
    return max(status, run(*table, check=False))


def check(python: str) -> int:
    tools = (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    return max(run(python, "-m", *tool, check=False) for tool in tools)


def pictures(python: str) -> int:
    return run(python, "-m", "benchmarks.pictures", check=False)


def docs(python: str) -> int:
    """Builds the documents, all of them anew: the tables in them come from files that Sphinx does not watch."""
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--fresh-env", "--quiet"]
    status = run(python, "-m", "sphinx", *options, "docs", "docs/_build/html", check=False)
    if not status:
        print("docs/_build/html/index.html")
    return status


def left_out(python: str) -> dict[str, str]:
    """The tiers that cannot run here; in CI that may only be gpu."""
    reasons = machine.left_out(python)
    if os.environ.get("CI") and reasons.keys() - {"gpu"}:
        sys.exit(f"CI may leave out no tier but gpu: {reasons}")
    return reasons


def workers(python: str) -> list[str]:
    """pytest's options for four tests at a time: many only wait. One where there are GPUs, which they would share."""
    if machine.cuda()[0] or run(python, "-c", "import xdist", check=False, stderr=subprocess.DEVNULL):
        return []
    return ["-n", "4", "--dist", "load", "--maxschedchunk", "1"]


def test_cuda12(python: str) -> int:
    """The tests that CUDA 12.9 can change: those that use its bindings, its compiler or a GPU.

    No process of the other tiers loads a module of CUDA: the tier sim has stand-ins for all of the package that imports
    cuda.bindings or cuda.core, and the tier mpi has NumPy arrays.
    """
    left_out(python)
    found = machine.output_of(python, "-c", TOOLKIT).split()[1::2]
    print("CUDA bindings {}, NVRTC {}".format(*found), flush=True)
    if not all(version.startswith("12.") for version in found):
        sys.exit("expected those of CUDA 12: leave out VENV=, or install the extra test-cuda12 and no other NVRTC")
    return pytest(python, "-m", "unit or gpu")


def test(python: str) -> int:
    left_out(python)
    with times.noted():
        return pytest(python)


def pytest(python: str, *options: str, measured: tuple[str, ...] = ()) -> int:
    """Run tests, and keep the bytecode of what they import: thousands of ranks do, and may be told to write none."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(machine.own_directory()))  # a user may bear another one's name
    with heartbeat.told("Python compiles the package and the tests"):
        run(python, "-m", "compileall", "-q", "-j", "2", "ipcreduce", "tests", "benchmarks", "mpi_examples")
    return run(python, *measured, "-m", "pytest", *TEST_OPTIONS, *workers(python), *options, check=False)


def quick(python: str) -> int:
    """For a developer's loop: quick tests of the tier unit, a scenario of each file, the first block of each page."""
    status = pytest(python, "--quick", "-m", "unit")
    if reasons := [reason for tier, reason in machine.left_out(python).items() if tier != "gpu"]:
        print(f"left out: the ranks: {reasons[0]}")
        return status
    for program in QUICK_PROGRAMS:
        print(" ".join(program), flush=True)
        status = max(status, run(*machine.mpirun(python), "-n", "2", python, "-m", *program, check=False))
    return status


def coverage(python: str) -> int:
    """All tests, with the branches of the package counted, in every process: a third slower than without."""
    if left_out(python).keys() - {"gpu"}:
        print("coverage is counted where the tiers mpi and sim run", file=sys.stderr)
        return 1
    coverage = [python, "-m", "coverage"]
    run(*coverage, "erase")
    status = pytest(python, measured=("-m", "coverage", "run"))
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


def test_pythons(venv: Path) -> int:
    """The tiers unit and mpi on each Python, in an environment of its own; says at the end what became of each."""
    generation = fitting_generation()
    results = {}
    for version in PYTHONS:
        base, found = find_python(version)
        print(f"Python {version}: {found}", flush=True)
        if base is None:
            results[version] = f"left out, {found}"
            continue
        own = venv.absolute().with_name(f"{venv.name}-py{version}")
        python = set_up(own, {"examples", TEST_EXTRAS[generation]}, generation, base)
        results[version] = f"exit code {status}" if (status := pytest(python, "-m", "unit or mpi")) else "passed"
    for version, result in results.items():
        print(f"Python {version:5} {result}")
    return int(any(result.startswith("exit code") for result in results.values()) or "passed" not in results.values())


def find_python(version: str) -> tuple[str | None, str]:
    """The path of an interpreter of this version, from uv, which may get it, or from PATH; and a remark on it."""
    uv = shutil.which("uv")
    if uv:
        subprocess.run([uv, "python", "install", "--quiet", version], stderr=subprocess.DEVNULL)  # or the machine's own
        named = [uv, "python", "find", "--no-project", "--system", version]
        found = subprocess.run(named, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
        if found:
            return found, f"{found}, by uv"
    name = shutil.which(f"python{version}")
    if name is None:
        return None, f"no python{version} on PATH" + (", and uv has none" if uv else ", and no uv to get one")
    probe = [name, "-c", "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"]
    environ = {**os.environ, "PYENV_VERSION": version}  # for pyenv's, which runs no version that is not chosen
    ran = subprocess.run(probe, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode or ran.stdout.split()[-1] != version:
        return None, f"{name} does not run: {ran.stdout.strip().splitlines()[0]}"
    return ran.stdout.split()[0], name


def run(*command: str | Path, check: bool = True, stderr: int | None = None) -> int:
    """A command's exit code, run in this tree's environment; if check is set, only 0 lets us go on."""
    status = subprocess.run(command, env=machine.environment(), stderr=stderr).returncode
    if check and status:
        sys.exit(f"exit code {status}: {shlex.join(map(str, command))}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
