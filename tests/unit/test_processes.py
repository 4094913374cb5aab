"""Killing the processes that have a word in their environment, while they start others; what killed ranks leave."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared import bounds
from tests.tools import processes


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_none_that_starts_meanwhile_is_left():
    starting = "for number in 1 2 3 4 5 6 7 8; do setsid sleep 600 & done; wait"
    for _ in range(20):
        word = f"TEST_OF_PROCESSES={uuid.uuid4()}"
        name, _, value = word.partition("=")
        process = subprocess.Popen(["sh", "-c", starting], env={"PATH": "/usr/bin:/bin", name: value})
        bounds.until(lambda word=word: next(processes.marked(word), None), "the shell")
        processes.kill(word)
        process.wait(bounds.HANG)
        assert not list(processes.marked(word))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What stands for /dev/shm, in which the tests beside this one have files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        monkeypatch.setattr(processes, "SHARED_MEMORY", Path(path))
        yield Path(path)


def test_what_a_killed_rank_of_mpi_leaves_is_removed(shared: Path):
    """Once no process has it open or mapped; nothing else is removed, and no other user's."""
    of_rank, mapped, other = (shared / name for name in ("mpich_shm_1f_0", "sm_segment.host.0.1.0", "other"))
    rank = subprocess.Popen(
        [sys.executable, "-c", "import sys; file = open(sys.argv[1], 'w'); print(flush=True); input()", of_rank],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert rank.stdout is not None
    rank.stdout.readline()
    mapped.write_bytes(bytes(4096))
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    other.touch()
    kept = {other}
    if os.getuid() == 0:
        kept.add(shared / "mpich_shm_20_0")
        (shared / "mpich_shm_20_0").touch()
        os.chown(shared / "mpich_shm_20_0", 12345, -1)
    processes.remove_left()
    assert {*shared.iterdir()} == {of_rank, mapped, *kept}
    assert processes.left() == kept
    memory.close()
    rank.kill()
    rank.communicate()
    processes.remove_left()
    assert {*shared.iterdir()} == processes.left() == kept


def test_who_opens_a_file_that_is_looked_at_ends_nobody(shared: Path):
    """The kernel tells the holder of a lease of each who opens the file: by SIGIO, unless it is asked for another."""
    file = shared / "file"
    file.touch()
    opens = "import sys\nwhile True: open(sys.argv[1]).close()"
    process = subprocess.Popen([sys.executable, "-c", opens, file])
    for _ in range(20_000):
        processes.left()
    process.kill()
    process.wait()
