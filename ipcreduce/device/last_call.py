"""The state of the order of calls: what the next eager call has to follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..types import Stream


class State(Enum):
    """The states of a :class:`ipcreduce.device.stream_order.StreamOrder`.

    =============== ====================================================== ==========================================
    state           meaning                                                next
    =============== ====================================================== ==========================================
    NOTHING         no eager call is left to follow                        a call: ON_STREAM, or IN_EVENT if nothing
                                                                           keeps its stream
    RESTING         the same; the last call was on ``stream``              as NOTHING
    ON_STREAM       the last call is on ``stream``, which ``owner`` keeps: a call on another stream: ALWAYS_IN_EVENT;
                    a call there needs no event                            a captured call: BEHIND_CAPTURE;
                                                                           synchronize(): RESTING
    BEHIND_CAPTURE  the same, but a call was captured since: the next one  a call there: ON_STREAM; on another stream:
                    takes the slow path                                    ALWAYS_IN_EVENT; synchronize(): NOTHING
    IN_EVENT        the event has the end of the last call, on ``stream``  a call there, if kept: ON_STREAM; on
                    (None if other work or a capture came since)           another stream: ALWAYS_IN_EVENT;
                                                                           synchronize(): NOTHING
    ALWAYS_IN_EVENT the event has the end of every call, so any stream may it stays
                    follow
    =============== ====================================================== ==========================================

    From every other state extend() leads to IN_EVENT, reset() to NOTHING, and a program's own graph to ALWAYS_IN_EVENT
    (not over NCCL). A change to or from the stream of recordings is none.
    """

    NOTHING = 1
    RESTING = 2
    ON_STREAM = 3
    BEHIND_CAPTURE = 4
    IN_EVENT = 5
    ALWAYS_IN_EVENT = 6


NOTHING, RESTING, ON_STREAM, BEHIND_CAPTURE, IN_EVENT, ALWAYS_IN_EVENT = State  # State.X takes 0.05 us


@dataclass(frozen=True, slots=True)
class Last:
    """A state with its stream, and the object that keeps the stream. Replaced as a whole: other threads read it."""

    state: State
    stream: Stream | None = None
    owner: Any = None

    @property
    def in_event(self) -> bool:
        """True if the event has the end of the last eager call."""
        return self.state is IN_EVENT or self.state is ALWAYS_IN_EVENT

    @property
    def busy(self) -> Stream | None:
        """The stream on which the last eager call may still run, if its end is not in the event."""
        return self.stream if self.state is ON_STREAM or self.state is BEHIND_CAPTURE else None

    def recorded(self, stream: Stream | None, always: bool = False) -> Last:
        """The state once the end of a call on ``stream``, or of other work, is in the event."""
        return Last(ALWAYS_IN_EVENT if always or self.state is ALWAYS_IN_EVENT else IN_EVENT, stream)

    def behind_capture(self) -> Last:
        """The state once a call has been captured."""
        if self.in_event:
            return Last(self.state)
        return replace(self, state=BEHIND_CAPTURE) if self.state is ON_STREAM else self

    def waited_for(self) -> Last:
        """The state once the last call has been waited for."""
        if self.state is ON_STREAM or self.state is RESTING:
            return replace(self, state=RESTING)
        return self.after_reset()

    def after_reset(self) -> Last:
        """The state once no eager call runs any more, and no stream is trusted."""
        return Last(ALWAYS_IN_EVENT if self.state is ALWAYS_IN_EVENT else NOTHING)
