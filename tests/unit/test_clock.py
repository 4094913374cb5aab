"""The clock that deadlines go by, and the tests' hold on it."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from ipcreduce import clock as library
from ipcreduce.device import background
from tests.shared import bounds, clock


def test_it_goes_and_moves():
    before = library.now()
    clock.advance(1000.0)
    assert library.now() - before >= 1000
    assert library.on_host(library.now()) == pytest.approx(time.monotonic(), abs=bounds.HANG), "without the moves"


def test_it_stands_and_never_goes_back():
    with clock.standing():
        before = library.now()
        time.sleep(1e-3)
        assert library.now() == before
        clock.advance(7.0)
        assert library.now() == before + 7
    assert before + 7 <= library.now() < before + 7 + bounds.HANG


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_wait_of_no_time_asks_once(seconds: float):
    asked: list[float] = []
    assert not library.wait(lambda timeout: bool(asked.append(timeout)), seconds)
    assert asked == [0.0]
    assert library.wait(lambda timeout: timeout == 0, seconds)


def test_a_wait_ends_when_the_clock_has_moved():
    asked: list[float] = []

    def ask(timeout: float) -> bool:
        asked.append(timeout)
        clock.advance(30.0)
        return False

    with clock.standing():
        assert not library.wait(ask, 100.0)
    assert len(asked) == 4
    assert 0 < max(asked) <= 0.05, "else a move would be seen late"


def test_a_wait_ends_at_once_when_its_event_comes():
    """Within a slice, in one wait of the system's."""
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    events.put(1)
    assert library.wait(lambda timeout: events.get(timeout=timeout) == 1, bounds.LONG)


def test_a_job_is_waited_for_by_the_clock():
    over = threading.Event()
    background.start()
    job = background.Job(lambda: [over.wait(bounds.HANG)].clear())
    with clock.passing(60.0):
        assert not job.wait(300.0)
    over.set()
    assert job.wait(bounds.LONG)


def test_it_passes_once_an_event_has_come():
    begun, before = threading.Event(), library.now()
    with clock.passing(1000.0, when=begun.is_set):
        time.sleep(0.1)
        assert library.now() - before < 1000
        begun.set()
        bounds.until(lambda: library.now() - before > 3000)


def test_a_library_that_is_patient_is_so_for_a_while():
    from ipcreduce import process

    shipped = process.CLOSE_SECONDS
    with bounds.patient():
        assert process.CLOSE_SECONDS == bounds.LONG > bounds.HANG
    assert shipped == process.CLOSE_SECONDS
