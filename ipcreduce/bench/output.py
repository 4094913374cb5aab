"""The output of a command, by rank 0. If it cannot be written, all ranks raise the same error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from ..errors import IpcReduceError

# The problem if the reader of a pipe leaves early, as by ``| head -1``. The command then is silent, and ends with the
# status that a shell shows for programs that SIGPIPE has ended.
READER_LEFT = f"the output cannot be written ({os.strerror(errno.EPIPE)})"
READER_LEFT_STATUS = 141


class ReaderLeftError(IpcReduceError):
    """Nobody reads the output any more."""


def on_rank_0(write: Callable[[], object], mpi: Any = None, what: str = "the output") -> None:
    """Call ``write`` on rank 0, which prints or stores something. Collective.

    :param mpi: an mpi4py communicator; None for a single process.
    :param what: the name of the output in messages.
    :raises IpcReduceError: on every rank, if it cannot be written. :raises ReaderLeftError: if its pipe is closed.
    """
    problem = ""
    if mpi is None or mpi.Get_rank() == 0:
        problem = _tried(write, what) or _tried(sys.stdout.flush, what)
    if mpi is not None:
        problem = mpi.bcast(problem)
    if problem:
        raise (ReaderLeftError if problem == READER_LEFT else IpcReduceError)(problem)


def put(text: str, file: TextIO) -> str:
    """Print ``text``. Returns "", or the reason why that was not possible."""
    return _tried(partial(print, text, file=file, flush=True), "the output")


def settle() -> None:
    """Flush the standard streams, and discard what cannot be written: it would make the interpreter's exit fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):  # a stream that the program has made has no descriptor
                descriptor = os.open(os.devnull, os.O_WRONLY)
                os.dup2(descriptor, stream.fileno())
                os.close(descriptor)


def _tried(write: Callable[[], object], what: str) -> str:
    """Call ``write``. Returns "", or the reason why ``what`` cannot be written."""
    try:
        write()
    except IpcReduceError as error:
        return str(error)
    except OSError as error:
        settle()
        where = f": {error.filename}" if error.filename else ""
        return f"{what} cannot be written ({error.strerror or error}{where})"
    return ""
