"""Whether a fault has come, for what ranks keep from call to call and have to keep alike.

A call that fails on one rank may have succeeded on another, which has gone on. So what a rank keeps because of a call
is in doubt behind a fault.
"""

from __future__ import annotations

from .sequence import CallSequence


class FaultMark:
    """A place in the calls, from which faults count. It begins where it is made, on every rank at the same call."""

    def __init__(self, calls: CallSequence) -> None:
        self._calls = calls
        self._era = None if calls.raised else calls.page.era  # None: a fault is known, and the ranks have still to meet

    def is_passed(self) -> bool:
        """True if a fault has come since the mark.

        Every rank has raised its error by then. Whether they have met since, by a call or by ``recover()``, may differ.
        """
        return self._era is not None and (self._calls.raised or self._calls.page.era != self._era)

    def move(self) -> None:
        """Put the mark behind the present call, which every rank makes."""
        self._era = self._calls.page.era
