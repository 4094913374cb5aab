"""Files in /dev/shm: whose they are, and how those go that ranks leave which are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcreduce.page import shared_files
from ipcreduce.page.control_page import Page
from tests.tools import machine

MAKES = """
import sys
from ipcreduce.page import shared_files
from ipcreduce.page.control_page import Page
made = Page.create(0, 2) if sys.argv[1] == "mapped" else shared_files.create(4096)
print(made.path if sys.argv[1] == "mapped" else made[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of the tests that run beside this one are left alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        monkeypatch.setattr(shared_files, "_DIRECTORY", path)
        yield Path(path)


def start(directory: Path, how: str) -> tuple[subprocess.Popen[str], Path]:
    """Another process that has made a file, and the file."""
    program = f"from ipcreduce.page import shared_files\nshared_files._DIRECTORY = {str(directory)!r}\n{MAKES}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, how], cwd=machine.ROOT, env=machine.environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_mapping_has_no_descriptor():
    """Python's own would be closed with the mapping, by a number that the program may have given to another file."""
    before = os.listdir("/proc/self/fd")
    made = Page.create(0, 2)
    other = Page.open(made.path, 1, 2)
    assert os.listdir("/proc/self/fd") == before
    made.join(7, 8)
    assert other.identity(0) == (7, 8)
    with pytest.raises(OSError, match="Permission denied"):
        shared_files.mapped(os.open(made.path, os.O_WRONLY))


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_what_a_killed_rank_leaves_goes_with_the_next_file(directory: Path, how: str):
    """And what a living one has made stays."""
    killed, left = start(directory, how)
    living, kept = start(directory, how)
    mine = Page.create(0, 2)
    assert {*directory.iterdir()} == {left, kept, Path(mine.path)}
    end(killed)
    assert left.exists()
    descriptor, path = shared_files.create(4096)
    assert {*directory.iterdir()} == {kept, Path(mine.path), Path(path)}
    os.close(descriptor)
    end(living)
    Page.create(0, 2)  # of a communicator that has gone
    last = Page.create(0, 2)
    assert {*directory.iterdir()} == {Path(mine.path), Path(last.path)}


def test_other_files_are_left_alone(directory: Path):
    for name in ("of another program", "ipcreduce-of-an-older-version"):
        (directory / name).touch()
    (directory / "ipcreduce-locked-directory").mkdir()
    (directory / "ipcreduce-locked-link").symlink_to(directory / "of another program")
    expected = {*directory.iterdir()}
    if os.getuid() == 0:  # who may open others' files, too
        (directory / "ipcreduce-locked-of-another-user").touch()
        os.chown(directory / "ipcreduce-locked-of-another-user", 12345, -1)
        expected = {*directory.iterdir()}
    descriptor, path = shared_files.create(4096)
    os.close(descriptor)
    assert {*directory.iterdir()} == expected | {Path(path)}


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "about to be removed"])
def test_a_file_that_was_taken_for_left_over_is_made_again(monkeypatch: pytest.MonkeyPatch, removed: bool):
    """Another rank 0 may look between the making and the lock."""
    made, others, make = [], [], tempfile.mkstemp

    def raced(**arguments: str) -> tuple[int, str]:
        descriptor, path = make(**arguments)
        made.append(path)
        if len(made) < 3:
            others.append(os.open(path, os.O_RDWR))
            fcntl.flock(others[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if removed:
                os.unlink(path)
                fcntl.flock(others[-1], fcntl.LOCK_UN)
        return descriptor, path

    monkeypatch.setattr(shared_files.tempfile, "mkstemp", raced)
    descriptor, path = shared_files.create(4096)
    assert (len(made), path) == (3, made[-1])
    assert os.path.samestat(os.fstat(descriptor), os.stat(path))
    for one in (descriptor, *others):
        os.close(one)


def test_where_there_are_no_locks_nothing_is_left_over(directory: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    made = [shared_files.create(4096) for _ in range(2)]
    assert {*directory.iterdir()} == {Path(path) for _, path in made}
    for descriptor, _ in made:
        os.close(descriptor)


def test_only_such_files_are_removed(directory: Path, tmp_path: Path):
    """Another rank has told the path."""
    descriptor, path = shared_files.create(4096)
    os.close(descriptor)
    (directory / "other").touch()
    (tmp_path / "ipcreduce-locked-x").touch()
    for other in (directory / "other", tmp_path / "ipcreduce-locked-x", f"{directory}/ipcreduce-locked-/../other", ""):
        shared_files.remove(str(other))
    assert (directory / "other").exists()
    assert (tmp_path / "ipcreduce-locked-x").exists()
    shared_files.remove(path)
    shared_files.remove(path)
    assert not Path(path).exists()
