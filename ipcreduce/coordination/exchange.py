"""The exchange at start-up: fixed structs, by :class:`Ranks`, with a deadline. No handle is logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from .. import clock
from ..errors import IpcReduceError, PeerTimeoutError, RankMismatchError, UnsupportedError, report

MAGIC = 0x1B_C4ED
VERSION = 1
TEXT_BYTES = 512
MESSAGE_BYTES = 1024  # of every kind, so that ranks at different steps get an error and not MPI's truncation

_HEADER = [("magic", "<u4"), ("version", "<u2"), ("kind", "<u2"), ("length", "<u4"), ("ok", "<u4")]


def struct(kind: int, *fields: tuple[Any, ...]) -> np.dtype[Any]:
    """The layout of a message: common header, fields, and a text for errors. ``kind`` tells messages apart."""
    used = np.dtype([*_HEADER, *fields, ("text", f"S{TEXT_BYTES}")])
    padded = [*used.descr, ("padding", f"V{MESSAGE_BYTES - used.itemsize}")]
    return np.dtype(padded, metadata={"kind": kind})


# Identity and options of a rank. All ranks must have the same timeout, algorithm, backend and workspace.
IDENTITY = struct(
    1,
    ("wrong", "<u4"),
    ("host", "S64"),
    ("until", "<f8"),  # this rank's deadline, by its host's monotonic clock
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


def message(dtype: np.dtype[Any], error: BaseException | str | None = None, **fields: Any) -> np.ndarray[Any, Any]:
    """A filled-in record of ``dtype``, of shape ``(1,)``; with an error it is not ok, and has the error's text."""
    assert dtype.metadata is not None
    record = np.zeros(1, dtype)
    record["magic"], record["version"], record["kind"] = MAGIC, VERSION, dtype.metadata["kind"]
    record["length"], record["ok"] = MESSAGE_BYTES, error is None
    record["text"] = str(error or "").encode()[:TEXT_BYTES]
    for name, value in fields.items():
        record[name] = value
    return record


def text_of(record: Any) -> str:
    """The text of one record."""
    return bytes(record["text"]).rstrip(b"\0").decode(errors="replace")


class Request(Protocol):
    """An exchange under way."""

    def Test(self) -> bool:
        """True once it is done. :raises IpcReduceError: if it never will be."""


class Ranks(Protocol):
    """The ranks of one communicator, as start-up needs them: over MPI or over any group that the program has."""

    rank: int
    size: int
    silence: str  # the words for ranks that do not answer in time

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


def confirm(
    ranks: Ranks, error: BaseException | None, deadline: float, what: str, interrupt: Callable[[], None] | None = None
) -> None:
    """End a step of start-up on all ranks alike: if any rank met an error, every rank raises.

    :raises UnsupportedError: naming the ranks that failed and why.
    """
    check(ranks, allgather(ranks, message(CONFIRMATION, error), deadline, what, interrupt=interrupt), what)


def check(ranks: Ranks, gathered: np.ndarray[Any, Any], what: str) -> None:
    """:raises UnsupportedError: if a rank's record is not ok, which every message says."""
    failed = [rank for rank in range(len(gathered)) if not gathered[rank]["ok"]]
    if failed:
        reasons = "; ".join(f"rank {rank}: {text_of(gathered[rank])}" for rank in failed[:3])
        raise UnsupportedError(f"{what} failed on {len(failed)} of {len(gathered)} ranks: {reasons}")


@contextmanager
def step(ranks: Ranks, deadline: float, what: str) -> Iterator[None]:
    """The block, then a vote: all ranks go on or all give up. :raises UnsupportedError: with every rank's reason."""
    error: Exception | None = None
    try:
        yield
    except (IpcReduceError, OSError) as caught:
        error = caught
    confirm(ranks, error, deadline, what)
