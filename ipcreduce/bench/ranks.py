"""The ranks of a command: the launcher that started them, the MPI that they see, and their common exit."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from ..errors import UnsupportedError
from ..ranks import mpi
from ..ranks.launchers import Launch
from . import output

_MEETING_SECONDS = 5.0  # how long a rank that exits waits for the others to exit, too
_INTERRUPTED_STATUS = 130  # what a shell shows for programs that SIGINT has ended
_UNREAD_SECONDS = 0.3  # when a rank fails, a launcher may lose what it has not yet read


class Ranks:
    """The ranks of this run. ``rank`` is that of MPI if MPI has several ranks, or else that of the launcher."""

    def __init__(self) -> None:
        self.launch = Launch.seen()
        self.rank, self.size = self.launch.rank, 0  # join() replaces them by those of MPI
        self._ends: Any = None  # a communicator that serves the exit only

    def join(self) -> None:
        """Initialise MPI. Collective. :raises UnsupportedError: if there is none."""
        if self._ends is None:
            self._ends = mpi.require().COMM_WORLD.Dup()
            self.size = int(self._ends.Get_size())
            if self.size > 1:
                self.rank = int(self._ends.Get_rank())

    def mismatch(self) -> str:
        """The error message if MPI takes the launcher's ranks for single programs; else "". After :meth:`join`."""
        return self.launch.mismatch(self.size)

    def tell(self, text: str) -> None:
        """Print ``text`` on rank 0. Collective. :raises IpcReduceError: on every rank, if it cannot be written."""
        output.on_rank_0(lambda: print(text), self._ends if self.size > 1 else None)

    def exit(self, text: str, status: int) -> NoReturn:
        """Exit with ``status`` on every rank, after rank 0 has printed ``text``: to stderr if ``status`` is not 0.

        A rank that exits alone prints its own text after 5 s, and aborts the others.
        """
        problem = output.put(text, sys.stderr if status else sys.stdout) if text and self.rank == 0 else ""
        if status and max(self.size, self.launch.size) > 1:
            self._meet(text, status)
        if problem and not status:  # only for help and version, before the ranks have joined
            if problem == output.READER_LEFT:
                sys.exit(output.READER_LEFT_STATUS)
            output.put(f"ipcreduce: {problem}", sys.stderr)
            status = 1
        sys.exit(status)

    def _meet(self, text: str, status: int) -> None:
        with suppress(UnsupportedError):  # without MPI, the pause below is all
            self.join()
            request, deadline = self._ends.Ibarrier(), time.monotonic() + _MEETING_SECONDS
            while not request.Test():
                if time.monotonic() > deadline:
                    self.abort("" if self.rank == 0 else text, status)
                time.sleep(1e-3)
        if self.rank:
            time.sleep(_UNREAD_SECONDS)  # a launcher may kill rank 0 when this rank has failed

    def abort(self, text: str, status: int = 1) -> NoReturn:
        """Print ``text`` to stderr and abort every rank. After :meth:`join`."""
        if text:
            output.put(text, sys.stderr)
        if self.size > 1:
            time.sleep(_UNREAD_SECONDS)
            self._ends.Abort(status)
        sys.exit(status)

    def interrupted(self) -> NoReturn:
        """End every rank because of Ctrl-C on this one, wherever it is: perhaps within :meth:`join` or on its way out.

        Without MPI's abort this process ends by the signal, at which launchers end the others. MPI's own end, at
        Python's exit, would wait for them.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would get in the way
        output.put("ipcreduce: interrupted", sys.stderr)
        module = mpi.loaded()
        if self.launch.size > 1 and module is not None and module.Is_initialized() and not module.Is_finalized():
            time.sleep(_UNREAD_SECONDS)
            module.COMM_WORLD.Abort(_INTERRUPTED_STATUS)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError  # not reached
