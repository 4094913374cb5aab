"""The exchange at start-up: fixed structs, by :class:`Ranks`, with a deadline. No handle is logged.

All ranks make the same exchanges. A rank that leaves start-up says so in its part of the next one, or in place of it,
whichever that is: so the others hear of any exception at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from .. import clock
from ..errors import (
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    UnsupportedError,
    report,
)
from ..texts import decoded, described, encoded, out_of_descriptors, with_limit
from ..texts import text_of as words_of

MAGIC = 0x1B_C4ED
VERSION = 2
TEXT_BYTES = 512
MESSAGE_BYTES = 2048  # of every kind, so that ranks at different steps get an error and not MPI's truncation
_LAST_WORDS_SECONDS = 5.0  # for the others to hear of Ctrl-C or an exit, for which nobody should wait long

# Values of ``left``: the rank goes on, perhaps by another way; it leaves start-up as it lacks something, or otherwise.
_STAYS, _LACKS, _LEAVES = 0, 1, 2
_HEADER = [("magic", "<u4"), ("version", "<u2"), ("kind", "<u2"), ("length", "<u4"), ("ok", "<u4"), ("left", "<u4")]


def struct(kind: int, *fields: tuple[Any, ...]) -> np.dtype[Any]:
    """The layout of a message: common header, a text for errors, and fields. ``kind`` tells messages apart."""
    used = np.dtype([*_HEADER, ("text", f"S{TEXT_BYTES}"), *fields])
    padded = [*used.descr, ("padding", f"V{MESSAGE_BYTES - used.itemsize}")]
    return np.dtype(padded, metadata={"kind": kind})


# Identity and options of a rank. All ranks must have the same timeout, algorithm, backend and workspace.
IDENTITY = struct(
    1,
    ("wrong", "<u4"),
    ("host", "S64"),
    ("clock", "S64"),  # that by which this rank tells the time; b"" if it does not know
    ("until", "<f8"),  # this rank's deadline, by that clock
    ("timeout", "<f8"),
    ("algorithm", "S16"),
    ("backend", "S16"),
    ("workspace", "<u8"),
)
DEVICE = struct(
    2,
    ("wrong", "<u4"),
    ("uuid", "V16"),
    ("capability", "<u4", (2,)),
    ("multiprocessors", "<u4"),
    ("visible", "<u4"),
    ("name", "S64"),
)
PAGE = struct(3, ("path", "S64"))
MEMORY = struct(4, ("handle", "V64"), ("nbytes", "<u8"))
CONFIRMATION = struct(5)
CALL = struct(7, ("call", "<u8"))
LEAVING = struct(11)  # in place of any other


class Agreed(UnsupportedError):
    """The ranks have agreed that this way does not go: each of them raises it, and tries the next way."""


def message(dtype: np.dtype[Any], error: BaseException | str | None = None, **fields: Any) -> np.ndarray[Any, Any]:
    """A filled-in record of ``dtype``, of shape ``(1,)``; with an error it is not ok, and has the error's text."""
    assert dtype.metadata is not None
    record = np.zeros(1, dtype)
    record["magic"], record["version"], record["kind"] = MAGIC, VERSION, dtype.metadata["kind"]
    record["length"], record["ok"] = MESSAGE_BYTES, error is None
    if error is not None:
        text, record["left"] = _said(error)
        record["text"] = encoded(text, TEXT_BYTES)
    for name, value in fields.items():
        record[name] = encoded(value, dtype[name].itemsize) if isinstance(value, str) else value
    return record


def _said(error: BaseException | str) -> tuple[str, int]:
    """The words for the other ranks about an error, and a value of ``left``."""
    if isinstance(error, (str, IpcReduceError)):
        return words_of(error), _STAYS
    if isinstance(error, OSError):  # a process that can open no file would fail on another way too
        return with_limit(error), _LACKS if out_of_descriptors(error) else _STAYS
    return described(error), _LEAVES


def text_of(record: Any) -> str:
    """The text of one record."""
    return decoded(bytes(record["text"]))


class Request(Protocol):
    """An exchange under way."""

    def Test(self) -> bool:
        """True once it is done. :raises IpcReduceError: if it never will be."""


class Ranks(Protocol):
    """The ranks of one communicator, as start-up needs them: over MPI or over any group that the program has."""

    rank: int
    size: int
    silence: str  # the words for ranks that do not answer in time
    left: bool  # a rank has left start-up, and all know: no exchange follows

    def gather(self, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> Request:
        """Begin to collect every rank's ``sent``, uint8 of shape ``(m,)``, by rank in ``received``, ``(size * m,)``.

        Collective. Both arrays must stay as they are until the request is done.
        """

    def join(self, timeout: float) -> Ranks:
        """The same ranks, by a way on which they meet nothing of the program's. Collective.

        :raises PeerTimeoutError: if a rank does not come within ``timeout`` seconds.
        """

    def local_rank(self, hosts: Sequence[bytes]) -> int:
        """This process's number on its host. ``hosts`` has an identifier of every rank's."""

    def free(self) -> None:
        """Give back what :meth:`join` has made."""


LATE = "Look for a rank that has not made its Communicator, then make it again on every rank."
_STOPPED = "Look for a rank that waits elsewhere or has stopped; only close() is left."
_abandoned: list[Any] = []  # requests that were given up, with their buffers: MPI may still write into them


def complete(
    request: Request,
    ranks: Ranks,
    deadline: float,
    what: str,
    *,
    call: int = 0,
    interrupt: Callable[[], None] | None = None,
    advice: str = _STOPPED,
) -> None:
    """Wait for a request; ``interrupt()`` is called between polls, and may raise.

    :param deadline: on the clock of :mod:`ipcreduce.clock`, in seconds.
    :raises PeerTimeoutError: when the deadline has passed. The request stays pending: its communicator is lost.
    """
    try:
        pause = 0.0
        while not request.Test():
            now = clock.now()
            if now > deadline:
                raise PeerTimeoutError(
                    report(
                        ranks.rank, call, expected=f"all {ranks.size} ranks at {what}",
                        found=ranks.silence,
                        advice=advice,
                    )
                )  # fmt: skip
            if interrupt is not None:
                interrupt()
            if pause:
                time.sleep(pause)
            pause = min(1e-3, pause + 1e-6)  # quick at first, easy on the processor later
    except BaseException:
        _abandoned.append(request)
        raise


def allgather(
    ranks: Ranks,
    record: np.ndarray[Any, Any],
    deadline: float,
    what: str,
    *,
    call: int = 0,
    interrupt: Callable[[], None] | None = None,
    advice: str = _STOPPED,
) -> np.ndarray[Any, Any]:
    """Every rank's record, shape ``(n,)``, checked to be of the same kind, version and length.

    :raises RankMismatchError: if a rank sends something else. :raises PeerTimeoutError: see :func:`complete`.
    :raises UnsupportedError: if MPI is finalised. :raises PeerLostError: if the program's group fails.
    :raises PeerFailedError: if a rank leaves start-up. :raises UnsupportedError: if it does as it lacks something.
    """
    gathered = np.zeros(ranks.size, record.dtype)
    complete(
        ranks.gather(record.view(np.uint8), gathered.view(np.uint8)),
        ranks,
        deadline,
        what,
        call=call,
        interrupt=interrupt,
        advice=advice,
    )
    _raise_left(ranks, gathered, what)
    for rank, other in enumerate(gathered):
        for field in ("magic", "version", "kind", "length"):
            if other[field] != record[0][field]:
                raise RankMismatchError(
                    report(
                        ranks.rank, call, expected=f"{field} {record[0][field]} at {what}",
                        found=f"{field} {other[field]} from rank {rank}",
                        advice="Run the same version of ipcreduce and the same program on every rank.",
                    )
                )  # fmt: skip
    return gathered


def confirm(ranks: Ranks, error: BaseException | None, deadline: float, what: str) -> None:
    """End a step of start-up on all ranks alike: if any rank met an error, every rank raises.

    :raises Agreed: naming the ranks that failed and why.
    """
    check(ranks, allgather(ranks, message(CONFIRMATION, error), deadline, what), what)


def check(ranks: Ranks, gathered: np.ndarray[Any, Any], what: str) -> None:
    """:raises Agreed: if a rank's record is not ok, which every message says."""
    failed = [rank for rank in range(len(gathered)) if not gathered[rank]["ok"]]
    if failed:
        reasons = "; ".join(f"rank {rank}: {text_of(gathered[rank])}" for rank in failed[:3])
        raise Agreed(f"{what} failed on {len(failed)} of {len(gathered)} ranks: {reasons}")


@contextmanager
def step(ranks: Ranks, deadline: float, what: str) -> Iterator[None]:
    """The block, then a vote: all ranks go on or all give up.

    :raises Agreed: with every rank's reason. :raises IpcReduceError: if a rank leaves start-up: see :func:`allgather`.
        An exception that is neither ours nor the system's passes unchanged on its own rank.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
    try:
        confirm(ranks, error, last_words(error, deadline), what)
    except IpcReduceError as shared:
        if error is None or isinstance(error, (IpcReduceError, OSError)):
            raise shared from error
        raise error from None


# ---- ranks that leave
def _raise_left(ranks: Ranks, gathered: np.ndarray[Any, Any], what: str) -> None:
    for rank, other in enumerate(gathered):
        ours = (other["magic"], other["version"], other["length"]) == (MAGIC, VERSION, MESSAGE_BYTES)
        if ours and other["left"]:
            ranks.left = True
            raise (UnsupportedError if other["left"] == _LACKS else PeerFailedError)(report(
                ranks.rank, 0, expected=f"all {ranks.size} ranks at {what}",
                found=f"that rank {rank} has left start-up ({text_of(other)})",
                advice="Mend that, then make the Communicator again on every rank.",
            ))  # fmt: skip


def tell(ranks: Ranks, error: BaseException, deadline: float) -> None:
    """Tell the other ranks, in their next exchange, that this one leaves start-up for ``error``, unless they know.

    If every rank raises the same by itself, they all tell each other, and none has to wait.
    """
    if ranks.left or isinstance(error, (Agreed, PeerTimeoutError, PeerLostError, RankMismatchError)):
        return
    _, left = _said(error)
    lacks = left == _LACKS or isinstance(error, (UnsupportedError, OSError))
    record = message(LEAVING, error, left=_LACKS if lacks else _LEAVES)
    gathered = np.zeros(ranks.size, record.dtype)
    with suppress(RuntimeError):  # MPI's errors, and ours: ``error`` is the one to raise
        request = ranks.gather(record.view(np.uint8), gathered.view(np.uint8))
        complete(request, ranks, last_words(error, deadline), "the end of start-up")
        ranks.left = True


def last_words(error: BaseException | None, deadline: float) -> float:
    """The end of this rank's wait for the others to hear of its error."""
    if error is None or isinstance(error, Exception):
        return deadline
    return min(deadline, clock.now() + _LAST_WORDS_SECONDS)
