"""The gradient buckets of PyTorch's DistributedDataParallel, averaged beside the backward pass.

    PyTorch's stream     gradients of bucket 0 | of bucket 1     | of bucket 2     |            | the optimizer
    the hook's stream                          | all-reduce of 0 | all-reduce of 1 | ... of 2   |

:func:`ddp_hook` makes a hook of this.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from ..calls import call_lock
from ..communicator import Communicator
from ..errors import ArgumentError, IpcReduceError, Reach, report
from ..graphs.session import session_of
from ..options import checked_sms
from ..page.fingerprint import Fingerprint
from ..page.records import rows
from ..texts import kind_of
from ..types import DEFAULT_STREAM
from .names import check_is_communicator

_LONG = 4 << 20  # bytes of a bucket from which on its all-reduce has a limit of blocks
_BEHIND = "behind"  # in place of a limit: one call for all buckets, when the last is full
_WAYS = (8, None, _BEHIND)  # of which "auto" takes the fastest
_UNTIMED, _TIMED = 2, 3  # turns of a trial: first PyTorch lays out its buckets, and kernels are compiled
_COMPARISON = Fingerprint.of("comparison of the model's process group with the communicator")
Way = int | str | None
_MEMBER = np.dtype([("rank", "<i8"), ("size", "<i8"), ("processes", "<u4")])
_REMEDY = (
    "Make the communicator of the model's process group: ipcreduce.Communicator(group). If that is not PyTorch's "
    "default group, pass it with the hook: model.register_comm_hook(group, hook)"
)


class Buckets:
    """The buckets of one model on this rank."""

    def __init__(self, comm: Communicator, ways: tuple[Way, ...]) -> None:
        """``ways``: limits of blocks of the calls on long buckets, or "behind": one, or some to choose from."""
        self._comm, self._ways = comm, ways if comm.backend == "ipc" else ways[:1]
        self._trial = Trial(self._ways)
        self._calls = session_of(comm).calls
        self._faults = self._calls.faults  # as of this pass
        self._group = GroupCheck(comm)
        self._stream: Any = None  # of the all-reduces of tensors on the GPU
        self._full: list[tuple[Any, Any]] = []  # buckets on the GPU that are not reduced yet, and their futures
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
                self._full.clear()  # of a pass that has failed
                self._watch_this_pass()
                if self._faults != self._calls.faults:  # some ranks may have counted a pass that failed on others
                    self._faults, self._trial = self._calls.faults, Trial(self._ways)
            tensor = bucket.buffer()
            is_on_gpu = tensor.is_cuda and tensor.layout is torch.strided  # the call refuses others, on every rank
            future = torch.futures.Future(devices=[tensor.device] if is_on_gpu else [])
            if is_on_gpu:
                self._enter_stream(tensor)
                self._full.append((tensor, future))
            times = self._trial.begin() if is_on_gpu and bucket.index() == 0 else None
            begun = True  # from here on the calls tell the peers of their errors
            self._group.compare_once(torch.distributed.group.WORLD if group is None else group)
            if times is not None:
                self._trial.settle(self._comm.allreduce(times, "max"))
            if self._full and (bucket.is_last() or self._trial.way != _BEHIND):
                self._reduce_full(bucket.is_last())
            if not is_on_gpu:
                self._comm.allreduce(tensor, "avg", out=tensor)
                future.set_result(tensor)
            return future
        except BaseException as error:
            if self._unfinished is not None:
                self._unfinished.detach()
            if not begun or not isinstance(error, IpcReduceError):  # Ctrl-C, say, which may come between two calls
                self._calls.fail(error, begun=False, foreign=True)
            raise

    def _enter_stream(self, tensor: Any) -> None:
        """Let the stream of the all-reduces wait for the present work on the current one, and keep the memory."""
        cuda = torch.cuda
        if self._stream is None:  # of high priority, so that the all-reduces start between the backward pass's kernels
            self._stream = cuda.Stream(tensor.device, priority=-1)
        self._stream.wait_stream(cuda.current_stream(tensor.device))
        tensor.record_stream(self._stream)  # if the backward pass fails, the bucket may be freed while it is reduced

    def _reduce_full(self, is_last: bool) -> None:
        tensors, way = [tensor for tensor, _ in self._full], self._trial.way
        with torch.cuda.stream(self._stream):
            if len(tensors) > 1:
                self._comm.allreduce(tensors, "avg", out=tensors)
            else:
                is_limited = tensors[0].nbytes >= _LONG and not is_last  # behind the last one no product waits
                sms = way if is_limited and isinstance(way, int) else None
                self._comm.allreduce(tensors[0], "avg", out=tensors[0], sms=sms)
            for tensor, future in self._full:
                future.set_result(tensor)  # records the end of the current stream's work, for those who wait
            self._full.clear()
            if is_last:
                self._trial.end()

    # ---- the end of a backward pass
    def _watch_this_pass(self) -> None:
        """Tell the peers if the present backward pass ends by an exception, wherever that is raised.

        PyTorch drops ``finished`` at the end of the pass, and calls it before unless the pass fails. A pass within
        another one, as a reentrant checkpoint makes it, is dropped within that, which is the next to be watched.
        """
        ends: list[bool] = []

        def finished() -> None:
            ends.append(True)

        def dropped() -> None:
            if not ends:
                self._tell_of_the_failed_pass()
            elif torch._C._current_graph_task_id() >= 0:
                self._watch_this_pass()

        self._unfinished = weakref.finalize(finished, dropped)
        self._unfinished.atexit = False
        try:
            torch.autograd.Variable._execution_engine.queue_callback(finished)
        except RuntimeError:  # in DistributedDataParallel.join() there is no backward pass
            self._unfinished.detach()

    def _tell_of_the_failed_pass(self) -> None:
        error = RuntimeError("its backward pass raised an exception, after its first bucket of gradients")
        self._calls.fail(error, begun=False, foreign=True)


class Trial:
    """The choice between ways: the passes take turns with them, and are timed by the GPU.

    Beside long matrix products few blocks cost a step least. Beside short ones the all-reduces would then end behind
    the pass, and those without a limit do not. One call behind the pass is the least work for the host
    (benchmarks/overlap.py).
    """

    def __init__(self, ways: tuple[Way, ...]) -> None:
        self.way = ways[0]  # of the present pass
        self._ways = ways
        self._first: Any = None  # the event of this pass's first full bucket
        self._passes: list[tuple[Any, Any]] = []  # and of the last averaged one, by pass

    def begin(self) -> np.ndarray[Any, Any] | None:
        """Note the first full bucket of a pass, on the current stream.

        :returns: when all passes are timed, their milliseconds on this rank, by turn and way, of which :meth:`settle`
            wants the ranks' largest.
        """
        self._first, count = None, len(self._ways)
        if count == 1 or torch.cuda.is_current_stream_capturing():  # in a capture no event has a time
            return None
        if len(self._passes) == count * (_UNTIMED + _TIMED):
            self._passes[-1][1].synchronize()
            timed = self._passes[count * _UNTIMED :]
            return np.array([first.elapsed_time(last) for first, last in timed]).reshape(_TIMED, count)
        self.way = self._ways[len(self._passes) % count]
        self._first = _now()
        return None

    def end(self) -> None:
        """Note the last averaged bucket of a pass, on the current stream."""
        if self._first is not None:
            self._passes.append((self._first, _now()))

    def settle(self, times: np.ndarray[Any, Any]) -> None:
        """End the trial. ``times``: by turn and way, the same on every rank."""
        self.way = self._ways[int(np.median(times, axis=0).argmin())]
        self._ways = (self.way,)
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
        self._faults = 0  # as of then

    def compare_once(self, group: Any) -> None:
        """Compare a process group with the communicator, unless it was the last one and no fault has come since.

        Collective.

        :raises ArgumentError: on every rank, if they differ.
        """
        if group is not self._group or self._calls.faults != self._faults:
            call_lock.make(self._calls, self._compare, group)
            self._group, self._faults = group, self._calls.faults

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
        first 15 passes, and as many after an error, try 8, None, and one call for all buckets behind the pass. Then the
        ranks agree on the fastest.
        See :meth:`Communicator.allreduce`.
    :raises ArgumentError: if ``comm`` is not a Communicator, or ``sms`` none of these.
    """
    check_is_communicator(comm, "ddp_hook(comm)")
    is_auto = isinstance(sms, str) and sms == "auto"
    buckets = Buckets(comm, _WAYS if is_auto else (None if sms is None else checked_sms(sms),))

    def hook(state: Any, bucket: Any) -> Any:
        return buckets.average(state, bucket)

    hook.__annotations__.clear()  # PyTorch checks them, and takes none or its own classes, not their names
    hook.__qualname__ = "ipcreduce.torch.ddp_hook"  # for PyTorch's log
    return hook
