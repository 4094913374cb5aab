"""The tool that pauses ranks: whom it stops, that it lets them go on, and what it tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.bounds import HANG
from tests.tools.machine import ROOT, TOKEN, environment

# Starts a rank and a process that is none, and waits until the rank was stopped, and goes on; the other never was.
COMMAND = """
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
other = subprocess.Popen(sleep)
rank = subprocess.Popen(sleep, env={**os.environ, sys.argv[1]: "a test"})
for turn in range(2):
    _, status = os.waitpid(rank.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    _, status = os.waitpid(rank.pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status), status
assert os.waitpid(other.pid, os.WUNTRACED | os.WNOHANG) == (0, 0), "it is no rank"
for process in (other, rank):
    process.kill()
    process.wait()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
@pytest.mark.parametrize("status", [0, 3])
def test_ranks_are_stopped_and_go_on(status: int):
    command = [sys.executable, "-c", COMMAND, TOKEN, str(status)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.pauses", "--seed", "5", "--every", "0.1", "--", *command],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert re.fullmatch(
        rf"[2-9]\d* pauses of 1 ranks, \d+ s together, seed 5; the command has ended with {status}\n", done.stdout
    ), done.stdout
    assert TOKEN not in os.environ
