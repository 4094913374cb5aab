"""The communicator: from ``allreduce(x)`` to the engine or to MPI."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from . import arrays, lifetime, operands
from .coordination import exchange
from .coordination.calls import Faults
from .coordination.fingerprint import Signature, Vote
from .cuda import cupy_runtime
from .errors import (
    ArgumentError,
    CaptureError,
    CudaError,
    GraphStateError,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    UnsupportedError,
)
from .graphs.pool import CapturedMemory
from .graphs.session import GraphSupport
from .ipc import deferred_free, startup
from .ipc.options import Options
from .mpi.host import HostReducer

_CLOSE_SECONDS = 5.0  # how long close() waits for the peers to unmap our memory before leaving it to the process's end
_SHARED = (RankMismatchError, PeerFailedError, PeerTimeoutError, PeerLostError)  # every rank gets these by itself


class Communicator(GraphSupport):
    """All-reduce among the ranks of an MPI communicator. Making one is collective.

    :param mpi_comm: an mpi4py intracommunicator; None for ``MPI.COMM_WORLD``.
    :param device: this rank's GPU: an ordinal, "auto" for the local rank modulo the visible GPUs (it is made
        current), or None for CuPy's current device.
    :param timeout: seconds after which a wait for another rank ends in an error; the same on every rank.
    :param algorithm: "one_shot" or "two_shot" forces one at every size, for tests; "direct" too, in registered graphs
        (elsewhere that is "two_shot"). The same on every rank.
    :raises ArgumentError: if an argument is wrong or differs between ranks.
    :raises UnsupportedError: if MPI is not usable. Missing GPUs are no error: ``backend`` is then "mpi".
    :raises PeerTimeoutError: if a rank does not come.

    Calls may come from any thread (host arrays then need an MPI with thread support); they are made in the order in
    which they take the communicator's lock.
    """

    def __init__(
        self, mpi_comm: Any = None, *, device: Any = None, timeout: float = 120.0, algorithm: str | None = None
    ) -> None:
        lifetime.check_not_forked()
        mpi = exchange.require_mpi()
        mpi_comm = mpi.COMM_WORLD if mpi_comm is None else mpi_comm
        if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
            raise ArgumentError(f"mpi_comm must be an mpi4py Intracomm; found {mpi_comm!r}")
        options = Options.of(device, timeout, algorithm)
        self._lock = threading.RLock()
        self._call = 0  # attempts so far, refused ones included
        self._unusable: IpcReduceError | None = None
        self._no_recording()
        self._timeout = options.timeout
        self._sync = os.environ.get("IPCREDUCE_SYNC", "0") not in ("", "0")
        self._mpi, request = mpi_comm.Idup()  # our messages never meet the program's
        exchange.complete(request, mpi_comm, time.monotonic() + options.timeout, "start-up")
        self._rank, self._size = int(self._mpi.Get_rank()), int(self._mpi.Get_size())
        self._host = HostReducer(self._mpi, options.timeout)
        try:
            self._engine, self._reasons = startup.start(self._mpi, options)
        except (ArgumentError, CudaError):  # there are some thousand MPI communicators
            self._mpi.Free()
            raise
        self._faults = None
        if self._engine is not None:
            self._faults = Faults(self._engine, self._mpi, options.timeout)
            self._captured_memory = CapturedMemory(self._engine.context, self._engine.device.ordinal)
            deferred_free.mind(self._engine.order, self._lock)
        lifetime.add(self)

    # ---- what it is
    @property
    def rank(self) -> int:
        """This process's number, 0 to ``size`` - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def backend(self) -> str:
        """Where device arrays go: "ipc" (our kernels), or "mpi" if only host arrays can be reduced."""
        return "mpi" if self._engine is None else "ipc"

    def describe(self) -> str:
        """Backend, GPU and workspace, and why other backends were not chosen; several lines."""
        lines = [f"rank {self._rank} of {self._size}: backend {self.backend}"]
        if self._engine is not None:
            lines += self._engine.describe()
        return "\n".join([*lines, *(f"not {name}: {reason}" for name, reason in self._reasons.items())])

    # ---- the operation
    def allreduce(self, array: Any, op: str = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """The element-wise reduction of every rank's ``array``; every rank gets the same bits.

        :param array: NumPy, CuPy, or any device array with DLPack or ``__cuda_array_interface__``; any shape, alignment
            and layout; the same shape and dtype on every rank. dtypes: float16, bfloat16, float32, float64, and
            signed and unsigned integers of 8 to 64 bits.
        :param op: "sum", "prod", "min", "max" or "avg".
        :param out: where the result goes, of the same shape, dtype and kind; ``out=array`` is in place.
        :param stream: for device arrays: an int, a CuPy stream or an object with ``__cuda_stream__``; None for the
            current stream: PyTorch's for its tensors, outside of recordings, and CuPy's for all else.
        :returns: ``out``, or a new C-contiguous array: CuPy for device arrays, NumPy for host arrays.
        :raises ArgumentError: for what this rank passed. The other ranks get :class:`PeerFailedError`.
        :raises RankMismatchError: if the ranks' calls differ.
        :raises PeerTimeoutError: if a rank did not come in time. :raises PeerLostError: if a rank has gone.

        On the device, the call returns before the work is done. There these last may come with a later call or
        :meth:`synchronize`; where data is missing, the result then holds bytes 0xFF (NaN).
        """
        try:
            self._lock.acquire()  # not by with, 0.13 us more; and here: an interrupt right behind it must not keep it
            if self._unusable is not None:
                self.check_usable()
            self._call = call = self._call + 1
            try:
                if stream is None and self.recording is None and self._engine is not None and not self._sync:
                    result = self._engine.repeats.make(call, array, op, out)
                    if result is not None:
                        return result
                if arrays.is_device(array):
                    return self._reduce_device(array, op, out, stream)
                return self._reduce_host(array, op, out)
            except BaseException as error:
                self._failed(error)
                raise
        finally:
            try:  # noqa: SIM105  (suppress() takes 0.3 us)
                self._lock.release()
            except RuntimeError:  # not ours: interrupted while we waited for it
                pass

    def _reduce_device(self, array: Any, op: str, out: Any, stream: Any) -> Any:
        engine, faults = self._engine, self._faults
        if engine is None or faults is None:
            raise UnsupportedError(f"device arrays need backend ipc: {self._reasons['ipc']}")
        recording = self.recording
        in_body = recording is not None and recording.here
        handle, owner = cupy_runtime.stream_of(stream) if in_body else arrays.stream_for(array, stream)
        recorder = None if recording is None else recording.recorder(handle)
        source = arrays.view(array, handle, ordered=recorder is None)
        if type(op) is not str:
            operands.check_kind(source, op)
        launches, shape, dtype = engine.launches, source.shape, source.dtype
        prepared = launches.find(shape, dtype, op)
        if prepared is None:
            prepared = launches.prepare(shape, dtype, operands.check_kind(source, op), op, source.nbytes)
        device = engine.device.ordinal
        operands.check_device(device, source, "array")
        memory = nullcontext if recorder is not None else partial(self._captured_memory.allocating, handle)
        if out is None:
            with memory():
                target = result = arrays.empty(source.shape, source.dtype, handle, device)
        elif out is array:
            target, result = source, out
            if source is not array and arrays.is_readonly(out):
                raise ArgumentError("out must be writable; found a read-only array")
        else:
            target, result = operands.device_out(device, source, out, handle, recorder is None), out
        overlap = out is not None and target is not source and operands.overlap_in_part(source, target)
        direct = target
        if not arrays.is_contiguous(target):
            operands.check_apart(target)
            with memory():
                direct = arrays.empty(source.shape, source.dtype, handle, device)
        if overlap or not arrays.is_contiguous(source):
            with memory():
                source = arrays.contiguous_copy(source, handle)
        source_at, direct_at = arrays.pointer(source), arrays.pointer(direct)
        if (source_at | direct_at) & (source.itemsize - 1):
            operands.check_aligned(source, direct)
        if recorder is None:
            self._call = faults.enter(self._call, prepared.what, handle)
        elif recording is not None:
            recording.note(prepared.what, source, direct, target)
        if self._size == 1:
            with engine.order.behind(handle, owner, recorded=recorder is not None):
                arrays.copy_into(direct, source, handle)
        else:
            engine.run(prepared, source_at, direct_at, handle, owner, recorder)
        if direct is not target:
            arrays.copy_into(target, direct, handle)
            engine.order.extend(handle)
        if recorder is not None:
            self._call -= 1  # no call yet: its segment is one, whenever that is launched
        elif self._sync and not engine.is_capturing(handle):
            self.synchronize(handle)
        return result

    def _reduce_host(self, array: np.ndarray[Any, Any], op: str, out: Any) -> np.ndarray[Any, Any]:
        dtype = operands.check_host(array, op)
        if out is not None:
            operands.check_host_out(array, out)
        text = f"{op} of {dtype} {array.shape}"
        if self._engine is None or self._faults is None:
            result = self._host.allreduce(array, op, self._call, text)
        else:  # agreed on through the control page, where a rank that reduces a device array is noticed too
            faults, what = self._faults, Signature.of(f"{text} on the host")
            call = self._call = faults.enter(self._call, what, 0)
            faults.vote(call, Vote(call, True, 0, 0, ""))
            result = self._host.allreduce(array, op, call, None, interrupt=lambda: faults.raise_lost(call))
        if out is None:
            return result
        out[...] = result
        return out

    def _failed(self, error: BaseException) -> None:
        """Gives the error its place, and tells the other ranks that this one does not make this call."""
        if isinstance(error, PeerLostError):
            self._unusable = error
        elif self._faults is not None and self._faults.left is not None:
            self._unusable = self._faults.left
        elif not isinstance(error, _SHARED):
            if isinstance(error, IpcReduceError) and not str(error).startswith("rank "):
                error.args = (f"rank {self._rank}, call {self._call}: {error}",)
            recording = self.recording if self.recording is not None and self.recording.here else None
            if (isinstance(error, CaptureError) and error.within) or (recording and isinstance(error, GraphStateError)):
                self._call -= 1  # no rank can do this there: it is no call, and none waits for us
                return
            if recording:
                recording.error = recording.error or error  # however the body takes it
            try:
                self._refuse(error)
            except PeerLostError as lost:
                self._unusable = lost
                raise
        if self._host.halfway:
            self._unusable = self._host.left_halfway(self._call, error)

    def _refuse(self, error: BaseException) -> None:
        if self._engine is None or self._faults is None:
            self._host.refuse(error, self._call)
        else:
            self._faults.refuse(self._call, error)

    # ---- waiting and ending
    def synchronize(self, stream: Any = None) -> None:
        """Waits for the calls made so far on ``stream`` (None: the last one's), and raises what went wrong in them.

        Replays of graphs of others count. It raises each time once a kernel of this rank has ended without data, until
        every rank has made another call that is not captured.

        :raises IpcReduceError: see :meth:`allreduce`.
        """
        with self._lock:
            self.check_usable()
            if self._engine is not None and self._faults is not None:
                self._engine.order.synchronize(None if stream is None else cupy_runtime.stream_of(stream)[0])
                self._engine.mappings.collect()
                deferred_free.flush()
                try:
                    self._faults.raise_pending(self._call)
                except PeerLostError as error:
                    self._unusable = error
                    raise
                self._faults.raise_ended(self._call)

    def close(self) -> None:
        """Gives everything back. Every rank has to. It takes at most 6 s, whatever the others or the GPU are doing.

        Idempotent; also done at interpreter exit. Arrays that the caller has stay valid.
        """
        with lifetime.within(lifetime.CLOSE_SECONDS), deferred_free.taking(self._lock, self._engine) as taken:
            if not taken or self not in lifetime.live:
                return
            if self.recording is not None and self.recording.here:
                raise GraphStateError("close() within a recording: leave the with block first")
            lifetime.live.remove(self)
            engine, self._engine, self._faults = self._engine, None, None
            lost = isinstance(self._unusable, PeerLostError)
            self._unusable = ArgumentError("the communicator is closed: make a new one")
            if engine is not None:
                pools = [self.memory.release] if self.memory is not None else []
                engine.close(0.0 if lost else _CLOSE_SECONDS, self._captured_memory.release, *pools)
            if not lost and not exchange.mpi_is_finalised():
                self._mpi.Free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forked(self) -> None:
        """In a child process: nothing of the parent's may be touched or closed."""
        self._lock = threading.RLock()
        self._engine = self._faults = None
        self._unusable = UnsupportedError(lifetime.FORKED)
