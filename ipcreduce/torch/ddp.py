"""The gradient buckets of PyTorch's DistributedDataParallel, averaged beside the backward pass.

    PyTorch's stream     gradients of bucket 0 | of bucket 1     | of bucket 2     |            | the optimizer
    the hook's stream                          | all-reduce of 0 | all-reduce of 1 | ... of 2   |

:func:`ddp_hook` makes a hook of this.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from ..calls import call_lock
from ..communicator import Communicator
from ..errors import ArgumentError, Reach, report
from ..graphs.session import session_of
from ..options import checked_sms
from ..page.fingerprint import Fingerprint
from ..page.records import rows
from ..texts import kind_of
from ..types import DEFAULT_STREAM
from .names import check_is_communicator

_LONG = 4 << 20  # bytes of a bucket from which on its all-reduce has a limit of blocks
_LIMITS = (8, None)  # of which "auto" takes the faster one
_UNTIMED, _TIMED = 3, 6  # backward passes of the trial: first PyTorch lays out its buckets, and kernels are compiled
_COMPARISON = Fingerprint.of("comparison of the model's process group with the communicator")
_MEMBER = np.dtype([("rank", "<i8"), ("size", "<i8"), ("processes", "<u4")])
_REMEDY = (
    "Make the communicator of the model's process group: ipcreduce.Communicator(group). If that is not PyTorch's "
    "default group, pass it with the hook: model.register_comm_hook(group, hook)"
)


class Buckets:
    """The buckets of one model on this rank."""

    def __init__(self, comm: Communicator, limits: tuple[int | None, ...]) -> None:
        """``limits``: the most blocks of the calls on long buckets: one, or two to choose from."""
        self._comm, self._trial = comm, Trial(limits if comm.backend == "ipc" else limits[:1])
        self._calls = session_of(comm).calls
        self._group = GroupCheck(comm)
        self._stream: Any = None  # of the all-reduces of tensors on the GPU
        self._unfinished: Any = None  # tells the peers if the backward pass ends by an exception

    def average(self, group: Any, bucket: Any) -> Any:
        """Average a bucket over the ranks, in place. Collective.

        On the GPU the all-reduce waits for the work on the current stream, and runs on a stream of its own. On the host
        it is done at once.

        :param group: the model's process group; None for PyTorch's default group.
        :returns: a Future of the bucket's tensor, flat. The stream that is current in its ``wait()`` waits for the
            all-reduce.
        :raises ArgumentError: on every rank, if the processes of the group are not the ranks in their order.
        :raises IpcReduceError: see :meth:`Communicator.allreduce`.
        """
        begun = False
        try:
            if bucket.index() == 0:
                self._watch_this_pass()
            tensor = bucket.buffer()
            is_dense = tensor.layout is torch.strided  # others are refused by the call, on every rank
            stream = self._stream_beside(tensor) if tensor.is_cuda and is_dense else None
            times = self._trial.begin() if stream is not None and bucket.index() == 0 else None
            begun = True  # from here on the calls tell the peers
            self._group.compare_once(torch.distributed.group.WORLD if group is None else group)
            if times is not None:
                self._trial.settle(self._comm.allreduce(times, "max"))
            if stream is None:
                return self._reduce(tensor, None, torch.futures.Future())
            is_alone = tensor.nbytes < _LONG or bucket.is_last()  # behind the last one no product waits
            with torch.cuda.stream(stream):
                future = torch.futures.Future(devices=[tensor.device])
                self._reduce(tensor, None if is_alone else self._trial.sms, future)
                if bucket.is_last():
                    self._trial.end()
            return future
        except BaseException as error:
            if self._unfinished is not None:
                self._unfinished.detach()
            if not begun:
                self._calls.fail(error, begun=False, foreign=True)
            raise

    def _reduce(self, tensor: Any, sms: int | None, future: Any) -> Any:
        self._comm.allreduce(tensor, "avg", out=tensor, sms=sms)
        future.set_result(tensor)  # records the end of the current stream's work, for those who wait
        return future

    def _stream_beside(self, tensor: Any) -> Any:
        """The stream of the all-reduces, after the present work on the current stream, with the tensor's memory."""
        cuda = torch.cuda
        if self._stream is None:  # of high priority, so that the all-reduces start between the backward pass's kernels
            self._stream = cuda.Stream(tensor.device, priority=-1)
        self._stream.wait_stream(cuda.current_stream(tensor.device))
        tensor.record_stream(self._stream)  # if the backward pass fails, the bucket may be freed while it is reduced
        return self._stream

    # ---- the end of a backward pass
    def _watch_this_pass(self) -> None:
        """Tell the peers if the present backward pass ends by an exception, wherever that is raised.

        PyTorch calls ``finished`` at the end of the pass. If the pass fails, it drops ``finished`` without a call.
        """

        def finished() -> None:
            unfinished.detach()

        unfinished = weakref.finalize(finished, self._tell_of_the_failed_pass)
        unfinished.atexit = False
        self._unfinished = unfinished
        with suppress(RuntimeError):  # in DistributedDataParallel.join() there is no backward pass
            torch.autograd.Variable._execution_engine.queue_callback(finished)
            return
        unfinished.detach()

    def _tell_of_the_failed_pass(self) -> None:
        error = RuntimeError("its backward pass raised an exception, after its first bucket of gradients")
        self._calls.fail(error, begun=False, foreign=True)


class Trial:
    """The choice between two limits of blocks: passes take turns with them, and are timed by the GPU.

    Beside long matrix products few blocks cost a step least. Beside short ones the all-reduces would then end behind
    the pass, and those without a limit do not (benchmarks/overlap.py).
    """

    def __init__(self, limits: tuple[int | None, ...]) -> None:
        self.sms = limits[0]  # of the present pass
        self._limits = limits
        self._first: Any = None  # the event of this pass's first full bucket
        self._passes: list[tuple[Any, Any]] = []  # and of the last averaged one, by pass

    def begin(self) -> np.ndarray[Any, Any] | None:
        """Note the first full bucket of a pass, on the current stream.

        :returns: when all passes are timed, their milliseconds on this rank, of which :meth:`settle` wants the ranks'
            largest.
        """
        self._first = None
        if len(self._limits) == 1 or torch.cuda.is_current_stream_capturing():  # there no event has a time
            return None
        if len(self._passes) == _UNTIMED + _TIMED:
            self._passes[-1][1].synchronize()
            return np.array([first.elapsed_time(last) for first, last in self._passes[_UNTIMED:]])
        self.sms = self._limits[len(self._passes) % 2]
        self._first = _now()
        return None

    def end(self) -> None:
        """Note the last averaged bucket of a pass, on the current stream."""
        if self._first is not None:
            self._passes.append((self._first, _now()))

    def settle(self, times: np.ndarray[Any, Any]) -> None:
        """End the trial. ``times``: of the timed passes, the same on every rank."""
        turned = self._limits[_UNTIMED % 2 :] + self._limits[: _UNTIMED % 2]
        medians = [float(np.median(times[turn::2])) for turn in range(2)]
        self.sms = turned[medians.index(min(medians))]
        self._limits = (self.sms,)
        self._passes.clear()


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class GroupCheck:
    """The comparison of process groups with a communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._calls = session_of(comm).calls
        self._group: Any = None  # the one that has been compared

    def compare_once(self, group: Any) -> None:
        """Compare a process group with the communicator, unless it was the last one. Collective.

        :raises ArgumentError: on every rank, if they differ.
        """
        if group is not self._group:
            call_lock.make(self._calls, self._compare, group)
            self._group = group

    def _compare(self, group: Any) -> None:
        distributed, calls, number = torch.distributed, self._calls, self._calls.number
        if not isinstance(group, distributed.ProcessGroup):
            raise ArgumentError(
                f"the hook's state is {kind_of(group)}. Pass None for PyTorch's default group, or the "
                "model's process group: model.register_comm_hook(None, hook)"
            )
        member = np.zeros(1, _MEMBER)
        processes = np.array(distributed.get_process_group_ranks(group), "<i8")
        member[0] = distributed.get_rank(group), distributed.get_world_size(group), zlib.crc32(processes.tobytes())
        calls.enter(_COMPARISON, DEFAULT_STREAM)
        everyone = [
            rows(data, _MEMBER, "ranks of a process group")[0] for data in calls.gather(number, member.tobytes())
        ]
        size = len(everyone)
        differing = [
            f"rank {rank} of {size} is rank {other['rank']} of {other['size']} there"
            for rank, other in enumerate(everyone)
            if (other["rank"], other["size"]) != (rank, size)
        ]
        if not differing and len({int(other["processes"]) for other in everyone}) > 1:
            differing = ["its processes are not the same on every rank"]
        if differing:
            happened = f"the model's process group is not the communicator's ranks: {'; '.join(differing)}"
            raise ArgumentError(report(calls.rank, number, happened, _REMEDY), reach=Reach.ALL)


def ddp_hook(comm: Communicator, sms: int | Literal["auto"] | None = "auto") -> Callable[[Any, Any], Any]:
    """A communication hook for ``DistributedDataParallel`` that averages the gradients over the ranks.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ipcreduce.torch.ddp_hook(comm))

    Each model needs a hook of its own. The average has the same bits on every rank: those of ``comm.allreduce(bucket,
    "mean")``. On the GPU the all-reduces run on a stream of their own, beside the rest of the backward pass. With
    tensors on the host each is done before the backward pass goes on.

    The hook's state is the model's process group, or None for the default group. In the first backward pass the ranks
    compare it with the communicator.

    ``backward()`` then raises the errors of :meth:`Communicator.allreduce`, and ArgumentError on every rank if the
    processes of the group are not the communicator's ranks, in their order. If ``backward()`` raises on one rank, the
    others get PeerFailedError. DistributedDataParallel cannot go on with that model: wrap it again, on every rank.

    :param sms: the most blocks of an all-reduce of 4 MB or more, which then leaves most multiprocessors to the backward
        pass; the same on every rank. The last bucket's has no limit. None: as many as are fastest alone. "auto": the
        first nine passes try 8 and None, and the ranks agree on the faster one. See :meth:`Communicator.allreduce`.
    :raises ArgumentError: if ``comm`` is not a Communicator, or ``sms`` none of these.
    """
    check_is_communicator(comm, "ddp_hook(comm)")
    is_auto = isinstance(sms, str) and sms == "auto"
    buckets = Buckets(comm, _LIMITS if is_auto else (None if sms is None else checked_sms(sms),))

    def hook(state: Any, bucket: Any) -> Any:
        return buckets.average(state, bucket)

    hook.__annotations__.clear()  # PyTorch checks them, and takes none or its own classes, not their names
    hook.__qualname__ = "ipcreduce.torch.ddp_hook"  # for PyTorch's log
    return hook
