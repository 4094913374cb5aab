"""The all-reduces of host arrays: through shared memory if the ranks have some, else over MPI."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from .. import clock
from ..arrays.host_norms import HostNorm
from ..arrays.host_operands import HostOperands
from ..arrays.lists import HostLists
from ..arrays.maps import HostMap, Map
from ..arrays.norms import NormArguments
from ..calls.fingerprint import Fingerprint, of_list, of_map, of_norm
from ..calls.sequence import CallSequence
from ..dtypes import op_name
from ..errors import UnsupportedError
from ..ranks.mpi import check_runs
from ..types import DEFAULT_STREAM
from .over_mpi import MpiReducer
from .rmsnorm import normalise
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
        what = _fingerprint(used.shape, used.kind, used.op)
        self._enter(what)
        return self._exchange(what, used.source, used.op, used.target)

    def allreduce_list(self, arrays: Any, op: Any, out: Any) -> Any:
        """One call on a list of arrays. Those of one dtype are copied behind each other, and handed over together."""
        used = HostLists(arrays, op, out)
        what = of_list([(one.shape, one.kind) for one in used.members], op_name(op), " on the host")
        self._enter(what)
        if not used.members:  # it waits for the other ranks, too
            self._exchange(what, np.empty(0, np.uint8), "sum", None)
        reduced: dict[HostOperands, Array] = {}
        for name, members in used.by_dtype():
            flat = self._exchange(what, np.concatenate([one.source.reshape(-1) for one in members]), name, None)
            ends = accumulate(one.source.size for one in members)
            for one, end in zip(members, ends, strict=True):
                reduced[one] = flat[end - one.source.size : end].reshape(one.source.shape)
        return used.results([reduced[one] for one in used.members])

    def allreduce_rmsnorm(self, given: NormArguments) -> tuple[Any, ...]:
        """One call: see :meth:`ipcreduce.Communicator.allreduce_rmsnorm`."""
        used = HostNorm(given)
        what = of_norm(used.source.shape, used.shape, " on the host")
        self._enter(what)
        reduced = self._exchange(what, used.source, "sum", None)
        return used.results(*normalise(used.shape, used.as_rows(reduced), used.weight, used.residual, used.scale))
    def allreduce_then(self, array: Any, op: Any, out: Any, then: Map) -> Any:
        """One call with an expression, for which the host has a function of the program."""
        used = HostOperands(array, op, out)
        mapped = HostMap(then, used)
        expression = mapped.expression
        what = of_map(used.shape, used.kind, used.op, str(expression), expression.text, " on the host")
        self._enter(what)
        value = mapped.apply(self._exchange(what, used.source, used.op, None))
        if used.target is not None:
            used.target[...] = value
        return used.result(value)

    def _enter(self, what: Fingerprint) -> None:
        calls = self._calls
        if self._shared is None and self._mpi is None:
            raise UnsupportedError(
                f"host arrays need memory that the ranks share, or MPI: {self._reason}, and the group is not MPI's. "
                "Make the Communicator of one of mpi4py, or pass device arrays"
            )
        calls.enter(what, DEFAULT_STREAM)
        if self._shared is None:
            calls.gather(calls.number, b"")
            calls.compare(what)  # all have come: MPI does not compare what it carries

    def _exchange(self, what: Fingerprint, array: Array, op: str, out: Array | None) -> Array:
        if self._shared is not None:
            return self._through_memory(self._shared, what, array, op, out)
        assert self._mpi is not None
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
