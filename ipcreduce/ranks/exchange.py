"""The exchanges at start-up: every rank sends a fixed struct and gets those of all ranks, within a deadline.

All ranks make the same exchanges. A rank that leaves start-up with an exception says so in the next exchange, so that
the others hear of it at once. The structs hold IPC handles, and nothing logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import IntEnum, unique
from typing import Any, Protocol

import numpy as np

from .. import clock
from ..errors import (
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    Reach,
    UnsupportedError,
    report,
)
from ..interrupts import uninterrupted
from ..originals import time
from ..page.records import filled
from ..texts import described, out_of_descriptors, text_in, text_of, with_limit

MAGIC = 0x1B_C4ED
VERSION = 4
TEXT_BYTES = 512
MESSAGE_BYTES = 2048  # the same for all kinds: otherwise ranks at different steps would get MPI's error of truncation
_LAST_WORDS_SECONDS = 5.0  # how long a rank that ends by Ctrl-C or an exit waits for the others to hear of it

# Values of ``left``: the rank goes on; it leaves start-up because it lacks something; it leaves for another reason.
_STAYS, _LACKS, _LEAVES = 0, 1, 2
_HEADER = [("magic", "<u4"), ("version", "<u2"), ("kind", "<u2"), ("length", "<u4"), ("ok", "<u4"), ("left", "<u4")]


@unique
class Kind(IntEnum):
    """The kinds of message. Each has a layout of its own, which its module makes by :func:`struct`."""

    IDENTITY = 1
    DEVICE = 2
    PAGE = 3
    MEMORY = 4
    CONFIRMATION = 5
    LEAVING = 6  # sent in place of any other message
    MEMBER = 7
    PLACE = 8
    LINKS = 9
    TUNING = 10
    NETWORK = 11
    DESCRIPTOR = 12


def struct(kind: Kind, *fields: tuple[Any, ...]) -> np.dtype[Any]:
    """The layout of the messages of a kind: a common header, a text for errors, and fields."""
    used = np.dtype([*_HEADER, ("text", f"S{TEXT_BYTES}"), *fields])
    padded = [*used.descr, ("padding", f"V{MESSAGE_BYTES - used.itemsize}")]
    return np.dtype(padded, metadata={"kind": kind})


# Identity and options of a rank. All must have the same build, timeout, algorithm, backend, workspace and memory.
IDENTITY = struct(
    Kind.IDENTITY,
    ("wrong", "<u4"),
    ("build", "S64"),
    ("host", "S64"),
    ("clock", "S64"),  # an identifier of this rank's clock; b"" if it is unknown
    ("until", "<f8"),  # this rank's deadline, by that clock
    ("timeout", "<f8"),
    ("algorithm", "S16"),
    ("backend", "S16"),
    ("workspace", "<u8"),
    ("memory", "S8"),
)
DEVICE = struct(
    Kind.DEVICE,
    ("wrong", "<u4"),
    ("uuid", "V16"),
    ("capability", "<u4", (2,)),
    ("multiprocessors", "<u4"),
    ("shared_bytes", "<u4"),  # the most of a block
    ("visible", "<u4"),
    ("name", "S64"),
    ("driver", "<u4", (2,)),  # the newest version of CUDA that its driver has
)
PAGE = struct(Kind.PAGE, ("path", "S64"))
MEMORY = struct(Kind.MEMORY, ("handle", "V64"), ("nbytes", "<u8"))
CONFIRMATION = struct(Kind.CONFIRMATION)
LEAVING = struct(Kind.LEAVING)


class Agreed(UnsupportedError):
    """The error that every rank raises once all have agreed that a backend does not work. They try the next one."""


def message(dtype: np.dtype[Any], error: BaseException | str | None = None, **fields: Any) -> np.ndarray[Any, Any]:
    """A record of ``dtype``, of shape ``(1,)``, with these fields. With an error it is not ok, and has its text."""
    assert dtype.metadata is not None
    text, left = ("", _STAYS) if error is None else _said(error)
    header = {"magic": MAGIC, "version": VERSION, "kind": dtype.metadata["kind"], "length": MESSAGE_BYTES}
    return filled(dtype, **{**header, "ok": error is None, "text": text, "left": left, **fields})


def _said(error: BaseException | str) -> tuple[str, int]:
    """The text of an error for the other ranks, and a value of ``left``."""
    if isinstance(error, (str, IpcReduceError)):
        return text_of(error), _STAYS
    if isinstance(error, OSError):  # a process that can open no file would fail with every backend
        return with_limit(error), _LACKS if out_of_descriptors(error) else _STAYS
    return described(error), _LEAVES


class Request(Protocol):
    """An exchange under way."""

    def Test(self) -> bool:
        """True once the exchange is done. :raises IpcReduceError: if it fails."""


class Channel(Protocol):
    """The channel of the exchanges: MPI, another group of the program, or later the control page."""

    rank: int
    size: int
    call: int  # the call in which the exchanges take place; 0 at start-up
    silence: str  # the part of an error message for ranks that do not answer in time
    left: bool  # True once all ranks know that one has left start-up: no exchange follows

    def gather(self, sent: np.ndarray[Any, Any], received: np.ndarray[Any, Any]) -> Request:
        """Begin to collect every rank's ``sent``, uint8 of shape ``(m,)``, by rank in ``received``, ``(size * m,)``.

        Collective. Both arrays must stay as they are until the request is done.
        """


class Ranks(Channel, Protocol):
    """The ranks of one communicator, as start-up needs them."""

    def join(self, timeout: float) -> Ranks:
        """The same ranks, over a channel that the program does not use. Collective.

        :raises PeerTimeoutError: if a rank does not come within ``timeout`` seconds.
        """

    def local_rank(self, hosts: Sequence[bytes]) -> int:
        """This process's number on its host. ``hosts`` has an identifier of each rank's host."""

    def close(self) -> None:
        """Close the channel that :meth:`join` has made."""


LATE = "Look for a rank that has not made its Communicator, then make it again on every rank."
_STOPPED = "Look for a rank that waits elsewhere or has stopped, and close the communicator."


def complete(
    request: Request,
    ranks: Channel,
    deadline: float,
    what: str,
    *,
    call: int = 0,
    interrupt: Callable[[], None] | None = None,
    advice: str = _STOPPED,
) -> None:
    """Wait for a request.

    :param deadline: on the clock of :mod:`ipcreduce.clock`, in seconds.
    :param what: the exchange, for messages.
    :param interrupt: called between polls; it may raise.
    :raises PeerTimeoutError: when the deadline has passed. The request stays pending, so its communicator is lost.
    """
    pause = 0.0
    while not request.Test():
        now = clock.now()
        if now > deadline:
            raise PeerTimeoutError(
                report(ranks.rank, call, f"not all {ranks.size} ranks came to {what}: {ranks.silence}", advice)
            )
        if interrupt is not None:
            interrupt()
        if pause:
            time.sleep(pause)
        pause = min(1e-3, pause + 1e-6)  # polls often at first, and rarely later


def allgather(
    ranks: Channel, record: np.ndarray[Any, Any], deadline: float, what: str, advice: str = _STOPPED
) -> np.ndarray[Any, Any]:
    """Every rank's record, shape ``(n,)``, checked to be of the same kind, version and length.

    :raises RankMismatchError: if a rank sends another kind of record. :raises PeerTimeoutError: see :func:`complete`.
    :raises UnsupportedError: if MPI is finalised, or if a rank leaves start-up because it lacks something.
    :raises PeerFailedError: if a rank leaves start-up for another reason.
    :raises PeerLostError: if the program's group fails.
    """
    gathered = np.zeros(ranks.size, record.dtype)
    request = ranks.gather(record.view(np.uint8), gathered.view(np.uint8))
    complete(request, ranks, deadline, what, advice=advice)
    _raise_left(ranks, gathered, what)
    for rank, other in enumerate(gathered):
        for field in ("magic", "version", "kind", "length"):
            if other[field] != record[0][field]:
                raise RankMismatchError(report(
                    ranks.rank, ranks.call,
                    f"rank {rank} has {field} {other[field]} at {what}, and this rank has {record[0][field]}",
                    "Run the same version of ipcreduce and the same program on every rank.",
                ))  # fmt: skip
    return gathered


def share(
    ranks: Channel, dtype: np.dtype[Any], make: Callable[[], dict[str, Any]], deadline: float, what: str
) -> np.ndarray[Any, Any]:
    """Every rank's record of ``dtype``, with the fields that ``make()`` returns on that rank.

    :raises Agreed: on every rank, if ``make()`` has raised IpcReduceError or OSError on one.
    """
    error, fields = None, {}
    try:
        fields = make()
    except (IpcReduceError, OSError) as caught:
        error = caught
    sent, error = message(dtype, error, **fields), None  # for its traceback has this frame
    gathered = allgather(ranks, sent, deadline, what)
    check(ranks, gathered, what)
    return gathered


def confirm(ranks: Channel, error: BaseException | None, deadline: float, what: str) -> None:
    """End a step of start-up: if any rank has an error, every rank raises.

    :raises Agreed: naming the ranks that failed and why.
    """
    check(ranks, allgather(ranks, message(CONFIRMATION, error), deadline, what), what)


def check(ranks: Channel, gathered: np.ndarray[Any, Any], what: str) -> None:
    """Check that every rank's record is ok. :raises Agreed: on every rank, if one is not."""
    failed = [rank for rank in range(len(gathered)) if not gathered[rank]["ok"]]
    if failed:
        reasons = "; ".join(f"rank {rank}: {text_in(gathered[rank])}" for rank in failed[:3])
        raise Agreed(f"{what} failed on {len(failed)} of {len(gathered)} ranks: {reasons}")


@contextmanager
def step(ranks: Channel, deadline: float, what: str, *, waits: bool = False) -> Iterator[None]:
    """Run the block, then vote: either all ranks go on, or all raise.

    :param waits: the block waits for other ranks, so Ctrl-C ends it. Any other block ends before Ctrl-C raises.
    :raises Agreed: with the ranks' reasons. :raises IpcReduceError: if a rank leaves start-up: see :func:`allgather`.
        An exception that is neither an IpcReduceError nor an OSError is raised unchanged on its own rank.
    """
    error: BaseException | None = None
    try:
        with nullcontext() if waits else uninterrupted():
            yield
    except BaseException as caught:
        error = caught
    try:
        confirm(ranks, error, last_words(error, deadline), what)
    except IpcReduceError as shared:
        if error is None or isinstance(error, (IpcReduceError, OSError)):
            raise shared from error
        raise error from None
    finally:
        del error  # its traceback has this frame, and with it all callers' variables


# ---- ranks that leave
def _raise_left(ranks: Channel, gathered: np.ndarray[Any, Any], what: str) -> None:
    for rank, other in enumerate(gathered):
        ours = (other["magic"], other["version"], other["length"]) == (MAGIC, VERSION, MESSAGE_BYTES)
        if not ours or not other["left"]:
            continue
        if not ranks.call:
            ranks.left = True
            raise (UnsupportedError if other["left"] == _LACKS else PeerFailedError)(report(
                ranks.rank, 0, f"rank {rank} has left start-up ({text_in(other)})",
                "Mend that, then make the Communicator again on every rank.",
            ))  # fmt: skip
        if other["left"] == _LEAVES:  # what a rank lacks is an error as any other, once no further backend is tried
            raise PeerFailedError(f"rank {rank} raised an error ({text_in(other)})", reach=Reach.OWN)


def tell(ranks: Ranks, error: BaseException, deadline: float) -> None:
    """Tell the other ranks, in their next exchange, that this rank leaves start-up with ``error``.

    Nothing is sent if they know already. If every rank raises by itself, all tell each other, and none waits.
    """
    if ranks.left or isinstance(error, (Agreed, PeerTimeoutError, PeerLostError, RankMismatchError)):
        return
    _, left = _said(error)
    lacks = left == _LACKS or isinstance(error, (UnsupportedError, OSError))
    record = message(LEAVING, error, left=_LACKS if lacks else _LEAVES)
    gathered = np.zeros(ranks.size, record.dtype)
    with suppress(RuntimeError):  # an error of MPI or ipcreduce here must not hide ``error``
        request = ranks.gather(record.view(np.uint8), gathered.view(np.uint8))
        complete(request, ranks, last_words(error, deadline), "the end of start-up")
        ranks.left = True


def last_words(error: BaseException | None, deadline: float) -> float:
    """The time until which this rank waits for the other ranks to read its error."""
    if error is None or isinstance(error, Exception):
        return deadline
    return min(deadline, clock.now() + _LAST_WORDS_SECONDS)
