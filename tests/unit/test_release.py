"""What is put off, where threads meet over it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ipcreduce.ipc import release


class Met:
    """Stands for the lock of flush(): before this thread has it, another one has done all there is to do."""

    def __init__(self, then: Any) -> None:
        self._then, self._lock = then, threading.Lock()

    def acquire(self, blocking: bool) -> bool:
        self._then()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()


def test_another_thread_has_just_run_it_all(monkeypatch: pytest.MonkeyPatch):
    ran = []
    monkeypatch.setattr(release, "attempt", lambda context, *steps: [step() for step in steps])
    monkeypatch.setattr(release, "_flushing", Met(release._deferred.clear))
    release._deferred.append((1, lambda: ran.append("lost")))
    release.flush()
    assert not ran
    monkeypatch.setattr(release, "_flushing", Met(lambda: None))
    release.give_back(1, lambda: ran.append("first"), lambda: ran.append("second"))
    assert ran == ["first", "second"]
    assert not release._deferred
