"""A thread that ends the waits for a rank that has gone. It makes no MPI call and no CUDA call."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from .control_page import Page

_TICK_SECONDS = 0.1
_JOIN_SECONDS = 1.0
_NAME = "ipcreduce-watchdog"


def is_watching() -> bool:
    """Whether this thread is a watchdog's: a finaliser that runs in it must not wait for the device."""
    return threading.current_thread().name == _NAME


class Watchdog:
    """Watches the processes of the other ranks.

    ``lost`` becomes (rank, why) once a rank is dead, or has closed the communicator while others still call. The
    other survivors are told, and the abort word is kept up, so that every wait ends.
    """

    def __init__(self, page: Page) -> None:
        self.lost: tuple[int, str] | None = None
        self._page = page
        self._stop_read, self._stop_write = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._stop_read, select.POLLIN)
        self._processes: dict[int, int] = {}  # pidfd -> rank
        namespace = own_identity()[2]
        for rank in range(page.n):
            pid, started, other = page.identity(rank)
            if rank != page.rank and other == namespace and hasattr(os, "pidfd_open"):
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._died(rank)
                except OSError:  # not permitted here: its death is then seen at the deadline
                    continue
                else:
                    self._processes[descriptor] = rank
                    self._poll.register(descriptor, select.POLLIN)
                    if start_time(pid) != started:  # another process has its number by now
                        self._died(rank)
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(_TICK_SECONDS * 1000):
                if descriptor == self._stop_read:
                    return
                self._poll.unregister(descriptor)
                rank = self._processes[descriptor]
                self._died(rank)
            own = self._page.calls.call_of(self._page.rank)
            for rank in range(self._page.n):
                if self._page.has_left_before(rank, own):
                    self.lost = self.lost or (rank, "it closed the communicator")
            if self.lost is not None:
                self._page.lose(*self.lost)

    def _died(self, rank: int) -> None:
        self._page.bury(rank)
        if not self._page.has_left(rank):
            self.lost = self.lost or (rank, "its process has ended")

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        if self._stop_write >= 0:
            os.write(self._stop_write, b"0")  # closing it tells nothing while a forked child has it too
            self._thread.join(_JOIN_SECONDS)
            for descriptor in (self._stop_read, self._stop_write, *self._processes):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._stop_write = -1


def own_identity() -> tuple[int, int, int]:
    """(pid, start time, pid namespace) of this process: what tells it from a later one with the same pid."""
    return os.getpid(), start_time(os.getpid()), os.stat("/proc/self/ns/pid").st_ino


def start_time(pid: int) -> int:
    """When a process of this pid namespace started, in clock ticks since boot; 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0
