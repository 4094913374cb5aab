"""Killing the processes that have a word in their environment, while they start others."""

from __future__ import annotations

import subprocess
import uuid
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
