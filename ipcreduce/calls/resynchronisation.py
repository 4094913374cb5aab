"""The resynchronisation after a fault: all ranks meet on the page, alone, and start anew."""

from __future__ import annotations

from collections.abc import Sequence

from .. import clock
from ..page.control_page import Page
from ..page.records import fence
from ..page.rounds import Meetings
from . import faults
from .backend import Backend


def start_anew(
    page: Page, backends: Sequence[Backend], meetings: Meetings, number: int, last_round: int, deadline: float
) -> tuple[int, int]:
    """Bring all ranks and what they use to the state of start-up, and the page with them. Collective.

    After the first meeting all ranks are quiet, after the second all have reset.

    :param number: of this rank's last call; ``last_round`` that of its last round.
    :param deadline: on the clock of :mod:`ipcreduce.clock`.
    :returns: the highest of all ranks' numbers of calls, and of rounds.
    :raises PeerLostError: if a rank has gone, or does not come until ``deadline``.
    """

    def check(missing: list[int]) -> None:
        faults.raise_lost(page, number, any_call=True)
        if clock.now() > deadline:
            page.post_lost(missing[0], "it did not come to the resynchronisation after a fault")

    for backend in backends:
        backend.quiesce(deadline)
    # Before this rank says what it offers, and a peer can go on: a fault that another thread has found before would be
    # posted to what follows, and NCCL's guard, which has seen a call run, might abort behind the offer.
    page.next_era()
    offer = next(filter(None, (backend.offer() for backend in backends)), b"")
    everyone = meetings.meet(number, last_round, check, offer)
    calls, rounds, offers = zip(*everyone, strict=True)
    for backend in backends:
        backend.reset(offers)
    # Before the abort word goes: earlier calls are not compared any more, but the one in which the ranks meet is.
    page.calls.first = max(calls)
    page.clear()
    fence()  # before a peer goes on, and writes to the page, this has to be visible
    meetings.meet(number, last_round, check, offer)
    return max(calls), max(rounds)
