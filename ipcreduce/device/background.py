"""A background thread for work that may block on the device forever, so that a caller can stop waiting for it.

Freeing memory waits for all work on the device, which may include another library's kernel that never ends. cuda-python
releases the GIL during a call from version 12.9.1 on. The thread is started with the first communicator, since Python
starts no thread at the interpreter's exit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from .. import clock
from ..originals import RLock, Thread, current, queue, running

_NAME, _COMPILES = "ipcreduce-background", "ipcreduce-compiler"
_turn = RLock()  # for making a job, which a finaliser may do in the middle of anything
_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
_last: Job | None = None
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Job:
    """A function that runs in the background thread, after all earlier jobs: from :meth:`start` or :meth:`wait` on.

    A queue tells of its end. Ctrl-C at the wrong moment of a wait for a threading.Event would leave its inner lock
    taken, and the background thread would wait for that lock forever.

    :ivar is_over: True once the function has ended.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.is_over = self._is_queued = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def start(self) -> Job:
        """Start it, unless that was done. After an interrupt in this method it can be called again."""
        global _last
        with _turn:
            if self._is_queued or self._function is None:
                return self
            behind = _last is not None and not _last.is_over  # that job may hang: leave it its thread and queue
            at_once = not start(anew=behind) and (not behind or current() is not None)
            if not at_once:
                _last, self._is_queued = self, True  # no interrupt can come between this and the next
                _jobs.put(self)
        # There is no thread at all; or the job before may wait for this one, which a thread of this library makes.
        if at_once:
            self.run()
        return self

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end. True if it has come. The function's exception is raised here.

        Only one thread may wait.
        """
        self.start()
        if not self.is_over:
            clock.wait(self._has_ended, seconds)
        if self._error is not None:
            raise self._error
        return self.is_over

    def _has_ended(self, seconds: float) -> bool:
        with suppress(queue.Empty):
            self._end.get(timeout=seconds)
        return self.is_over

    def run(self) -> None:
        """Run the function. Called by the background thread."""
        function, self._function = self._function, None  # so its references are gone once it has run
        assert function is not None
        try:
            function()
        except BaseException as error:
            self._error = error
        finally:
            del function
            self.is_over = True
            self._end.put(None)


def start(anew: bool = False) -> bool:
    """Start the thread unless one runs. With ``anew``, start another one with a new queue.

    :returns: False if the system has no thread for it, or Python starts none any more, at the interpreter's exit.
    """
    global _jobs
    with _turn:
        if not anew and any(thread.name == _NAME for thread in list(running.values())):
            return True
        before, _jobs = _jobs, queue.SimpleQueue()  # first: an interrupt in start() may come when the thread runs
        try:
            Thread(partial(_run, _jobs), _NAME).start()
        except OSError:
            _jobs = before
            return False
        before.put(None)
        return True


def _run(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()


def each(function: Callable[[_Item], _Found], items: Sequence[_Item], most: int) -> list[_Found]:
    """The results of ``function`` for all items, computed by this thread and up to ``most - 1`` further ones.

    :raises BaseException: the first one that the function has raised.
    """
    found: dict[int, _Found] = {}
    failed: list[BaseException] = []
    turns = itertools.count()

    def work() -> None:
        try:
            while not failed and (index := next(turns)) < len(items):
                found[index] = function(items[index])
        except BaseException as error:
            failed.append(error)

    threads: list[Thread] = []
    with suppress(OSError):
        for _ in range(min(most, len(items)) - 1):
            thread = Thread(work, _COMPILES)
            thread.start()
            threads.append(thread)
    work()
    for thread in threads:
        thread.join(math.inf)
    if failed:
        raise failed.pop(0)
    return [found[index] for index in range(len(items))]
