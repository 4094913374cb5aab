"""Ctrl-C that comes within a short step, and raises at the step's end: nothing is lost between two lines of it."""

from __future__ import annotations

from types import FrameType
from typing import Any

from .originals import signal


class uninterrupted:
    """A context manager for a short step, in which Python waits for no other rank. Ctrl-C is handled at its end.

    Where the driver has made something, and the next line keeps it, an interrupt between the two would leave it to the
    process's end. In threads other than the main one this does nothing: Python runs no handlers there.
    """

    __slots__ = ("_before", "_frame", "_has_come")

    def __enter__(self) -> None:
        self._has_come = False
        self._frame: FrameType | None = None
        self._before: Any = signal.getsignal(signal.SIGINT)
        if not callable(self._before):  # Ctrl-C ends the process, or is ignored, or is no concern of Python's
            return
        try:
            signal.signal(signal.SIGINT, self._note)
        except ValueError:  # not in the main thread
            self._before = None
        except BaseException:  # raised by the handler of another signal
            signal.signal(signal.SIGINT, self._before)
            raise

    def __exit__(self, *_: object) -> None:
        if not callable(self._before):
            return
        try:
            signal.signal(signal.SIGINT, self._before)  # first: what comes from here on is the program's at once
        except BaseException:  # raised by the handler of another signal, before the handler was set
            signal.signal(signal.SIGINT, self._before)
            raise
        if self._has_come:
            self._before(signal.SIGINT, self._frame)

    def _note(self, _signal: int, frame: FrameType | None) -> None:
        self._has_come, self._frame = True, frame
