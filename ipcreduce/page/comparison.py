"""The comparison of calls after they were made, which finds the differences that could not be seen before.

Between hosts no rank sees the other ranks' calls as it makes its own. On one host, two ranks that enter a call at the
same moment may miss each other's call: a processor may read another processor's word before its own is visible there.
"""

from __future__ import annotations

from .. import clock
from .control_page import MISMATCH, Page

BUSY_SECONDS = 0.01  # between two looks while calls are made over mirrors: fewer than the flight recorder has room for
_SETTLED_SECONDS = 0.5  # after which the last call of two ranks is compared too; a call may be withdrawn until the next
# From finding a mismatch to posting it. The post ends earlier calls that still run: this thread cannot wait for them.
# A rank that finds the mismatch itself, as it enters the call, waits for them first: see CallSequence._post.
_PATIENCE_SECONDS = 1.0


class Comparison:
    """The comparison of this rank's calls with those of every other rank, as far as both have made them."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._compared = [0] * page.n  # the last call, by rank
        self._number, self._moved = 0, clock.now()  # of this rank's last call, and when it was seen first
        self._found: tuple[int, str] | None = None  # a mismatch that is not posted yet: the call, and it in words
        self._era, self._seen = 0, 0.0  # of the mismatch, and when it was found

    @property
    def is_busy(self) -> bool:
        """True while this rank makes calls that the other ranks have to learn of soon."""
        return clock.now() - self._moved < 2 * BUSY_SECONDS

    def look(self) -> None:
        """Compare the calls made since the last look. Post the first mismatch if no rank has done so after a while."""
        page, era = self._page, self._page.era
        number = page.calls.number[0]
        if number != self._number:
            self._number, self._moved = number, clock.now()
        if self._found is None and not page.aborted:
            settled = clock.now() - self._moved > _SETTLED_SECONDS
            for rank in range(page.n):
                if rank != page.rank and self._found is None:
                    self._compare(rank, settled, era)
        found = self._found
        if found is not None and (self._era != page.era or clock.now() - self._seen > _PATIENCE_SECONDS):
            self._found = None
            with page.in_era(self._era) as current:
                if current and not page.aborted:
                    page.post_fault(MISMATCH, *found)

    def _compare(self, rank: int, settled: bool, era: int) -> None:
        calls = self._page.calls
        last = min(self._number, calls.call_of(rank))
        last -= not (settled and self._number == calls.call_of(rank))
        if last <= self._compared[rank]:
            return
        self._found = calls.difference(rank, self._compared[rank] + 1, last)
        self._compared[rank], self._era, self._seen = last, era, clock.now()
