"""The parts of a communicator, and its end. They outlive a communicator that the program drops without closing it."""

from __future__ import annotations

import weakref
from typing import Any

from . import process, startup
from .calls import faults
from .calls.sequence import CallSequence
from .device import deferred_free
from .device_reducer import DeviceReducer
from .errors import ArgumentError, GraphStateError, UnsupportedError
from .graphs.session import GraphSession
from .host.over_mpi import MpiReducer
from .host.reducer import HostReducer
from .options import Options
from .ranks.exchange import Ranks
from .ranks.mpi import MpiRanks
from .suspension import Suspension

_CLOSE_SECONDS = 5.0  # for the peers to unmap this rank's memory, before close() leaves it to the process's end


class OpenCommunicator:
    """The parts of a communicator that is open.

    :ivar owner: returns the communicator; None once the program has dropped it.
    :ivar backend: of device arrays; None without GPUs, and once the communicator is closed. So are the next two.
    :ivar fast: the way of repeated calls; None also if each call is waited for (``sync``).
    :ivar fast_norms: the same for calls with RMSNorm.
    :ivar reasons: see :class:`startup.Started`. ``why_none``: those for which there is no backend, in words.
    """

    def __init__(self, owner: Any, ranks: Ranks, options: Options, started: startup.Started) -> None:
        self.owner = weakref.ref(owner)
        self.ranks, self.sync, self.reasons = ranks, options.sync, started.reasons
        self.backend, self.watch = started.backend, started.watch
        self.why_none = "; ".join(
            f"not {name}, because {self.reasons[name]}" for name in ("ipc", "nccl") if name in self.reasons
        )
        backends = [one for one in (started.backend, started.shared) if one is not None]
        self.calls = CallSequence(started.page, options.timeout, backends)
        over_mpi = MpiReducer(ranks, options.timeout) if isinstance(ranks, MpiRanks) else None
        self.host = HostReducer(self.calls, over_mpi, started.shared, self.reasons.get("shm", ""))
        self.session = GraphSession(self.calls, self.backend, self.why_none, self.sync, options.direct)
        self.suspension = Suspension(self.calls, self.backend, self.session)
        self.device = DeviceReducer(self.calls, self.backend, self.why_none, self.session, self.sync)
        self.fast = self.fast_norms = None
        if self.backend is not None:
            if not self.sync:
                self.fast, self.fast_norms = self.backend.open_fast_paths(self.calls)
            deferred_free.track(self.backend.order, self.calls.lock)

    @property
    def is_needed(self) -> bool:
        """True if graphs that other libraries captured, which use this memory, may still be replayed."""
        return self.backend is not None and self.backend.order.shared

    def close(self, why: str = "") -> None:
        """See :meth:`Communicator.close`, and :meth:`process.Closable.close`. Idempotent."""
        if self not in process.live:
            return
        calls, page = self.calls, self.calls.page
        with process.time_limit(process.CLOSE_SECONDS), deferred_free.taking(calls.lock, page) as taken:
            if not taken or self not in process.live:
                return
            if calls.recording is not None and calls.recording.in_this_thread:
                raise GraphStateError("close() within a recording: leave the with block first")
            if calls.within:  # by a signal handler or a finaliser
                raise UnsupportedError(f"close() within call {calls.number} of the same thread: let that end first")
            process.live.remove(self)
            if why:
                faults.say_why(page, why)
            lost = calls.close(ArgumentError("the communicator is closed: make a new one"))
            self.session.close(0.0 if lost else _CLOSE_SECONDS)
            if self.backend is None:  # a backend leaves once it has unmapped the peers' memory
                page.leave()
            if self.watch is not None:
                self.watch.stop()
            self._let_go()
            if not lost:
                self.ranks.close()

    def forked(self) -> None:
        """In a child process: nothing of the parent's may be touched or closed."""
        if self.watch is not None:
            self.watch.forked()
        self._let_go()
        self.calls.forked(UnsupportedError(process.FORKED))
        self.session.forked()

    def _let_go(self) -> None:
        self.backend = self.fast = self.fast_norms = self.watch = None
        self.suspension.close()
        self.device.close()
        self.host.close()
