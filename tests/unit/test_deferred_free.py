"""What is put off, where threads meet over it."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from ipcreduce import process
from ipcreduce.device import deferred_free
from tests.shared import clock
from tests.shared.bounds import HANG


class Met(deferred_free._Turn):
    """The lock of flush(): before this thread has it, another one has done all there is to do."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self._then = then

    def acquire(self, token: object) -> bool:
        self._then()
        return super().acquire(token)


class Interrupted(deferred_free._Turn):
    """The same, with Ctrl-C right behind its first acquire()."""

    left = 1

    def acquire(self, token: object) -> bool:
        acquired = super().acquire(token)
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return acquired


class Order:
    """The order of a communicator's calls."""

    over = False

    def is_over(self) -> bool:
        return self.over


def test_another_thread_has_just_run_it_all(monkeypatch: pytest.MonkeyPatch):
    ran = []
    monkeypatch.setattr(deferred_free, "attempt", lambda context, *steps: [step() for step in steps])
    monkeypatch.setattr(deferred_free, "_flushing", Met(deferred_free._deferred.clear))
    deferred_free._deferred.append((1, lambda: ran.append("lost")))
    deferred_free.flush()
    assert not ran
    monkeypatch.setattr(deferred_free, "_flushing", Met(lambda: None))
    deferred_free.free_later(1, lambda: ran.append("first"), lambda: ran.append("second"))
    assert ran == ["first", "second"]
    assert not deferred_free._deferred


def test_nothing_is_freed_beside_a_call(monkeypatch: pytest.MonkeyPatch):
    """Neither while a call runs on the device nor while another thread makes one."""
    ran: list[int] = []
    order, lock = Order(), threading.RLock()
    monkeypatch.setattr(deferred_free, "attempt", lambda context, *steps: [step() for step in steps])
    monkeypatch.setattr(deferred_free, "_orders", {})
    deferred_free.track(order, lock)  # type: ignore[arg-type]
    deferred_free.free_later(1, lambda: ran.append(1))
    assert not ran, "a call runs"
    order.over = True
    made, ended = threading.Event(), threading.Event()

    def make_a_call() -> None:
        with lock:
            made.set()
            ended.wait(HANG)

    other = threading.Thread(target=make_a_call)
    other.start()
    made.wait(HANG)
    deferred_free.flush()
    assert not ran, "another thread makes a call"
    ended.set()
    other.join()
    deferred_free.flush()
    assert ran == [1]


def test_an_interrupt_behind_the_lock_does_not_keep_it(monkeypatch: pytest.MonkeyPatch):
    ran = []
    monkeypatch.setattr(deferred_free, "attempt", lambda context, *steps: [step() for step in steps])
    monkeypatch.setattr(deferred_free, "_flushing", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        deferred_free.free_later(1, lambda: ran.append(1))
    deferred_free.flush()
    assert ran == [1]


def test_an_interrupt_comes_behind_all_actions(monkeypatch: pytest.MonkeyPatch):
    ran = []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        ran.append(1)

    monkeypatch.setattr(deferred_free, "attempt", lambda context, *steps: [step() for step in steps])
    monkeypatch.setattr(deferred_free.watchdog, "is_watching", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        deferred_free.free_later(1, interrupted, lambda: ran.append(2))
    assert ran == [1, 2]
    deferred_free.free_later(1, lambda: ran.append(3))
    assert ran == [1, 2, 3]


def test_an_interrupt_behind_a_communicators_lock_does_not_keep_it(monkeypatch: pytest.MonkeyPatch):
    class Lock:
        def __init__(self) -> None:
            self.lock = threading.RLock()

        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            self.lock.acquire()
            raise KeyboardInterrupt

        def release(self) -> None:
            self.lock.release()

    lock, ran = Lock(), []
    monkeypatch.setattr(deferred_free, "attempt", lambda context, *steps: [step() for step in steps])
    monkeypatch.setattr(deferred_free, "_orders", {None: lock})
    for call in (lambda: deferred_free.free_later(1, lambda: ran.append(1)), deferred_free.reclaim):
        with pytest.raises(KeyboardInterrupt):
            call()
        taken = []
        thread = threading.Thread(target=lambda taken=taken: taken.append(lock.lock.acquire(timeout=HANG)))
        thread.start()
        thread.join()
        assert taken == [True], "the interrupted thread has it still"
        lock.lock = threading.RLock()
    monkeypatch.setattr(deferred_free, "_orders", {})
    deferred_free.flush()
    assert ran == [1]


def test_nothing_is_freed_in_a_forked_child_or_at_the_end(monkeypatch: pytest.MonkeyPatch):
    ran = []
    monkeypatch.setattr(deferred_free, "attempt", lambda context, *steps: [step() for step in steps])
    for name in ("_forked", "_ended"):
        monkeypatch.setattr(process, name, True)
        deferred_free.free_later(1, lambda: ran.append(1))
        deferred_free.free_after(lambda: True, 1, lambda: ran.append(1))
        deferred_free.flush()
        monkeypatch.setattr(process, name, False)
    deferred_free.flush()
    assert not ran


def test_waits_are_bounded_by_the_blocks_around():
    assert process.at_most(5.0) == 5.0
    with clock.standing(), process.time_limit(3.0), process.time_limit(60.0):
        assert process.at_most(5.0) == pytest.approx(3)
        assert process.at_most(0.1) == 0.1
        clock.advance(1.0)
        assert process.at_most(5.0) == pytest.approx(2)
        with process.time_limit(0.0):
            assert process.at_most(5.0) == 0
    assert process.at_most(5.0) == 5.0
