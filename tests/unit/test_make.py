"""The targets of make: a release needs its section of the changelog, an environment is renewed, progress is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.shared import bounds
from tests.tools import heartbeat, machine, release, run, times

WITH_PROGRESS = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "tests.tools.progress"]


def test_a_release_needs_its_section_of_the_changelog(tmp_path: Path):
    (tmp_path / "ipcreduce").mkdir()
    (tmp_path / "ipcreduce" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n## Unreleased\n## 1.2.30 - 2030-01-02\n")
    with pytest.raises(
        SystemExit, match=r"version 1\.2\.3, .* no section '## 1\.2\.3'\. .* are: Unreleased, 1\.2\.30\."
    ):
        release.version_of_the_tree(tmp_path)
    changelog.write_text("# Changelog\n## 1.2.3 - 2030-01-02\n")
    assert release.version_of_the_tree(tmp_path) == "1.2.3"


def test_a_release_looks_for_its_section_before_it_installs_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["run", "release", "--venv", str(tmp_path / "venv")])
    monkeypatch.setattr(release, "version_of_the_tree", lambda root: sys.exit("no section"))
    monkeypatch.setattr(run, "set_up", pytest.fail)
    with pytest.raises(SystemExit, match="no section"):
        run.main()


def test_what_a_release_lacks_is_listed(tmp_path: Path):
    (tmp_path / "ipcreduce").mkdir()
    (tmp_path / "ipcreduce" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    texts = {  # by file: as long as nobody knows, and once they do
        "pyproject.toml": ("[project.urls]\n\n[project.scripts]\n", '[project.urls]\nHome = "https://a.invalid"\n'),
        "setup.py": ('FILES = ""\n', 'FILES = "https://a.invalid/"\n'),
        "SECURITY.md": ("https://a.invalid\n\n## Reports\n\nTell us.\n", "\n## Reports\n\nWrite to a@b.invalid.\n"),
        "ipcreduce/errors.py": ("PUBLISHED = False\n", "PUBLISHED = True\n"),
        "CHANGELOG.md": ("## 1.2.3\n", "## 1.2.3 - 2030-01-02\n"),
    }
    for name, (before, _) in texts.items():
        (tmp_path / name).write_text(before)
    assert {what.partition(":")[0] for what in release.missing(tmp_path)} == {*texts}
    for name, (_, after) in texts.items():
        (tmp_path / name).write_text(after)
    assert release.missing(tmp_path) == []


def test_a_new_module_needs_a_new_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An editable install links each file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "ipcreduce").mkdir()
    before = run.digest_of_the_install()
    module = tmp_path / "ipcreduce" / "new.py"
    module.touch()
    after = run.digest_of_the_install()
    assert after != before
    module.write_text("x = 1\n")
    module.with_suffix(".pyc").touch()
    assert run.digest_of_the_install() == after


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_mpirun_of_another_environment_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It belongs to the MPI that is installed there, which our python does not load."""
    other, system, ours = (tmp_path / name / "bin" for name in ("other", "system", "ours"))
    for folder in (other, system, ours):
        folder.mkdir(parents=True)
        (folder / "mpirun").touch(0o755)
    (other.parent / "pyvenv.cfg").touch()
    monkeypatch.delenv("MPIRUN", raising=False)
    monkeypatch.setenv("PATH", f"{other}:{system}")
    assert machine.find_mpirun(str(tmp_path / "python")) == str(system / "mpirun")
    assert machine.find_mpirun(str(ours / "python")) == str(ours / "mpirun")
    monkeypatch.setenv("PATH", str(other))
    assert machine.find_mpirun(str(tmp_path / "python")) is None, "then make installs one"


@pytest.mark.parametrize("where", ["PATH", "beside", "MPIRUN", "MPIRUN with words"])
def test_an_mpirun_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    """Its folder has a space and letters beyond ASCII; others of PATH are closed, missing, or none at all."""
    folder, closed, loop = (tmp_path / name for name in ("my \u00fc folder", "closed", "loop"))
    for path in (folder, closed, tmp_path / "bin"):
        path.mkdir()
    closed.chmod(0)
    loop.symlink_to(loop)
    program(folder / "mpirun", "echo world of 2")
    strange = ["", ".", "\udcff", "x" * 1000, "/etc/passwd", str(closed), str(loop), str(tmp_path / "none")]
    monkeypatch.setenv("PATH", os.pathsep.join([*strange, *([str(folder)] if where == "PATH" else []), os.defpath]))
    monkeypatch.delenv("MPIRUN", raising=False)
    if where.startswith("MPIRUN"):
        words = where.removeprefix("MPIRUN")
        monkeypatch.setenv("MPIRUN", f"'{folder}/mpirun' {words}" if words else f"{folder}/mpirun")
    python = str((folder if where == "beside" else tmp_path / "bin") / "python")
    assert machine.mpirun(python) == (f"{folder}/mpirun", *where.split()[1:])


def test_an_mpirun_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mpirun").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.delenv("MPIRUN", raising=False)
    with pytest.raises(RuntimeError, match=r"do not work together\n.*\n.*Exec format error"):
        machine.mpirun(str(tmp_path / "python"))


def test_a_directory_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What another user, or root within a user namespace, has left under its name stays as it is."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = [tmp_path / f"ipcreduce-tests-{os.getuid()}-{number}" for number in range(5)]
    taken[0].touch()
    taken[1].mkdir(mode=0o755)
    taken[2].symlink_to(tmp_path)
    taken[3].symlink_to("nowhere")
    if os.getuid() == 0:
        taken[4].mkdir(mode=0o700)
        os.chown(taken[4], 12345, -1)
    found = machine.own_directory()
    assert (found.name[-1], found.stat().st_mode & 0o777) == ("5" if os.getuid() == 0 else "4", 0o700)
    assert machine.own_directory() == found


def test_letters_beyond_ascii(monkeypatch: pytest.MonkeyPatch):
    assert machine.letters_beyond_ascii("a \u2502 b \u2500 c") == {"\u2502", "\u2500"}
    monkeypatch.setenv("TMPDIR", "/tmp/\u00fc")
    assert machine.letters_beyond_ascii("kept in /tmp/\u00fc \u2502") == {"\u2502"}


def test_pythons_on_path(on_path: Path):
    assert run.find_python("3.12") == (None, "no python3.12 on PATH, and no uv to get one")
    program(on_path / "python3.12", "echo 'not chosen'; exit 127")
    assert run.find_python("3.12") == (None, f"{on_path}/python3.12 does not run: not chosen")
    program(on_path / "python3.12", "echo /real/python 3.12")
    assert run.find_python("3.12") == ("/real/python", f"{on_path}/python3.12")


def test_pythons_of_uv(on_path: Path):
    program(on_path / "python3.12", "echo /real/python 3.12")
    program(on_path / "uv", 'test "$2" = find && echo /of/uv')
    assert run.find_python("3.12") == ("/of/uv", "/of/uv, by uv")
    program(on_path / "uv", "exit 1")
    assert run.find_python("3.12") == ("/real/python", f"{on_path}/python3.12")
    assert run.find_python("3.14") == (None, "no python3.14 on PATH, and uv has none")


def test_progress_is_told_in_lines(tmp_path: Path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_absent(): pytest.skip('no moon')\n"
    )
    command = [*WITH_PROGRESS, "-q", "--rootdir", tmp_path, "."]

    def lines() -> list[str]:
        output = subprocess.run(
            command, cwd=tmp_path, env=machine.environment(), stdout=subprocess.PIPE, text=True
        ).stdout
        assert "\033" not in output
        assert "\r" not in output
        return output.splitlines()

    first = lines()
    assert first[:2] == [
        "3 tests; nothing is known of their time on this machine",
        "failed: test_three.py::test_wrong (call)",
    ]
    assert any(line.startswith("100 %  3 of 3 tests, 0:0") and "1 failed" in line for line in first)
    assert "python -m pytest test_three.py::test_wrong" in first
    assert first[-1].startswith("1 failed, 1 passed, 1 skipped")
    assert lines()[0].startswith("3 tests; the last time they took 0:0")


def test_progress_is_told_by_kept_times_and_while_a_test_runs(tmp_path: Path):
    """A test of a minute comes last: before it hardly any of the time has gone, and lines come while it runs."""
    (tmp_path / "tests").mkdir()
    kept = {"tests": {"test_four.py::test_long": 60.0}, "seconds": 90.0, "unit seconds": 1e-9}
    (tmp_path / "tests" / "times.json").write_text(json.dumps(kept))
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "from tests.tools import heartbeat\n"
        "heartbeat.SECONDS = 0.05\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_collection_modifyitems(items): items.sort(key=lambda item: item.name)\n"
    )
    (tmp_path / "test_four.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\ndef test_long(): time.sleep(0.5)\n"
    )
    output = subprocess.run(
        [*WITH_PROGRESS, "-q", "--rootdir", tmp_path, "."],
        cwd=tmp_path, env=machine.environment(), stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    assert re.search(r"^4 tests; they take about \d+ min at the pace of this machine$", output, re.M), output
    told = re.findall(r"^ *(\d+) %  (\d) of 4 tests, 0:0\d min  ", output, re.M)
    assert told.count(("0", "3")) > 1, output
    assert told[-1] == ("100", "4")


def test_a_silent_command_is_told_to_go_on(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    output, until = "", time.monotonic() + bounds.HANG
    with heartbeat.told("pip installs"):
        while output.count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
            output += capfd.readouterr().out
    assert output.startswith("pip installs: 0:00 min so far\npip installs: 0:0")


def test_a_run_ends_with_the_shared_memory_that_it_found(tmp_path: Path):
    """What MPI leaves is removed. What else was not there before fails the run."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        before, of_mpi, other = (Path(shared, name) for name in ("before", "mpich_shm_1_0", "other"))
        before.touch()
        (tmp_path / "conftest.py").write_text(
            "from pathlib import Path\n"
            "from tests.tools import processes, progress\n"
            f"processes.SHARED_MEMORY = Path({shared!r})\n"
            "progress.HANG_SECONDS = 0.0\n"
        )
        (tmp_path / "test_one.py").write_text(
            "from pathlib import Path\n"
            f"def test_mpi(): Path({str(of_mpi)!r}).touch()\n"
            f"def test_other(): Path({str(other)!r}).touch()\n"
        )

        for status in (1, 0):  # the second run finds what the first one has left
            done = subprocess.run(
                [*WITH_PROGRESS, "-q", "--rootdir", tmp_path, "."],
                cwd=tmp_path, env=machine.environment(), stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert (done.returncode, f"left behind in /dev/shm: {other}\n" in done.stdout) == (status, status == 1)
            assert {*Path(shared).iterdir()} == {before, other}


def test_subtests_count_once(tmp_path: Path):
    """Each that fails is named; the test is one failure."""
    (tmp_path / "test_cases.py").write_text(
        "def test_cases(subtests):\n"
        "    for case in range(5):\n"
        "        with subtests.test(case=case):\n"
        "            assert case % 2 == 0\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "tests.tools.progress",
        "--rootdir",
        tmp_path,
    ]
    done = subprocess.run([*command, "."], cwd=tmp_path, env=machine.environment(), stdout=subprocess.PIPE, text=True)
    assert "1 tests; " in done.stdout
    assert "failed: test_cases.py::test_cases (test_cases (case=1))" in done.stdout
    assert "(case=3)" in done.stdout
    assert "100 %  1 of 1 tests" in done.stdout
    assert done.stdout.count("python -m pytest test_cases.py::test_cases") == 1
    assert done.returncode == 1


def test_the_longest_go_first(tmp_path: Path):
    (tmp_path / "test_three.py").write_text("".join(f"def test_{name}(): pass\n" for name in "abc"))
    (tmp_path / "tests").mkdir()
    tests = {"test_three.py::test_b": 3.0, "test_three.py::test_c": 20.0}
    (tmp_path / "tests" / "times.json").write_text(json.dumps({"tests": tests}))

    def ran(*options: str) -> list[str]:
        output = subprocess.run(
            [*WITH_PROGRESS, *options, "-vv", "-rA", "--rootdir", tmp_path, "test_three.py"],
            cwd=tmp_path, env=machine.environment(), stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        return re.findall(r"^PASSED test_three.py::test_(.)$", output, re.MULTILINE)

    assert ran() == ["c", "b", "a"]
    assert ran("--quick") == ["a"]


@pytest.mark.parametrize(
    ("spent", "unit", "status"), [(119.0, 1.0, 0), (121.0, 1.0, 1), (239.0, 2.0, 0), (61.0, 0.5, 1)]
)
def test_processor_time_has_a_limit(spent: float, unit: float, status: int):
    """It is told in a piece of work of this processor: one that is half as fast may take twice as long."""
    kept = {"processor seconds": 100.0, "unit seconds": 1.0}
    said, found = times.verdict({"processor seconds": spent, "unit seconds": unit}, kept)
    assert found == status
    assert f"took {spent:.0f} s" in said
    assert ("--keep" in said) == bool(status)


def test_without_times_there_is_no_verdict(tmp_path: Path):
    nothing = times.read(tmp_path / "none.json")
    run_of = {"processor seconds": 100.0, "unit seconds": 1.0}
    assert times.verdict(nothing, run_of) == ("no whole run of make test is known here", 1)
    assert times.verdict(run_of, nothing)[1] == 1


def test_the_time_of_all_processes_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("LAST", "TESTS"):
        monkeypatch.setattr(times, name, tmp_path / f"{name}.json")
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with times.noted():
        subprocess.run(
            [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"]
        )
        times.TESTS.write_text('{"a": 0.1, "b": 0.6, "c": 7}')
    found = times.read(times.LAST)
    assert found["processor seconds"] >= 0.3
    assert found["tests"] == {"c": 7, "b": 0.6}
    with times.noted():  # a run that was ended
        pass
    assert times.read(times.LAST) == found
