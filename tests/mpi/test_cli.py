"""The commands under mpirun: one voice, one status, and what ``info`` shows of MPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipcreduce.ranks import launchers
from tests.tools.machine import ROOT, environment, letters_beyond_ascii

Run = Callable[..., subprocess.CompletedProcess[str]]
HOST = {"CUDA_VISIBLE_DEVICES": ""}  # on machines with GPUs too
WORKER = "tests/mpi/bench_worker.py"
WITHOUT_MPI = "import sys; sys.modules['mpi4py'] = None; from ipcreduce.cli import main; main(sys.argv[1:])"

OWN_SUM = """
import sys
from mpi4py import MPI
import ipcreduce
try:
    print(ipcreduce.Communicator({}).allreduce(3.0))
except ipcreduce.UnsupportedError as error:
    print("refused" if sys.argv[1] in str(error) else error)
"""


def alone(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, started by no launcher but the one that ``variables`` tell of."""
    known = [name for _, *names in launchers._LAUNCHERS for name in names]
    bare = {name: value for name, value in environment().items() if name not in known}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=bare | HOST | variables, capture_output=True, text=True, timeout=120
    )


# ---- one voice
@pytest.mark.parametrize("arguments", [("--help",), ("bench", "--help"), ("tune", "--help"), ("info", "--help")])
def test_help_is_printed_once(mpirun: Run, arguments: tuple[str, ...]) -> None:
    assert mpirun("ipcreduce", 3, *arguments).stdout.count("usage: ") == 1


def test_the_version_is_printed_once(mpirun: Run) -> None:
    assert re.fullmatch(r"ipcreduce [\d.]+\n", mpirun("ipcreduce", 3, "--version").stdout)


def test_an_error_of_all_ranks_is_printed_once(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(WORKER, 3, "fails_everywhere", tmp_path / "kept", check=False, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("no luck on rank") == done.stdout.count("ipcreduce: no luck on rank 0") == 1


def test_an_error_of_one_rank_is_printed_and_ends_all(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(WORKER, 3, "fails_on_the_last_rank", tmp_path / "kept", check=False, timeout=60)
    assert done.returncode
    assert done.stdout.count("ipcreduce: no luck on the last rank") == 1


def test_an_exception_on_one_rank_ends_all(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(WORKER, 3, "breaks_on_the_last_rank", tmp_path / "kept", check=False, timeout=60)
    assert done.returncode
    assert done.stdout.count("ValueError: not today") == 1
    assert "Traceback" in done.stdout
    alone = mpirun(WORKER, 1, "breaks_on_the_last_rank", tmp_path / "kept", check=False, timeout=60)
    assert (alone.returncode, alone.stdout.count("ValueError: not today")) == (1, 1)
    assert "abort" not in alone.stdout.lower()


@pytest.mark.parametrize("name", ["interrupted_on_the_last_rank", "interrupted_on_its_way_out"])
def test_an_interrupt_on_one_rank_ends_all(mpirun: Run, tmp_path: Path, name: str) -> None:
    """The others wait in MPI for good."""
    done = mpirun(WORKER, 3, name, tmp_path / "kept", check=False, timeout=60)
    assert done.returncode
    assert done.stdout.count("ipcreduce: interrupted") == 1
    assert "Traceback" not in done.stdout


# ---- info
def test_info_shows_mpi_and_its_ranks(mpirun: Run) -> None:
    output = mpirun("ipcreduce", 2, "info", env=HOST).stdout
    assert len(re.findall(r"^ranks: started 2 by [\w ]+; seen by MPI 2$", output, re.MULTILINE)) == 1, output
    assert re.search(r"^MPI: \S.+; launcher: /.+$", output, re.MULTILINE), output
    assert "\n2 ranks: backend host\n" in output
    assert "PROBLEM" not in output
    assert not letters_beyond_ascii(output)
    found = json.loads(mpirun("ipcreduce", 2, "info", "--json", env=HOST).stdout)
    assert (found["mpi"]["started_ranks"], found["mpi"]["seen_ranks"], found["ranks"]["size"]) == (2, 2, 2)
    assert found["mpi"]["library"] in output
    assert found["mpi"]["problem"] == ""


def test_info_without_a_launcher() -> None:
    done = alone("-m", "ipcreduce", "info")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nranks: started 1, by no launcher; seen by MPI 1\n" in done.stdout


def test_a_launcher_and_an_mpi_that_do_not_belong_together() -> None:
    """Every command says so, once, and every program that takes MPI's ranks for the launcher's."""
    library = json.loads(alone("-m", "ipcreduce", "info", "--json").stdout)["mpi"]["library"]
    other = "MPICH or Intel MPI" if library.startswith("Open MPI") else "Open MPI"
    name, rank, size = next(launcher for launcher in launchers._LAUNCHERS if launcher[0] == other)
    words = f"the launcher started 4 ranks ({size}=4, of {name}), but to MPI each of them is rank 0 of 1"
    for number in (0, 3):
        launched = {rank: str(number), size: "4"}
        shown = alone("-m", "ipcreduce", "info", **launched)
        assert (shown.returncode, shown.stdout.count(f"PROBLEM: {words}")) == (0, number == 0)
        assert f"ranks: started 4 by {name}; seen by MPI 1" in shown.stdout or number
        for command in ("bench", "tune"):
            refused = alone("-m", "ipcreduce", command, **launched)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert refused.stderr.count(words) == (number == 0)
        for group, answer in (("", "refused"), ("MPI.COMM_WORLD", "refused"), ("MPI.COMM_SELF", "3.0")):
            done = alone("-c", OWN_SUM.format(group), words, **launched)
            assert (done.returncode, done.stdout) == (0, f"{answer}\n"), done.stderr


def test_without_mpi() -> None:
    """info says what is there, alone and under a launcher; the other commands what is missing."""
    ended = {"": "\n1 rank: backend host\n", "2": "\nno communicator: MPI cannot be loaded"}
    for size, words in ended.items():
        launched = {"PMI_RANK": "0", "PMI_SIZE": size}
        done = alone("-c", WITHOUT_MPI, "info", **launched)
        assert (done.returncode, done.stderr) == (0, "")
        assert "MPI: error: MPI cannot be loaded" in done.stdout
        assert words in done.stdout
        assert "seen by MPI 0" in done.stdout
        done = alone("-c", WITHOUT_MPI, "bench", **launched)
        assert done.returncode == 1
        assert done.stderr.startswith("ipcreduce: MPI cannot be loaded")


# ---- what cannot be written
BENCH = "bench --smallest 4 --largest 4 --replays 1 --peers mpi"


@pytest.fixture(params=["Broken pipe", "No space left on device"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """A descriptor to which nothing can be written, as of ``| true`` and ``> /dev/full``, and the reason."""
    if request.param == "Broken pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    yield writing, request.param
    os.close(writing)


def written_to(descriptor: int, arguments: str, both: bool = False) -> tuple[int, str]:
    """The exit code of a command, and what it says on stderr. Python keeps what it could not write, for its end."""
    command = [sys.executable, "-m", "ipcreduce", *arguments.split()]
    streams = {"stdout": descriptor, "stderr": descriptor if both else subprocess.PIPE}
    env = environment() | HOST | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, **streams, text=True, timeout=120)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("arguments", ["info", "--help", "--version", BENCH])
def test_an_output_that_cannot_be_written(nowhere: tuple[int, str], arguments: str) -> None:
    """One line at most, and neither a traceback nor MPI's words about an abort.

    A closed pipe is no error of the command: it says nothing, and has the status of a program that SIGPIPE has ended.
    """
    descriptor, reason = nowhere
    closed = reason == "Broken pipe"
    status, words = (141, "") if closed else (1, f"ipcreduce: the output cannot be written ({reason})\n")
    assert written_to(descriptor, arguments) == (status, words)
    assert arguments != "info" or written_to(descriptor, arguments, both=True) == (status, "")


def test_a_reader_of_one_line() -> None:
    """As ``| head -1``, which may leave before or after the rest has been written."""
    command = [sys.executable, "-m", "ipcreduce", "info"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen(command, cwd=ROOT, env=environment() | HOST, text=True, **pipes)
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline().startswith("ipcreduce ")
    running.stdout.close()
    words = running.stderr.read()
    assert (running.wait(120), words) in ((0, ""), (141, ""))


def test_a_file_that_cannot_be_written() -> None:
    done = alone("-m", "ipcreduce", *BENCH.split(), "--json", "/dev/full")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("size 1 of 1")]
    assert lines == ["ipcreduce: --json cannot be written (No space left on device)"]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("no_room_for_info", "the output cannot be written (No space left on device)"),
        ("no_room_for_times", "the output cannot be written (No space left on device)"),
        ("no_room_for_progress", ""),
        ("no_cache_for_a_table", "no cache here"),
    ],
)
def test_rank_0_cannot_write(mpirun: Run, tmp_path: Path, scenario: str, words: str) -> None:
    """Every rank ends by itself, with one status."""
    done = mpirun(WORKER, 3, scenario, tmp_path / "kept", env=HOST, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("ipcreduce: ") == done.stdout.count(f"ipcreduce: {words}\n") == bool(words), done.stdout
    assert done.stdout.count("ended with 1\n") == 3, done.stdout
    assert "bus GB/s" not in done.stdout


# ---- environment variables
def test_an_unknown_variable_warns_once(mpirun: Run, tmp_path: Path) -> None:
    """On each rank: a warning that the program makes an error of has to be one of all."""
    program = tmp_path / "program.py"
    program.write_text("import ipcreduce\nfor _ in range(2):\n    ipcreduce.Communicator().close()\n")
    for times, what, *arguments in ((3, program), (1, "ipcreduce", "info")):
        output = mpirun(what, 3, *arguments, env=HOST | {"IPCREDUCE_SINC": "1"}).stdout
        assert output.count("ipcreduce does not know the environment variable IPCREDUCE_SINC") == times, output
        assert "Did you mean IPCREDUCE_SYNC?" in output


def test_a_wrong_value_is_an_error(mpirun: Run) -> None:
    env = HOST | {"IPCREDUCE_SYNC": "yes"}
    words = "IPCREDUCE_SYNC is 'yes'. Set it to 0 or 1"
    done = mpirun("ipcreduce", 2, "bench", env=env, check=False, timeout=60)
    assert (done.returncode, done.stdout.count(words)) == (2, 1)
    assert f"no communicator: rank 0, start-up: {words}" in mpirun("ipcreduce", 2, "info", env=env).stdout
    env = HOST | {"IPCREDUCE_WORKSPACE_MB": "1G"}
    assert "\nworkspace: error: IPCREDUCE_WORKSPACE_MB is" in mpirun("ipcreduce", 2, "info", env=env).stdout
