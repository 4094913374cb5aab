"""A pytest plugin, ``-p tests.tools.progress``: a line now and then on how far the tests are, also into a pipe.

It replaces pytest's dots, which a pipe shows late. At the start it says how long the same tests took the last time.
"""

from __future__ import annotations

import time

import pytest

SECONDS_BETWEEN_LINES = 10.0


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


class Progress:
    """The lines of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.total = 0
        self.done = 0
        self.failed = 0
        self.start = self.last_line = time.monotonic()

    @property
    def key(self) -> str:
        """The name of these tests, under which pytest's cache keeps their time."""
        option = self.config.option
        chosen = " ".join([*self.config.args, option.markexpr, option.keyword])
        return "ipcreduce/seconds of " + chosen.replace("/", ".")

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
        if report.failed:
            return ("failed" if report.when == "call" else "error", "", "")
        return ("skipped" if report.skipped else "passed" if report.when == "call" else "", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self.say(f"failed: {report.nodeid} ({report.when})")
        if report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        if now - self.last_line > SECONDS_BETWEEN_LINES or self.done == self.total:
            self.last_line = now
            share = 100 * self.done // max(self.total, self.done)
            failures = f", {self.failed} failed" if self.failed else ""
            took = minutes(now - self.start)
            self.say(f"{share:3} %  {self.done} of {self.total} tests, {took}{failures}  {report.nodeid}")

    def pytest_sessionfinish(self) -> None:
        if self.done and self.done == self.total:
            self.config.cache.set(self.key, time.monotonic() - self.start)

    def say(self, line: str) -> None:
        print(line, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist, whose results its controller tells
        config.pluginmanager.register(Progress(config), "ipcreduce-progress")
