"""A segment of shared memory in which the ranks of one host hand data over to each other."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from . import semaphores

_AREA_BYTES, _LEAST_AREA_BYTES = 1 << 20, 64 << 10  # of a rank: two ranks take 0.2 us more a MB with a quarter of it
_SEGMENT_BYTES = 8 << 20  # of all areas together, as far as the least size allows; Docker gives /dev/shm 64 MB
_SMALL_BYTES = 128 << 10  # of all ranks' data of a small message: then it is quicker to read all of it than to share
_SPIN_SECONDS = 1e-4  # before a rank sleeps; on waking up it loses 30 to 50 us
_TICK_SECONDS = 0.05  # of a sleep: between two looks at faults and deadline


class Segment:
    """Each rank's place in the segment, and a handover among all.

    A rank's place has two parts of ``small_bytes``, used in turns, for small messages; an area of ``area_bytes`` for
    chunks of larger ones; and room for the result of one share of a chunk. Behind the places lie semaphores, one for
    each ordered pair of ranks. They count the handovers that one has made and the other has not taken yet.

    One rank calls :meth:`create`, the others :meth:`open`.
    """

    def __init__(self, descriptor: int, path: str, rank: int, n: int) -> None:
        self.path, self.rank, self.n, self.nbytes = path, rank, n, segment_bytes(n)
        self.small_bytes, self.area_bytes = sizes(n)
        place = _place_bytes(n)
        try:
            self._map = mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)
        data = np.frombuffer(self._map, np.uint8)
        places = [data[begin : begin + place] for begin in range(0, n * place, place)]
        self.small = [[one[part * self.small_bytes :][: self.small_bytes] for one in places] for part in (0, 1)]
        self.areas = [one[2 * self.small_bytes :][: self.area_bytes] for one in places]
        self.results = [one[2 * self.small_bytes + self.area_bytes :] for one in places]
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + n * place
        self._semaphores = [first + index * semaphores.BYTES for index in range(n * n)]  # [giver * n + taker]
        peers = [peer for peer in range(n) if peer != rank]
        self._outgoing = [self._semaphores[rank * n + peer] for peer in peers]
        self._incoming = [(peer, self._semaphores[peer * n + rank]) for peer in peers]
        # With fewer processors than ranks, who spins holds one that a peer needs: so let others run between two looks.
        self._yields = len(os.sched_getaffinity(0)) < n
        self._post, self._try_wait = semaphores.library().post, semaphores.library().try_wait

    @classmethod
    def create(cls, rank: int, n: int) -> Segment:
        """A new segment, in a file that only this user can open and nobody else made. :raises OSError: without room."""
        semaphores.library()
        descriptor, path = tempfile.mkstemp(prefix="ipcreduce-", dir="/dev/shm")
        try:
            os.posix_fallocate(descriptor, 0, segment_bytes(n))  # no room: an error now, not a signal later
        except OSError as error:
            os.close(descriptor)
            os.unlink(path)
            if error.errno != errno.ENOSPC:
                raise
            size = segment_bytes(n) / (1 << 20)
            text = f"{error.strerror}: /dev/shm needs {size:.1f} MB more (docker run --shm-size makes it larger)"
            raise OSError(error.errno, text) from None
        segment = cls(descriptor, path, rank, n)
        for address in segment._semaphores:
            semaphores.init(address)
        return segment

    @classmethod
    def open(cls, path: str, rank: int, n: int) -> Segment:
        """The segment that another rank created. :raises OSError: if it cannot be opened."""
        return cls(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path, rank, n)

    def unlink(self) -> None:
        """Remove the file's name; the mappings stay. Only after all ranks have opened it."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def hand_over(self, check: Callable[[list[int]], None]) -> None:
        """Give this rank's data to all peers, and wait for theirs.

        What a peer wrote before its handover of the same number can be read then, and it has read what this rank had
        written before its handover before this one.

        :param check: called between sleeps with the ranks that have not come; raises to give up.
        """
        post, try_wait = self._post, self._try_wait
        for address in self._outgoing:
            post(address)
        for index, (_, address) in enumerate(self._incoming):
            if try_wait(address):
                self._wait(index, address, check)

    def _wait(self, index: int, address: int, check: Callable[[list[int]], None]) -> None:
        try_wait, now = self._try_wait, time.monotonic
        deadline = now() + _SPIN_SECONDS
        while now() < deadline:
            if not try_wait(address):
                return
            if self._yields:
                os.sched_yield()
        while not semaphores.wait(address, _TICK_SECONDS):
            check([peer for peer, later in self._incoming[index:] if later == address or not self._has_come(later)])

    def _has_come(self, address: int) -> bool:
        """True if a peer's handover waits to be taken."""
        if self._try_wait(address):
            return False
        self._post(address)  # nobody else takes it
        return True

    def drain(self) -> None:
        """Take all handovers that the peers have made, while no rank makes one."""
        for _, address in self._incoming:
            while not self._try_wait(address):
                pass


def sizes(n: int) -> tuple[int, int]:
    """(bytes of a small part, bytes of an area) of each of ``n`` ranks: multiples of 64."""
    small = max(_SMALL_BYTES // n // 64 * 64, 1024)
    area = min(_AREA_BYTES, max(_SEGMENT_BYTES // n, _LEAST_AREA_BYTES)) // 64 * 64
    return small, area


def _place_bytes(n: int) -> int:
    small, area = sizes(n)
    return 2 * small + area + (area // n // 64 + 2) * 64


def segment_bytes(n: int) -> int:
    """Size of the segment of ``n`` ranks: whole pages."""
    nbytes = n * _place_bytes(n) + n * n * semaphores.BYTES
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
