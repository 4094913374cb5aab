"""A pytest plugin, ``-p tests.tools.progress``: the longest tests first, and a line at least every ten seconds.

It replaces pytest's dots, which a pipe shows late. How far the tests are is told by the times that tests/times.json
keeps, and not by their number. At the start a line says how long the tests will take. At the end others say which
command repeats a test that failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from pathlib import Path

import pytest

from tests.tools import processes, times
from tests.tools.heartbeat import Heartbeat, minutes

HANG_SECONDS = 60.0
SHORT_SECONDS = 0.1  # of a test that is so short that its time is not kept
_STDOUT = os.dup(1)  # before pytest captures it


def left_in_memory() -> set[Path]:
    """The files in /dev/shm that no process has, and the library's, whose names no process keeps."""
    return {*processes.left(), *processes.SHARED_MEMORY.glob("ipcreduce-*")}


class Progress:
    """The lines of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.total = self.done = 0
        self.known: dict[str, float] = times.read(times.KEPT)["tests"]
        self.work = self.worked = 0.0  # in the seconds that are kept
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}
        self.last = "collecting the tests"
        self.heartbeat = Heartbeat(self.line, _STDOUT)
        self.heartbeat.__enter__()
        self.left = left_in_memory()

    @property
    def key(self) -> str:
        """The name of these tests, under which pytest's cache keeps their time."""
        option = self.config.option
        chosen = " ".join([*self.config.args, option.markexpr, option.keyword])
        return f"ipcreduce/seconds of {hashlib.sha256(chosen.encode()).hexdigest()[:16]}"

    def begin(self, names: list[str]) -> None:
        if self.total:  # another worker, with the same tests
            return
        self.total, self.work = len(names), sum(map(self.kept, names))
        self.last = "the longest tests go first"
        last = self.config.cache.get(self.key, None)
        took = f"the last time they took {minutes(last)}" if last else times.expected(self.work)
        self.heartbeat.say(f"{self.total} tests; {took}")

    def kept(self, name: str) -> float:
        return self.known.get(name, SHORT_SECONDS)

    def line(self) -> str:
        """How far the tests are."""
        if not self.total:
            return f"{self.last}: {self.heartbeat.took} so far"
        share = int(100 * self.worked / self.work) if self.done < self.total else 100
        failures = f", {len(set(self.failed))} failed" if self.failed else ""
        return f"{share:3} %  {self.done} of {self.total} tests, {self.heartbeat.took}{failures}  {self.last}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with xdist only its workers have any
            self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.begin(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count the report as pytest does, and show no letter."""
        if hasattr(report, "wasxfail"):
            return None
        if isinstance(report, pytest.SubtestReport):
            return ("failed", "", "FAILED") if report.failed else ("", "", "")
        if report.failed:
            return ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")
        if report.skipped:
            return ("skipped", "", "SKIPPED")
        return ("passed", "", "PASSED") if report.when == "call" else ("", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = isinstance(report, pytest.SubtestReport)
        if report.failed:
            self.failed.append(report.nodeid)
            self.heartbeat.say(f"failed: {report.nodeid} ({report.head_line if case else report.when})")
        if case:
            return
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.when != "teardown":
            return
        self.done += 1
        self.worked += self.kept(report.nodeid)
        self.last = report.nodeid
        if self.heartbeat.is_due or self.done == self.total:
            self.heartbeat.say(self.line())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.done and self.done == self.total:
            self.config.cache.set(self.key, time.monotonic() - self.heartbeat.start)
            times.TESTS.parent.mkdir(exist_ok=True)
            times.TESTS.write_text(json.dumps(self.seconds))
        until = time.monotonic() + HANG_SECONDS
        processes.remove_left()
        while (left := left_in_memory() - self.left) and time.monotonic() < until:
            time.sleep(0.1)  # those of other jobs of this machine go meanwhile
            processes.remove_left()
        if left:
            self.heartbeat.say(f"left behind in /dev/shm: {', '.join(map(str, sorted(left)))}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.heartbeat.__exit__(None, None, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.failed:
            terminalreporter.section("to repeat what failed")
        for name in dict.fromkeys(self.failed):
            terminalreporter.line(f"python -m pytest {shlex.quote(name)}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without the tests that are known to take half a second")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, as they were when their times were kept: else one that starts last is waited for alone."""
    known = times.read(times.KEPT)["tests"]
    if config.option.quick:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]
    items.sort(key=lambda item: -known.get(item.nodeid, 0.0))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist, whose results its controller tells
        config.pluginmanager.register(Progress(config), "ipcreduce-progress")
