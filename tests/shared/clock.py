"""The clock of this process in tests whose subject is time: the library's, and the timer of the simulated GPU.

To import this module puts a clock in the library's place that goes as the machine's does, until it is moved. Real time
passes only where a test of each kind asks for it, and has no upper bound but a hang.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from ipcreduce import clock as library

_STEP_SECONDS = 0.02  # of real time, between two moves

_moved = 0.0  # seconds
_stands_at: float | None = None


_looks: Counter[int] = Counter()  # at the clock, by thread


def now() -> float:
    """What the library sees."""
    _looks[threading.get_ident()] += 1
    return (time.monotonic() if _stands_at is None else _stands_at) + _moved


library.now = now


def once_looked() -> Callable[[], bool]:
    """A condition that holds once this thread looks at the clock again: it has begun to wait by a deadline."""
    thread = threading.get_ident()
    before = _looks[thread]
    return lambda: _looks[thread] > before


def advance(seconds: float) -> None:
    """Move the clock of this process, and the timer of its simulated GPU, if it has one."""
    global _moved
    _moved += seconds
    advance_device(seconds)


def advance_device(seconds: float) -> None:
    """Move the timer of this process's simulated GPU alone, if it has one."""
    driver = sys.modules.get("ipcreduce.cuda.driver")
    if driver is not None and hasattr(driver, "move_timer"):
        driver.move_timer(seconds)


@contextlib.contextmanager
def passing(
    seconds: float, when: Callable[[], object] = lambda: True, *, most: float = math.inf,
    move: Callable[[float], None] = advance,
) -> Iterator[None]:  # fmt: skip
    """In the block, the clock is moved by ``seconds`` once ``when()`` holds, and again and again until the block ends.

    Again, since a wait may begin behind the first move.

    :param when: an event that has to come first, such as that another rank stands in the same wait.
    :param most: seconds in all, after which the clock goes as it does, or stands.
    """
    over, problems = threading.Event(), []

    def run() -> None:
        try:
            while not when():
                if over.wait(1e-3):
                    return
            moved = 0.0
            while moved < most and not over.wait(_STEP_SECONDS):
                move(min(seconds, most - moved))
                moved += seconds
        except BaseException as error:
            problems.append(error)

    mover = threading.Thread(target=run, name="mover", daemon=True)
    mover.start()
    try:
        yield
    finally:
        over.set()
        mover.join()
    if problems:
        raise problems[0]


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """In the block the library's clock stands, but for moves: what happens in it takes as long as it was moved.

    The timer of the simulated GPU goes on, and so does what it waits for by itself.
    """
    global _stands_at, _moved
    assert _stands_at is None
    _stands_at = time.monotonic()
    try:
        yield
    finally:  # it goes on from where it stands
        _moved, _stands_at = _moved + _stands_at - time.monotonic(), None


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Take back at the end by how much the block has moved the clock: for tests that share a process."""
    global _moved
    before = _moved
    try:
        yield
    finally:
        _moved = before
