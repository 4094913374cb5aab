"""The parts of a communicator, and its end. They outlive a communicator that the program drops without closing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from . import process, startup
from .calls import faults
from .calls.sequence import CallSequence
from .device import deferred_free
from .device_reducer import DeviceReducer
from .errors import ArgumentError, GraphStateError, PeerLostError, UnsupportedError
from .graphs.session import GraphSession
from .host.over_mpi import MpiReducer
from .host.reducer import HostReducer
from .options import Options
from .ranks.mpi import MpiRanks
from .suspension import Suspension

_CLOSE_SECONDS = 5.0  # for the peers to unmap this rank's memory, before close() leaves it to the process's end


class CommunicatorState:
    """The parts of a communicator.

    :ivar owner: returns the communicator; None once the program has dropped it, or begun to close it.
    :ivar backend: of device arrays. ``fast``: the fast path of repeated calls. Both are None without GPUs, and once the
        communicator is closed. ``fast`` is None also if each call is waited for (``sync``).
    :ivar reasons: see :class:`startup.Started`. ``why_none``: those for which there is no backend, in words.
    """

    def __init__(self, owner: Any, options: Options, started: startup.Started) -> None:
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self._is_closing = self._was_lost = False
        self.ranks, self.sync, self.reasons = started.ranks, options.sync, started.reasons
        self.backend, self.watch = started.backend, started.watch
        self.why_none = "; ".join(
            f"not {name}, because {self.reasons[name]}" for name in ("ipc", "nccl") if name in self.reasons
        )
        backends = [one for one in (started.backend, started.shared) if one is not None]
        self.calls = CallSequence(started.page, options.timeout, backends)
        over_mpi = MpiReducer(self.ranks, options.timeout) if isinstance(self.ranks, MpiRanks) else None
        self.host = HostReducer(self.calls, over_mpi, started.shared, self.reasons.get("shm", ""))
        self.session = GraphSession(self.calls, self.backend, self.why_none, self.sync, options.direct)
        self.suspension = Suspension(self.calls, self.backend, self.session)
        self.device = DeviceReducer(self.calls, self.backend, self.why_none, self.session, self.sync)
        self.fast = None
        if self.backend is not None:
            self.fast = None if self.sync else self.backend.open_fast_path(self.calls)
            deferred_free.track(self.backend.order, self.calls.lock)

    @property
    def is_needed(self) -> bool:
        """True if graphs that other libraries captured, which use this memory, may still be replayed."""
        return self.backend is not None and self.backend.order.shared

    def close(self, why: str = "") -> None:
        """Close the communicator. Idempotent, also after an interrupt. The peers' errors name the reason ``why``."""
        if self not in process.live:
            return
        calls = self.calls
        with process.time_limit(process.CLOSE_SECONDS), deferred_free.taking(calls.lock, calls.page) as taken:
            if not taken or self not in process.live or self._is_closing:  # by a signal handler within close()
                return
            if calls.recording is not None and calls.recording.in_this_thread:
                raise GraphStateError("close() within a recording: leave the with block first")
            if calls.within:  # by a signal handler or a finaliser
                raise UnsupportedError(f"close() within call {calls.number} of the same thread: let that end first")
            try:
                self._is_closing = True
                self._close(why)
            finally:
                self._is_closing = False

    def _close(self, why: str) -> None:
        """Close everything. After an interrupt this is called again, and goes on: each step is idempotent."""
        calls = self.calls
        self.owner = _nobody  # so the next communicator's start goes on, too
        if why:
            faults.say_why(calls.page, why)
        self._was_lost = self._was_lost or isinstance(calls.unusable, PeerLostError)
        calls.unusable = error = ArgumentError("the communicator is closed: make a new one")
        self.session.close(0.0 if self._was_lost else _CLOSE_SECONDS)
        if self.backend is None:  # a backend leaves once it has unmapped the peers' memory
            calls.page.leave()
        if self.watch is not None:
            self.watch.stop()
        self._let_go()
        calls.close(error)
        if not self._was_lost:
            self.ranks.close()
        process.live.remove(self)

    def forked(self) -> None:
        """Forget everything in a forked child, which must not touch or close what its parent owns."""
        if self.watch is not None:
            self.watch.forked()
        self._let_go()
        self.calls.forked(UnsupportedError(process.FORKED))
        self.session.forked()

    def _let_go(self) -> None:
        self.backend = self.fast = self.watch = None
        self.suspension.close()
        self.device.close()
        self.host.close()


def _nobody() -> None:
    """The owner of a communicator that is being closed."""
