"""Work that may wait for the device for good, done in a thread so that it can be given up, and be interrupted.

Freeing waits for all that runs on the device, which may be a kernel of another library that never ends. In a call the
bindings let go of the GIL (from 12.9.1 on). The thread is made with the first communicator: at the interpreter's exit
Python makes none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

_NAME = "ipcreduce-background"
_jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
_last: Job | None = None


class Job:
    """A function that runs in the thread, behind the jobs before it."""

    def __init__(self, function: Callable[[], None]) -> None:
        global _last
        self._function: Callable[[], None] | None = function
        self._over = threading.Event()
        self._error: BaseException | None = None
        if _last is not None and not _last.is_over:  # that one may hang: it keeps the thread and the queue that it has
            start(anew=True)
        _last = self
        _jobs.put(self)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for its end; whether it has come. An exception that it ended with is raised here."""
        over = self._over.wait(seconds)
        if self._error is not None:
            raise self._error
        return over

    def run(self) -> None:
        """Runs the function, in the thread."""
        function, self._function = self._function, None  # what it holds ends with it
        assert function is not None
        try:
            function()
        except BaseException as error:
            self._error = error
        finally:
            del function
            self._over.set()


def start(anew: bool = False) -> None:
    """Makes the thread, if there is none; another one ``anew``, if Python still makes threads."""
    global _jobs, _last
    if anew:
        _jobs = queue.SimpleQueue()
    elif any(thread.name == _NAME for thread in threading.enumerate()):
        return
    with suppress(RuntimeError):  # at exit, behind a job that hangs: this one is not done at all
        threading.Thread(target=_run, args=[_jobs], name=_NAME, daemon=True).start()


def _run(jobs: queue.SimpleQueue[Job]) -> None:
    while jobs is _jobs:
        jobs.get().run()
