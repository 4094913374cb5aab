"""What the package takes for Python's own, where another library has put something else in its place."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import Any

import pytest

from ipcreduce import originals
from ipcreduce.device import background
from tests.shared.bounds import HANG
from tests.tools.machine import ROOT, environment

PROGRAM = """
from tests.shared import replaced
{}
from ipcreduce import clock, originals
from ipcreduce.device import background
from ipcreduce.interrupts import uninterrupted
from ipcreduce.page import watchdog
before = clock.now()
originals.time.sleep(1e-3)
assert before < clock.now() and originals.select.epoll().poll(0) == []
with originals.RLock(), originals.Lock(), uninterrupted(), originals.Socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)
    with originals.Socket() as guest:
        guest.connect(listener.getsockname())
        listener.accept()[0].close()
seen = []
assert background.start()
job = background.Job(lambda: seen.append(originals.current().name))
assert job.wait(60) and seen == ["ipcreduce-background"]
assert background.each(abs, range(100), 4) == [*range(100)]
"""


@pytest.mark.parametrize("order", ["replaced.replace(); import ipcreduce", "import ipcreduce; replaced.replace()"])
def test_what_has_been_replaced_is_not_used(order: str):
    command = [sys.executable, "-c", PROGRAM.format(order)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def _refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch):
    thread = originals.Thread(lambda: None, "none")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(OSError, match=r"no further thread \(can't start new thread\)\. Raise the limit"):
            thread.start()
    assert not thread.is_alive
    thread.join(math.inf)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive


@pytest.mark.parametrize("place", [sys, threading])
@pytest.mark.parametrize("has_it", [False, True])
def test_a_thread_where_the_program_has_taken_excepthook_away(
    monkeypatch: pytest.MonkeyPatch, place: Any, has_it: bool
):  # fmt: skip
    """Python's own threads cannot be without it. This is no want of threads, as the error said."""
    if has_it:
        monkeypatch.setattr(place, "excepthook", None)
    else:
        monkeypatch.delattr(place, "excepthook")
    seen: list[str] = []
    thread = originals.Thread(lambda: seen.append("run"), "one")
    thread.start()
    thread.join(HANG)
    assert seen == ["run"]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_each_item_without_enough_threads(monkeypatch: pytest.MonkeyPatch, threads: int):
    """The calling thread does what no other one can."""
    usual, left = threading.Thread.start, [None] * threads

    def start(thread: threading.Thread) -> None:
        (left.pop if left else _refuse)()
        usual(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert background.each(str, range(50), 5) == [*map(str, range(50))]
    with pytest.raises(ZeroDivisionError):
        background.each(lambda item: 1 // item, [2, 1, 0, 3], 3)
    assert background.each(str, [], 5) == []
    assert not [one for one in originals.running.values() if one.name == "ipcreduce-compiler"]


def test_a_job_without_any_thread(monkeypatch: pytest.MonkeyPatch):
    """It runs at once, and raises where it is waited for."""
    monkeypatch.setattr(originals, "running", {})
    monkeypatch.setattr(background, "running", {})
    monkeypatch.setattr(background, "_last", None)
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    seen: list[int] = []
    assert background.Job(lambda: seen.append(1)).wait(0.0)
    assert seen == [1]
    with pytest.raises(ZeroDivisionError):
        background.Job(lambda: [1 // 0].clear()).wait(0.0)
