"""The backend of the backend "nccl": NCCL's all-reduces, in the order and with the errors of our own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import clock
from ..calls.faults import raise_lost
from ..calls.fingerprint import Fingerprint, of_allreduce
from ..calls.sequence import CallSequence
from ..cuda import driver
from ..cuda.contexts import using_relaxed
from ..device import background
from ..device.backend import Actions, DeviceBackend
from ..device.deferred_free import Action, attempt, flush, forget
from ..device.fast_path import FastPath, Ready
from ..dtypes import kind_name, op_name, reduced_as
from ..errors import CudaError
from ..page.control_page import Page
from ..types import Stream
from . import library
from .comm import NcclCommunicator
from .guard import Guard

_MOST_PREPARED = 4096
_FREED_SECONDS = 1.0  # at an end
_FREE_SECONDS = 10.0  # before a new one: NCCL takes half a second, and waits for the program's work on the device
_SLICE_SECONDS = 0.05  # of a wait for the ranks in NCCL, after which we look for losses
_LONG_SECONDS = 3600.0
_NOTICE_SECONDS = 1.0  # for the watchdog to notice the end of a rank
_WIDER = {"int16": np.dtype(np.int32), "uint16": np.dtype(np.uint32)}  # which NCCL lacks; sums wrap to the same bits


@dataclass(frozen=True)
class PreparedCall:
    """A call, but for its addresses. ``through``: the dtype as which it is reduced, if not its own."""

    what: Fingerprint
    dtype: int
    op: int
    count: int
    nbytes: int
    through: np.dtype[Any] | None
    by: str = "nccl"

    @property
    def fast(self) -> bool:
        """True if NCCL takes the arrays as they are."""
        return self.through is None


class NcclBackend(DeviceBackend):
    """A communicator's backend over NCCL, made by :func:`ipcreduce.nccl.join.start`."""

    name = "nccl"

    def __init__(self, device: driver.DeviceInfo, context: int, page: Page, *, timeout: float, reason: str) -> None:
        """:param reason: why it is this backend."""
        super().__init__(device, context, page, timeout)
        self.nccl = NcclCommunicator(context)
        self._reason = reason
        self._prepared: dict[tuple[Any, ...], PreparedCall] = {}
        self._joining: background.Job | None = None
        self._identity = b""  # offered and not used so far: NCCL keeps a socket and a thread for each
        with using_relaxed(context):
            self._guard = Guard(context, page, self.order, self.nccl, timeout)

    def join(self, identity: bytes, deadline: float) -> None:
        """Make the NCCL communicator. Collective.

        :raises CudaError: if that fails, or takes beyond ``deadline``. :raises PeerLostError: if a rank has gone.
        """
        given_up: list[bool] = []

        def join() -> None:
            with using_relaxed(self.context):
                self.nccl.use(library.join(self.n, self.rank, identity))
            if given_up:
                self.nccl.abort()

        self._joining = background.Job(join)
        try:
            self._wait_for_joining(deadline)
            self.life = self.nccl.life
        except BaseException:
            given_up.append(True)
            self.nccl.abort()
            raise

    def _wait_for_joining(self, deadline: float) -> None:
        assert self._joining is not None
        number, error = self.page.calls.number[0], None
        while True:
            try:
                if self._joining.wait(_SLICE_SECONDS):
                    return
            except CudaError as caught:
                if error is None:  # NCCL may have noticed a rank's end before the watchdog
                    error, deadline = caught, clock.now() + _NOTICE_SECONDS
                time.sleep(_SLICE_SECONDS)
            raise_lost(self.page, number, any_call=True)
            if clock.now() > deadline:
                raise error or CudaError("ncclCommInitRank", library.TIMEOUT, "the ranks did not meet in time")

    def watch(self) -> None:
        """Begin to watch over calls, once the ranks have met."""
        self._guard.start()

    def open_fast_path(self, calls: CallSequence) -> FastPath:
        """The fast path for the calls of ``calls``, which is closed with the backend."""
        self.fast = FastPath(
            calls, self.device.ordinal, self.context, self.order, self.page, self._find, self._make_ready
        )
        return self.fast

    @staticmethod
    def captured_in_order() -> bool:
        """See :class:`StreamOrder`. NCCL does it by events of its own, unless it is told that there is no need."""
        return os.environ.get(library.MIXING, "1") != "0"

    def describe(self) -> list[str]:
        """GPU, NCCL's version, and the reason for this backend."""
        major, minor, patch = (library.version() // step % 100 for step in (10_000, 100, 1))
        return [
            f"GPU {self.device.ordinal}: {self.device.name}",
            f"NCCL {major}.{minor}.{patch}, because {self._reason}",
        ]

    # ---- running
    def for_array(self, array: Any, op: Any) -> PreparedCall:
        """See :class:`DeviceBackend`."""
        name = op_name(op, array.dtype)
        kind = kind_name(array.dtype, name)
        found = self._find(array.shape, array.dtype, name)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            through, reduced = _WIDER.get(kind), reduced_as(kind)
            element = array.itemsize // 2 if kind.startswith("complex") else array.itemsize
            code = library.DTYPES[reduced if through is None else through.name]
            found = self._prepared[array.shape, array.dtype, name] = PreparedCall(
                of_allreduce(array.shape, kind, name), code, library.OPS[name], array.nbytes // element, array.nbytes,
                through,
            )  # fmt: skip
        return found

    def _find(self, shape: tuple[int, ...], dtype: np.dtype[Any], op: str) -> PreparedCall | None:
        return self._prepared.get((shape, dtype, op))

    def _make_ready(self, prepared: PreparedCall, source: int, target: int) -> Ready:
        return Ready(prepared.what, self.nccl.all_reduce, _argument(prepared, source, target), True)

    def start(self, prepared: PreparedCall, source: int, target: int, stream: Stream) -> None:
        """Put an all-reduce on ``stream``."""
        if prepared.count:
            self.nccl.all_reduce(_argument(prepared, source, target), stream)

    # ---- ends: in quiesce() the guard aborts NCCL's communicator if a call waits for a rank in vain
    def offer(self) -> bytes:
        """One byte that says if this rank has aborted; and of rank 0 that by which the ranks find each other again."""
        if self.rank == 0 and not self._identity:
            self._identity = library.new_id()
        return bytes([not self.nccl.is_open]) + self._identity

    def reset(self, offers: Sequence[bytes]) -> None:
        """Make a new NCCL communicator, if a rank has aborted the last one. Collective.

        :raises CudaError: if that fails.
        """
        if not any(offer[0] for offer in offers):
            self._guard.forget()
            return
        self.nccl.abort()
        self.life.end()
        self._guard.forget()
        self._identity = b""
        if not self.order.shared and not self.life.replays:  # no graph holds it
            # Freeing waits for all work on the device, and keeps others from the driver meanwhile: behind a call that
            # waits for a rank in vain it would keep the guard from ending that.
            self.nccl.is_freed(_FREE_SECONDS)
        self.join(offers[0][1:], clock.now() + self._timeout)

    def _close(self, deadline: float, free: Actions) -> None:
        attempt(self.context, lambda: self._stop(deadline))
        forget(self.order)
        self.page.leave()
        while not self.peers_have_left() and clock.now() < deadline:
            time.sleep(1e-3)
        if self.peers_have_left():  # nobody waits for what this rank still has to send
            attempt(self.context, self.nccl.destroy)
        self.release()
        for action in free:
            action()
        flush()

    def _stop(self, deadline: float) -> None:
        """Wait for our calls, and end those that wait for a peer beyond the deadline."""
        if not self._end_calls(deadline):
            self.nccl.abort()
        self.wait_for_device()

    def release(self) -> None:
        """Give back all that this process has."""
        self._guard.stop()
        attempt(self.context, self.nccl.abort, *self.own_resources())
        if self._joining is not None and not self._joining.is_over:  # it was given up, and has the context
            background.Job(self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        """Give the context back once NCCL does not use it any more."""
        with suppress(CudaError):
            while self._joining is not None and not self._joining.wait(_LONG_SECONDS):
                pass
        leave: Action = partial(driver.release_context, self.device.ordinal)
        self.nccl.when_freed(partial(attempt, self.context, leave), _FREED_SECONDS)


def _argument(prepared: PreparedCall, source: int, target: int) -> tuple[int, int, int, int, int]:
    return source, target, prepared.count, prepared.dtype, prepared.op
