"""Errors made from the faults on the control page, and the log of faults."""

from __future__ import annotations

from ..errors import IpcReduceError, PeerFailedError, PeerLostError, PeerTimeoutError, RankMismatchError, report
from ..logs import WARNING, log
from ..page.control_page import CLOSED_IT, MISMATCH, Page
from ..page.records import ask_twice
from ..texts import text_in, text_of

ONLY_CLOSE = "The communicator can only be closed."
MISSED = "it made no call after an error"  # a loss: the rank may well be alive
USE_AGAIN = "The communicator can be used again."
RECOVER = "recover()"  # begins the text of a rank that calls it, in place of an error's class
_GO_ON = (
    "Do not use what this rank has reduced since then. Graphs captured by other libraries work again once every rank "
    "has made a call that is not captured: an all-reduce, or a replay of an ipcreduce.Graph. With backend nccl, "
    "capture them again then."
)


def note(page: Page, rank: int, error: BaseException, noted: int) -> int:
    """Log a fault of a call at WARNING, with each rank's last call, unless it has been logged.

    :param noted: what has been logged since all ranks last met: 0 nothing; 1 a fault, which later waits and votes meet
        again; 2 a loss, which ends the communicator.
    :returns: the next value of ``noted``.
    """
    severity = 2 if isinstance(error, PeerLostError) else 1
    if severity <= noted:
        return noted
    where = "" if isinstance(error, IpcReduceError) else f"rank {rank}: "
    log(WARNING, "%s%s: %s [last calls: %s]", where, type(error).__name__, text_of(error), _last_calls(page))
    return severity


def _last_calls(page: Page) -> str:
    """The flight record: each rank's last call."""
    numbers = [page.calls.call_of(rank) for rank in range(page.n)]
    return "; ".join(
        f"rank {rank}: " + (f"{number} ({page.calls.describe(rank, number) or 'not recorded'})" if number else "none")
        for rank, number in enumerate(numbers)
    )


def fault_error(page: Page, call: int, timeout: float) -> PeerFailedError | RankMismatchError | PeerTimeoutError:
    """The error that this rank has to raise in its call ``call``, once the abort word is up."""
    fault = page.fault()
    if fault is None or (fault[2] != MISMATCH and fault[1] != page.rank):
        fault = _difference_before(page, call if fault is None else fault[0]) or fault
    if fault is None:
        return PeerTimeoutError(report(
            page.rank, call, _positions(page, timeout), "Check whether a rank waits elsewhere (in a transfer, a lock "
            "or another collective; in graphs, in a decorator outside of eager_break), or raise timeout=.",
        ))  # fmt: skip
    where, rank, kind, text = fault
    after = USE_AGAIN if page.loss() is None else ONLY_CLOSE
    if kind == MISMATCH:
        happened = f"call {where} is not the same on every rank: {text}"
        remedy = "Let the ranks make the same calls"
        if text.count("all-gather of") > 1 and "no sizes=" in text:
            remedy += " or, if the parts differ in length, pass sizes=, the same on every rank"
        return RankMismatchError(report(page.rank, call, happened, f"{remedy}. {after}"))
    did = f"raised an error ({text})"
    if text.startswith(RECOVER):
        did, after = f"called {text}", f"Call {RECOVER} on this rank, too. " * (after == USE_AGAIN) + after
    return PeerFailedError(report(page.rank, call, f"in call {where}, rank {rank} {did}", after))


def _difference_before(page: Page, call: int) -> tuple[int, int, int, str] | None:
    """The first call before ``call`` in which a rank differs from this one, in the form of :meth:`Page.fault`.

    No rank has found this difference so far.
    """
    found = []
    for rank in range(page.n):
        last = min(call - 1, page.calls.call_of(rank), page.calls.number[0])
        difference = page.calls.difference(rank, 1, last)
        if difference is not None:
            found.append((difference[0], rank, MISMATCH, difference[1]))
    return min(found, default=None)


def ended_error(page: Page, call: int, timeout: float) -> IpcReduceError:
    """:func:`fault_error` for a rank whose kernel has ended without data, with advice on how to go on."""
    error = fault_error(page, call, timeout)
    error.args = (f"{error} {_GO_ON}",)
    return error


def raise_lost(page: Page, number: int, any_call: bool = False) -> None:
    """Check that no rank has gone without making call ``number``; with ``any_call``, that none has gone at all.

    :raises PeerLostError: if one has.
    """
    concerned = None if any_call else number
    gone = (rank for rank in range(page.n) if page.has_left_before(rank, number) or (any_call and page.has_left(rank)))
    loss = page.loss(concerned) or next(((rank, CLOSED_IT) for rank in gone), None)
    if loss is not None:
        page.post_lost(*loss)  # before this rank closes because of it, so that later readers find the first loss
        raise _lost_error(page, number, *(page.loss(concerned) or loss))


def all_come(page: Page, number: int) -> bool:
    """True if every rank has entered this call, or will enter it because no fault prevents it."""
    fault = page.fault()
    if fault is not None:
        return fault[0] > number
    return all(page.calls.call_of(rank) >= number for rank in range(page.n))


def say_why(page: Page, why: str) -> None:
    """Write why this rank is about to close the communicator. The other ranks' errors then name this reason."""
    page.slot(page.rank, "farewell").write(1, text=why)


def why_closed(page: Page, rank: int) -> str:
    """The reason for which a rank has closed the communicator, in words."""
    slot = page.slot(rank, "farewell")
    if ask_twice(lambda: slot.read() is None):  # the state may become visible before it
        return CLOSED_IT
    return text_in(slot.read())


def _lost_error(page: Page, call: int, rank: int, why: str) -> PeerLostError:
    why = why_closed(page, rank) if why == CLOSED_IT else why
    last = page.calls.call_of(rank)
    if why != MISSED:
        return PeerLostError(report(page.rank, call, f"rank {rank} is gone: {why}, after its call {last}", ONLY_CLOSE))
    return PeerLostError(report(
        page.rank, call, f"after an error the other ranks waited in vain for rank {rank} to make a call after its "
        f"call {last}", f"Let every rank call again right after an error, with no barrier before. {ONLY_CLOSE}",
    ))  # fmt: skip


def _positions(page: Page, timeout: float) -> str:
    """The ranks for which others waited in vain, and the calls in which the others are, in words."""
    describe = page.calls.describe
    calls = [page.calls.call_of(rank) for rank in range(page.n)]
    behind = {rank for rank in range(page.n) if calls[rank] < max(calls)}
    missed = page.missed()
    late = []
    for rank in sorted(missed & behind or missed or behind):
        last = f"its last call was {calls[rank]}" if calls[rank] else "it has made no call yet"
        last += f": {text}" if (text := describe(rank, calls[rank])) else ""
        own = "; it is this rank" if rank == page.rank else ""
        late.append(f"rank {rank} did not call within {timeout:g} s ({last}{own})")
    others: dict[str, list[int]] = {}
    for rank in range(page.n):
        if calls[rank] == max(calls):
            others.setdefault(describe(rank, max(calls)), []).append(rank)
    sentences = [", and ".join(late) or f"a wait for another rank took longer than {timeout:g} s"]
    for what, ranks in others.items():
        who = f"Rank {ranks[0]} is" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} are"
        sentences.append(f"{who} in call {max(calls)} ({what})")
    return ". ".join(sentences)
