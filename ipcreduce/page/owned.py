"""Descriptors that this package keeps open, and that the program may close, as ``os.closerange()`` does."""

from __future__ import annotations

import os
from contextlib import suppress

CLOSED_BY_PROGRAM = "the program has closed a descriptor of ipcreduce, as os.closerange() does"


class Known:
    """A descriptor of this package. Once the program has closed it, its number may be that of another file.

    Linux before 6.9 shows all pidfds and eventfds as one file, which hides a change among these.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._status = os.fstat(number)

    @property
    def is_ours(self) -> bool:
        """False once it is closed, or is another file's number."""
        try:
            return os.path.samestat(os.fstat(self.number), self._status)
        except OSError:
            return False


class Owned(Known):
    """One that is closed with :meth:`close`, or as the last reference goes, unless the program has closed it before."""

    def close(self) -> None:
        """Close it. Idempotent."""
        if self.is_ours:
            with suppress(OSError):  # the program has just done so
                number, self.number = self.number, -1  # no interrupt can come between this and the next
                os.close(number)

    def __del__(self) -> None:
        self.close()  # after an interrupt


def pipe() -> tuple[Owned, Owned]:
    """The reading and the writing end of a new pipe."""
    read, write = map(Owned, os.pipe())
    return read, write
