"""The watchdog: one thread a process ends the waits for a rank that has gone. It makes no MPI call and no CUDA call."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from ..logs import ERROR, INFO, WARNING, log
from ..originals import RLock, Thread, current, select
from ..texts import out_of_descriptors
from . import owned
from .comparison import BUSY_SECONDS, Comparison
from .control_page import CLOSED_IT, Page
from .mirror import Mirror
from .owned import Owned

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

    pidfd: Owned
    ranks: list[tuple[Watch, int]] = field(default_factory=list)


class _Watchdog:
    """The process's watches and peer processes, and the thread that waits for them, which lives as long as a watch."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._watches: list[Watch] = []
        self._processes: dict[int, _Process] = {}  # by pid: those that have not ended, as far as was seen
        self._thread: Thread | None = None
        self._pipe: tuple[Owned, Owned] | None = None  # wakes the thread
        self._woken = self._has_warned = False

    def wake(self) -> None:
        """Let the thread look at all pages at once, and not at its next turn."""
        if not self._woken and not is_watching():
            with self._lock:  # the pipe's number may soon be that of a file of the program's
                self._woken = self._write()

    def _write(self) -> bool:
        """Wake the thread. False without a pipe."""
        if self._pipe is None or not self._pipe[1].is_ours:
            return False
        os.write(self._pipe[1].number, b"0")
        return True

    def add(self, watch: Watch, page: Page) -> None:
        """Begin a watch."""
        with self._lock:
            if self._thread is None:
                self._start()
            self._watches.append(watch)
            if watch.mirror.descriptors():
                page.changed = self.wake
                return  # the connections tell of the ranks' ends
            _, namespace = own_identity()
            for rank in range(page.n):
                pid, other = page.identity(rank)
                if rank != page.rank and other == namespace != UNKNOWN and hasattr(os, "pidfd_open"):
                    self._add_process(watch, rank, pid)

    def _start(self) -> None:
        """Start the thread. :raises OSError: if the system has no thread or no descriptor left."""
        self._pipe = owned.pipe()
        self._woken = self._has_warned = False
        self._thread = Thread(self._run, _NAME)
        try:
            self._thread.start()
        except BaseException:
            self._thread = self._pipe = None
            raise

    def _add_process(self, watch: Watch, rank: int, pid: int) -> None:
        """Watch the process that has the number ``pid`` now.

        It is the rank's: the rank takes part in exchanges after this one, which a process that has ended cannot.
        """
        process = self._processes.get(pid)
        if process is not None and process.pidfd.number in self._ready():  # another one may have its number by now
            self._end(pid)
            process = None
        if process is None:
            try:
                process = self._processes[pid] = _Process(Owned(os.pidfd_open(pid)))
            except ProcessLookupError:
                watch.died(rank)
                return
            except OSError as error:
                if out_of_descriptors(error):
                    raise
                return  # not permitted here: its death is noticed at the deadline
        process.ranks.append((watch, rank))
        if process.pidfd.number in self._ready():
            self._end(pid)

    def _poll(self) -> select.poll:
        """A wait for the pipe, for processes and for connections."""
        found = select.poll()
        ours = [*(self._pipe or ())[:1], *[process.pidfd for process in list(self._processes.values())]]
        for descriptor in [one.number for one in ours if one.is_ours]:
            found.register(descriptor, select.POLLIN)
        for watch in self._watches:
            for descriptor in watch.mirror.descriptors():
                found.register(descriptor, select.POLLIN)
        return found

    def _ready(self) -> set[int]:
        """The descriptors of processes and connections that have something to say now."""
        return {descriptor for descriptor, _ in self._poll().poll(0)}

    def _restore(self) -> None:
        """Open anew what the program has closed. The next turn tries again what the system does not allow now."""
        lost = [(pid, process) for pid, process in list(self._processes.items()) if not process.pidfd.is_ours]
        if not lost and all(end.is_ours for end in self._pipe or ()):
            return
        if not self._has_warned:
            self._has_warned = True
            log(WARNING, "%s. ipcreduce goes on. Close only what you have opened", owned.CLOSED_BY_PROGRAM)
        with suppress(OSError):
            self._pipe, self._woken = owned.pipe(), False
            for pid, process in lost:
                try:
                    process.pidfd = Owned(os.pidfd_open(pid))
                except ProcessLookupError:
                    self._end(pid)

    def _end(self, pid: int) -> None:
        """Note that a process of peers has ended."""
        process = self._processes.pop(pid, None)  # None: a communicator was collected in this thread meanwhile
        if process is not None:
            process.pidfd.close()
            for watch, rank in process.ranks:
                watch.died(rank)

    def remove(self, watch: Watch) -> None:
        """End a watch; the last one ends the thread. Idempotent, also after an interrupt."""
        with self._lock:
            if watch in self._watches:
                self._restore()
                watch.mirror.close(_LAST_WORDS_SECONDS)
                watch._page.changed = None
                for pid, process in list(self._processes.items()):
                    process.ranks = [one for one in process.ranks if one[0] is not watch]
                    if not process.ranks:
                        self._end(pid)
                self._watches.remove(watch)
            if self._watches or self._thread is None:
                return
            self._write()  # closing the pipe wakes nobody while a forked child has it too
            thread, self._thread, self._pipe = self._thread, None, None
        if thread is not current():
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        own = current()
        while self._thread is own:  # not once the last watch was stopped, perhaps by a finaliser in this thread
            with self._lock:
                self._restore()
                poll = self._poll()
                is_busy = any(watch.mirror.descriptors() and watch.comparison.is_busy for watch in self._watches)
            poll.poll(1e3 * (BUSY_SECONDS if is_busy else _TICK_SECONDS))
            self._look(own)  # in a function, so that no watch, nor its page, is kept alive meanwhile

    def _look(self, own: Thread | None) -> None:
        """Tell the watches of the processes that have ended, and let each look at its page."""
        with self._lock:
            if self._pipe is None or self._thread is not own:
                return
            # Ask again under the lock: a descriptor may have been closed since, and its number used again.
            self._restore()
            ready, wake = self._ready(), self._pipe[0].number
            if wake in ready:
                self._woken = False  # first: who wakes us from here on is heard at the next turn
                os.read(wake, _MAX_WAKES)
            for pid, process in list(self._processes.items()):
                if process.pidfd.number in ready:
                    self._end(pid)
            watches = list(self._watches)
        for watch in watches:
            try:
                watch.look()
            except Exception:  # the other watches need this thread, and this one may do better in its next turn
                if not watch.has_failed:
                    watch.has_failed = True
                    log(ERROR, "the watch over the other ranks of a communicator has failed in a turn", trace=True)


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
