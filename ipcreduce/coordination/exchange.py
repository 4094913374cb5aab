"""The exchange at start-up: fixed structs, by nonblocking MPI with a deadline. Nothing is pickled, no handle logged."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import IpcReduceError, PeerTimeoutError, RankMismatchError, UnsupportedError, first_line, report

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


def mpi_is_finalised() -> bool:
    """True if no MPI call may be made any more."""
    module = sys.modules.get("mpi4py.MPI")  # to import it would initialise MPI
    return module is not None and module.Is_finalized()


def check_mpi_runs() -> None:
    """:raises UnsupportedError: if the program has finalised MPI."""
    if mpi_is_finalised():
        raise UnsupportedError("MPI is finalised: make and use communicators before MPI.Finalize()")


def require_mpi() -> Any:
    """The MPI module, initialised. :raises UnsupportedError: if MPI is missing, not initialised or finalised."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py's wheel raises RuntimeError where it finds no MPI library
        raise UnsupportedError(
            f"MPI cannot be loaded ({first_line(error)}): pip install 'ipcreduce[mpi]', or install MPICH or Open MPI"
        ) from None
    check_mpi_runs()
    if not MPI.Is_initialized():
        raise UnsupportedError("MPI is not initialised: call MPI.Init(), or leave mpi4py.rc.initialize at True")
    return MPI


_abandoned: list[Any] = []  # requests that were given up, with their buffers: MPI may still write into them


def complete(
    request: Any,
    mpi: Any,
    deadline: float,
    what: str,
    *,
    call: int = 0,
    interrupt: Callable[[], None] | None = None,
    advice: str = "Look for a rank that waits elsewhere or has stopped; only close() is left.",
) -> None:
    """Wait for a request; ``interrupt()`` is called between polls, and may raise.

    :param deadline: on ``time.monotonic()``'s clock, in seconds.
    :raises PeerTimeoutError: when the deadline has passed. The request stays pending: its communicator is lost.
    """
    try:
        pause = 0.0
        while not request.Test():
            now = time.monotonic()
            if now > deadline:
                raise PeerTimeoutError(
                    report(
                        mpi.Get_rank(), call, expected=f"all {mpi.Get_size()} ranks at {what}",
                        found="that some did not come in time",
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
    mpi: Any,
    record: np.ndarray[Any, Any],
    deadline: float,
    what: str,
    *,
    call: int = 0,
    interrupt: Callable[[], None] | None = None,
) -> np.ndarray[Any, Any]:
    """Every rank's record, shape ``(n,)``, checked to be of the same kind, version and length.

    :raises RankMismatchError: if a rank sends something else. :raises PeerTimeoutError: see :func:`complete`.
    :raises UnsupportedError: if MPI is finalised.
    """
    check_mpi_runs()
    n = mpi.Get_size()
    gathered = np.zeros(n, record.dtype)
    complete(
        mpi.Iallgather(record.view(np.uint8), gathered.view(np.uint8)),
        mpi,
        deadline,
        what,
        call=call,
        interrupt=interrupt,
    )
    for rank, other in enumerate(gathered):
        for field in ("magic", "version", "kind", "length"):
            if other[field] != record[0][field]:
                raise RankMismatchError(
                    report(
                        mpi.Get_rank(), call, expected=f"{field} {record[0][field]} at {what}",
                        found=f"{field} {other[field]} from rank {rank}",
                        advice="Run the same version of ipcreduce and the same program on every rank.",
                    )
                )  # fmt: skip
    return gathered


def confirm(
    mpi: Any, error: BaseException | None, deadline: float, what: str, interrupt: Callable[[], None] | None = None
) -> None:
    """End a step of start-up on all ranks alike: if any rank met an error, every rank raises.

    :raises UnsupportedError: naming the ranks that failed and why.
    """
    check(mpi, allgather(mpi, message(CONFIRMATION, error), deadline, what, interrupt=interrupt), what)


def check(mpi: Any, gathered: np.ndarray[Any, Any], what: str) -> None:
    """:raises UnsupportedError: if a rank's record is not ok, which every message says."""
    failed = [rank for rank in range(len(gathered)) if not gathered[rank]["ok"]]
    if failed:
        reasons = "; ".join(f"rank {rank}: {text_of(gathered[rank])}" for rank in failed[:3])
        raise UnsupportedError(f"{what} failed on {len(failed)} of {len(gathered)} ranks: {reasons}")


@contextmanager
def step(mpi: Any, deadline: float, what: str) -> Iterator[None]:
    """The block, then a vote: all ranks go on or all give up. :raises UnsupportedError: with every rank's reason."""
    error: Exception | None = None
    try:
        yield
    except (IpcReduceError, OSError) as caught:
        error = caught
    confirm(mpi, error, deadline, what)
