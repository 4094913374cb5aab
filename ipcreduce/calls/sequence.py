"""The sequence of calls of a communicator: their numbers, what happens if one fails, and how the ranks go on then."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from .. import clock
from ..errors import (
    CaptureError,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    RankMismatchError,
    Reach,
    new_origin,
    report,
)
from ..originals import RLock
from ..page import control_page
from ..page.control_page import Page
from ..page.fingerprint import Fingerprint
from ..page.records import fence
from ..page.rounds import Abandon, Left, Rounds
from ..texts import described
from ..types import Stream
from . import call_lock, faults
from .backend import Backend
from .right_calls import RightCalls

_PATIENCE_SECONDS = 30.0  # in a resynchronisation, for a rank that came too late for a call and is still on its way


class CallSequence:
    """The calls of one communicator, in the order in which threads take its lock.

    A call is an attempt at an all-reduce, a replay, a recording, or the end of ``capture()``. All ranks make the same
    calls, so the numbers are the same on all ranks. docs/architecture.md has the table of a call's states, and where
    each is kept.

    :param backends: what may still work on a call, or hold parts of one, when it has failed.
    """

    def __init__(self, page: Page, timeout: float, backends: Sequence[Backend]) -> None:
        self.rank, self.timeout, self._origin = page.rank, timeout, new_origin()
        self.number = 0  # of the last attempt, refused ones included
        self.raised = False  # this rank's program has got the error behind the abort word
        self.unusable: IpcReduceError | None = None  # why no further call is possible: lost, or closed
        self.recording: Any = None  # the open Recording of graphs/, which calls/ cannot import
        self.lock = RLock()
        self.within = False  # this and the next: see call_lock.py
        self.nested: list[partial[Any]] = []
        self._noted = self._meetings = 0  # see faults.note(); and how often the ranks have met
        self._right = RightCalls()
        self._take(page, backends)

    def _take(self, page: Page, backends: Sequence[Backend]) -> None:
        self.page, self._backends = page, backends
        self._rounds = Rounds(page)

    @property
    def faults(self) -> int:
        """The number of faults of which the program has heard: the same on all ranks that make a call together.

        What a rank keeps because of a call is in doubt once this changes: on another rank that call may have failed.
        It does not change when the ranks meet, which may be in ``recover()`` on some, and in their next call on others.
        """
        return self._meetings + self.raised

    # ---- making a call
    def check_usable(self) -> None:
        """Check that calls can be made. :raises IpcReduceError: if the communicator is closed or lost."""
        if self.unusable is not None:
            raise self.unusable.again(self._origin)

    def enter(self, fingerprint: Fingerprint, stream: Stream) -> None:
        """Settle an earlier fault, then record this call and compare it with that of each rank that has come to it.

        :raises IpcReduceError: an earlier fault that was not raised yet; :class:`RankMismatchError` if calls differ.
        :raises CaptureError: if there is a fault to settle and ``stream`` is being captured.
        """
        page = self.page
        if page.abort_word[0]:
            self.raise_pending()
            # Not raised: the fault belongs to a later call. This one (empty, or captured) does not depend on a peer.
            if self.raised:
                if any(backend.is_capturing(stream) for backend in self._backends):
                    raise CaptureError(
                        "a call failed before this capture, and the ranks have not met since. Make a call that is not "
                        "captured on every rank, then capture again.",
                        reach=Reach.CAPTURED,
                    )
                self._resynchronise()
        self._check_same(page.calls.enter(self.number, fingerprint))

    def compare(self, fingerprint: Fingerprint) -> None:
        """Compare the current call with every rank's, once all have come to it.

        :meth:`enter` may have missed a difference between two ranks that entered the call at the same moment.

        :raises RankMismatchError: if calls differ.
        """
        self._check_same(self.page.calls.compare(self.number, fingerprint))

    def _check_same(self, other: int | None) -> None:
        if other is not None:
            self._post(control_page.MISMATCH, self.page.calls.describe_all(self.number))
            self.raise_pending()

    def withdraw(self) -> None:
        """Take the current call's number back, as the call is only recorded, or invalid on every rank alike."""
        self.number -= 1

    def catch_up(self, number: int) -> None:
        """Go on from the highest call number of all ranks, which a vote has shown."""
        self.number = number
        self.page.calls.first = number + 1

    # ---- a call that fails here
    def fail(self, error: BaseException, *, begun: bool = True, foreign: bool = False) -> None:
        """Tell the peers that a call of this rank raises ``error``, if it does not reach them: see :class:`Reach`.

        Rank and call are added to the message. The caller raises ``error``.

        :param begun: False if the call has no number yet: this rank does not begin it.
        :param foreign: the program raises ``error``, where the peers may be in a call or wait for this rank's vote.
            It may be another communicator's, so the peers hear of every kind. They do not if they know of a fault.
        :raises IpcReduceError: a fault of an earlier call, if ``begun``: the earliest takes precedence.
        """
        if begun:
            self._fail(error, foreign)
            return
        with self.lock, suppress(IpcReduceError):
            if foreign and self.raised:
                return
            if self.within:
                self.nested.append(partial(self.fail, error, begun=False, foreign=foreign))
            elif self.unusable is None:
                call_lock.alone(self, self._fail_next, error, foreign)

    def _fail_next(self, error: BaseException, foreign: bool) -> None:
        self.number += 1
        self._fail(error, foreign)

    def _fail(self, error: BaseException, foreign: bool) -> None:
        body = self.recording if self.recording is not None and self.recording.is_own else None
        reach = error.reach_in(self._origin) if isinstance(error, IpcReduceError) else Reach.OWN
        if foreign and not (body and reach is Reach.CAPTURED):
            reach = Reach.OWN
        if isinstance(error, PeerLostError) and reach is Reach.ALL:
            self.unusable = error
        elif self.unusable is None and reach is not Reach.ALL:
            if isinstance(error, IpcReduceError):
                error.locate(self.rank, self.number)
            if reach is Reach.CAPTURED or (body and isinstance(error, GraphStateError)):
                self.withdraw()
                return
            if body:
                body.error = body.error or error  # even if the program catches it
            try:
                self._tell(error, reach)
            except PeerLostError as lost:
                self._fail(lost, foreign=False)
                raise
            finally:
                self.spoil(self.number)
        elif self.within:
            self.spoil(self.number)
        self._noted = faults.note(self.page, self.rank, error, self._noted)

    def _tell(self, error: BaseException, reach: Reach) -> None:
        """Write ``error`` on the page, for the peers. :raises IpcReduceError: an earlier fault, in its place."""
        page = self.page
        if page.aborted:
            earlier = page.fault()
            if earlier is None or earlier[0] < self.number + (reach is Reach.ENDED):
                if not isinstance(error, Exception):  # Ctrl-C and exits pass at once: the next call meets the fault
                    return
                self.raise_pending()
                self._resynchronise()
        self._post(control_page.REFUSED, described(error), raised=True)

    def left(self, number: int, error: BaseException, known: BaseException | None = None) -> None:
        """Tell the peers, who know of an IpcReduceError and of ``known``, that this rank leaves call ``number``."""
        if error is not known and self.unusable is None and not isinstance(error, IpcReduceError):
            self._post(control_page.REFUSED, described(error), raised=True, call=number)
            self._noted = faults.note(self.page, self.rank, error, self._noted)

    def _post(
        self, kind: int, text: str, of: int | None = None, *, raised: bool = False, call: int | None = None
    ) -> None:  # fmt: skip
        """Write a fault of this rank, or of rank ``of``, and end every wait.

        :param call: None for the current one.
        :param raised: the program gets the error. That is noted once the fault stands on the page, not before.
        """
        try:
            for backend in self._backends:
                with suppress(IpcReduceError):  # the fault at hand comes first
                    backend.drain()  # the abort word would end earlier calls too
        finally:  # also if the program is interrupted: the peers wait
            self.page.post_fault(kind, self.number if call is None else call, text, of)
            self.raised = self.raised or raised

    # ---- faults of others
    def raise_pending(self) -> None:
        """Raise the fault behind the abort word, if it is not raised yet and concerns this rank's calls so far."""
        page = self.page
        if not page.aborted:
            return
        fault = page.fault()
        if fault is None:
            faults.raise_lost(page, self.number)
            if page.loss() is not None and not page.missed():
                return  # a rank has closed the communicator, which concerns later calls only
        if not self.raised and (fault is None or fault[0] <= self.number):  # even if a rank was lost because of it
            self.raised = True
            raise faults.fault_error(page, self.number, self.timeout)
        faults.raise_lost(page, self.number)

    def check_faults(self) -> None:
        """Raise what went wrong in the calls so far, once they have ended. See :meth:`raise_ended`."""
        try:
            self.raise_pending()
            self.raise_ended()
        except IpcReduceError as error:
            self.fail(error)
            raise

    def raise_ended(self) -> None:
        """Raise the reason for which a kernel of this rank has ended without data, even if it was raised before.

        Replays of graphs that other libraries captured are no calls. Until the ranks have met, they end without data.
        """
        if self.page.ended_without_data:
            raise faults.ended_error(self.page, self.number, self.timeout)

    # ---- exchanges over the page
    def check_wait(self, number: int, deadline: float, missing: list[int]) -> None:
        """Go on waiting for the ranks ``missing`` in call ``number``, or raise what has happened.

        :param deadline: on the clock of :mod:`ipcreduce.clock`.
        :raises IpcReduceError: if they do not come: they made another call, refused this one, or are late or lost.
        """
        page = self.page
        aborted = page.aborted  # once, before the records: after them it may be the word of one that came meanwhile
        fault = page.fault() if aborted else None
        cancelled = fault is not None and fault[0] <= number  # first, even if a rank was lost because of it
        if not cancelled:
            faults.raise_lost(page, number)
        late = clock.now() > deadline
        if late:
            page.post_timeout(missing)
        if cancelled or late or (aborted and not faults.all_come(page, number)):
            self.raised = True
            raise faults.fault_error(page, number, self.timeout)

    def gather(self, number: int, payload: bytes, abandon: Abandon | None = None) -> list[bytes]:
        """Every rank's ``payload``, within call ``number``, which this rank has entered. See :meth:`Rounds.gather`.

        :raises IpcReduceError: if a rank does not come: it made another call, refused this one, or is late or lost.
        """
        page = self.page
        try:
            check = partial(self.check_wait, number, clock.now() + self.timeout)
            return self._rounds.gather(payload, check, abandon)
        except Left as left:  # its fault may come later than its record of that
            if not page.aborted and page.fault() is None:
                self._post(control_page.REFUSED, left.text, left.rank)
            if page.fault() is None:
                faults.raise_lost(page, number)
            self.raised = True
            raise faults.fault_error(page, number, self.timeout) from None

    def spoil(self, first: int) -> None:
        """Note that this rank raises an error for the calls from ``first`` on."""
        self._right.spoil(first, self.number, self.raised or self.page.aborted)

    def recover(self) -> int:
        """Meet all ranks after an error, and start anew. Collective. It is no call. A fault counts as raised.

        :returns: see :class:`RightCalls`. :raises PeerLostError: if a rank has gone, or does not come.
        """
        self.check_usable()
        call_lock.tell_late(self)
        return call_lock.alone(self, self._recover)

    def _recover(self) -> int:
        page = self.page
        self.number += 1  # the other ranks may come to the meeting by a call, which has a number
        self._right.spoil(self.number, self.number, True)  # the ranks meet, whether a fault is known yet or not
        try:
            fault = page.fault() if page.aborted else None
            if not page.aborted or (fault is not None and fault[0] > self.number):  # nothing ends the peers' waits
                cause = sys.exc_info()[1]
                text = faults.RECOVER + ("" if cause is None else f" after {described(cause)}")
                self._post(control_page.REFUSED, text, raised=True)
            elif not self.raised:
                error = faults.fault_error(page, self.number, self.timeout)
                self._noted = faults.note(page, self.rank, error, self._noted)
            self._resynchronise(is_call=False)
        except IpcReduceError as error:
            self.fail(error)
            raise
        return self._right.last

    def _resynchronise(self, is_call: bool = True) -> None:
        """Meet all ranks, each of which has raised its error, and start anew with one call number. Collective.

        :param is_call: False if the current number is to be taken back.
        :raises PeerLostError: if a rank does not come.
        """
        with self.losing("it left the resynchronisation after a fault"):
            number, last_round = self._start_anew(clock.now() + max(self.timeout, _PATIENCE_SECONDS))
            self.number, self._rounds.last = number - (not is_call), last_round  # no interrupt can come in between
            self._meetings, self.raised, self._noted = self._meetings + 1, False, 0

    def _start_anew(self, deadline: float) -> tuple[int, int]:
        """Bring all ranks and what they use to the state of start-up, and the page with them. Collective.

        After the first meeting all ranks are quiet, after the second all have reset.

        :param deadline: on the clock of :mod:`ipcreduce.clock`.
        :returns: the numbers of the current call, and of the last round.
        :raises PeerLostError: if a rank has gone, or does not come until ``deadline``.
        """
        page = self.page

        def check(missing: list[int]) -> None:
            faults.raise_lost(page, self.number, any_call=True)
            if clock.now() > deadline:
                page.post_lost(missing[0], faults.MISSED)

        for backend in self._backends:
            backend.quiesce(deadline)
        # Before this rank says what it offers, and a peer can go on: a fault that another thread has found before would
        # be posted to what follows, and NCCL's guard, which has seen a call run, might abort after the offer.
        page.next_era()
        offer = next(filter(None, (backend.offer() for backend in self._backends)), b"")
        right = self._right.here(self.number - 1, self._backends)
        everyone = self._rounds.meet(self.number, check, offer, right)
        calls, rounds, offers, rights = zip(*everyone, strict=True)
        for backend in self._backends:
            backend.reset(offers)
        # Before the abort word goes: earlier calls are not compared any more, but the one in which the ranks meet is.
        page.calls.first = max(calls)
        page.clear()
        fence()  # before a peer goes on, and writes to the page, this has to be visible
        self._rounds.meet(self.number, check, offer, right)
        self._right.meet(max(calls), rights)
        return max(calls), max(rounds)

    @contextmanager
    def losing(self, why: str) -> Iterator[None]:
        """Lose the communicator, for this reason, if the block raises: the ranks are not alike any more.

        :raises PeerLostError: in place of any IpcReduceError of the block.
        """
        try:
            yield
        except PeerLostError:
            raise
        except BaseException as error:
            tell = partial(self.lose, why, error)
            self.nested.insert(0, tell)  # in case it is interrupted, or has no room on the stack
            lost = tell()
            self.nested.remove(tell)
            if isinstance(error, IpcReduceError):
                raise lost from error
            raise

    def lose(self, why: str, cause: BaseException) -> PeerLostError:
        """Lose the communicator on all ranks, because this one does not go on.

        :returns: the error of its further calls; the caller raises it or ``cause``.
        """
        fault = self.page.fault() if isinstance(cause, (PeerFailedError, RankMismatchError)) else None
        if fault is not None:
            call, rank, kind, text = fault
            self.page.post_fault(kind, call, text, rank)  # its own record may reach a peer after the loss
        reason = described(cause).replace(f". {faults.USE_AGAIN}", "")
        self.page.post_lost(self.rank, f"{why} ({reason})")
        happened = f"this rank cannot go on with the others ({reason})"
        self.unusable = lost = PeerLostError(report(self.rank, self.number, happened, faults.ONLY_CLOSE))
        return lost

    # ---- ends
    def close(self, error: IpcReduceError) -> None:
        """No call is possible any more; further ones raise ``error``. Idempotent."""
        self.unusable = error
        self._take(Page.alone(0, 1), ())  # the ranks' page can be freed, and nothing is written to it any more

    def forked(self, error: IpcReduceError) -> None:
        """Forget everything in a forked child, which must not touch what its parent owns."""
        self.lock, self.within, self.nested = RLock(), False, []
        self.close(error)
