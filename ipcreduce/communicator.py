"""The communicator: what programs see of a call sequence, a backend, host arrays, and a graph session."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, overload

import numpy as np

from . import habits, process, startup
from .arrays import lists
from .arrays.lists import ListCall
from .arrays.maps import Map, MapCall
from .arrays.norms import FP8, NormCall
from .arrays.plain import PlainCall
from .calls import call_lock
from .collectives import Collectives, breaks_trace
from .communicator_state import CommunicatorState
from .cuda import cupy_runtime
from .device.launch_cache import Limited
from .errors import ArgumentError, GraphStateError, PeerLostError, UnsupportedError
from .graphs.session import GraphSession
from .logs import INFO, is_logged, log
from .options import Options, checked_sms, unknown_variables
from .ranks import groups
from .texts import described
from .types import Array, DType, Number, Op, Out, OutList, Shape

_ENDS = {  # by the error of later calls
    ArgumentError: "closed", GraphStateError: "suspended", PeerLostError: "lost: it can only be closed",
    UnsupportedError: "of the process that this one was forked from",
}  # fmt: skip


class Communicator(Collectives):
    """The collectives among the ranks of a group. Making one is collective.

    :param group: an mpi4py intracommunicator; a ``torch.distributed`` process group; or any :class:`Group`, which has
        ``rank``, ``size`` and ``allgather(bytes)``. None for ``MPI.COMM_WORLD``; without an MPI library and without a
        launcher that is this process alone. After start-up only an mpi4py communicator is used, for host arrays of
        ranks that share no memory. With the other groups MPI is not initialised.
    :param device: this rank's GPU: an ordinal or a library's device, such as ``torch.device("cuda", 1)`` or "cuda:1";
        "auto" for the local rank modulo the visible GPUs (it is made current); or None for CuPy's current device.
    :param timeout: seconds after which a wait for another rank ends in an error; the same on every rank.
    :param algorithm: "one_shot" or "two_shot" forces it at every size, for tests, and one or two hops of a broadcast.
        "direct" lets recorded graphs write into the peers' outputs, and is "two_shot" elsewhere. The same on every
        rank. NCCL ignores it.
    :param backend: "ipc", "nccl" or "host" forces the backend of device arrays; the same on every rank. None for the
        first of them that works here.
    :param workspace: bytes of GPU memory of each rank through which backend "ipc" exchanges data, at least 1 MB; the
        same on every rank. None for ``IPCREDUCE_WORKSPACE_MB``. Messages that need more go in several launches.
    :raises ArgumentError: if an argument is wrong or differs between ranks.
    :raises RankMismatchError: if the ranks do not have the same version of this package, with the same code.
    :raises UnsupportedError: if MPI is needed and not usable; if the ranks neither share /dev/shm nor reach each other
        over TCP; or if the backend that was asked for cannot be used. If none was asked for, no GPU is no error.
    :raises PeerTimeoutError: if a rank does not come, or the group does not answer.
    :raises PeerLostError: if the group's ``allgather`` raises.

    Calls may come from any thread (host arrays over MPI then need one with thread support); they are made in the order
    in which they take the communicator's lock.
    """

    def __init__(
        self, group: Any = None, *, device: Any = None, timeout: float = 120.0, algorithm: str | None = None,
        backend: str | None = None, workspace: int | None = None,
    ) -> None:  # fmt: skip
        process.begin()
        process.close_dropped()
        if issubclass(type(group), Communicator):
            raise ArgumentError("group is a Communicator. Pass the group that it was made of")
        given = groups.of(group)
        options = Options.of(device, timeout, algorithm, backend, workspace)
        with startup.starting(given, options) as started:
            self._state = started.opened = CommunicatorState(self, options, started)
            process.add(self._state)  # within the block: an interrupt after it leaves what close_dropped() closes
            for text in (*started.warnings, *unknown_variables()):
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            if is_logged(INFO):
                log(INFO, "ipcreduce made a communicator: %s", "; ".join(self.describe().splitlines()))

    # ---- identity
    @property
    def backend(self) -> str:
        """The backend of device arrays: "ipc" (this package's kernels) or "nccl"; "host" if there is none."""
        backend = self._state.backend
        return "host" if backend is None else backend.name

    @property
    def xp(self) -> Any:
        """The module for this communicator's arrays: NumPy with backend "host", and otherwise CuPy."""
        return np if self._state.backend is None else cupy_runtime.load()

    @property
    def calls(self) -> int:
        """The number of this rank's last call: the ranks count alike.

        Calls on arrays and lists, recordings, :meth:`suspend` and :meth:`resume` count one each, also if they raise. A
        replay counts one for each segment that has calls: one without breaks.
        """
        return self._state.calls.number

    def describe(self) -> str:
        """Backend, GPU, workspace, how host arrays travel, and why other backends were not chosen: several lines."""
        state = self._state
        suspended = ", suspended" if state.suspension.is_on else ""
        lines = [f"rank {self.rank} of {self.size}: backend {self.backend}{suspended}"]
        if state.backend is not None:
            lines += state.backend.describe()
        lines.append(f"host arrays: {state.host.describe()}")
        lines += [f"not {name}: {state.reasons[name]}" for name in ("ipc", "nccl") if name in state.reasons]
        return "\n".join(lines)

    # ---- the operation
    @overload
    def allreduce(
        self, array: Number, op: Op = ..., *, out: None = ..., then: Map | None = ..., sms: int | None = ...,
        stream: Any = ...,
    ) -> Number: ...  # fmt: skip
    @overload
    def allreduce(
        self, array: list[Any] | tuple[Any, ...], op: Op = ..., *, out: None = ..., then: None = ...,
        sms: int | None = ..., stream: Any = ...,
    ) -> list[Any]: ...  # fmt: skip
    @overload
    def allreduce(
        self, array: list[Any] | tuple[Any, ...], op: Op = ..., *, out: OutList, then: None = ...,
        sms: int | None = ..., stream: Any = ...,
    ) -> OutList: ...  # fmt: skip
    @overload
    def allreduce(
        self, array: np.ndarray[Shape, DType], op: Op = ..., *, out: None = ..., then: Map | None = ...,
        sms: int | None = ..., stream: Any = ...,
    ) -> np.ndarray[Shape, DType]: ...  # fmt: skip
    @overload
    def allreduce(
        self, array: Array, op: Op = ..., *, out: None = ..., then: Map | None = ..., sms: int | None = ...,
        stream: Any = ...,
    ) -> Any: ...  # fmt: skip
    @overload
    def allreduce(
        self, array: Array, op: Op = ..., *, out: Out, then: Map | None = ..., sms: int | None = ..., stream: Any = ...
    ) -> Out: ...  # fmt: skip
    @breaks_trace("all_reduce")
    def allreduce(
        self, array: Any, op: Any = "sum", *more: Any, out: Any = None, then: Any = None, sms: Any = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """The element-wise reduction of every rank's ``array``; every rank gets the same bits.

        :param array: NumPy, CuPy, or any array with DLPack or ``__cuda_array_interface__``, on the device or on the
            host; any shape, alignment and layout; the same shape and dtype on every rank. dtypes: float16, bfloat16,
            float32, float64, signed and unsigned integers of 8 to 64 bits; bool for "any", "all", "min" and "max";
            complex64 and complex128 for "sum" and "avg". Or a number of Python's or NumPy's; an int is an int64, and
            wraps as one. Masked arrays are refused, and subclasses with an ``__array_ufunc__`` of their own; others
            count as plain arrays. Or a list or tuple of arrays, of any shapes and dtypes, which is one call: all on the
            device or all on the host.
        :param op: "sum", "prod" or "product", "min", "max", "avg" or "mean", or "any" or "all"; or an op of MPI or
            ``torch.distributed.ReduceOp`` that means one of these. The average of integers is truncated toward zero.
        :param out: the array for the result, of the same shape and dtype, and on the device if ``array`` is;
            ``out=array`` is in place. For a list, a list of such arrays, which share no memory with each other.
        :param then: a :class:`Map`: an element-wise expression that each rank applies to its result. Not for lists.
        :param sms: the most blocks that exchange data, and so the most multiprocessors that wait for other ranks; the
            same on every rank. 8 suits calls of 1 MB and more beside matrix products. None: as many as are fastest
            alone. Copies on the GPU before and after the exchange are not limited. Host arrays and backend "nccl"
            check the number and do not use it.
        :param stream: for device arrays: an int, a CuPy stream or an object with ``__cuda_stream__``; None for the
            current stream: PyTorch's for its tensors, and CuPy's for all else.
        :returns: ``out``, or a new C-contiguous array, whatever the layout of ``array``: for a tensor a tensor, from
            PyTorch's allocator; else CuPy for device arrays, NumPy for host arrays. For a number one of the same type.
            For a list of arrays a list.
        :raises ArgumentError: if this rank's arguments are wrong. The other ranks get :class:`PeerFailedError`.
        :raises RankMismatchError: if the ranks' calls differ.
        :raises PeerTimeoutError: if a rank did not come in time. :raises PeerLostError: if a rank has gone.

        On the device, the call returns before the work is done. So the last three may be raised by a later call or
        :meth:`synchronize`. Where data is missing, the result holds bytes 0xFF (NaN). On the host it returns when the
        work is done; after an error the values in ``out`` are undefined.
        """
        if more:
            raise TypeError(habits.BY_POSITION)
        fast = self._state.fast  # once: another thread may close the communicator
        if sms is not None:
            usual = partial(self._allreduce_limited, op, then, sms)
            if fast is not None:
                key = Limited(op, sms) if then is None and type(op) is str and type(sms) is int else None
                return fast.make(None, usual, array, key, out, stream)
            return call_lock.make(self._state.calls, usual, array, op, out, stream)
        if fast is not None:
            if then is None:
                return fast.make(None, self._allreduce, array, op, out, stream)
            return fast.make(None, self._allreduce_then, array, (op, then), out, stream, fast.lookup_map)
        if then is None:
            return call_lock.make(self._state.calls, self._allreduce, array, op, out, stream)
        return call_lock.make(self._state.calls, self._allreduce_then, array, (op, then), out, stream)

    def _allreduce(self, array: Any, op: Any, out: Any, stream: Any) -> Any:
        return self._call((ListCall if lists.is_list(array) else PlainCall)(array, op, out), stream)

    def _allreduce_then(self, array: Any, mapped: tuple[Any, Any], out: Any, stream: Any) -> Any:
        return self._call(MapCall(array, mapped[0], out, mapped[1]), stream)

    def _allreduce_limited(self, op: Any, then: Any, limit: Any, array: Any, _key: Any, out: Any, stream: Any) -> Any:
        sms = checked_sms(limit)
        if then is not None:
            return self._call(MapCall(array, op, out, then, sms), stream)
        return self._call((ListCall if lists.is_list(array) else PlainCall)(array, op, out, sms), stream)

    def _allreduce_rmsnorm(self, given: tuple[Any, ...], _op: None, _out: Any, stream: Any) -> tuple[Any, None]:
        return self._call(NormCall(*given), stream), None  # see NormHits.lookup()

    # ---- the operation and a norm
    @overload
    def allreduce_rmsnorm(
        self, x: np.ndarray[Shape, DType], weight: Any, eps: float = ..., *, residual: Any = ...,
        out: np.ndarray[Shape, DType] | None = ..., residual_out: np.ndarray[Shape, DType] | None = ...,
        weight_bias: float = ..., quantize: None = ..., stream: Any = ...,
    ) -> tuple[np.ndarray[Shape, DType], np.ndarray[Shape, DType]]: ...  # fmt: skip
    @overload
    def allreduce_rmsnorm(
        self, x: Array, weight: Array, eps: float = ..., *, residual: Array | None = ..., out: Any = ...,
        residual_out: Any = ..., weight_bias: float = ..., quantize: None = ..., stream: Any = ...,
    ) -> tuple[Any, Any]: ...  # fmt: skip
    @overload
    def allreduce_rmsnorm(
        self, x: Array, weight: Array, eps: float = ..., *, residual: Array | None = ..., out: Any = ...,
        residual_out: Any = ..., weight_bias: float = ..., quantize: FP8, quant_out: Any = ..., scales_out: Any = ...,
        stream: Any = ...,
    ) -> tuple[Any, Any, Any]: ...  # fmt: skip
    @breaks_trace("all_reduce_rmsnorm")
    def allreduce_rmsnorm(
        self, x: Any, weight: Any, eps: float = 1e-6, *, residual: Any = None, out: Any = None,
        residual_out: Any = None, weight_bias: float = 0.0, quantize: FP8 | None = None, quant_out: Any = None,
        scales_out: Any = None, stream: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The sum of every rank's ``x``, with the residual added, and its rows normalised by RMSNorm; one call.

        The residual sum is the plain all-reduce's sum plus ``residual``. Of each of its rows r the result is
        y = r * (weight + weight_bias) / sqrt(mean(r * r) + eps). docs/fused.md says how each step is rounded.

        :param x: an array of shape (..., hidden), of float16, bfloat16 or float32; see :meth:`allreduce`. All arrays
            lie on the device, or all on the host, and have the dtype of ``x``.
        :param weight: of shape (hidden,). :param eps: 0 or more; the same on every rank, as ``weight_bias``.
        :param residual: of the shape of ``x``, the same values on every rank; None for no residual.
        :param out: the array for y. ``out=x`` is in place. :param residual_out: the array for the residual sum.
            ``residual_out=residual`` is in place. No other two arguments may share memory if one of them is written.
        :param quantize: y is also rounded to numbers of 8 bits, with scales, as :class:`FP8` says.
        :param quant_out: the array for these numbers: of float8_e4m3fn, or of uint8 for their bytes.
        :param scales_out: the array for their scales, of float32, unless ``quantize`` gives the scale.
        :param stream: see :meth:`allreduce`.
        :returns: (y, residual sum); with ``quantize`` (numbers, scales, residual sum), and y only in ``out``. Each is
            the caller's array or a new one of the library of ``x``. Scales are (..., 1) for each row, (..., hidden/128)
            for each 128 elements, or the given scale itself.
        :raises IpcReduceError: see :meth:`allreduce`. Where data is missing, all outputs are NaN.
        """
        given = x, weight, eps, residual, out, residual_out, weight_bias, quantize, quant_out, scales_out
        fast = self._state.fast
        if fast is None:
            return call_lock.make(self._state.calls, self._allreduce_rmsnorm, given, None, given, stream)[0]
        made: tuple[Any, Any] = fast.make(None, self._allreduce_rmsnorm, given, None, given, stream, fast.lookup_norm)
        return made[0]

    # ---- waiting and ending
    def synchronize(self, stream: Any = None) -> None:
        """Wait for the calls made so far on ``stream`` (None: the last one's), and raise what went wrong in them.

        Graphs captured by other libraries are included. After a kernel of this rank has given up, every call raises
        until every rank has made a call that is not captured.

        :raises IpcReduceError: see :meth:`allreduce`.
        """
        self._state.session.synchronize(None if stream is None else cupy_runtime.stream_of(stream)[0])

    def recover(self) -> int:
        """Wait for all ranks after an error, and start anew, as the next call would. Collective.

        Use it after any exception, also one of your own: it ends the other ranks' waits for this rank. Later calls do
        not raise the errors from before. ``calls`` is the same on every rank afterwards.

        :returns: the last call that was right on every rank, with all before it since the ranks last met. It is the
            same on every rank. It can be an earlier one if calls have ended without data, and other libraries' graphs
            have been replayed, or with backend "nccl"; but not before the last call of a :meth:`synchronize` that
            raised nothing.
        :raises PeerLostError: if a rank has gone, or does not come within ``timeout``, or 30 s if that is longer.
        :raises GraphStateError: within a recording, or while the communicator is suspended.
        :raises CaptureError: while the current stream is being captured.
        """
        return self._state.session.recover()

    def capture(self) -> AbstractContextManager[None]:
        """Surround several recordings: with ``algorithm="direct"`` their graphs are registered together, at the end.

        Every rank has to. Within the block, graphs are "staged" and can be replayed. If a rank's block raises, they
        stay staged. On a communicator without GPUs recordings in the block raise, and runners call their functions.

        :raises GraphStateError: within a recording.
        :raises PeerFailedError: with ``algorithm="direct"``, if another rank's block raised. Otherwise the next call
            raises it; with NCCL graphs may then have to be recorded again. An exception in the block passes unchanged.
        """
        return self._state.session.capture()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """A new C-contiguous array in memory that peers can map: outputs of recorded all-reduces in it can be direct.

        CuPy, or NumPy with backend "host". Not collective. Valid as long as it lives, also after close().
        """
        return self._state.session.empty(shape, dtype)

    def suspend(self, pools: bool = False, timeout: float | None = None) -> None:
        """Give the workspace's memory back, until :meth:`resume`. Every rank has to. Graphs stay valid.

        It waits for all work on the GPU first. Until :meth:`resume`, calls and replays raise :class:`GraphStateError`.
        Launch no graph that another library captured until then: it would write bytes 0xFF. With backend "host" and
        with one rank this does nothing. Idempotent. docs/suspend.md has a table of what stays.

        :param pools: give back the memory of graphs, too, the same on every rank. What is in it is lost, results of
            graphs among it: do not read them until they are filled again. An array of comm.empty() keeps its values.
        :param timeout: how many seconds the GPU's work may take; None, or more, for the communicator's timeout.
        :raises UnsupportedError: on every rank, if the workspaces are not in virtual memory: ``describe()`` says why.
        :raises GraphStateError: in a recording or a capture.
        :raises PeerTimeoutError: if this rank's GPU is still busy then. Nothing has changed.
        :raises PeerFailedError: if another rank cannot suspend. Nothing has changed.
        :raises PeerLostError: if a rank has gone, or if the driver refuses to take memory back.
        """
        self._state.suspension.suspend(pools, timeout)

    def resume(self) -> None:
        """Get new memory for the workspace, at the same addresses. Every rank has to. Idempotent.

        :raises CudaError: if this rank gets no memory. Free some, and call it again on every rank.
        :raises PeerFailedError: if another rank gets none. The communicator is still suspended.
        :raises UnsupportedError: on every rank, if one can open no file or import no memory. The communicator is still
            suspended.
        :raises GraphStateError: if a graph of another library was launched while the communicator was suspended. It is
            resumed on every rank.
        :raises PeerLostError: if a rank has gone, or if mapping the memory fails.
        """
        self._state.suspension.resume()

    def close(self) -> None:
        """Close the communicator and free its memory. Every rank has to. It takes at most 6 s, also with a busy GPU.

        Idempotent; also done at interpreter exit. Arrays that the caller has stay valid.
        After Ctrl-C within it, call it again: it goes on.
        """
        self._state.close()

    def __enter__(self) -> Communicator:
        self._state.calls.check_usable()
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        self._state.close("" if value is None else f"its program left the communicator's block by {described(value)}")

    # ---- what Python and other modules of the package ask for
    __reduce__ = process.refuse_copies

    def __repr__(self) -> str:
        if "_state" not in vars(self):  # __init__ has raised
            return "<Communicator: not made>"
        unusable = self._state.calls.unusable
        end = None if unusable is None else _ENDS.get(type(unusable), "not usable")
        return f"<Communicator: rank {self.rank} of {self.size}, {end or f'backend {self.backend}'}>"

    @property
    def _graph_session(self) -> GraphSession:
        """The recordings of this communicator: see session_of."""
        return self._state.session
