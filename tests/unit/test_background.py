"""Jobs that may hang: given up, told of their errors, and out of each other's way."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from ipcreduce.device import background
from tests.shared.bounds import HANG


def test_jobs_run_one_after_the_other_in_one_thread():
    background.start()
    seen: list[str] = []
    jobs = [background.Job(lambda: seen.append(threading.current_thread().name)).start() for _ in range(3)]
    assert all(job.wait(HANG) for job in jobs)
    assert seen == ["ipcreduce-background"] * 3


def test_a_job_that_hangs_is_given_up_and_holds_no_other():
    background.start()
    over = threading.Event()
    hanging = background.Job(lambda: (over.wait(), None)[1]).start()
    assert not hanging.wait(0.01)
    assert not hanging.is_over
    assert background.Job(lambda: None).wait(HANG)
    over.set()
    assert hanging.wait(HANG)


def test_what_a_job_raises_is_raised_where_it_is_waited_for():
    background.start()

    def fail() -> None:
        raise ValueError("of the job")

    with pytest.raises(ValueError, match="of the job"):
        background.Job(fail).wait(HANG)


def test_a_job_that_is_over_holds_nothing():
    background.start()

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    assert background.Job(lambda held=held: None).wait(HANG)
    del held
    gc.collect()
    assert alive() is None


def test_a_process_that_makes_no_threads_any_more_waits_for_none(monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()
    background.start()
    background.Job(over.wait).start()  # the thread that there is hangs

    def refuse(*args: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        behind = background.Job(lambda: None).start()
        assert not behind.wait(0.01)
        over.set()
        assert behind.wait(HANG), "the thread that there is has not gone on with it"
    assert background.Job(lambda: None).wait(HANG)


def test_a_job_that_makes_a_job_which_no_thread_can_run(monkeypatch: pytest.MonkeyPatch):
    background.start()
    seen: list[str] = []

    def refuse(*args: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    outer = background.Job(lambda: seen.append(str(background.Job(lambda: seen.append("inner")).wait(HANG))))
    assert outer.wait(HANG)
    assert seen == ["inner", "True"]


def test_no_job_is_lost_between_two_threads():
    """One looks the queue up, another one starts a thread with a new queue."""
    background.start()
    over = threading.Event()
    jobs: list[background.Job] = []

    def make() -> None:
        for _ in range(200):
            jobs.append(background.Job(lambda: None).start())

    for _ in range(5):
        background.Job(over.wait).start()
        makers = [threading.Thread(target=make) for _ in range(3)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join(HANG)
        over.set()
        assert all(job.wait(HANG) for job in jobs)
        over.clear()
    over.set()


def test_an_interrupt_as_the_thread_starts_leaves_one_that_serves(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C may come when the thread runs already."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            background.start(anew=True)
    assert background.start()
    assert background.Job(lambda: None).wait(HANG)


def test_a_job_whose_start_is_interrupted_is_started_once(monkeypatch: pytest.MonkeyPatch):
    """Before it is in the queue, and behind that."""
    background.start()
    seen: list[int] = []

    class Turn:
        def __init__(self, before: bool) -> None:
            self.before = before

        def __enter__(self) -> None:
            if self.before:
                raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    for before in (True, False):
        job = background.Job(lambda: seen.append(1))
        with monkeypatch.context() as patch:
            patch.setattr(background, "_turn", Turn(before))
            with pytest.raises(KeyboardInterrupt):
                job.wait(HANG)
        assert job.wait(HANG)
    assert seen == [1, 1]
