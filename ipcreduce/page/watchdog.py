"""The watchdog: one thread a process ends the waits for a rank that has gone. It makes no MPI call and no CUDA call."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ..logs import ERROR, INFO, log
from ..originals import RLock, Thread, current, select
from ..texts import out_of_descriptors
from .comparison import BUSY_SECONDS, Comparison
from .control_page import CLOSED_IT, Page
from .mirror import Mirror

_TICK_SECONDS = 0.1
_JOIN_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.5  # for a mirror to send, in stop()
_MAX_WAKES = 4096
_NAME = "ipcreduce-watchdog"
UNKNOWN = 0  # a pid namespace


class Watch:
    """The watch over the other ranks of one control page, from :func:`watch` to :meth:`stop`.

    ``lost`` becomes (rank, why) once a rank is dead, or has closed the communicator while others still call. The other
    survivors read that on the page, and the abort word is kept up, so that every wait ends.
    """

    def __init__(self, page: Page, mirror: Mirror) -> None:
        self.lost: tuple[int, str] | None = None
        self.mirror = mirror
        self.comparison = Comparison(page)
        self.has_failed = False  # in a turn, of which the log tells once
        self._has_logged = False  # its loss
        self._page = page

    def died(self, rank: int, why: str = "its process has ended") -> None:
        """Note that ``rank`` has gone, or cannot be reached any more."""
        self._page.mark_dead(rank)
        if not self._page.has_left(rank):
            self.lost = self.lost or (rank, why)

    def look(self) -> None:
        """Compare calls, look for ranks that have closed the communicator, and tell the peers of a loss."""
        for rank, why in self.mirror.receive():
            self.died(rank, why)
        try:
            self.comparison.look()
        finally:  # a loss is told in any case
            own = self._page.calls.call_of(self._page.rank)
            for rank in range(self._page.n):
                if self._page.has_left_before(rank, own):
                    self.lost = self.lost or (rank, CLOSED_IT)
            if self.lost is not None:
                self._page.post_lost(*self.lost)
            self.mirror.send()
            self._log_loss()

    def _log_loss(self) -> None:
        """Log once which rank is gone. A program that only replays graphs of other libraries never calls this one."""
        if self.lost is not None and not self._has_logged:
            self._has_logged = True
            log(INFO, "rank %d of %d: rank %d is gone: %s", self._page.rank, self._page.n, *self.lost)

    def forked(self) -> None:
        """Let a forked child drop what would keep the parent's end from being seen."""
        self.mirror.forked()

    def stop(self) -> None:
        """End the watch, and the thread if this was the last one. Idempotent."""
        _watchdog.remove(self)


@dataclass
class _Process:
    """A process of peers: one pidfd, however many communicators are shared with it."""

    descriptor: int
    ranks: list[tuple[Watch, int]] = field(default_factory=list)


class _Watchdog:
    """The process's watches and peer processes, and the thread that waits for them, which lives as long as a watch."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._watches: list[Watch] = []
        self._processes: dict[int, _Process] = {}  # by pid: those that have not ended, as far as was seen
        self._thread: Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake_read = self._wake_write = -1
        self._woken = False

    def wake(self) -> None:
        """Let the thread look at all pages at once, and not at its next turn."""
        if not self._woken and not is_watching():
            with self._lock:  # the pipe's number may soon be that of a file of the program's
                self._woken = self._wake_write >= 0
                if self._woken:
                    os.write(self._wake_write, b"0")

    def add(self, watch: Watch, page: Page) -> None:
        """Begin a watch."""
        with self._lock:
            if self._thread is None:
                try:
                    self._thread = self._started()
                except BaseException:
                    _close(*self._let_go())
                    raise
            self._watches.append(watch)
            if descriptors := watch.mirror.descriptors():
                assert self._epoll is not None
                watch.mirror.ended = self._unregister
                for descriptor in descriptors:
                    self._epoll.register(descriptor, select.EPOLLIN)
                page.changed = self.wake
                return  # the connections tell of the ranks' ends
            _, namespace = own_identity()
            for rank in range(page.n):
                pid, other = page.identity(rank)
                if rank != page.rank and other == namespace != UNKNOWN and hasattr(os, "pidfd_open"):
                    self._add_process(watch, rank, pid)

    def _started(self) -> Thread:
        """The thread, running. :raises OSError: if the system has no thread or no descriptor left."""
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe()
        self._woken = False
        self._epoll.register(self._wake_read, select.EPOLLIN)
        thread = Thread(partial(self._run, self._epoll), _NAME)
        thread.start()
        return thread

    def _add_process(self, watch: Watch, rank: int, pid: int) -> None:
        """Watch the process that has the number ``pid`` now.

        It is the rank's: the rank takes part in exchanges after this one, which a process that has ended cannot.
        """
        assert self._epoll is not None
        process = self._processes.get(pid)
        if process is not None and process.descriptor in self._ready():  # another one may have its number by now
            self._end(pid)
            process = None
        if process is None:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                watch.died(rank)
                return
            except OSError as error:
                if out_of_descriptors(error):
                    raise
                return  # not permitted here: its death is noticed at the deadline
            process = self._processes[pid] = _Process(descriptor)
            self._epoll.register(descriptor, select.EPOLLIN)
        process.ranks.append((watch, rank))
        if process.descriptor in self._ready():
            self._end(pid)

    def _ready(self) -> set[int]:
        """The descriptors of processes and connections that have something to say now."""
        return set() if self._epoll is None else {descriptor for descriptor, _ in self._epoll.poll(0)}

    def _end(self, pid: int) -> None:
        """Note that a process of peers has ended."""
        process = self._processes[pid]
        self._unregister(process.descriptor)
        del self._processes[pid]  # no interrupt can come between this and the next
        os.close(process.descriptor)
        for watch, rank in process.ranks:
            watch.died(rank)

    def remove(self, watch: Watch) -> None:
        """End a watch; the last one ends the thread. Idempotent, also after an interrupt."""
        held: tuple[select.epoll | None, int, int] = None, -1, -1
        try:
            with self._lock:
                if watch in self._watches:
                    watch.mirror.close(_LAST_WORDS_SECONDS)
                    watch._page.changed = None
                    for pid, process in list(self._processes.items()):
                        process.ranks = [one for one in process.ranks if one[0] is not watch]
                        if not process.ranks:
                            self._end(pid)
                    self._watches.remove(watch)
                if self._watches or self._thread is None:
                    return
                os.write(self._wake_write, b"0")  # closing it wakes nobody while a forked child has it too
                thread, held = self._thread, self._let_go()
            if thread is not current():
                thread.join(_JOIN_SECONDS)
        finally:
            epoll, read, write = held
            if epoll is not None:  # an interrupt within a function that closes them would leave one open
                try:
                    os.close(read)
                finally:
                    os.close(write)
                    epoll.close()

    def _let_go(self) -> tuple[select.epoll | None, int, int]:
        """Forget thread, epoll and pipe, so that nobody uses them any more. Returns what the caller has to close."""
        held = self._epoll, self._wake_read, self._wake_write
        self._thread, self._epoll, self._wake_read, self._wake_write = None, None, -1, -1
        return held

    def _unregister(self, descriptor: int) -> None:
        """Stop watching a descriptor. Closing it is not enough, since a forked child may have it too."""
        if self._epoll is not None:
            with suppress(FileNotFoundError):  # an interrupt came after this before
                self._epoll.unregister(descriptor)

    def _run(self, epoll: select.epoll) -> None:
        while epoll is self._epoll:  # it is not once the last watch was stopped, perhaps by a finaliser in this thread
            is_busy = any(watch.mirror.descriptors() and watch.comparison.is_busy for watch in list(self._watches))
            epoll.poll(BUSY_SECONDS if is_busy else _TICK_SECONDS)
            self._look(epoll)  # in a function, so that no watch, nor its page, is kept alive meanwhile

    def _look(self, epoll: select.epoll) -> None:
        """Tell the watches of the processes that have ended, and let each look at its page."""
        with self._lock:
            if epoll is not self._epoll:
                return
            # Ask again under the lock: a descriptor may have been closed since, and its number used again.
            ready = self._ready()
            if self._wake_read in ready:
                self._woken = False  # first: who wakes us from here on is heard at the next turn
                os.read(self._wake_read, _MAX_WAKES)
            for pid, process in list(self._processes.items()):
                if process.descriptor in ready:
                    self._end(pid)
            watches = list(self._watches)
        for watch in watches:
            try:
                watch.look()
            except Exception:  # the other watches need this thread, and this one may do better in its next turn
                if not watch.has_failed:
                    watch.has_failed = True
                    log(ERROR, "the watch over the other ranks of a communicator has failed in a turn", trace=True)


def _close(epoll: select.epoll | None, *ends: int) -> None:
    if epoll is not None:
        epoll.close()
    for descriptor in ends:
        if descriptor >= 0:
            os.close(descriptor)


_watchdog = _Watchdog()


def watch(page: Page, mirror: Mirror | None = None) -> Watch:
    """Watch the processes of the other ranks of ``page``, through ``mirror`` where each rank has a page of its own."""
    new = Watch(page, mirror or Mirror(page, {}))
    try:
        _watchdog.add(new, page)
    except BaseException:
        _watchdog.remove(new)
        raise
    return new


def is_watching() -> bool:
    """True in the watchdog's thread: a finaliser that runs in it must not wait for the device."""
    thread = current()
    return thread is not None and thread.name == _NAME


def own_identity() -> tuple[int, int]:
    """(pid, pid namespace) of this process; :data:`UNKNOWN` for the namespace where /proc does not tell."""
    try:
        return os.getpid(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.getpid(), UNKNOWN
