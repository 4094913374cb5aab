"""Random programs on the simulated device: a few of those of ``make fuzz``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import machine

# Breaks the library in the ranks, which are forked from this process, and runs random programs.
BROKEN = """
import sys
from tests.fuzz import job, programs
job.prepare(2, True)
{fault}
from tests.fuzz import __main__
sys.argv = ["tests.fuzz", "--ranks", "2", "--programs", "600", "--tries", "1", "--script", {script!r}]
sys.exit(__main__.main())
"""
NO_BREAKS = "from ipcreduce.graphs import breaks; breaks.Break.replay = lambda *_: None"
ALL_AT_THE_BEGINNING = """
from ipcreduce.calls.request import Split
rows = Split.rows
Split.rows = lambda split, shape, itemsize, n: rows(split, shape, itemsize, n)._replace(offsets=(0,) * n)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=machine.ROOT, env=machine.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_programs(ranks: int, tmp_path: Path):
    done = run("-m", "tests.fuzz", "--programs", "60", "--ranks", str(ranks), "--script", str(tmp_path / "found.py"))
    assert done.returncode == 0, done.stdout


def test_deaths(tmp_path: Path):
    done = run(
        "-m", "tests.fuzz", "--deaths", "--programs", "10", "--ranks", "2", "4", "--script", str(tmp_path / "found.py")
    )
    assert done.returncode == 0, done.stdout
    assert "survivors" in done.stdout


def test_a_soak():
    done = run("-m", "tests.fuzz.soak", "--communicators", "20", "--recordings", "60")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("fault", "kind"), [(NO_BREAKS, "replay"), (ALL_AT_THE_BEGINNING, "split")], ids=["no breaks", "no places"]
)
def test_a_broken_library_is_found(fault: str, kind: str, tmp_path: Path):
    script = tmp_path / "found.py"
    done = run("-c", BROKEN.format(fault=fault, script=str(script)))
    assert done.returncode == 1, done.stdout
    found = script.read_text()
    assert "STEPS = [" in found
    assert f"'kind': '{kind}'" in found
