"""The default communicator, in the middle of its start-up and beside it: handlers, threads, forked children."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import ipcreduce
from ipcreduce import UnsupportedError, communicator, default, process
from tests.shared import clock, worker
from tests.shared.bounds import HANG


@pytest.fixture
def none_yet(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(default, "_default", None)
    return monkeypatch


def _handler(found: list[object]) -> Callable[..., None]:
    """A handler that makes a call, of which it notes the result or the error."""

    def handle(*_: object) -> None:
        try:
            found.append(ipcreduce.allreduce(2.0))
        except UnsupportedError as error:
            found.append(str(error))

    return handle


def _raised_within(found: list[object]) -> None:
    assert len(found) == 1
    assert "while the same thread makes the default communicator. Let it set a flag" in str(found[0])


def test_a_signal_handler_within_its_start_up(none_yet: pytest.MonkeyPatch):
    """The handler's call raises, and the start-up goes on."""
    found: list[object] = []
    usual = communicator.startup.starting

    def starting(*given: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return usual(*given)

    none_yet.setattr(communicator.startup, "starting", starting)
    before = signal.signal(signal.SIGUSR1, _handler(found))
    try:
        assert ipcreduce.allreduce(3.0) == 3.0  # in a world of one
    finally:
        signal.signal(signal.SIGUSR1, before)
    _raised_within(found)
    ipcreduce.get_communicator().close()


def test_a_log_handler_of_our_own_record(none_yet: pytest.MonkeyPatch):
    found: list[object] = []
    handler, log = logging.Handler(), logging.getLogger("ipcreduce")
    none_yet.setattr(handler, "emit", _handler(found))
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        with ipcreduce.get_communicator():
            _raised_within(found)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def test_an_interrupted_start_up_leaves_the_next_one_free(none_yet: pytest.MonkeyPatch):
    with none_yet.context() as patch:
        patch.setattr(communicator.startup, "starting", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ipcreduce.get_communicator()
    ipcreduce.get_communicator().close()


def _held_by_another_thread(over: threading.Event) -> threading.Thread:
    taken = threading.Event()

    def hold() -> None:
        with default._making:
            taken.set()
            over.wait(HANG)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(HANG)
    return thread


def _refused_as_forked() -> None:
    for call in (ipcreduce.get_communicator, lambda: ipcreduce.allreduce(1.0)):
        with pytest.raises(UnsupportedError, match="Start processes by spawn"):
            call()


def test_it_is_found_and_refused_without_the_lock(none_yet: pytest.MonkeyPatch):
    """Who only looks it up waits for nobody, and a forked child never waits for a thread of its parent."""
    comm, over = ipcreduce.get_communicator(), threading.Event()
    thread = _held_by_another_thread(over)

    try:
        assert ipcreduce.get_communicator() is comm
        worker.in_a_fork(_refused_as_forked)
    finally:
        over.set()
        thread.join()
    comm.close()


def test_a_child_that_is_forked_within_start_up(none_yet: pytest.MonkeyPatch):
    """The parent has not made its first communicator yet."""
    none_yet.setattr(process, "_used", False)
    usual = communicator.groups.of

    def of(group: object) -> Any:
        worker.in_a_fork(_refused_as_forked)
        return usual(group)

    none_yet.setattr(communicator.groups, "of", of)
    ipcreduce.get_communicator().close()


def test_a_start_up_of_another_thread_that_never_ends(none_yet: pytest.MonkeyPatch):
    over = threading.Event()
    thread = _held_by_another_thread(over)
    try:
        with clock.own(), clock.passing(100.0), pytest.raises(UnsupportedError, match="Look for what that thread"):
            ipcreduce.get_communicator()
    finally:
        over.set()
        thread.join()
    ipcreduce.get_communicator().close()
