"""A pytest plugin, ``-p tests.tools.progress``: the longest tests first, and a line now and then on how far they are.

It replaces pytest's dots, which a pipe shows late. At the start it says how long the same tests took the last time, and
at the end which command repeats a test that failed.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from pathlib import Path

import pytest

from tests.tools import processes, times

SECONDS_BETWEEN_LINES = 10.0
HANG_SECONDS = 60.0


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


def left_in_memory() -> set[Path]:
    """The files in /dev/shm that no process has, and the library's, whose names no process keeps."""
    return {*processes.left(), *processes.SHARED_MEMORY.glob("ipcreduce-*")}


class Progress:
    """The lines of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.total = 0
        self.done = 0
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}
        self.start = self.last_line = time.monotonic()
        self.left = left_in_memory()

    @property
    def key(self) -> str:
        """The name of these tests, under which pytest's cache keeps their time."""
        option = self.config.option
        chosen = " ".join([*self.config.args, option.markexpr, option.keyword])
        return f"ipcreduce/seconds of {hashlib.sha256(chosen.encode()).hexdigest()[:16]}"

    def begin(self, total: int) -> None:
        if self.total:  # another worker, with the same tests
            return
        self.total = total
        last = self.config.cache.get(self.key, None)
        took = f"the last time they took {minutes(last)}" if last else "nothing is known of their time on this machine"
        self.say(f"{total} tests; {took}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with xdist only its workers have any
            self.begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.begin(len(ids))

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
            self.say(f"failed: {report.nodeid} ({report.head_line if case else report.when})")
        if case:
            return
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        if now - self.last_line > SECONDS_BETWEEN_LINES or self.done == self.total:
            self.last_line = now
            share = 100 * self.done // max(self.total, self.done)
            failures = f", {len(set(self.failed))} failed" if self.failed else ""
            took = minutes(now - self.start)
            self.say(f"{share:3} %  {self.done} of {self.total} tests, {took}{failures}  {report.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.done and self.done == self.total:
            self.config.cache.set(self.key, time.monotonic() - self.start)
            times.TESTS.parent.mkdir(exist_ok=True)
            times.TESTS.write_text(json.dumps(self.seconds))
        until = time.monotonic() + HANG_SECONDS
        processes.remove_left()
        while (left := left_in_memory() - self.left) and time.monotonic() < until:
            time.sleep(0.1)  # those of other jobs of this machine go meanwhile
            processes.remove_left()
        if left:
            self.say(f"left behind in /dev/shm: {', '.join(map(str, sorted(left)))}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.failed:
            terminalreporter.section("to repeat what failed")
        for name in dict.fromkeys(self.failed):
            terminalreporter.line(f"python -m pytest {shlex.quote(name)}")

    def say(self, line: str) -> None:
        print(line, flush=True)


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
