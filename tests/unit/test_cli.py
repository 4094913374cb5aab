"""The command line of one process, and the ranks of a launcher by its environment variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ipcreduce
from ipcreduce.bench import contenders, info
from ipcreduce.ranks import launchers
from tests.tools.machine import ROOT, environment

VARIABLES = [name for _, *names in launchers._LAUNCHERS for name in names]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m ipcreduce``, started by no launcher but the one that ``variables`` tell of."""
    bare = {name: value for name, value in environment().items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", "ipcreduce", *arguments],
        cwd=ROOT, env=bare | variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_closed_output_is_no_error():
    command = ["sh", "-c", f"exec {sys.executable} -m ipcreduce info >&-"]
    bare = {name: value for name, value in environment().items() if name not in VARIABLES}
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_is_the_command():
    (target,) = re.findall(r'^\[project\.scripts\]\nipcreduce = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    module, _, name = target.partition(":")
    assert getattr(import_module(module), name) is import_module("ipcreduce.cli").main


def test_the_name_of_the_script():
    """Help says how the command was called."""
    program = "import sys; from ipcreduce.cli import main; sys.argv = ['/x/bin/ipcreduce', '--help']; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("usage: ipcreduce [-h] [--version] COMMAND")
    assert run("--help").stdout.startswith("usage: python -m ipcreduce [-h] [--version] COMMAND")


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ipcreduce {ipcreduce.__version__}\n", "")


def test_help_names_the_peers():
    text = " ".join(run("bench", "--help").stdout.split())
    assert all(name in text for name in contenders.known())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("banch",), "invalid choice: 'banch'"),
        (("bench", "--replays", "0"), "--replays: '0' is no whole number from 1 to 1000000"),
        (("bench", "--replays", "-3"), "--replays: '-3' is no whole number from 1 to 1000000"),
        (("bench", "--smallest", "-4"), "--smallest: '-4' is no number of bytes from 1 to 1024G"),
        (("bench", "--largest=-4K"), "--largest: '-4K' is no number of bytes from 1 to 1024G"),
        (("bench", "--smallest", "2K", "--largest", "1K"), "--smallest 2048 is above --largest 1024 bytes"),
        (("bench", "--peers", "gloo"), f"'gloo' is unknown. Choose from {', '.join(contenders.known())}"),
        (("bench", "--mode", "graphs"), "--mode: 'graphs' is unknown. Choose from graph, eager"),
        (("bench", "--mode", ""), "--mode: '' names no mode. Choose from graph, eager"),
        (("bench", "--dtype", "float8"), "--dtype: invalid choice: 'float8'"),
        (("tune", "--largest", "4"), "--largest: '4' is no number of bytes from 1024 to 1024G"),
        (("tune", "--replays", "0"), "--replays: '0' is no whole number from 1 to 1000000"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str):
    """They are known before MPI is: it need not be there."""
    done = run(*arguments, MPI4PY_RC_INITIALIZE="wrong")  # of which mpi4py complains, if it is imported
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("bench", "--help")])
def test_rank_0_of_a_launcher_speaks(rank: int, arguments: tuple[str, ...]):
    done = run(*arguments, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2", MPI4PY_RC_INITIALIZE="wrong")
    assert (done.returncode, done.stderr, bool(done.stdout)) == (0, "", rank == 0)


# ---- the launcher that a shell would find
def launcher(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What info says of an mpirun that is this script."""
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    monkeypatch.setattr(info.sys, "executable", str(folder / "python"))
    return info._launcher().removeprefix(f"{path} ")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'mpirun (Open MPI) 5.0.7'; echo; echo 'Report bugs to ...'", "(mpirun (Open MPI) 5.0.7)"),
        ("echo 'HYDRA build details:'; echo '    Version:       5.0.2'", "(Hydra 5.0.2)"),
        ("echo 'HYDRA build details:'", "(Hydra)"),
    ],
)
def test_the_launcher_and_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str):
    assert launcher(tmp_path, script, monkeypatch) == words


def test_a_silent_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert launcher(tmp_path, "exit 1", monkeypatch) == str(tmp_path / "mpirun")
