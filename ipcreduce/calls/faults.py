"""Faults that are on the control page, as errors; and every fault in the log."""

from __future__ import annotations

import logging
import time

from ..errors import IpcReduceError, PeerFailedError, PeerLostError, PeerTimeoutError, RankMismatchError, report
from ..page.control_page import CLOSED_IT, MISMATCH, Page
from ..page.layout import FAREWELL
from ..page.records import text_of as written
from ..texts import text_of

_log = logging.getLogger("ipcreduce")
_GO_ON = (
    "What has been reduced on this rank since then is not to be used. Graphs captured by others work again once every "
    "rank has made a call that is not captured: an all-reduce, or a replay of an ipcreduce.Graph. Those of backend "
    "nccl have to be captured again then."
)


def note(page: Page, rank: int, error: BaseException, noted: int) -> int:
    """Log a fault of a call at WARNING, with each rank's last call.

    :param noted: 0 since the ranks have met last. 1 after a fault: the same is then met again, in waits and votes.
        2 after a loss, the end of a communicator.
    :returns: ``noted`` from now on.
    """
    severity = 2 if isinstance(error, PeerLostError) else 1
    if severity <= noted:
        return noted
    where = "" if isinstance(error, IpcReduceError) else f"rank {rank}: "
    _log.warning("%s%s: %s [last calls: %s]", where, type(error).__name__, text_of(error), _last_calls(page))
    return severity


def _last_calls(page: Page) -> str:
    """The flight record: each rank's last call."""
    numbers = [page.calls.call_of(rank) for rank in range(page.n)]
    return "; ".join(
        f"rank {rank}: {number} ({page.calls.describe(rank, number) or 'not recorded'})"
        if number
        else f"rank {rank}: none"
        for rank, number in enumerate(numbers)
    )


def fault_error(page: Page, call: int, timeout: float) -> PeerFailedError | RankMismatchError | PeerTimeoutError:
    """The error behind the raised abort word, for this rank to raise in its call ``call``."""
    fault = page.fault()
    if fault is None or (fault[2] != MISMATCH and fault[1] != page.rank):
        fault = _difference_before(page, call if fault is None else fault[0]) or fault
    if fault is None:
        return PeerTimeoutError(report(
            page.rank, call, expected=f"every rank within {timeout:g} s", found=_positions(page),
            advice="Look for a rank that waits elsewhere (a transfer, a lock, another collective, a decorator outside"
            " of eager_break), or raise timeout=.",
        ))  # fmt: skip
    where, rank, kind, text = fault
    if kind == MISMATCH:
        return RankMismatchError(report(
            page.rank, call, expected=f"the same call {where} on every rank", found=text,
            advice="Make the ranks' programs agree; the communicator can be used again.",
        ))  # fmt: skip
    return PeerFailedError(report(
        page.rank, call, expected=f"call {where} on every rank", found=f"that rank {rank} refused it ({text})",
        advice="The communicator can be used again.",
    ))  # fmt: skip


def _difference_before(page: Page, call: int) -> tuple[int, int, int, str] | None:
    """As :meth:`Page.fault`, the first call before ``call`` in which a rank differs from this one: nobody has told."""
    found = []
    for rank in range(page.n):
        last = min(call - 1, page.calls.call_of(rank), page.calls.number[0])
        differing = page.calls.first_differing(rank, 1, last) if rank != page.rank else None
        if differing is not None:
            time.sleep(1e-3)  # some processors show another's key after the number that it wrote behind
            differing = page.calls.first_differing(rank, differing, last)
        if differing is not None:
            mine, theirs = (page.calls.describe(one, differing) for one in (page.rank, rank))
            found.append((differing, rank, MISMATCH, f"{mine} on rank {page.rank} and {theirs} on rank {rank}"))
    return min(found, default=None)


def ended_error(page: Page, call: int, timeout: float) -> IpcReduceError:
    """:func:`fault_error` for a kernel of this rank that has ended without data, with the way to go on."""
    error = fault_error(page, call, timeout)
    error.args = (f"{error} {_GO_ON}",)
    return error


def raise_lost(page: Page, number: int, any_call: bool = False) -> None:
    """:raises PeerLostError: if a rank has gone without making call ``number``; ``any_call``: if one has gone."""
    concerned = None if any_call else number
    loss = page.loss(concerned)
    if loss is None:
        for rank in range(page.n):
            if page.has_left_before(rank, number) or (any_call and page.has_left(rank)):
                loss = rank, CLOSED_IT
                break
    if loss is not None:
        page.post_lost(*loss)  # before this rank closes because of it: later readers are to find the first loss
        raise _lost_error(page, number, *(page.loss(concerned) or loss))


def all_come(page: Page, number: int) -> bool:
    """True if every rank has entered this call, or will: no fault keeps it from that."""
    fault = page.fault()
    if fault is not None:
        return fault[0] > number
    return all(page.calls.call_of(rank) >= number for rank in range(page.n))


def say_why(page: Page, why: str) -> None:
    """Write why this rank is about to close the communicator, for the others to hear in place of that it has."""
    page.slot(page.rank, "farewell", FAREWELL).write(1, text=why)


def why_closed(page: Page, rank: int) -> str:
    """Why a rank has closed the communicator, in words."""
    farewell = page.slot(rank, "farewell", FAREWELL).read()
    return CLOSED_IT if farewell is None else written(farewell)


def _lost_error(page: Page, call: int, rank: int, why: str) -> PeerLostError:
    why = why_closed(page, rank) if why == CLOSED_IT else why
    last = page.calls.call_of(rank)
    return PeerLostError(report(
        page.rank, call, expected=f"rank {rank} to take part", found=f"that {why}, after its call {last}",
        advice="The communicator can only be closed.",
    ))  # fmt: skip


def _positions(page: Page) -> str:
    """The ranks that others missed, and each rank's last call."""
    describe = page.calls.describe
    calls = [page.calls.call_of(rank) for rank in range(page.n)]
    behind = {rank for rank in range(page.n) if calls[rank] < max(calls)}
    missed = page.missed()
    parts = []
    for rank in sorted(missed & behind or missed or behind):
        last = describe(rank, calls[rank])
        own = " in time, which is this rank" if rank == page.rank else ""
        parts.append(f"rank {rank} never came{own}: its last call was {calls[rank]}" + (f" ({last})" if last else ""))
    others: dict[str, list[int]] = {}
    for rank in range(page.n):
        if calls[rank] == max(calls):
            others.setdefault(describe(rank, max(calls)), []).append(rank)
    parts += [f"ranks {ranks} are at call {max(calls)} ({what})" for what, ranks in others.items()]
    return "; ".join(parts)
