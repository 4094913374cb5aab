"""``allgather``, ``reduce_scatter`` and ``broadcast`` on arrays on the host, checked and brought into rows of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..calls.request import BROADCAST, Collective, Request, Split
from ..cuda import torch_runtime
from ..dtypes import KINDS, op_name, reduced_as
from ..errors import ArgumentError
from . import views
from .host_operands import Array, as_numpy, view_of_out
from .operands import check_writable
from .splits import SplitCall, Splitting, is_simple, readable


class SplitParts(NamedTuple):
    """The memory of one array that the ranks exchange, in contiguous arrays of one axis.

    :ivar op: one of ``dtypes.OPS``; "" where nothing is reduced. :ivar root: of a collective that is rooted; else None.
    :ivar sources: this rank's part alone, if the collective gathers; else each rank's part.
    :ivar targets: for the results: each rank's part, if the collective gathers; else this rank's part alone.
    """

    collective: Collective
    op: str
    root: int | None
    sources: list[Array]
    targets: list[Array]

    @classmethod
    def of_root(cls, flat: Array, root: int, rank: int, n: int) -> SplitParts:
        """Those of a broadcast: rank ``root``'s part is everything, and the others' are empty."""
        parts = [flat[:0]] * n
        parts[root] = flat
        return cls(BROADCAST, "", root, [parts[rank]], parts)

    @classmethod
    def at(cls, places: Iterable[Any], collective: Collective, op: str, source: Array, target: Array) -> SplitParts:
        """Those of another collective: the index of each rank's part in the whole array is among ``places``."""
        if collective.gathers:
            return cls(collective, op, None, [source], [target[place] for place in places])
        return cls(collective, op, None, [source[place] for place in places], [target])


class HostSplit:
    """The host arrays of an all-gather, reduce-scatter or broadcast, checked. It is a :class:`HostCall`."""

    def __init__(self, given: SplitCall) -> None:
        self._call = given
        self.arrays, split = given.checked(HostSplitArray)
        op = self.arrays[0].op if self.arrays else op_name(given.op) if given.collective.reduces else ""
        members = tuple(one.member for one in self.arrays)
        self.request = Request(op, members, is_list=given.is_list, on_host=True, sms=given.sms, split=split)

    def parts(self) -> Iterator[SplitParts]:
        """The exchange of each array. That of an empty list is without data, but waits for the other ranks, too."""
        for one in self.arrays:
            yield one.parts
        if not self.arrays:
            yield SplitParts.of_root(np.empty(0, np.uint8), 0, self._call.rank, self._call.n)

    def result(self, _: Any) -> Any:
        """The call's result, once each array is exchanged."""
        results = [one.finish() for one in self.arrays]
        if not self._call.is_list:
            return results[0]
        return results if self._call.out is None else self._call.out


class HostSplitArray:
    """One array of a call, and its output.

    :ivar reduced: the dtype as which it is exchanged. :ivar parts: the memory that is exchanged.
    """

    def __init__(self, call: SplitCall, split: Split, array: Any, out: Any) -> None:
        self._array, self._out, collective = array, out, call.collective
        moved, dtype = readable(call, array)
        view = as_numpy(moved, "array")
        if isinstance(array, views.NUMBERS) and (collective.rooted or not collective.gathers):
            raise ArgumentError(f"array is a number, and {collective.name} takes arrays. Pass numpy.asarray(it)")
        if view.dtype.hasobject:
            raise ArgumentError(f"dtype {view.dtype} is of Python objects, which lie in one process. Pass numbers")
        self.splitting = Splitting.of(call, split, view, dtype)
        source = self.source = self.splitting.source
        self.op, self.member = self.splitting.compared()
        self.reduced = KINDS[reduced_as(self.member.kind)] if self.op else np.dtype(np.uint8)
        if collective.rooted:
            self.splitting.check_in_place(source, array)
            self.target: Array = source
        elif out is None:
            self.target = np.empty(self.splitting.result, source.dtype)
        else:
            self.target = self._output(out)
        self.parts, self._copies = self._exchanged()

    def _output(self, out: Any) -> Array:
        target = view_of_out(readable(self.splitting.call, out)[0])
        self.splitting.check_output(target)
        check_writable(target, out)
        return target

    def _exchanged(self) -> tuple[SplitParts, list[tuple[Array, Array]]]:
        """The memory that is exchanged, and the copies to make then: to an array from contiguous memory."""
        call, split, *_ = self.splitting
        if call.collective.rooted:
            flat = self._flat(self.source)
            parts = SplitParts.of_root(flat, split.root, call.rank, call.n)
            return parts, [] if call.rank == split.root else [(self.target, flat)]
        parts = SplitParts.at(self.splitting.places, call.collective, self.op, self.source, self.target)
        rooms = [self._flat(one if one.flags.c_contiguous else np.empty(one.shape, one.dtype)) for one in parts.targets]
        copies = [*zip(parts.targets, rooms, strict=True)]
        return parts._replace(sources=[*map(self._flat, parts.sources)], targets=rooms), copies

    def _flat(self, array: Array) -> Array:
        """The elements in the same memory, if they are contiguous there; else a copy."""
        return np.ascontiguousarray(array).reshape(-1).view(self.reduced)

    def finish(self) -> Any:
        """Copy results to where they belong. Returns what the call returns for this array."""
        for target, flat in self._copies:
            if not np.may_share_memory(target, flat):
                target[...] = flat.view(target.dtype).reshape(target.shape)
        if self._out is not None:
            return self._out
        if torch_runtime.is_tensor(self._array):
            return torch_runtime.float8_of_bytes(torch_runtime.of_numpy(self.target), self._array)
        return self.target


class CachedSplit:
    """Calls like one that was checked: on contiguous arrays of NumPy of the same shape and dtype.

    :ivar fingerprint: of each of these calls, by which the ranks compare it.
    """

    def __init__(self, given: SplitCall, used: HostSplit) -> None:
        (one,), self.fingerprint, self._rank, self._n = used.arrays, used.request.fingerprint, given.rank, given.n
        self._collective, self._op, self._root, *_ = one.parts
        self._reduced, self._dtype, self._shape = one.reduced, one.source.dtype, one.splitting.result
        rows = one.splitting.split.rows(one.splitting.whole, one.source.itemsize, given.n)
        self._has_gaps, self._is_read = rows.rows > 1, self._root in (None, given.rank)
        firsts = [begin // self._reduced.itemsize for begin in (*rows.offsets, rows.pitch)]
        self._places = [slice(*ends) for ends in pairwise(firsts)]  # of the parts, in a whole array

    @staticmethod
    def key(given: SplitCall) -> Any:
        """The key of such calls; None for one that is always checked, as one on a list is."""
        array, key = given.array, given.key
        return (key, array.shape, array.dtype) if type(array) is np.ndarray and array.ndim and is_simple(key) else None

    def again(self, array: Any, out: Any) -> tuple[SplitParts, Any] | None:
        """The parts and the result of a call; None if it has to be checked."""
        if self._has_gaps or not (array.flags.c_contiguous if self._is_read else array.flags.carray):
            return None  # carray: contiguous, aligned and writable
        flat = array.reshape(-1).view(self._reduced)
        if self._root is not None:
            return SplitParts.of_root(flat, self._root, self._rank, self._n), array
        if out is None:
            out = np.empty(self._shape, self._dtype)
        elif (
            type(out) is not np.ndarray or out.shape != self._shape or out.dtype != self._dtype
            or not out.flags.carray or np.may_share_memory(array, out)
        ):  # fmt: skip
            return None
        target = out.reshape(-1).view(self._reduced)
        return SplitParts.at(self._places, self._collective, self._op, flat, target), out
