"""``allgather``, ``reduce_scatter`` and ``broadcast`` on arrays on the host, checked and brought into rows of bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..calls.request import Member, Moved, Request, Rows
from ..cuda import torch_runtime
from ..dtypes import KINDS, kind_name, op_name, reduced_as
from ..errors import ArgumentError, naming_member
from ..page.fingerprint import Fingerprint
from . import views
from .host_operands import Array, as_numpy
from .lists import check_apart
from .operands import check_own_elements, check_writable
from .splits import BROADCAST, GATHER, SCATTER, SplitCall, Splitting, check_output, is_simple, readable


class HostSplit:
    """The host arrays of an all-gather, reduce-scatter or broadcast, and their outputs, checked."""

    def __init__(self, given: SplitCall) -> None:
        self._call, splitting = given, given.checked()
        self.arrays: list[HostSplitArray] = []
        for index, (array, out) in enumerate(zip(given.arrays, given.outputs, strict=True)):
            with naming_member(index if given.is_list else None):
                self.arrays.append(HostSplitArray(given, splitting, array, out))
        self.exchanged = self.arrays or [_nothing(given)]
        if given.is_list and given.out is not None:
            check_apart([(one.source, one.target) for one in self.arrays])
        split = splitting.split if given.is_list else self.arrays[0].splitting.split
        op = "" if not given.reduces else self.arrays[0].op if self.arrays else op_name(given.op)
        members = tuple(one.member for one in self.arrays)
        self.request = Request(op, members, is_list=given.is_list, on_host=True, sms=given.sms, split=split)

    def finish(self) -> Any:
        """The call's result, once each array is exchanged."""
        results = [one.finish() for one in self.arrays]
        if not self._call.is_list:
            return results[0]
        return results if self._call.out is None else self._call.out


class SplitParts(NamedTuple):
    """The memory of one array that the ranks exchange, in contiguous arrays of one axis.

    :ivar op: one of ``dtypes.OPS``; "" where nothing is reduced. :ivar root: of a broadcast; else None.
    :ivar sources: of a reduce-scatter each rank's part; else this rank's part alone.
    :ivar targets: for the results: of a reduce-scatter this rank's part; else all parts.
    """

    op: str
    root: int | None
    sources: list[Array]
    targets: list[Array]


class HostSplitArray:
    """One array of a call, and its output.

    :ivar reduced: the dtype as which it is exchanged. See :class:`SplitParts` for the others.
    """

    def __init__(self, call: SplitCall, splitting: Splitting, array: Any, out: Any) -> None:
        self._collective, self._call, self._array, self._out = call.collective, call, array, out
        self.root = splitting.split.root if call.collective == BROADCAST else None
        gathers = call.collective == GATHER
        moved, self._dtype = readable(call, array)
        source = as_numpy(moved, "array")
        if isinstance(array, views.NUMBERS) and not gathers:
            raise ArgumentError(f"array is a number, and {call.collective} takes arrays. Pass numpy.asarray(it)")
        if source.dtype.hasobject:
            raise ArgumentError(f"dtype {source.dtype} is of Python objects, which lie in one process. Pass numbers")
        self.splitting, self.whole, self.part = splitting.of(source)
        self.source = source.reshape(self.part) if gathers and not source.ndim else source
        self.op = op_name(call.op, source.dtype) if call.reduces else ""
        self.reduced = np.dtype(np.uint8) if not call.reduces else KINDS[reduced_as(kind_name(source.dtype, self.op))]
        if call.collective == BROADCAST:
            self.target: Array = source
            if call.rank != self.root:
                check_writable(source, array, "array")
                check_own_elements(source, "array")
        elif out is None:
            self.target = np.empty(self.whole if gathers else self.part, source.dtype)
        else:
            self.target = self._output(out)
        self._prepare()

    def _output(self, out: Any) -> Array:
        if views.is_device(out, "out") or isinstance(out, views.NUMBERS):
            raise ArgumentError(
                f"array lies on the host, but out is a {type(out).__qualname__}. Pass a NumPy array as out"
            )
        target = as_numpy(readable(self._call, out)[0], "out")
        check_output(self._call, self.splitting, self.whole, self.source, target)
        check_writable(target, out)
        return target

    @property
    def member(self) -> Member | Moved:
        """The array as the ranks compare it."""
        if self.op:
            return Member(self.whole, kind_name(self.source.dtype, self.op))
        return Moved(self.whole, self._dtype or str(self.source.dtype), self.source.itemsize)

    @property
    def parts(self) -> SplitParts:
        """The memory that is exchanged."""
        return SplitParts(self.op, self.root, self.sources, self.targets)

    def _prepare(self) -> None:
        call, n = self._call, self.splitting.n
        if self._collective == BROADCAST:
            flat = self._flat(self.source)
            self.sources, nothing = [flat], flat[:0]
            self.targets = [flat if rank == self.root else nothing for rank in range(n)]
            if call.rank != self.root:
                self.sources = [nothing]
            self._copied = flat
            return
        places = [self.splitting.place(self.whole, rank) for rank in range(n)]
        if self._collective == SCATTER:
            self.sources = [self._flat(self.source[place]) for place in places]
            self.targets = [self._room(self.target)]
        else:
            self.sources = [self._flat(self.source)]
            self.targets = [self._room(self.target[place]) for place in places]
        self._places = places

    def _flat(self, array: Array) -> Array:
        """The elements in the same memory, if they are contiguous there; else a copy."""
        return np.ascontiguousarray(array).reshape(-1).view(self.reduced)

    def _room(self, target: Array) -> Array:
        """Room for the elements of a target: in its memory, if they are contiguous there."""
        return self._flat(target if target.flags.c_contiguous else np.empty(target.shape, target.dtype))

    def finish(self) -> Any:
        """Copy results to where they belong. Returns what the call returns for this array."""
        if self._collective == BROADCAST:
            if self._call.rank != self.root:
                self._put(self.target, self._copied)
            return self._array
        if self._collective == SCATTER:
            self._put(self.target, self.targets[0])
        else:
            for place, part in zip(self._places, self.targets, strict=True):
                self._put(self.target[place], part)
        if self._out is not None:
            return self._out
        if torch_runtime.is_tensor(self._array):
            return torch_runtime.float8_of_bytes(torch_runtime.of_numpy(self.target), self._array)
        return self.target

    def _put(self, target: Array, flat: Array) -> None:
        if not np.may_share_memory(target, flat):
            target[...] = flat.view(target.dtype).reshape(target.shape)


class CachedSplit:
    """Calls like one that was checked: on contiguous arrays of NumPy of the same shape and dtype.

    :ivar fingerprint: of each of these calls, by which the ranks compare it.
    """

    def __init__(self, given: SplitCall, one: HostSplitArray, fingerprint: Fingerprint, rows: Rows) -> None:
        self.fingerprint, self._rank, self._n = fingerprint, given.rank, given.n
        self._op, self._root, self._reduced, self._dtype = one.op, one.root, one.reduced, one.source.dtype
        self._shape = one.whole if given.collective == GATHER else one.part
        firsts = [begin // self._reduced.itemsize for begin in (*rows.offsets, rows.pitch)]
        self._places = [slice(*ends) for ends in pairwise(firsts)]  # of the parts, in a whole array

    @staticmethod
    def of(given: SplitCall, used: HostSplit) -> CachedSplit | None:
        """The call as one that may come again; None if it is not of such an array, or if its parts have gaps."""
        split, array = used.request.split, given.array
        if type(array) is not np.ndarray or not array.ndim or split is None or not is_simple(given.key):
            return None
        (one,) = used.arrays
        rows = split.rows(one.whole, array.itemsize, given.n)
        return CachedSplit(given, one, used.request.fingerprint, rows) if rows.rows == 1 else None

    def again(self, array: Any, out: Any) -> tuple[SplitParts, Any] | None:
        """The parts and the result of a call; None if it has to be checked."""
        is_read = self._root is None or self._root == self._rank
        if not (array.flags.c_contiguous if is_read else array.flags.carray):
            return None
        flat = array.reshape(-1).view(self._reduced)
        if self._root is not None:
            nothing = flat[:0]
            targets = [flat if rank == self._root else nothing for rank in range(self._n)]
            return SplitParts("", self._root, [flat if is_read else nothing], targets), array
        if out is None:
            out = np.empty(self._shape, self._dtype)
        elif not self._fits(out) or np.may_share_memory(array, out):
            return None
        target = out.reshape(-1).view(self._reduced)
        if self._op:
            return SplitParts(self._op, None, [flat[place] for place in self._places], [target]), out
        return SplitParts("", None, [flat], [target[place] for place in self._places]), out

    def _fits(self, out: Any) -> bool:
        same = type(out) is np.ndarray and out.shape == self._shape and out.dtype == self._dtype
        return same and bool(out.flags.carray)  # contiguous, aligned and writable


def _nothing(given: SplitCall) -> HostSplitArray:
    """An exchange without data, by which a call on an empty list waits for the ranks."""
    none = given._replace(array=np.empty(0, np.uint8), key=(BROADCAST, None, 0, None, 0, None))
    return HostSplitArray(none, none.checked(), none.array, None)
