"""The calls on host arrays: through shared memory if the ranks have some, else over MPI."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import clock
from ..arrays import kinds
from ..arrays.host_operands import Array, HostCall, Part
from ..arrays.host_splits import CachedSplit, HostSplit, SplitParts
from ..arrays.plain import PlainCall
from ..arrays.splits import SplitCall
from ..calls.sequence import CallSequence
from ..dtypes import DTYPES, OPS
from ..errors import IpcReduceError, UnsupportedError
from ..page.fingerprint import Fingerprint
from ..ranks.mpi import check_runs
from ..types import DEFAULT_STREAM
from .over_mpi import MpiReducer
from .shared import SharedReducer

_MAX_KNOWN = 4096
_GRACE_SECONDS = 1.0


class _Patience:
    """The check of a wait over MPI. Its error ends the wait only after a second.

    A rank can fail as soon as it has the data of all others, and what it has sent still comes. The communicator is lost
    only if this rank leaves before.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.error: IpcReduceError | None = None
        self._check, self._until = check, math.inf

    def __call__(self) -> None:
        if self.error is None:
            try:
                self._check()
            except IpcReduceError as error:
                self.error, self._until = error, clock.now() + _GRACE_SECONDS
        elif clock.now() > self._until:
            raise self.error


class HostReducer:
    """The calls on NumPy arrays of one communicator. Its lock is held around every method.

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
        self._splits: dict[Any, CachedSplit] = {}  # by arguments, shape and dtype

    def describe(self) -> str:
        """The way in which the data travel, and the reason if that is not shared memory."""
        return self._way

    def call(self, given: Any) -> Any:
        """Make one call of any kind. After an error the values in the caller's outputs are undefined.

        :param given: its arguments: a :class:`PlainCall`, say.
        :raises IpcReduceError: if the arguments are wrong, or the ranks do not come or differ.
        """
        plain = type(given) is PlainCall and given.sms is None
        fingerprint = self._repeated(*given[:3]) if plain else None
        if fingerprint is not None and self._shared is not None:
            self._calls.enter(fingerprint, DEFAULT_STREAM)
            return self._through_memory(self._shared, fingerprint, *given[:3])
        key = CachedSplit.key(given) if type(given) is SplitCall else None
        known = self._splits.get(key)
        again = None if known is None else known.again(given.array, given.out)
        if known is not None and again is not None:
            self._enter(known.fingerprint)
            self._exchange_parts(known.fingerprint, again[0])
            return again[1]
        used: HostCall = kinds.HOST[type(given)](given)
        fingerprint = used.request.fingerprint
        self._enter(fingerprint)
        exchange = self._exchange_parts if type(given) is SplitCall else self._exchange
        result = used.result([exchange(fingerprint, part) for part in used.parts()])
        if key is not None and isinstance(used, HostSplit) and known is None and len(self._splits) < _MAX_KNOWN:
            self._splits[key] = CachedSplit(given, used)
        if plain and type(given.array) is np.ndarray and len(self._plain) < _MAX_KNOWN:
            array, op = given[:2]
            if type(op) is str and op in OPS and array.dtype in DTYPES:
                self._plain[array.shape, array.dtype, op] = fingerprint
        return result

    def _exchange_parts(self, fingerprint: Fingerprint, one: SplitParts) -> None:
        calls, shared, mpi = self._calls, self._shared, self._mpi
        if shared is not None:
            check = partial(calls.check_wait, calls.number, clock.now() + calls.timeout)
            shared.split(one, check, partial(calls.compare, fingerprint))
        else:
            assert mpi is not None
            self._over_mpi(partial(mpi.split, one))

    def _repeated(self, array: Any, op: Any, out: Any) -> Fingerprint | None:
        """The fingerprint of a call on contiguous NumPy arrays, if one like it came before: 2 us less to check."""
        if type(array) is not np.ndarray or type(op) is not str or not array.flags.c_contiguous:
            return None
        fingerprint = self._plain.get((array.shape, array.dtype, op))
        if out is None or fingerprint is None:
            return fingerprint
        same = type(out) is np.ndarray and out.shape == array.shape and out.dtype == array.dtype
        return fingerprint if same and out.flags.carray else None  # carray: contiguous, aligned and writable

    def _enter(self, fingerprint: Fingerprint) -> None:
        calls = self._calls
        if self._shared is None and self._mpi is None:
            raise UnsupportedError(
                f"host arrays need memory that the ranks share, or MPI: {self._reason}, and the group is not MPI's. "
                "Make the Communicator of one of mpi4py, or pass device arrays"
            )
        calls.enter(fingerprint, DEFAULT_STREAM)
        if self._shared is None:
            calls.gather(calls.number, b"")
            calls.compare(fingerprint)  # all have come: MPI does not compare what it carries

    def _exchange(self, fingerprint: Fingerprint, part: Part) -> Array:
        array, op, out = part
        if self._shared is not None:
            return self._through_memory(self._shared, fingerprint, array, op, out)
        assert self._mpi is not None
        result = self._over_mpi(partial(self._mpi.allreduce, array, op))
        if out is None:
            return result
        out[...] = result
        return out

    def _through_memory(
        self, shared: SharedReducer, fingerprint: Fingerprint, array: Array, op: str, out: Array | None
    ) -> Array:
        calls = self._calls
        source = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        target = out if out is not None and out.flags.c_contiguous else np.empty(array.shape, array.dtype)
        check = partial(calls.check_wait, calls.number, clock.now() + calls.timeout)
        shared.allreduce(source, op, target, check, partial(calls.compare, fingerprint))
        if out is None or target is out:
            return target
        out[...] = target
        return out

    def _over_mpi(self, exchange: Callable[[int, Callable[[], None]], Any]) -> Any:
        check_runs()
        calls, number = self._calls, self._calls.number
        check = _Patience(partial(calls.check_wait, number, math.inf, []))
        with calls.losing(f"it left call {number} halfway"):
            result = exchange(number, check)
        if check.error is not None:
            raise check.error
        return result

    def close(self) -> None:
        """Let go of the shared memory. There are no more calls."""
        self._shared = None
