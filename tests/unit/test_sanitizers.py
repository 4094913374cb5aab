"""The table of the sanitizers, with a stand-in for compute-sanitizer that finds what it is told to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.shared import bounds
from tests.tools import machine, sanitizers

# Two ranks, and the status of the one that fails.
BOTH = '"$@" & "$@"; second=$?; wait $! || exit; exit $second'
LAUNCHER = ("sh", "-c", f"shift 2; {BOTH}", "launcher")  # -n 2
LOG = """\
while [ "$1" != --log-file ]; do shift; done
exec 3> "$(echo "$2" | sed "s/%p/$$/")"
echo "========= COMPUTE-SANITIZER" >&3
"""
RIGHT = "echo 'one_shot: 20 cases, all right'\n"
CLEAN = "echo '========= ERROR SUMMARY: 0 errors' >&3\n"
ERRORS = """\
echo '========= Invalid __global__ read of size 16 bytes' >&3
echo '=========     at one_shot+0x10 in one_shot.cu:12' >&3
echo '========= ERROR SUMMARY: 3 errors' >&3
echo '========= ERROR SUMMARY: 2 errors were not printed. Use --print-limit option to adjust the number' >&3
exit 9
"""
HAZARDS = "echo '========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)' >&3; exit 9\n"
NO_HAZARDS = "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' >&3\n"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is compute-sanitizer: to be written."""
    path = tmp_path / "compute-sanitizer"
    path.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (RIGHT + CLEAN, (40, 0, "")),
        (RIGHT + NO_HAZARDS, (40, 0, "")),
        (RIGHT + ERRORS, (40, 6, "")),
        (RIGHT + HAZARDS, (40, 4, "")),
        (ERRORS, (0, 6, "exit status 9: nothing printed")),
        ("echo one; echo two >&2; kill -SEGV $$\n", (0, 0, "exit status 139: Segmentation fault")),
        ("echo 'AssertionError: wrong'; exit 1\n" + CLEAN, (0, 0, "exit status 1: AssertionError: wrong")),
        (RIGHT, (40, 0, "0 summaries of the tool, expected 2")),
        (CLEAN, (0, 0, "no calls were made")),
    ],
    ids=[
        "clean", "no hazards", "errors", "hazards", "errors and no end", "a crash", "a wrong result", "no summary",
        "no calls",
    ],
)  # fmt: skip
def test_a_line_of_the_table(tool: Path, script: str, expected: tuple[int, int, str]):
    tool.write_text(f"#!/bin/sh\n{LOG}{script}")
    row = sanitizers.run(LAUNCHER, "memcheck", "one_shot", 60)
    assert (row["cases"], row["errors"], row["problem"]) == expected
    shown = ["Invalid __global__ read of size 16 bytes", "at one_shot+0x10 in one_shot.cu:12"]
    assert (row["found"][:2] == shown) == (ERRORS in script)


def test_a_hang_is_ended_with_all_that_it_has_started(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alive, wait = tmp_path / "alive", subprocess.Popen.wait
    alive.touch()

    def until_both_hang(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        bounds.until(lambda: len(alive.read_text().split()) == 2, "both ranks")
        raise subprocess.TimeoutExpired("the ranks", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_both_hang)
    tool.write_text(f"#!/bin/sh\n{LOG}setsid sleep 600 &\necho $! >> {alive}\nwait\n")
    row = sanitizers.run(LAUNCHER, "racecheck", "direct", 1)
    assert row["problem"] == "not done after 1 s"
    bounds.until(lambda: all(has_ended(Path("/proc", pid, "stat")) for pid in alive.read_text().split()), "its end")


def has_ended(state: Path) -> bool:
    try:
        return state.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_words_of_a_rank(tmp_path: Path):
    words = sanitizers.command("initcheck", "limit", tmp_path)
    assert words[:3] == ["compute-sanitizer", "--tool", "initcheck"]
    program = words.index(sys.executable)
    assert Path(words[program + 1]).is_file()
    assert words[program + 2 :] == ["limit"]


@pytest.mark.parametrize(
    ("script", "status", "line"),
    [
        (RIGHT + CLEAN, 0, "memcheck  verify             40       0  clean"),
        (RIGHT + ERRORS, 1, "memcheck  verify             40       6"),
        (RIGHT, 1, "0 summaries of the tool, expected 2"),
    ],
)
def test_the_exit_status(
    tool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], script: str, status: int, line: str
):
    tool.write_text(f"#!/bin/sh\n{LOG}{script}")
    monkeypatch.setattr(machine, "cuda", lambda: (1, 13))
    monkeypatch.setattr(machine, "mpirun", lambda python: LAUNCHER)
    monkeypatch.setattr(sys, "argv", ["sanitizers", "--tools", "memcheck", "--kernels", "verify"])
    assert sanitizers.main() == status
    assert line in capfd.readouterr().out


def test_where_something_is_missing(tool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["sanitizers"])
    monkeypatch.setattr(machine, "cuda", lambda: (0, 0))
    assert sanitizers.main() == 2
    assert "the sanitizers cannot run here: no GPU" in capfd.readouterr().out
    tool.unlink()
    monkeypatch.setenv("PATH", str(tool.parent))
    assert sanitizers.main() == 2
    assert "no compute-sanitizer on PATH" in capfd.readouterr().out
