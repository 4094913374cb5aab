"""The watchdog sees a rank's process end, and tells that from a rank that has closed its communicator."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ipcreduce.coordination.control_page import Page
from ipcreduce.coordination.fingerprint import of_allreduce
from ipcreduce.coordination.watchdog import Watchdog, own_identity
from ipcreduce.errors import PeerLostError

SUM = of_allreduce((10,), "float32", "sum")


class Ranks:
    """Rank 0 in this process; the others are processes that only sleep, their parts of the page written from here."""

    def __init__(self, n: int) -> None:
        self.page = Page.create(0, n)
        self.page.join(*own_identity())
        self.pages, self.processes = {0: self.page}, {}
        for rank in range(1, n):
            self.processes[rank] = subprocess.Popen(["sleep", "60"])
            self.pages[rank] = Page.open(self.page.path, rank, n)
            self.pages[rank].join(*identity(self.processes[rank].pid))
        self.page.unlink()
        self.watchdogs: list[Watchdog] = []

    def watch(self) -> Watchdog:
        self.watchdogs.append(Watchdog(self.page))
        return self.watchdogs[-1]

    def end(self, rank: int) -> None:
        """Ends a rank's process. It is not waited for: a rank's parent may not do so either."""
        self.processes[rank].kill()

    def stop(self) -> None:
        for watchdog in self.watchdogs:
            watchdog.stop()
        for process in self.processes.values():
            process.kill()
            process.wait()


def identity(pid: int) -> tuple[int, int, int]:
    with open(f"/proc/{pid}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return pid, started, os.stat(f"/proc/{pid}/ns/pid").st_ino


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Ranks]]:
    made = []

    def make(n: int) -> Ranks:
        made.append(Ranks(n))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


@pytest.mark.parametrize("dead", [1, 2])
def test_a_death_is_seen_at_once(ranks: Callable[[int], Ranks], dead: int):
    world = ranks(3)
    watchdog = world.watch()
    assert not within(0.3, lambda: watchdog.lost or world.page.aborted), "all are alive"
    world.end(dead)
    assert within(3.0, lambda: watchdog.lost)
    assert watchdog.lost == (dead, "its process has ended")
    assert within(3.0, lambda: world.page.aborted), "the waits go on"
    error = world.page.lost(5, *watchdog.lost)
    assert type(error) is PeerLostError
    assert f"rank {dead}" in str(error)


def test_the_abort_word_stays_up(ranks: Callable[[int], Ranks]):
    """A rank that comes to wait later, or clears the word, must not wait for the dead one either."""
    world = ranks(2)
    watchdog = world.watch()
    world.end(1)
    assert within(3.0, lambda: world.page.aborted)
    world.page.clear()
    assert within(3.0, lambda: world.page.aborted)
    assert watchdog.lost


def test_the_first_to_go_is_the_one_that_is_named(ranks: Callable[[int], Ranks]):
    world = ranks(3)
    watchdog = world.watch()
    world.end(2)
    assert within(3.0, lambda: watchdog.lost)
    world.end(1)
    time.sleep(0.3)
    assert watchdog.lost == (2, "its process has ended")


def test_a_rank_that_was_dead_before_is_seen(ranks: Callable[[int], Ranks]):
    world = ranks(2)
    world.end(1)
    world.processes[1].wait()
    watchdog = world.watch()
    assert watchdog.lost == (1, "its process has ended")
    assert within(3.0, lambda: world.page.aborted)


def test_another_process_with_the_same_pid_is_not_taken_for_the_rank(ranks: Callable[[int], Ranks]):
    """The start time tells them apart."""
    world = ranks(2)
    pid, started, namespace = identity(world.processes[1].pid)
    world.pages[1].join(pid, started - 1, namespace)
    watchdog = world.watch()
    assert within(3.0, lambda: watchdog.lost == (1, "its process has ended"))


def test_a_rank_that_closed_may_end(ranks: Callable[[int], Ranks]):
    world = ranks(2)
    watchdog = world.watch()
    for page in world.pages.values():
        page.calls.enter(1, SUM)
    world.pages[1].leave()
    world.end(1)
    assert not within(0.5, lambda: watchdog.lost or world.page.aborted)


def test_a_call_after_another_rank_has_closed_is_lost(ranks: Callable[[int], Ranks]):
    world = ranks(2)
    watchdog = world.watch()
    world.page.calls.enter(1, SUM)
    world.pages[1].calls.enter(1, SUM)
    world.pages[1].leave()
    assert not within(0.3, lambda: watchdog.lost), "both made the same calls"
    world.page.calls.enter(2, SUM)
    assert within(3.0, lambda: watchdog.lost)
    assert watchdog.lost == (1, "it closed the communicator")
    assert within(3.0, lambda: world.page.aborted)


def test_a_rank_of_another_pid_namespace_is_left_alone(ranks: Callable[[int], Ranks]):
    """Its pid means another process here, or none."""
    world = ranks(2)
    pid, started, namespace = identity(world.processes[1].pid)
    world.pages[1].join(pid, started, namespace + 1)
    watchdog = world.watch()
    world.end(1)
    assert not within(0.5, lambda: watchdog.lost)


def test_stop_leaves_nothing(ranks: Callable[[int], Ranks]):
    world = ranks(4)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for turn in range(5):
        watchdog = world.watch()
        assert threading.active_count() == threads + 1
        if turn == 3:
            world.end(2)
            assert within(3.0, lambda: world.page.aborted)
        started = time.monotonic()
        watchdog.stop()
        watchdog.stop()
        assert time.monotonic() - started < 2
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_costs_next_to_nothing(ranks: Callable[[int], Ranks]):
    """Also with a dead rank, whose descriptor stays readable for ever."""
    world = ranks(3)
    watchdog = world.watch()
    world.end(1)
    assert within(3.0, lambda: watchdog.lost)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2
