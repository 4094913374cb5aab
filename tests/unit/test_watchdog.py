"""The watchdog sees a rank's process end, and tells that from a rank that has closed its communicator."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import pytest

from ipcreduce.calls import faults
from ipcreduce.errors import PeerLostError
from ipcreduce.page import shared_files, watchdog
from ipcreduce.page.control_page import Page
from ipcreduce.page.mirror import Mirror
from ipcreduce.page.watchdog import Watch, own_identity
from tests.shared import bounds
from tests.shared.fingerprints import of_allreduce

SUM = of_allreduce((10,), "float32", "sum")


class Make(Protocol):
    def __call__(self, n: int, of: Ranks | None = None) -> Ranks: ...


class Ranks:
    """Rank 0 in this process; the others are processes that only sleep, their parts of the page written from here.

    :param of: the ranks whose processes these share; without it they get processes of their own.
    """

    def __init__(self, n: int, of: Ranks | None = None) -> None:
        self.page = Page.create(0, n)
        self.page.join(*own_identity())
        self.pages: dict[int, Page] = {0: self.page}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, n):
            self.processes[rank] = subprocess.Popen(["sleep", "600"]) if of is None else of.processes[rank]
            self.pages[rank] = Page.open(self.page.path, rank, n)
            self.pages[rank].join(*identity(self.processes[rank].pid))
        shared_files.remove(self.page.path)
        self.watches: list[Watch] = []

    def watch(self) -> Watch:
        self.watches.append(watchdog.watch(self.page))
        return self.watches[-1]

    def end(self, rank: int) -> None:
        """Ends a rank's process. It is not waited for: a rank's parent may not do so either."""
        self.processes[rank].kill()

    def stop(self) -> None:
        for watch in self.watches:
            watch.stop()
        for process in self.processes.values():
            process.kill()
            process.wait()


def identity(pid: int) -> tuple[int, int]:
    return pid, os.stat(f"/proc/{pid}/ns/pid").st_ino


@pytest.fixture
def ranks() -> Iterator[Make]:
    made: list[Ranks] = []

    def make(n: int, of: Ranks | None = None) -> Ranks:
        made.append(Ranks(n, of))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def happens(condition: Callable[[], object]) -> bool:
    return bool(bounds.until(condition))


def happens_within(seconds: float, condition: Callable[[], object]) -> bool:
    """For what must not happen: so long it has its chance."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


@pytest.mark.parametrize("dead", [1, 2])
def test_a_death_is_seen_at_once(ranks: Make, dead: int):
    world = ranks(3)
    watch = world.watch()
    assert not happens_within(0.3, lambda: watch.lost or world.page.aborted), "all are alive"
    world.end(dead)
    assert happens(lambda: watch.lost)
    assert watch.lost == (dead, "its process has ended")
    assert happens(lambda: world.page.aborted), "the waits go on"
    with pytest.raises(PeerLostError, match=f"rank {dead} is gone: its process has ended"):
        faults.raise_lost(world.page, 5)


def test_the_log_tells_once_who_is_gone(ranks: Make, caplog: pytest.LogCaptureFixture):
    """A server that replays its own graphs makes no call that could raise."""
    caplog.set_level(logging.INFO, "ipcreduce")
    world = ranks(3)
    watch = world.watch()
    world.end(2)
    assert happens(lambda: caplog.messages)
    watch.look()
    assert caplog.messages == ["rank 0 of 3: rank 2 is gone: its process has ended"]


def test_the_abort_word_stays_up(ranks: Make):
    """A rank that comes to wait later, or clears the word, must not wait for the dead one either."""
    world = ranks(2)
    watch = world.watch()
    world.end(1)
    assert happens(lambda: world.page.aborted)
    world.page.clear()
    assert happens(lambda: world.page.aborted)
    assert watch.lost


def test_the_first_to_go_is_the_one_that_is_named(ranks: Make):
    world = ranks(3)
    watch = world.watch()
    world.end(2)
    assert happens(lambda: watch.lost)
    world.end(1)
    assert happens(lambda: world.page.has_unmapped(1)), "it is seen too"
    assert watch.lost == (2, "its process has ended")


def test_a_rank_that_was_dead_before_is_seen(ranks: Make):
    world = ranks(2)
    world.end(1)
    world.processes[1].wait()
    watch = world.watch()
    assert watch.lost == (1, "its process has ended")
    assert happens(lambda: world.page.aborted)


def test_a_process_that_has_got_the_number_of_one_that_ended(ranks: Make, monkeypatch: pytest.MonkeyPatch):
    """Its own page is watched, though the watchdog has not looked since, and still knows the number."""
    first, second = ranks(2), ranks(2)
    number = first.processes[1].pid
    pids = {number: [number, second.processes[1].pid]}  # what a second look at the number finds
    real = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", lambda pid: real(pids[pid].pop(0)))
    second.pages[1].join(number, identity(number)[1])
    watch = first.watch()
    with watchdog._watchdog._lock:  # so that it does not look
        first.end(1)
        first.processes[1].wait()
        late = second.watch()
        assert (watch.lost, late.lost) == ((1, "its process has ended"), None)
    assert not happens_within(0.5, lambda: late.lost)
    second.end(1)
    assert happens(lambda: late.lost == (1, "its process has ended"))


def test_a_rank_without_proc_is_left_to_the_deadline(ranks: Make, monkeypatch: pytest.MonkeyPatch):
    """It does not know the pid namespace for which its number counts, nor does this rank know its own."""
    world = ranks(2)
    stat = os.stat

    def hidden(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return stat(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", hidden)
        assert own_identity() == (os.getpid(), watchdog.UNKNOWN)
        world.pages[1].join(world.processes[1].pid, watchdog.UNKNOWN)
        watch = world.watch()
    world.end(1)
    assert not happens_within(0.5, lambda: watch.lost)


def test_without_a_descriptor_the_watch_is_an_error_and_leaves_nothing(ranks: Make, monkeypatch: pytest.MonkeyPatch):
    """And not a watch that misses the rank's end."""
    world = ranks(3)
    before, opened = len(os.listdir("/proc/self/fd")), []

    def full(pid: int) -> int:
        if opened:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        opened.append(pid)
        return pidfd_open(pid)

    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", full)
    with pytest.raises(OSError, match="Too many open files"):
        watchdog.watch(world.page)
    assert (watchdogs(), pidfds()) == ([], 0)
    assert len(os.listdir("/proc/self/fd")) <= before  # what other tests have left may go meanwhile


def test_a_rank_that_closed_may_end(ranks: Make):
    world = ranks(2)
    watch = world.watch()
    for page in world.pages.values():
        page.calls.enter(1, SUM)
    world.pages[1].leave()
    world.end(1)
    assert not happens_within(0.5, lambda: watch.lost or world.page.aborted)


def test_a_call_after_another_rank_has_closed_is_lost(ranks: Make):
    world = ranks(2)
    watch = world.watch()
    world.page.calls.enter(1, SUM)
    world.pages[1].calls.enter(1, SUM)
    world.pages[1].leave()
    assert not happens_within(0.3, lambda: watch.lost), "both made the same calls"
    world.page.calls.enter(2, SUM)
    assert happens(lambda: watch.lost)
    assert watch.lost == (1, "it closed the communicator")
    assert happens(lambda: world.page.aborted)


def test_a_rank_of_another_pid_namespace_is_left_alone(ranks: Make):
    """Its pid means another process here, or none."""
    world = ranks(2)
    pid, namespace = identity(world.processes[1].pid)
    world.pages[1].join(pid, namespace + 1)
    watch = world.watch()
    world.end(1)
    assert not happens_within(0.5, lambda: watch.lost)


def test_stop_leaves_nothing(ranks: Make):
    world = ranks(4)
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in range(5):
        watch = world.watch()
        assert len(watchdogs()) == 1
        if turn == 3:
            world.end(2)
            assert happens(lambda: world.page.aborted)
        with bounds.no_hang("stop()"):
            watch.stop()
            watch.stop()
        assert not watchdogs()
        assert len(os.listdir("/proc/self/fd")) <= descriptors  # what other tests have left may go meanwhile


def test_it_costs_next_to_nothing(ranks: Make, monkeypatch: pytest.MonkeyPatch):
    """Also with a dead rank, whose descriptor stays readable for ever: each turn waits for a tick of 0.1 s."""
    looks: list[float] = []
    look = Watch.look
    monkeypatch.setattr(Watch, "look", lambda self: (looks.append(time.monotonic()), look(self))[1])
    world = ranks(3)
    watch = world.watch()
    world.end(1)
    assert happens(lambda: watch.lost)
    looks.clear()
    assert happens(lambda: len(looks) > 5)
    assert looks[5] - looks[0] > 0.4


# ---- one for the whole process
def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == watchdog._NAME]


def pidfds() -> int:
    """How many descriptors of processes this process has open."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("pidfd" in link for link in links)


def test_pages_of_the_same_peers_share_a_thread_and_a_descriptor_each(ranks: Make):
    first = ranks(3)
    worlds = [first, *(ranks(3, of=first) for _ in range(3))]
    assert (watchdogs(), pidfds()) == ([], 0)
    watches = [world.watch() for world in worlds]
    assert len(watchdogs()) == 1
    assert pidfds() == 2, "one a peer process"
    first.end(2)
    for world, watch in zip(worlds, watches, strict=True):
        assert happens(lambda watch=watch, world=world: watch.lost and world.page.aborted)
        assert watch.lost == (2, "its process has ended")
    for watch in watches[:-1]:
        watch.stop()
        assert len(watchdogs()) == 1
        assert pidfds() == 1, "that of the process that lives: the others still need it"
    watches[-1].stop()
    assert (watchdogs(), pidfds()) == ([], 0)


def test_a_page_stays_watched_while_another_ones_watch_fails(ranks: Make, caplog: pytest.LogCaptureFixture):
    first = ranks(2)
    second = ranks(2, of=first)
    broken, watch = first.watch(), second.watch()
    broken.comparison = SimpleNamespace(look=lambda: 1 // 0)  # type: ignore[assignment]
    assert happens(lambda: broken.has_failed)
    first.end(1)
    assert happens(lambda: watch.lost and second.page.aborted)
    assert happens(lambda: broken.lost and first.page.aborted), "a loss is told all the same"
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError], "it tells once"


def test_a_page_stays_watched_while_another_ones_watch_ends(ranks: Make):
    first = ranks(2)
    other = ranks(2, of=first)
    ended, watch = first.watch(), other.watch()
    ended.stop()
    first.end(1)
    assert happens(lambda: watch.lost == (1, "its process has ended"))
    assert ended.lost is None
    assert not first.page.aborted


@pytest.mark.parametrize("reaped", [False, True])
def test_a_page_that_comes_after_a_peer_has_died(ranks: Make, reaped: bool):
    """The process's end was reported once, to the pages of that time."""
    first = ranks(3)
    late = ranks(3, of=first)
    watch = first.watch()
    first.end(1)
    assert happens(lambda: watch.lost)
    if reaped:
        first.processes[1].wait()
    assert late.watch().lost == (1, "its process has ended")
    assert happens(lambda: late.page.aborted)


@pytest.fixture
def forked() -> Iterator[Callable[[], None]]:
    """forked(): from then on a child of this process has all of its descriptors too."""
    read, write = os.pipe()
    children = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # returns when the test is over
            os._exit(0)
        children.append(child)

    yield fork
    os.close(write)
    for child in children:
        os.waitpid(child, 0)
    os.close(read)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_descriptor_that_a_forked_child_holds_too(ranks: Make, forked: Callable[[], None], monkeypatch: Any):
    """A wait that still had it would be readable for ever, and pass for the next process with its number."""
    looks = []
    look = Watch.look
    monkeypatch.setattr(Watch, "look", lambda self: (looks.append(time.monotonic()), look(self))[1])
    stays, goes, comes = ranks(2), ranks(2), ranks(2)
    watch, other = stays.watch(), goes.watch()
    (known,) = (one.pidfd.number for one in watchdog._watchdog._processes.values() if one.ranks[0][0] is other)
    forked()
    other.stop()
    goes.end(1)
    goes.processes[1].wait()
    pidfd_open = os.pidfd_open

    def at_its_number(pid: int) -> int:
        descriptor = pidfd_open(pid)
        if descriptor != known:  # the collector has closed a file of an earlier test meanwhile
            os.dup2(descriptor, known, inheritable=False)
            os.close(descriptor)
        return known

    monkeypatch.setattr(os, "pidfd_open", at_its_number)
    late = comes.watch()
    looks.clear()
    assert happens(lambda: len(looks) > 10)
    assert looks[10] - looks[0] > 0.4, "2 each tick of 0.1 s"
    assert (watch.lost, late.lost) == (None, None)
    for world, one in ((stays, watch), (comes, late)):
        world.end(1)
        assert happens(lambda one=one: one.lost == (1, "its process has ended"))


def test_a_number_that_is_used_again_right_behind_a_poll(ranks: Make, monkeypatch: pytest.MonkeyPatch):
    """The process whose end was reported has gone from the table by then; the next one with its number lives."""
    behind: list[Callable[[], None]] = []
    done = threading.Event()

    class Poll:
        waits: ClassVar[set[int]] = set()

        def __init__(self) -> None:
            self._poll, self._numbers = select.poll(), set[int]()

        def register(self, number: int, events: int) -> None:
            self._poll.register(number, events)
            self._numbers.add(number)

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            if timeout:
                Poll.waits = self._numbers
            ready = self._poll.poll(timeout)
            if ready and behind:
                behind.pop()()
                done.set()
            return ready

    monkeypatch.setattr(watchdog, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    stays, goes, comes = ranks(2), ranks(2), ranks(2)
    watch, other = stays.watch(), goes.watch()
    late: list[Watch] = []
    descriptors: list[set[int]] = []

    def numbers() -> set[int]:
        return {one.pidfd.number for one in watchdog._watchdog._processes.values()}

    def change() -> None:
        descriptors.append(numbers())
        other.stop()
        (free,) = descriptors[0] - numbers()
        below: list[int] = []  # numbers that are free too, by an earlier test's rubbish: the lowest is given first
        while (number := os.open(os.devnull, os.O_RDONLY)) != free:
            below.append(number)
        os.close(free)
        late.append(comes.watch())
        descriptors.append(numbers())
        for number in below:
            os.close(number)

    behind.append(change)
    assert happens(lambda: numbers() <= Poll.waits)
    goes.end(1)
    assert done.wait(bounds.HANG)
    assert descriptors[0] == descriptors[1], "the number is used again"
    assert not happens_within(0.5, lambda: late[0].lost or watch.lost)
    comes.end(1)
    assert happens(lambda: late[0].lost == (1, "its process has ended"))


@pytest.mark.parametrize("used_again", [False, True])
def test_descriptors_that_the_program_has_closed(ranks: Make, caplog: pytest.LogCaptureFixture, used_again: bool):
    """What has their numbers by then is neither read, written nor closed, and the next death is seen all the same."""
    first, second = ranks(2), ranks(2)
    watch, other = first.watch(), second.watch()
    dog = watchdog._watchdog
    assert dog._pipe is not None
    taken, files = [], []
    with dog._lock:  # so that it does not look
        numbers = [one.number for one in (*dog._pipe, *(process.pidfd for process in dog._processes.values()))]
        read, write = os.pipe()
        os.write(write, b"the program's")
        for number in numbers:
            os.close(number)
            if used_again:
                taken.append(os.dup2(read if len(taken) % 2 else write, number))
                files.append(os.fstat(number))
        dog._woken = False
        dog.wake()
    first.end(1)
    assert happens(lambda: watch.lost == (1, "its process has ended"))
    other.stop()
    watch.stop()
    assert watchdogs() == []
    for number, file in zip(taken, files, strict=True):
        assert os.path.samestat(os.fstat(number), file)
        os.close(number)
    assert os.read(read, 100) == b"the program's"
    os.close(read)
    os.close(write)
    assert [message[:35] for message in caplog.messages] == ["the program has closed a descriptor"], "it tells once"


def test_a_watch_that_ends_in_the_watchdogs_own_thread(ranks: Make, monkeypatch: pytest.MonkeyPatch):
    """By a finaliser. An exception in that thread would fail this test."""
    look = Watch.look

    def stop(self: Watch) -> None:
        look(self)
        assert watchdog.is_watching()
        self.stop()

    monkeypatch.setattr(Watch, "look", stop)
    ranks(2).watch()
    assert happens(lambda: not watchdogs())
    assert not watchdog.is_watching()
    monkeypatch.setattr(Watch, "look", look)
    world = ranks(2)
    watch = world.watch()
    world.end(1)
    assert happens(lambda: watch.lost), "a later watch begins anew"


def test_a_watch_that_ends_in_the_middle_of_a_turn():
    """By a finaliser in the watchdog's thread: what the thread goes through changes meanwhile."""
    own, ended = watchdog._Watchdog(), list[int]()

    class Descriptor:
        number = 0

        def __init__(self, pid: int) -> None:
            self._pid = pid

        @property
        def is_ours(self) -> bool:
            for pid in [*own._processes]:
                own._end(pid)
            return True

        def close(self) -> None:
            ended.append(self._pid)

    own._processes.update({pid: watchdog._Process(Descriptor(pid)) for pid in (1, 2)})  # type: ignore[arg-type]
    own._restore()
    own._end(1)
    assert ended == [1, 2]


def mirrored() -> tuple[Page, Mirror, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    page = Page.alone(0, 2)
    page.join(*own_identity())
    return page, Mirror(page, {1: ours}), theirs


def test_nothing_is_written_to_a_pipe_that_is_closed(tmp_path: Path):
    """Its number may be that of a file of the program's by then."""
    page, mirror, _theirs = mirrored()
    watchdog.watch(page, mirror).stop()
    files = [open(tmp_path / str(index), "wb", buffering=0) for index in range(20)]  # noqa: SIM115
    page.leave()
    watchdog._watchdog.wake()
    for file in files:
        file.close()
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0] * 20


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch):
    """The next watch starts one."""

    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    page, mirror, theirs = mirrored()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="this process can start no further thread"):
            watchdog.watch(page, mirror)
    watch = watchdog.watch(page, mirror)
    theirs.close()
    assert happens(lambda: watch.lost)
    watch.stop()
    assert len(os.listdir("/proc/self/fd")) <= before
