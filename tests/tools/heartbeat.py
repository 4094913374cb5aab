"""A line at least every ten seconds, so that a command that works is not taken for one that hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

SECONDS = 10.0


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


class Heartbeat:
    """Lines of a block. ``words`` makes one whenever none has been said for ten seconds."""

    def __init__(self, words: Callable[[], str], descriptor: int = 1) -> None:
        self._words, self._descriptor = words, descriptor
        self._last = self.start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    @property
    def took(self) -> str:
        return minutes(time.monotonic() - self.start)

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._last >= SECONDS

    def say(self, line: str) -> None:
        self._last = time.monotonic()
        os.write(self._descriptor, f"{line}\n".encode())

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(max(0.0, self._last + SECONDS - time.monotonic())):
            if self.is_due:
                self.say(self._words())


def told(what: str) -> Heartbeat:
    """A block whose lines say for how long ``what`` has been going on."""
    beat = Heartbeat(lambda: f"{what}: {beat.took} so far")
    return beat
