"""``python -m ipcreduce bench`` where it cannot run: an error that says what it needs, and exit code 1."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.machine import ROOT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "bench needs GPUs and at least 2 ranks under mpirun"),
        (["--mode", "graphs"], "--mode takes graph and eager"),
        (["--peers", "gloo"], "found {'gloo'}"),
    ],
)
def test_refused(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "ipcreduce", "bench", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert words in done.stderr
