"""What happens when a rank refuses a call, calls differ, or a wait ends: every rank raises once, then all start anew.

Two endings: *cancelled*, when all ranks are alive, after which the next call of every rank meets the others' in a
resynchronisation and the communicator works again; and *lost*, when a rank has gone or does not come to that, after
which the communicator can only be closed.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import CaptureError, CudaError, IpcReduceError, PeerLostError, PeerTimeoutError, report
from ..ipc.engine import Engine
from . import control_page, exchange
from .fingerprint import Signature, Vote

_PATIENCE_SECONDS = 30.0  # a rank that came too late for a call may still be on its way

_GO_ON = (
    "What has been reduced on this rank since then is not to be used. Graphs captured by others work again once every "
    "rank has made a call that is not captured: an all-reduce, or a replay of an ipcreduce.Graph."
)


class Faults:
    """The faults of one communicator with an engine. The communicator's lock is held around every method."""

    def __init__(self, engine: Engine, mpi: Any, timeout: float) -> None:
        self._engine, self._page, self._mpi, self._timeout = engine, engine.page, mpi, timeout
        self._abort_word = engine.page.abort_word
        self.told = False  # this rank has raised what the abort word stands for
        self.left: PeerLostError | None = None  # why this rank has left a resynchronisation, for whatever is no fault
        self._serial = 0  # of the last vote

    def enter(self, call: int, what: Signature, stream: int) -> int:
        """Settles an earlier fault, then records this call and compares it with the peers' of the same number.

        :returns: the call's number, which a resynchronisation may have moved.
        :raises IpcReduceError: an earlier fault that was not raised yet; :class:`RankMismatchError` if calls differ.
        :raises CaptureError: if there is something to settle and ``stream`` is being captured.
        """
        page = self._page
        if self._abort_word[0]:
            self.raise_pending(call)
            # Not told: the fault is a later call's, and this one, with no elements or captured, waits for nobody.
            if self.told:
                if self._engine.is_capturing(stream):
                    raise CaptureError(
                        "expected no failed call before a capture; found one after which the ranks have not met yet. "
                        "Make a call that is not captured on every rank, then capture again.",
                        within=True,
                    )
                call = self._resynchronise(call)
        other = page.calls.enter(call, what)
        if other is not None:
            theirs = page.calls.describe(other, call)
            self._post(control_page.MISMATCH, call, f"{what} on rank {page.rank} and {theirs} on rank {other}")
            self.raise_pending(call)
        return call

    def raise_pending(self, call: int) -> None:
        """Raises what the abort word stands for, if this rank has not done so, and if it is about its calls so far."""
        if not self._page.aborted:
            return
        fault = self._page.fault()
        if fault is None:
            self.raise_lost(call)
        if not self.told and (fault is None or fault[0] <= call):  # a rank may have gone since, but that is why
            self.told = True
            raise self._page.explain(call, self._timeout)
        self.raise_lost(call)

    def raise_ended(self, call: int) -> None:
        """Raises what has ended a kernel of this rank without data, raised before or not: replays of graphs that others
        have captured are no calls, and go on to end so until the ranks have met."""
        if self._page.ended_without_data:
            error = self._page.explain(call, self._timeout)
            error.args = (f"{error} {_GO_ON}",)
            raise error

    def raise_lost(self, call: int, whoever: bool = False) -> None:
        """For waits for the other ranks in ``call``.

        :raises PeerLostError: if one has gone and has not made this call; with ``whoever``, if one has gone.
        """
        loss = self._page.loss()
        if loss is not None:
            raise self._page.lost(call, *loss)
        for rank in range(self._page.n):
            if self._page.has_left_before(rank, call) or (whoever and self._page.has_left(rank)):
                raise self._page.lost(call, rank, "it closed the communicator")

    def refuse(self, call: int, error: BaseException) -> None:
        """Ends a call that this rank does not make, on every rank; the caller raises ``error`` here.

        :raises IpcReduceError: a fault of an earlier call instead: what went wrong first is what has to be heard of.
        """
        if self._page.aborted:  # and only now the fault: it is written before the word is raised
            earlier = self._page.fault()
            if earlier is None or earlier[0] < call:
                self.raise_pending(call)
                call = self._resynchronise(call)
        self._post(control_page.REFUSED, call, f"{type(error).__name__}: {error}")
        self.told = True

    def _post(self, kind: int, call: int, text: str) -> None:
        # Earlier calls are let through first: the abort word would end them too.
        with contextlib.suppress(CudaError):  # the fault in hand is the one to tell of
            self._engine.order.ends_by(math.inf)
        self._page.post(kind, call, text)

    def vote(self, number: int, mine: Vote) -> list[Vote]:
        """Tells the others how call ``number``, which this rank has entered, ended here; what they say, by rank.

        :raises IpcReduceError: if a rank does not come to this call: it made another one, refused, or is late or lost.
        """
        page, deadline = self._page, time.monotonic() + self._timeout
        self._serial += 1
        page.cast(self._serial, mine)
        try:
            while None in (votes := page.votes(self._serial)):
                self.raise_lost(number)
                late = time.monotonic() > deadline
                if late:
                    page.miss(rank for rank, vote in enumerate(votes) if vote is None)
                if late or (page.aborted and not self._all_come(number)):
                    self.told = True
                    raise page.explain(number, self._timeout)
                time.sleep(1e-4)
        except BaseException as error:  # who comes later must not count on this rank
            page.cast(self._serial, replace(mine, ok=False, text=f"{type(error).__name__}: {error}"))
            raise
        return [vote for vote in votes if vote is not None]

    def _all_come(self, number: int) -> bool:
        """Whether every rank has entered this call, or will: see raise_pending() for what keeps one from it."""
        fault = self._page.fault()
        if fault is not None:
            return fault[0] > number
        return all(self._page.calls.call_of(rank) >= number for rank in range(self._page.n))

    def _resynchronise(self, call: int) -> int:
        """Empty slots, fresh epochs, no fault, one call number: collective, once every rank has raised.

        :raises PeerLostError: if a rank does not come.
        """
        deadline = time.monotonic() + max(self._timeout, _PATIENCE_SECONDS)
        try:
            self._engine.quiesce(deadline)
            record = exchange.message(exchange.RESYNC, call=call, serial=self._serial)
            interrupt = partial(self.raise_lost, call, whoever=True)  # who has left will not come
            everyone = exchange.allgather(
                self._mpi, record, deadline, "the resynchronisation", call=call, interrupt=interrupt
            )
            self._engine.reset()
            exchange.vote(self._mpi, None, deadline, "the resynchronisation", interrupt=interrupt)
        except PeerLostError:
            raise
        except BaseException as error:
            lost = PeerLostError(
                report(
                    self._page.rank,
                    call,
                    expected="every rank to go on after a fault",
                    found=f"this on rank {self._page.rank}: {type(error).__name__}: {error}",
                    advice="The communicator can only be closed.",
                )
            )
            if not isinstance(error, PeerTimeoutError):  # the others wait for this rank
                self._page.lose(self._page.rank, f"it left the clean-up after a fault ({type(error).__name__})")
            if isinstance(error, IpcReduceError):
                raise lost from error
            self.left = lost
            raise
        self.told = False
        self._serial = int(everyone["serial"].max())
        return int(everyone["call"].max())
