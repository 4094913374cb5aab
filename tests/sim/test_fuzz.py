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
sys.argv = ["tests.fuzz", "--ranks", "2", "--programs", "150", "--tries", "1", "--script", {script!r}]
sys.exit(__main__.main())
"""
FAULT = "from ipcreduce.graphs import breaks; breaks.Break.replay = lambda *_: None"


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


def test_a_broken_library_is_found(tmp_path: Path):
    """Breaks are left out of replays."""
    script = tmp_path / "found.py"
    done = run("-c", BROKEN.format(fault=FAULT, script=str(script)))
    assert done.returncode == 1, done.stdout
    found = script.read_text()
    assert "STEPS = [" in found
    assert "'kind': 'replay'" in found
