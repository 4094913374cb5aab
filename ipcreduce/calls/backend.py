"""The protocols between calls and what makes them: a new backend implements :class:`Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Stream


class Backend(Protocol):
    """The part of a backend that a call sequence needs. Times are on the clock of :mod:`ipcreduce.clock`."""

    def drain(self) -> None:
        """Wait until this rank's calls so far have ended."""

    def quiesce(self, deadline: float) -> None:
        """Wait until no work of ours runs, the abort word being up. :raises IpcReduceError: at ``deadline``."""

    def offer(self) -> bytes:
        """Up to 136 bytes that the other ranks' :meth:`reset` is to get; b"" for none."""

    def reset(self, offers: Sequence[bytes]) -> None:
        """Return to the state of start-up, once every rank is quiet. ``offers``: every rank's :meth:`offer`.

        :raises IpcReduceError: if it cannot.
        """

    def is_capturing(self, stream: Stream) -> bool:
        """True if work on ``stream`` is captured, and does not run yet."""


class Body(Protocol):
    """A recording in progress."""

    error: BaseException | None  # the first one raised within it

    @property
    def in_this_thread(self) -> bool:
        """True if it is this thread that records."""
