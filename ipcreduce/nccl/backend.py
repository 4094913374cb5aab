"""The backend "nccl": NCCL's collectives, with the same order of calls and the same errors as the other backends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .. import clock
from ..calls.addresses import Places, pairs_of
from ..calls.faults import raise_lost
from ..calls.request import Member, Request
from ..cuda import driver
from ..cuda.contexts import using_relaxed
from ..device import background
from ..device.backend import DeviceBackend, have_left
from ..device.deferred_free import Action, attempt
from ..device.kernels import Kernels
from ..device.prepared import OwnStep, Prepared, Start
from ..dtypes import KINDS, reduced_as
from ..errors import CudaError, Reach, UnsupportedError
from ..originals import time
from ..page.control_page import Page
from ..types import Stream
from . import library, splits
from .comm import NcclCommunicator
from .guard import Guard

_FREED_SECONDS = 1.0  # the wait in close() for NCCL to free a communicator
_FREE_SECONDS = 10.0  # the same wait before a new communicator: NCCL also waits for the program's work on the device
_SLICE_SECONDS = 0.05  # between two looks for lost ranks, while NCCL waits for the ranks
_LONG_SECONDS = 3600.0
_NOTICE_SECONDS = 1.0  # after so long the watchdog has noticed the end of a rank
_WIDER = {"int16": np.dtype(np.int32), "uint16": np.dtype(np.uint32)}  # NCCL lacks int16; its low bits are the same


_Part = tuple[int, int, int]  # the number of elements, and NCCL's numbers for dtype and op


class NcclBackend(DeviceBackend):
    """A communicator's backend over NCCL. :func:`ipcreduce.nccl.join.start` makes it."""

    name = "nccl"

    def __init__(self, device: driver.DeviceInfo, context: int, page: Page, *, timeout: float, reason: str) -> None:
        """Make the backend; :meth:`join` connects it. ``reason`` says why this backend was chosen."""
        # NCCL orders captured calls by its events, unless this variable is 0.
        super().__init__(device, context, page, timeout, os.environ.get(library.MIXING, "1") != "0")
        self.nccl = NcclCommunicator(context)
        self._reason = reason
        self.kernels = Kernels(context, device.capability, self.drain, self.n, self.rank)
        self._joining: background.Job | None = None
        self._identity = b""  # kept until it is used, because NCCL has a socket and a thread for each identity
        with using_relaxed(context):
            self._guard = Guard(context, page, self.order, self.nccl, timeout)

    def join(self, identity: bytes, deadline: float) -> None:
        """Make the NCCL communicator. Collective.

        :raises CudaError: if that fails, or takes beyond ``deadline``. :raises PeerLostError: if a rank is lost.
        """
        too_late: list[bool] = []

        def join() -> None:
            with using_relaxed(self.context):
                self.nccl.use(library.join(self.n, self.rank, identity))
            if too_late:
                self.nccl.abort()

        self._joining = background.Job(join)
        try:
            self._wait_for(self._joining, deadline)
            self.validity = self.nccl.validity
        except BaseException:
            too_late.append(True)
            self.nccl.abort()
            raise

    def _wait_for(self, job: background.Job, deadline: float) -> None:
        """Wait for a job in which NCCL waits for the ranks. See :meth:`join` for errors."""
        number, error = self.page.calls.number[0], None
        while True:
            try:
                if job.wait(_SLICE_SECONDS):
                    return
            except CudaError as caught:
                if error is None:  # NCCL may notice a rank's end before the watchdog does
                    error, deadline = caught, clock.now() + _NOTICE_SECONDS
                time.sleep(_SLICE_SECONDS)
            raise_lost(self.page, number, any_call=True)
            if clock.now() > deadline:
                raise error or CudaError("ncclCommInitRank", library.TIMEOUT, "the ranks did not meet in time")

    def watch(self) -> None:
        """Begin to watch over calls. All ranks must have joined."""
        self._guard.start()

    def describe(self) -> list[str]:
        """Lines about the GPU, NCCL's version, and the reason for this backend."""
        return [
            f"GPU {self.device.ordinal}: {self.device.name}",
            f"NCCL {library.shown_version(library.version())}, because {self._reason}",
        ]

    # ---- running
    def prepare_whole(self, request: Request) -> Prepared | None:
        """One call of NCCL, or one group of calls for a list or for parts; None for a call with an epilogue."""
        if request.epilogue is not None:
            return None
        wider: list[Any] = [_WIDER.get(one.kind) if request.op else None for one in request.members]
        if request.split is not None:
            bind = partial(self._bound_split, request, wider)
        else:
            parts = [_part(one, request.op) for one in request.members]
            bind = partial(self._bound_list, parts) if request.is_list else partial(self._bound, *parts)

        def start(addresses: Any, stream: Stream) -> None:
            make, argument = bind(addresses)
            make(argument, stream)

        return Prepared(
            request=request, fingerprint=request.fingerprint, kernels=self.name, nbytes=request.nbytes,
            steps=(OwnStep(start, bind),), wire_dtypes=tuple(wider), packed=splits.packs(request, self.n),
        )  # fmt: skip

    def _bound(self, part: _Part, addresses: Sequence[int]) -> tuple[Start, Any]:
        if not part[0]:
            return self.nccl.group, []
        return self.nccl.all_reduce, (*addresses, *part)

    def _bound_split(self, request: Request, wider: Sequence[Any], addresses: Any) -> tuple[Start, Any]:
        return self.nccl.group, [*splits.calls(request, self.n, self.rank, addresses, wider)]

    def _bound_list(self, parts: Sequence[_Part], places: Places) -> tuple[Start, Any]:
        every = zip(pairs_of(places), parts, strict=True)
        return self.nccl.group, [("all_reduce", (*pair, *part)) for pair, part in every if part[0]]

    # ---- suspend and resume
    def check_suspendable(self) -> None:
        """Check that NCCL, of one version on all ranks, can give memory back. :raises UnsupportedError: if not."""
        why = library.cannot_suspend()
        if why is not None:
            raise UnsupportedError(f"rank {self.rank}, suspend(): {why}", reach=Reach.ALL)

    def drop_prepared(self) -> None:
        """Do nothing: NCCL prepares no memory."""

    def suspend(self) -> None:
        """Let NCCL give its memory back. :raises IpcReduceError: if that fails, or a rank is lost."""
        self._wait_for(background.Job(self.nccl.suspend), clock.now() + self._timeout)

    def resume(self, deadline: float) -> bool:
        """Let NCCL get its memory again. Returns False: nobody can notice that a graph was launched meanwhile."""
        self._wait_for(background.Job(self.nccl.resume), deadline)
        return False

    # ---- ends. In quiesce() the guard aborts NCCL's communicator if a call waits for a rank that does not come
    def offer(self) -> bytes:
        """One byte that says whether this rank has aborted. Rank 0 adds the identity of a new communicator."""
        if self.rank == 0 and not self._identity:
            self._identity = library.new_id()
        return bytes([not self.nccl.is_open]) + self._identity

    def right(self, number: int) -> int:
        """The last right call up to ``number``: also calls that ended before the guard aborted later ones."""
        return max(super().right(number), min(number, self._guard.ended))

    def reset(self, offers: Sequence[bytes]) -> None:
        """Make a new NCCL communicator, if a rank has aborted the last one. Collective.

        :raises CudaError: if that fails.
        """
        if not any(offer[0] for offer in offers):
            self._guard.reset()
            return
        self.nccl.abort()
        self.validity.end()
        self._guard.reset()
        self._identity = b""
        if not self.order.shared and not self.validity.replays:  # no graph holds it
            # Freeing waits for all work on the device, and blocks other threads' calls of the driver. If a new call
            # waited for a late rank meanwhile, the guard could not abort it.
            self.nccl.is_freed(_FREE_SECONDS)
        self.join(offers[0][1:], clock.now() + self._timeout)

    def _abort_calls(self, deadline: float) -> bool:
        have_ended = super()._abort_calls(deadline)
        if not have_ended:
            self.nccl.abort()
        return have_ended

    def end(self) -> None:
        """Close NCCL's communicator if no rank waits for data, and free everything of this process."""
        if have_left(self.page):  # no rank waits for data of this one
            attempt(self.context, self.nccl.close)
        self.release()

    def release(self) -> None:
        """Free all resources of this process."""
        self._guard.close()
        attempt(self.context, self.nccl.abort, self.order.close, *self.kernels.release_actions())
        if self._joining is not None and not self._joining.is_over:  # the thread that joins still uses the context
            background.Job(self._release_context).start()
        else:
            self._release_context()

    def _release_context(self) -> None:
        """Release the context once NCCL does not use it any more."""
        with suppress(CudaError):
            while self._joining is not None and not self._joining.wait(_LONG_SECONDS):
                pass
        leave: Action = partial(driver.release_context, self.device.ordinal)
        self.nccl.when_freed(partial(attempt, self.context, leave), _FREED_SECONDS)


def _part(member: Member, op: str) -> _Part:
    wider = _WIDER.get(member.kind)
    reduced = reduced_as(member.kind)
    return member.nbytes // KINDS[reduced].itemsize, library.DTYPES[wider.name if wider else reduced], library.OPS[op]
