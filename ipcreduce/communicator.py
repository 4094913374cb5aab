"""The communicator: from ``allreduce(x)`` to the engine or to MPI, and what happens when a rank fails."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from types import TracebackType
from typing import Any

import numpy as np

from . import arrays
from .errors import (
    ArgumentError,
    CudaError,
    IpcReduceError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    RankMismatchError,
    UnsupportedError,
    report,
)
from .host import HostReducer
from .ipc import control, plan, setup, wire
from .ipc.engine import Engine, Prepared
from .numerics import DTYPES, OPS

_CLOSE_SECONDS = (
    5.0  # how long close() waits for the peers to unmap our memory before it leaves it to the process's end
)
_FIX = "Correct the call."
_SHARED = (
    RankMismatchError,
    PeerFailedError,
    PeerTimeoutError,
    PeerLostError,
)  # every rank gets these by itself


def _require_mpi() -> Any:
    """The MPI module, initialised. :raises UnsupportedError: if MPI is missing, not initialised or finalised."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UnsupportedError(f"no MPI on this machine ({error}): pip install 'ipcreduce[mpi]'") from None
    if MPI.Is_finalized():
        raise UnsupportedError("MPI is finalised: make and use communicators before MPI.Finalize()")
    if not MPI.Is_initialized():
        raise UnsupportedError("MPI is not initialised: call MPI.Init(), or leave mpi4py.rc.initialize at True")
    return MPI


class Communicator:
    """All-reduce among the ranks of an MPI communicator. Making one and closing it are collective.

    :param mpi_comm: an mpi4py communicator; None for ``MPI.COMM_WORLD``.
    :param device: this rank's GPU: an ordinal, "auto" for the local rank modulo the visible GPUs (it is made
        current), or None for CuPy's current device.
    :param timeout: seconds after which a wait for another rank ends in an error; the same on every rank.
    :param algorithm: "one_shot" or "two_shot" forces one at every size, for tests; the same on every rank.
    :raises ArgumentError: if an argument is wrong or differs between ranks.
    :raises UnsupportedError: if MPI is not usable. Missing GPUs are no error: ``backend`` is then "mpi".

    Calls may come from any thread (and then need an MPI with thread support for host arrays); they are made in the
    order in which they take the communicator's lock.
    """

    def __init__(
        self,
        mpi_comm: Any = None,
        *,
        device: Any = None,
        timeout: float = 120.0,
        algorithm: str | None = None,
    ) -> None:
        mpi = _require_mpi()
        mpi_comm = mpi.COMM_WORLD if mpi_comm is None else mpi_comm
        if not isinstance(mpi_comm, mpi.Intracomm) or mpi_comm == mpi.COMM_NULL:
            raise ArgumentError(f"mpi_comm must be an mpi4py Intracomm; found {mpi_comm!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
            raise ArgumentError(f"timeout must be a positive number of seconds; found {timeout!r}")
        if algorithm is not None and algorithm not in plan.ALGORITHMS:
            raise ArgumentError(f"algorithm must be None or one of {plan.ALGORITHMS}; found {algorithm!r}")
        self._lock = threading.RLock()
        self._call = 0  # attempts so far, refused ones included
        self._told = False  # the fault that the abort word stands for has been raised here
        self._unusable: IpcReduceError | None = None
        self._timeout = float(timeout)
        self._sync = os.environ.get("IPCREDUCE_SYNC", "0") not in ("", "0")
        self._mpi, request = mpi_comm.Idup()
        wire.complete(request, mpi_comm, time.monotonic() + timeout, "start-up")
        self._rank, self._size = int(self._mpi.Get_rank()), int(self._mpi.Get_size())
        self._host = HostReducer(self._mpi, self._timeout)
        self._engine, self._world = setup.start(self._mpi, device, self._timeout, algorithm)
        _live.append(self)

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
            engine = self._engine
            lines.append(
                f"GPU {engine.device.ordinal}: {engine.device.name}, {engine.workspace.nbytes >> 20} MB of workspace"
            )
            lines.append("packets arrive " + ("whole" if engine.whole_packets else "in halves of 8 bytes"))
        lines += [f"not {name}: {reason}" for name, reason in self._world.reasons.items()]
        return "\n".join(lines)

    # ---- the operation
    def allreduce(self, array: Any, op: str = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """The element-wise reduction of every rank's ``array``; every rank gets the same bits.

        :param array: NumPy, CuPy, or any array with DLPack or ``__cuda_array_interface__``; any shape, alignment and
            layout; the same shape and dtype on every rank. dtypes: float16, bfloat16, float32, float64, and signed
            and unsigned integers of 8 to 64 bits.
        :param op: "sum", "prod", "min", "max" or "avg".
        :param out: where the result goes, of the same shape, dtype and kind; ``out=array`` is in place.
        :param stream: for device arrays: an int, a CuPy stream or an object with ``__cuda_stream__``; None for CuPy's
            current stream. The call returns before the work is done, as CuPy's do.
        :returns: ``out``, or a new array: CuPy for device arrays, NumPy for host arrays.
        :raises ArgumentError: for what this rank passed. The other ranks get :class:`PeerFailedError`.
        :raises RankMismatchError: if the ranks' calls differ. :raises PeerTimeoutError: if a rank did not come.
        :raises PeerLostError: if a rank has gone. Of device arrays, these three may come with a later call or with
            :meth:`synchronize`; the result then holds 0xFF bytes where data is missing.
        """
        with self._lock:
            if self._unusable is not None:
                raise type(self._unusable)(str(self._unusable))
            self._call += 1
            try:
                if arrays.is_device(array):
                    return self._reduce_device(array, op, out, stream)
                return self._reduce_host(array, op, out)
            except _SHARED:
                raise
            except BaseException as error:
                self._refuse(error, array)
                raise

    def _reduce_device(self, array: Any, op: str, out: Any, stream: Any) -> Any:
        engine = self._engine
        if engine is None:
            raise UnsupportedError(f"device arrays need backend ipc: {self._world.reasons['ipc']}")
        if stream is None:
            handle, owner = arrays.current_stream(), None
        else:
            handle, owner = arrays.stream_handle(stream), stream
        source = arrays.view(array, handle)
        prepared = self._prepare(engine, source, op)
        target = self._device_target(engine, source, array, out, handle)
        if not arrays.is_contiguous(source) or (target is not source and _overlap_in_part(source, target)):
            source = arrays.contiguous_copy(source, handle)
        direct = target if arrays.is_contiguous(target) else arrays.empty(source.shape, source.dtype, handle)
        self._enter(engine, prepared.what, handle)
        if self._size == 1:
            if direct is not source:
                arrays.copy_into(direct, source, handle)
        elif source.size:
            engine.run(prepared, arrays.pointer(source), arrays.pointer(direct), handle, owner)
        if direct is not target:
            arrays.copy_into(target, direct, handle)
        if self._sync and not engine.is_capturing(handle):
            self.synchronize(handle)
        return target if out is None else out

    def _prepare(self, engine: Engine, source: Any, op: str) -> Prepared:
        prepared = engine.find(source.shape, source.dtype, op)
        if prepared is None:
            dtype = self._check(source, op)
            prepared = engine.prepare(source.shape, source.dtype, dtype, op, source.nbytes)
        if arrays.device_of(source) != engine.device.ordinal:
            raise ArgumentError(self._text(
                f"an array on GPU {engine.device.ordinal}, as this communicator is",
                f"one on GPU {arrays.device_of(source)}",
                "Move it, or make the communicator with device=.",
            ))  # fmt: skip
        return prepared

    def _check(self, source: Any, op: Any) -> str:
        """The dtype's name. :raises ArgumentError: if dtype or op is none of ours."""
        if not isinstance(op, str) or op not in OPS:
            raise ArgumentError(self._text(f"op to be one of {', '.join(OPS)}", repr(op), _FIX))
        name = DTYPES.get(source.dtype)
        if name is None:
            raise ArgumentError(self._text(f"dtype to be one of {', '.join(DTYPES.values())}", str(source.dtype), _FIX))
        return name

    def _device_target(self, engine: Engine, source: Any, array: Any, out: Any, stream: int) -> Any:
        """The CuPy array to write to. :raises ArgumentError: if ``out`` does not fit."""
        if out is None:
            return arrays.empty(source.shape, source.dtype, stream)
        if out is not array and not arrays.is_device(out):
            raise ArgumentError(self._text("out on the device, as array is", "one on the host", _FIX))
        if arrays.is_readonly(out):
            raise ArgumentError(self._text("an out that can be written", "a read-only one", _FIX))
        if out is array:
            return source
        target = arrays.view(out, stream)
        self._check_out(source, target)
        if arrays.device_of(target) != engine.device.ordinal:
            raise ArgumentError(self._text(
                f"out on GPU {engine.device.ordinal}, as array is", f"one on GPU {arrays.device_of(target)}", _FIX
            ))  # fmt: skip
        return target

    def _check_out(self, array: Any, out: Any) -> None:
        if out.shape != array.shape or out.dtype != array.dtype:
            raise ArgumentError(self._text(
                f"out of shape {array.shape} and dtype {array.dtype}, as array has", f"{out.shape} and {out.dtype}",
                _FIX,
            ))  # fmt: skip

    def _reduce_host(self, array: np.ndarray[Any, Any], op: str, out: Any) -> np.ndarray[Any, Any]:
        dtype = self._check(array, op)
        if isinstance(array, np.ma.MaskedArray):
            raise ArgumentError(self._text("an array without a mask", "a masked one", "Fill it first."))
        if out is not None:
            if not isinstance(out, np.ndarray):
                raise ArgumentError(self._text("out to be a NumPy array, as array is", type(out).__qualname__, _FIX))
            if arrays.is_readonly(out):
                raise ArgumentError(self._text("an out that can be written", "a read-only one", _FIX))
            self._check_out(array, out)
        interrupt = None
        if self._engine is not None:  # a rank that reduces a device array in this call will be noticed there
            self._enter(self._engine, control.host_signature(array.shape, dtype, op, array.nbytes), 0)
            interrupt = self._raise_fault
        try:
            result = self._host.allreduce(array, op, self._call, interrupt)
        except _SHARED as error:
            if self._host.pending:
                self._unusable = PeerLostError(f"{error} An MPI call is pending: the communicator can only be closed.")
            raise
        if out is None:
            return result
        out[...] = result
        return out

    # ---- faults
    def _text(self, expected: str, found: str, advice: str) -> str:
        return report(self._rank, self._call, expected=expected, found=found, advice=advice)

    def _enter(self, engine: Engine, what: control.Signature, stream: int) -> None:
        """Settles an earlier fault, then records this call and compares it with the peers'."""
        if engine.page.aborted:
            self._raise_fault()
            self._resynchronise(engine)
        other = engine.page.enter(self._call, what, stream)
        if other is not None:
            theirs = engine.page.describe(other, self._call)
            text = f"{what} on rank {self._rank} and {theirs} on rank {other}"
            self._post(engine, control.MISMATCH, text)
            self._raise_fault()

    def _raise_fault(self) -> None:
        """Raises what the abort word stands for, once."""
        engine = self._engine
        assert engine is not None
        lost = engine.watchdog.lost if engine.watchdog else None
        if lost is not None and engine.page.aborted:
            self._unusable = engine.page.lost(self._call, *lost)
            raise self._unusable
        if engine.page.aborted and not self._told:
            self._told = True
            raise engine.page.explain(self._call, self._timeout)

    def _refuse(self, error: BaseException, array: Any) -> None:
        """Tells the other ranks that this one does not make this call, and gives the error its place."""
        if isinstance(error, IpcReduceError) and not str(error).startswith("rank "):
            error.args = (f"rank {self._rank}, call {self._call}: {error}",)
        engine = self._engine
        if engine is None or isinstance(array, np.ndarray):
            self._host.refuse(error, self._call)
            return
        earlier = engine.page.fault()
        if engine.page.aborted and (earlier is None or earlier[0] < self._call):
            self._raise_fault()  # what went wrong first is what the user has to hear of
            if self._told:
                self._resynchronise(engine)
        self._post(engine, control.REFUSED, f"{type(error).__name__}: {error}")
        self._told = True

    def _post(self, engine: Engine, kind: int, text: str) -> None:
        """Ends this call on every rank. Earlier calls are let through first: the abort word would end them too."""
        with contextlib.suppress(CudaError):  # in a capture nothing runs yet
            engine.synchronize()
        engine.page.post(kind, self._call, text)

    def _resynchronise(self, engine: Engine) -> None:
        """After a fault that every rank has raised: empty slots, fresh epochs, one call number. Collective.

        :raises PeerLostError: if a rank does not come; the communicator can then only be closed.
        """
        deadline = time.monotonic() + self._timeout
        try:
            engine.quiesce()
            record = wire.message(wire.RESYNC, call=self._call)
            everyone = wire.allgather(self._mpi, record, deadline, "the resynchronisation", interrupt=self._raise_lost)
            engine.reset()
            wire.vote(self._mpi, None, deadline, "the resynchronisation")
        except IpcReduceError as error:
            self._unusable = PeerLostError(
                self._text("every rank at the resynchronisation after a fault", str(error), "")
            )
            raise self._unusable from error
        self._call, self._told = int(everyone["call"].max()), False

    def _raise_lost(self) -> None:
        if self._engine is not None and self._engine.watchdog is not None and self._engine.watchdog.lost:
            raise self._engine.page.lost(self._call, *self._engine.watchdog.lost)

    # ---- waiting and ending
    def synchronize(self, stream: Any = None) -> None:
        """Waits for the calls made so far on ``stream`` (None: the last one's), and raises what went wrong in them.

        :raises RankMismatchError, PeerFailedError, PeerTimeoutError, PeerLostError: see :meth:`allreduce`.
        """
        with self._lock:
            if self._unusable is not None:
                raise type(self._unusable)(str(self._unusable))
            if self._engine is not None:
                self._engine.synchronize(None if stream is None else arrays.stream_handle(stream))
                fault = self._engine.page.fault()
                if (
                    fault is None or fault[0] <= self._call
                ):  # a peer may be in trouble with a call that we have not made
                    self._raise_fault()

    def close(self) -> None:
        """Gives everything back. Collective, but it never waits longer than some seconds for another rank.

        Idempotent; also done at interpreter exit. Arrays that the caller has stay valid.
        """
        with self._lock:
            if self in _live:
                _live.remove(self)
                engine, self._engine = self._engine, None
                lost = isinstance(self._unusable, PeerLostError)
                self._unusable = ArgumentError("the communicator is closed: make a new one")
                if engine is not None:
                    engine.close(0.0 if lost else _CLOSE_SECONDS)
                if not lost and not _require_mpi().Is_finalized():
                    self._mpi.Free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _overlap_in_part(source: Any, target: Any) -> bool:
    """Whether writing ``target`` could change parts of ``source`` that are not read yet. In place is safe."""
    if arrays.pointer(source) == arrays.pointer(target) and source.strides == target.strides:
        return False
    (first, past), (other_first, other_past) = arrays.extent(source), arrays.extent(target)
    return first < other_past and other_first < past


_live: list[Communicator] = []
_default: Communicator | None = None
_default_lock = threading.Lock()


def get_communicator() -> Communicator:
    """The default communicator: over ``MPI.COMM_WORLD``, on CuPy's current device. The first call is collective."""
    return _default_for(None)


def _default_for(array: Any) -> Communicator:
    global _default
    with _default_lock:
        if _default is None or _default not in _live:
            device = None
            if array is not None and not isinstance(array, np.ndarray) and arrays.is_device(array):
                device = arrays.device_of(arrays.view(array, arrays.current_stream()))
            _default = Communicator(device=device)
        return _default


def allreduce(
    array: Any, op: str = "sum", *, out: Any = None, comm: Communicator | None = None, stream: Any = None
) -> Any:
    """:meth:`Communicator.allreduce` on ``comm``, or on the default communicator (for which the first array's GPU
    is taken)."""
    return (comm or _default_for(array)).allreduce(array, op, out=out, stream=stream)


@atexit.register
def _close_all() -> None:
    for communicator in list(_live):
        try:
            communicator.close()
        except Exception as error:
            print(f"ipcreduce: closing a communicator at exit: {error}", flush=True)


def _after_fork_in_child() -> None:
    """CUDA and MPI do not survive fork(): the child gets errors, and closes nothing of its parent's."""
    global _default
    for communicator in _live:
        communicator._lock = threading.RLock()
        communicator._engine = None
        communicator._unusable = UnsupportedError(
            "this process was forked from one that used ipcreduce: neither CUDA nor MPI works in it. Start processes "
            "by spawn (multiprocessing.set_start_method('spawn'))"
        )
    _live.clear()
    _default = None


os.register_at_fork(after_in_child=_after_fork_in_child)
