"""The all-reduces of host arrays: through shared memory if the ranks have some, else over MPI."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np

from .. import clock
from ..arrays.host_operands import HostOperands
from ..calls.fingerprint import Fingerprint
from ..calls.sequence import CallSequence
from ..errors import UnsupportedError
from ..ranks.mpi import check_runs
from ..types import DEFAULT_STREAM
from .over_mpi import MpiReducer
from .shared import SharedReducer

_MOST_KNOWN = 4096
Array = np.ndarray[Any, Any]


class HostReducer:
    """The all-reduces of NumPy arrays of one communicator. Its lock is held around every method.

    :param mpi: None for ranks of a group that is not MPI's.
    :param shared: None for ranks that share no memory, for this ``reason``. MPI carries their data. Without MPI they
        cannot reduce host arrays.
    """

    def __init__(self, calls: CallSequence, mpi: MpiReducer | None, shared: SharedReducer | None, reason: str) -> None:
        self._calls, self._mpi, self._shared, self._reason = calls, mpi, shared, reason
        if shared is not None:
            self._way = shared.describe()
        else:
            self._way = f"{'cannot be reduced' if mpi is None else 'by messages of MPI'}, because {reason}"
        self._plain: dict[tuple[tuple[int, ...], Any, str], Fingerprint] = {}  # of NumPy arrays that are no views

    def describe(self) -> str:
        """The way that the data take, and the reason if it is not shared memory."""
        return self._way

    def allreduce(self, array: Any, op: Any, out: Any) -> Any:
        """One call: see :meth:`ipcreduce.Communicator.allreduce`. After an error the values in ``out`` are undefined.

        :raises IpcReduceError: if the arguments are wrong, or the ranks do not come or differ.
        """
        what = self._repeated(array, op, out)
        if what is not None and self._shared is not None:
            self._calls.enter(what, DEFAULT_STREAM)
            return self._through_memory(self._shared, what, array, op, out)
        used = HostOperands(array, op, out)
        result = used.result(self._reduce(used))
        if used.source is array and op == used.op and type(op) is str and len(self._plain) < _MOST_KNOWN:
            self._plain[array.shape, array.dtype, op] = _fingerprint(used.shape, used.kind, used.op)
        return result

    def _repeated(self, array: Any, op: Any, out: Any) -> Fingerprint | None:
        """The fingerprint of a call on contiguous NumPy arrays, if one like it came before: 2 us less to check."""
        if type(array) is not np.ndarray or type(op) is not str or not array.flags.c_contiguous:
            return None
        what = self._plain.get((array.shape, array.dtype, op))
        if out is None or what is None:
            return what
        same = type(out) is np.ndarray and out.shape == array.shape and out.dtype == array.dtype
        return what if same and out.flags.carray else None  # carray: contiguous, aligned and writable

    def _reduce(self, used: HostOperands) -> Array:
        calls, array, op, out = self._calls, used.source, used.op, used.target
        what = _fingerprint(used.shape, used.kind, op)
        if self._shared is not None:
            calls.enter(what, DEFAULT_STREAM)
            return self._through_memory(self._shared, what, array, op, out)
        if self._mpi is None:
            raise UnsupportedError(
                f"host arrays need memory that the ranks share, or MPI: {self._reason}, and the group is not MPI's. "
                "Make the Communicator of one of mpi4py, or pass device arrays"
            )
        calls.enter(what, DEFAULT_STREAM)
        calls.gather(calls.number, b"")
        calls.compare(what)  # all have come: MPI does not compare what it carries
        result = self._over_mpi(self._mpi, array, op)
        if out is None:
            return result
        out[...] = result
        return out

    def _through_memory(
        self, shared: SharedReducer, what: Fingerprint, array: Array, op: str, out: Array | None
    ) -> Array:
        calls = self._calls
        source = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        target = out if out is not None and out.flags.c_contiguous else np.empty(array.shape, array.dtype)
        check = partial(calls.check_wait, calls.number, clock.now() + calls.timeout)
        shared.allreduce(source, op, target, check, partial(calls.compare, what))
        if out is None or target is out:
            return target
        out[...] = target
        return out

    def _over_mpi(self, mpi: MpiReducer, array: Array, op: str) -> Array:
        check_runs()
        calls, number = self._calls, self._calls.number
        try:
            return mpi.allreduce(array, op, number, partial(calls.check_wait, number, math.inf, []))
        except BaseException as error:
            calls.lose(f"it left call {number} halfway", error)
            raise

    def close(self) -> None:
        """Let go of the shared memory. There are no more calls."""
        self._shared = None


@lru_cache(_MOST_KNOWN)
def _fingerprint(shape: tuple[int, ...], name: str, op: str) -> Fingerprint:
    return Fingerprint.of(f"{op} of {name} {shape} on the host")
