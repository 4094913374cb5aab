"""A segment of shared memory in which the ranks of one host hand data over to each other."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np

from ..originals import monotonic
from ..page import shared_files
from . import semaphores

# Bytes of a rank's area: two ranks take 0.2 us more a MB with a quarter of it.
_AREA_BYTES, _LEAST_AREA_BYTES = 1 << 20, 64 << 10
_CROWDED_AREA_BYTES = 16 << 10  # the least where there is little room
_SEGMENT_BYTES = 8 << 20  # of all areas together, as far as the least size allows
_PART_OF_ROOM = 16  # a segment takes a 16th of the room that is left: Docker gives /dev/shm 64 MB
_SMALL_BYTES = 128 << 10  # of all ranks' data of a small message: then it is quicker to read all of it than to share
_SPIN_SECONDS = 1e-4  # a rank looks again and again for so long before it sleeps; waking up takes 30 to 50 us
_TICK_SECONDS = 0.05  # of a sleep: between two looks at faults and deadline


class Segment:
    """Each rank's place in the segment, and a handover among all.

    A rank's place has two parts of ``small_bytes``, used in turns, for small messages; an area of ``area_bytes`` for
    chunks of larger ones; and room for the result of one share of a chunk. After the places lie semaphores, one for
    each ordered pair of ranks. They count the handovers that one has made and the other has not taken yet.

    One rank calls :meth:`create`, the others :meth:`open`.
    """

    def __init__(self, descriptor: int, path: str, rank: int, n: int) -> None:
        self.path, self.rank, self.n = path, rank, n
        self._map = shared_files.mapped(descriptor)
        self.nbytes = len(self._map)
        # By its size every rank knows what rank 0 has chosen.
        self.area_bytes = {segment_bytes(n, area): area for area in areas(n)}[self.nbytes]
        self.small_bytes = small_bytes(n)
        place = _place_bytes(n, self.area_bytes)
        data = np.frombuffer(self._map, np.uint8)
        places = [data[begin : begin + place] for begin in range(0, n * place, place)]
        self.small = [[one[part * self.small_bytes :][: self.small_bytes] for one in places] for part in (0, 1)]
        self.areas = [one[2 * self.small_bytes :][: self.area_bytes] for one in places]
        self.results = [one[2 * self.small_bytes + self.area_bytes :] for one in places]
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + n * place
        addresses = range(first, first + n * n * semaphores.BYTES, semaphores.BYTES)
        self._semaphores = [ctypes.c_void_p(address) for address in addresses]  # [giver * n + taker]
        peers = [peer for peer in range(n) if peer != rank]
        self._outgoing = [self._semaphores[rank * n + peer] for peer in peers]
        self._incoming = [(peer, self._semaphores[peer * n + rank]) for peer in peers]
        self._post, self._try_wait = semaphores.library().post, semaphores.library().try_wait

    @classmethod
    def create(cls, rank: int, n: int) -> Segment:
        """A new segment, in a file that only this user can open and nobody else made. :raises OSError: without room."""
        semaphores.library()
        descriptor, path = shared_files.create(segment_bytes(n, _area_bytes(n, shared_files.free_bytes())))
        segment = cls(descriptor, path, rank, n)
        for address in segment._semaphores:
            semaphores.init(address)
        return segment

    @classmethod
    def open(cls, path: str, rank: int, n: int) -> Segment:
        """The segment that another rank created. :raises OSError: if it cannot be opened."""
        return cls(shared_files.open_existing(path), path, rank, n)

    def hand_over(self, check: Callable[[list[int]], None]) -> None:
        """Give this rank's data to all peers, and wait for the data of the peers.

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

    def _wait(self, index: int, address: ctypes.c_void_p, check: Callable[[list[int]], None]) -> None:
        try_wait, now = self._try_wait, monotonic
        deadline = now() + _SPIN_SECONDS
        while now() < deadline:
            if not try_wait(address):
                return
            os.sched_yield()  # to a peer on this processor: there may be fewer than ranks, or others' work on them
        while not semaphores.wait(address, _TICK_SECONDS):
            check([peer for peer, later in self._incoming[index:] if later is address or not self._has_come(later)])

    def _has_come(self, address: ctypes.c_void_p) -> bool:
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


def small_bytes(n: int) -> int:
    """Bytes of a small part of each of ``n`` ranks: a multiple of 64."""
    return max(_SMALL_BYTES // n // 64 * 64, 1024)


def areas(n: int) -> list[int]:
    """Bytes that an area of each of ``n`` ranks may have: multiples of 64, the largest first."""
    found = [min(_AREA_BYTES, max(_SEGMENT_BYTES // n, _LEAST_AREA_BYTES)) // 64 * 64]
    while found[-1] // 2 >= _CROWDED_AREA_BYTES:
        found.append(found[-1] // 2 // 64 * 64)
    return found


def _area_bytes(n: int, room: int) -> int:
    """The area to take where so many bytes are left: many communicators find room, and each one's pages, too."""
    fitting = (area for area in areas(n) if segment_bytes(n, area) * _PART_OF_ROOM <= room)
    return next(fitting, areas(n)[-1])


def _place_bytes(n: int, area: int) -> int:
    return 2 * small_bytes(n) + area + (area // n // 64 + 2) * 64


def segment_bytes(n: int, area: int) -> int:
    """Size of the segment of ``n`` ranks with such areas: whole pages."""
    nbytes = n * _place_bytes(n, area) + n * n * semaphores.BYTES
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
