"""The base of all backends: the part of a backend that the calls of a communicator use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..types import Stream


class Backend(ABC):
    """The part of a backend that a call sequence needs. Times are on the clock of :mod:`ipcreduce.clock`.

    It is an interface without state. Its methods are those of a backend of which nothing runs between calls.
    """

    def drain(self) -> None:  # noqa: B027  (a backend may have nothing to do)
        """Wait until this rank's calls so far have ended."""

    def quiesce(self, deadline: float) -> None:  # noqa: B027  (a backend may have nothing to do)
        """Wait until no kernel of this package runs; the abort word is up. :raises IpcReduceError: at ``deadline``."""

    def offer(self) -> bytes:
        """Up to 136 bytes that the other ranks' :meth:`reset` is to get; b"" for none."""
        return b""

    def right(self, number: int) -> int:
        """The last call up to ``number`` that is known to be right on this rank, all of whose calls have ended."""
        return number

    @abstractmethod
    def reset(self, offers: Sequence[bytes]) -> None:
        """Return to the state of start-up, once every rank is quiet. ``offers``: every rank's :meth:`offer`.

        :raises IpcReduceError: if it cannot.
        """

    def is_capturing(self, stream: Stream) -> bool:
        """True if work on ``stream`` is captured, and does not run yet."""
        return False
