"""The ranks give the memory of their workspaces back, and get new memory at the same addresses: suspend() and resume().

Each is one call of the communicator. Steps that can fail, such as allocating memory or opening descriptors, run first,
and the ranks vote on it: then all go on, or nothing has changed. An error after the votes loses the communicator on
every rank.
While it is suspended, its sequence of calls is unusable. So calls and replays raise at once, and no rank tells another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import clock
from .calls import call_lock
from .calls.page_channel import PageChannel
from .calls.sequence import CallSequence
from .device.backend import DeviceBackend
from .errors import (
    ArgumentError,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    Reach,
    UnsupportedError,
    reading,
    report,
)
from .graphs.pools import Pools
from .graphs.session import GraphSession
from .interrupts import uninterrupted
from .options import is_seconds
from .page.fingerprint import Fingerprint
from .ranks.exchange import Agreed
from .texts import decoded, encoded, shown, text_of, with_limit
from .types import DEFAULT_STREAM

_SUSPEND, _RESUME = "suspend()", "resume()"
_AGAIN = "Call resume() again after that."
_TEXT_BYTES = 512


class Suspension:
    """The state of a communicator that is suspended or not, and the two calls that change it.

    :param backend: None without GPUs. Then, and in a world of one, nothing has to be done.
    """

    def __init__(self, calls: CallSequence, backend: DeviceBackend | None, session: GraphSession) -> None:
        self._calls, self._session = calls, session
        self._backend = None if backend is None or backend.n == 1 else backend
        self._error: GraphStateError | None = None  # of all calls, while it is suspended

    @property
    def is_on(self) -> bool:
        """True while the communicator is suspended, and neither lost nor closed."""
        return self._error is not None and self._calls.unusable is self._error

    def suspend(self, pools: bool, timeout: float | None) -> None:
        """Give the workspace's memory back, and with ``pools`` that of graphs: see :meth:`Communicator.suspend`."""
        with self._calls.lock:
            if not self.is_on:
                call_lock.make(self._calls, self._suspend, pools, timeout)

    def resume(self) -> None:
        """Get new memory, at the same addresses: see :meth:`Communicator.resume`."""
        calls = self._calls
        with calls.lock:
            if calls.unusable is not self._error:
                calls.check_usable()
            if self._error is None:
                return
            if calls.within:  # a handler within resume() itself, which goes on undisturbed
                call_lock.make_way(calls)
            try:
                calls.unusable = None
                used = call_lock.make(calls, self._resume)
            finally:
                if calls.unusable is None:
                    calls.unusable = self._error  # None, if it is resumed
            if used:  # a call of its own: a peer may not have left resume() yet, and a fault in that would lose it
                call_lock.make(calls, _raise_used)

    def close(self) -> None:
        """Let go of the backend. The communicator is closed."""
        self._backend = None

    def _suspend(self, pools: bool, timeout: Any) -> None:
        calls, backend = self._calls, self._backend
        limit = calls.timeout if timeout is None else timeout
        with reading("timeout", timeout):
            if not is_seconds(limit):
                raise ArgumentError(f"timeout is {shown(timeout)}. Pass a positive number of seconds, or None")
            seconds = float(min(limit, calls.timeout))
        self._check_outside(_SUSPEND)
        if backend is None:
            calls.withdraw()
            return
        self._meet("suspend(pools=True)" if pools else _SUSPEND)
        backend.check_suspendable()
        given = self._pools(pools)

        def prepare() -> None:
            backend.prepare_suspension(seconds)
            for one in given:
                one.prepare_suspension()

        try:
            self._vote(_SUSPEND, prepare, "The communicator goes on as before.")
            with calls.losing("it left suspend()"):
                for one in given:
                    one.suspend()
                backend.suspend()
                advice = "Call resume() on every rank first."
                self._error = GraphStateError(report(calls.rank, calls.number, "the communicator is suspended", advice))
                calls.unusable = self._error  # an error in the block replaces it
                calls.gather(calls.number, b"")  # no rank goes on unless all are suspended
        except BaseException:
            self._drop_prepared(backend)
            raise

    def _resume(self) -> bool:
        calls, backend = self._calls, self._backend
        assert backend is not None
        self._check_outside(_RESUME)
        self._meet(_RESUME)

        def prepare() -> None:
            backend.prepare_resumption(calls.timeout)
            self._session.pools.prepare_resumption()

        try:
            self._vote(_RESUME, prepare, _AGAIN)
            self._hand_over(backend)
            with calls.losing("it left resume()"):
                self._session.pools.resume()
                used = backend.resume(clock.now() + calls.timeout)
                calls.gather(calls.number, b"")  # no rank writes to a peer's memory before that is empty
                self._error = None
            return used
        except BaseException:
            self._drop_prepared(backend)
            raise

    def _hand_over(self, backend: DeviceBackend) -> None:
        """Give each rank what it maps of the others. It is a vote, too: on every rank it fails, or on none."""
        calls = self._calls
        ranks = PageChannel(calls.page, calls.number, partial(calls.gather, calls.number))
        deadline = clock.now() + calls.timeout
        try:
            self._session.pools.hand_over(ranks, deadline)
            backend.hand_over(ranks, deadline)
        except Agreed as error:
            text = report(calls.rank, calls.number, text_of(error), _AGAIN)
            raise UnsupportedError(text, reach=Reach.ALL) from error

    def _pools(self, wanted: bool) -> Sequence[Pools]:
        """The pools of graphs, if they are to be given back. :raises UnsupportedError: if they cannot."""
        pools = self._session.pools
        if wanted and not pools.are_virtual:
            raise UnsupportedError(
                f"rank {self._calls.rank}, suspend(pools=True): the pools of this communicator's graphs are not in "
                "virtual memory. With backend nccl they cannot be. Call suspend()",
                reach=Reach.ALL,
            )
        return [pools] if wanted else []

    def _drop_prepared(self, backend: DeviceBackend) -> None:
        with uninterrupted():
            backend.drop_prepared()
            self._session.pools.drop_prepared()

    def _check_outside(self, what: str) -> None:
        """:raises GraphStateError: in a recording, in capture(), or while a current stream is captured."""
        if self._session.is_capturing:
            raise GraphStateError(f"{what} was called in a recording or in capture(). Leave that block first")
        if self._backend is not None:
            self._backend.check_not_captured(what, GraphStateError)

    def _meet(self, what: str) -> None:
        """Enter the call, and go on once all ranks have."""
        calls, fingerprint = self._calls, Fingerprint.of(what)
        calls.enter(fingerprint, DEFAULT_STREAM)
        calls.gather(calls.number, b"")
        calls.compare(fingerprint)

    def _vote(self, what: str, prepare: Callable[[], None], advice: str) -> None:
        """Run ``prepare()`` on every rank, and go on if no rank has an error.

        :raises IpcReduceError: this rank's error; or PeerFailedError, with another rank's.
        """
        calls = self._calls
        error: IpcReduceError | None = None
        try:
            prepare()
        except IpcReduceError as caught:
            error = caught
        except OSError as caught:
            error = UnsupportedError(with_limit(caught))
        text = b"" if error is None else encoded(text_of(error), _TEXT_BYTES)
        failed = {rank: decoded(data) for rank, data in enumerate(calls.gather(calls.number, text)) if data}
        if error is not None:
            error.locate(calls.rank, calls.number)
            error.reach = Reach.ALL
            raise error
        for rank, reason in failed.items():
            happened = f"{what} failed on rank {rank} ({reason})"
            raise PeerFailedError(report(calls.rank, calls.number, happened, advice))


def _raise_used() -> None:
    raise GraphStateError(
        "the communicator is resumed, but a graph that another library captured was launched while it was suspended. "
        "Its all-reduces wrote bytes 0xFF. Launch such graphs only after resume()"
    )
