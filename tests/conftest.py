"""Tiers (a test's directory is its marker; what cannot run here is skipped with the reason), and mpirun."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools import machine, processes

TIERS = ("unit", "mpi", "sim", "gpu")
SHOWN = 10_000  # characters of a rank's output, if it fails
# Each rank's output goes into a file of its own in the folder $0: MPICH's launcher or Open MPI's says which rank it is.
INTO_FILES = 'exec "$@" > "$0/rank${PMI_RANK-$OMPI_COMM_WORLD_RANK}" 2>&1'
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ranks that hang are ended by SIGABRT, for their stacks
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's job in the background begins
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    left_out = None
    for item in items:
        tier = item.path.relative_to(machine.ROOT / "tests").parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path} is in none of the directories {', '.join(TIERS)}")
        item.add_marker(tier)
        if tier != "unit":
            left_out = left_out if left_out is not None else machine.left_out(sys.executable)
            if tier in left_out:
                item.add_marker(pytest.mark.skip(f"tier {tier}: {left_out[tier]}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("left out on this machine")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {'tests' if count > 1 else 'test '}  {reason}")


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A test fails that leaves the environment changed for those behind it."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    changed -= {"PYTEST_CURRENT_TEST", "MPLCONFIGDIR"}  # the latter is matplotlib's, where a home is read-only
    assert not changed, "left changed in the environment"


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """mpirun(program, n, *args, timeout=300, check=True, env=None): runs n ranks of a program.

    program is the path of a script, from the root of the tree, or the name of a module. The result's stdout
    holds both streams of all ranks, rank by rank, and then the launcher's. The test fails, and shows them, if the exit
    code is not 0 (unless check is False), and after timeout seconds, with the Python stacks of all ranks. No process
    outlives the call.
    """
    return run_ranks


def run_ranks(
    program: str | Path,
    n: int,
    *args: object,
    timeout: float = 300,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    token = f"{machine.TOKEN}={uuid.uuid4()}"
    what = [str(program)] if str(program).endswith(".py") else ["-m", str(program)]
    launcher = [*machine.mpirun(sys.executable), "-n", str(n)]
    command = [sys.executable, *what, *map(str, args)]
    # Stacks on SIGABRT; and whole lines, which the ranks do not tear apart as they print.
    environ = {**machine.environment(), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "", **(env or {})}
    environ.update([token.split("=")])
    problem = ""
    # Files: a pipe would keep us waiting for any process that holds it.
    with tempfile.TemporaryDirectory() as folder, Path(folder, "launcher").open("w+") as output:
        environ["SIM_SHARED"] = folder  # what killed ranks leave there goes with it
        process = subprocess.Popen(
            [*launcher, "sh", "-c", INTO_FILES, folder, *command],
            cwd=machine.ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            problem = f"not done after {timeout:g} s"
            for rank in processes.marked(token):
                with contextlib.suppress(OSError):
                    if os.readlink(rank / "exe") == os.path.realpath(sys.executable):
                        os.kill(int(rank.name), signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            processes.kill(token)
            process.wait()
        files = sorted(Path(folder).glob("rank*"), key=lambda file: int(file.name[4:]))
        parts = {file.name.replace("rank", "rank "): file.read_text(errors="replace") for file in files}
        output.seek(0)
        parts["launcher"] = output.read()
    if check and process.returncode and not problem:
        problem = f"exit code {process.returncode}"
    if problem:
        said = "".join(f"--- {name}\n{text[-SHOWN:].rstrip()}\n" for name, text in parts.items() if text.strip())
        pytest.fail(f"{problem}: {shlex.join([*launcher, *command])}\n{said}", pytrace=False)
    return subprocess.CompletedProcess([*launcher, *command], process.returncode, "".join(parts.values()))
