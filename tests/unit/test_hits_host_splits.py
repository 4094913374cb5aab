"""All-gathers, reduce-scatters and broadcasts of NumPy arrays that have come before: which of them need no check."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ipcreduce.arrays.host_splits import CachedSplit, HostSplit, SplitParts
from ipcreduce.arrays.splits import SplitCall
from ipcreduce.calls.request import BROADCAST, GATHER, SCATTER, Collective

N, RANK = 3, 1
PART, WHOLE = (2, 4), (6, 4)
SHAPES = {GATHER: (PART, WHOLE), SCATTER: (WHOLE, PART), BROADCAST: (WHOLE, WHOLE)}


def known_of(array: Any, out: Any, collective: Collective, axis: Any = 0, root: int = 0) -> Any:
    """What is cached after a call."""
    key = collective, "sum" if collective == SCATTER else None, axis, None, root, None
    given = SplitCall(array, out, key, RANK, N)
    return None if CachedSplit.key(given) is None else CachedSplit(given, HostSplit(given))


@pytest.mark.parametrize("dtype", ["f4", "i1", "c8", "?"])
@pytest.mark.parametrize("collective", SHAPES)
def test_the_parts_are_those_of_a_checked_call(collective: Collective, dtype: str):
    """In the caller's own memory, or in that of a new result."""
    if collective == SCATTER and dtype == "?":
        return
    first, second = SHAPES[collective]
    array, out = (np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in (first, second))
    for root in (0, RANK):
        target = array if collective == BROADCAST else out
        key = collective, "sum" if collective == SCATTER else None, 0, None, root, None
        given = SplitCall(array, target, key, RANK, N)
        used = HostSplit(given)
        calls = CachedSplit(given, used)
        assert calls.fingerprint == used.request.fingerprint
        for result in (target, None):
            found, given_back = calls.again(array, result)  # type: ignore[misc]
            due: SplitParts = used.arrays[0].parts
            assert given_back is target or (result is None and given_back.shape == target.shape)
            assert found[:3] == due[:3]
            for ones, others, of in ((found.sources, due.sources, array), (found.targets, due.targets, given_back)):
                assert [one.dtype for one in ones] == [other.dtype for other in others]
                assert [one.size for one in ones] == [other.size for other in others]
                assert all(one.base is not None and np.may_share_memory(one, of) for one in ones if one.size)
            if result is not None:
                for one, other in zip([*found.sources, *found.targets], [*due.sources, *due.targets], strict=True):
                    assert one.ctypes.data == other.ctypes.data or not one.size


@pytest.mark.parametrize("collective", [GATHER, SCATTER])
def test_outputs_that_are_checked(collective: Collective):
    first, second = SHAPES[collective]
    array, out = np.zeros(first, "f4"), np.zeros(second, "f4")
    calls = known_of(array, out, collective)
    assert calls.again(array, out) is not None
    frozen, memory = out.copy(), np.zeros(96, "f4")
    frozen.flags.writeable = False
    odd = np.zeros(out.nbytes + 1, "u1")[1:].view("f4").reshape(second)
    for wrong in (
        np.zeros(second, "f8"), np.zeros(second[::-1], "f4"), np.zeros((*second, 2), "f4")[..., 0], frozen, odd,
        out.view(np.matrix), out.tolist(), array,
    ):  # fmt: skip
        assert calls.again(array, wrong) is None, wrong
    whole = memory[:24].reshape(WHOLE)
    own = (whole[2:4], whole) if collective == GATHER else (whole, whole[2:4])
    assert calls.again(*own) is None, "in place, or any other overlap"
    assert calls.again(np.zeros((*first, 2), "f4")[..., 0], out) is None, "an array with gaps"


def test_a_broadcast_writes_to_arrays_that_take_it():
    """The root's array is only read."""
    array = np.zeros(WHOLE, "f4")
    frozen, gaps = array.copy(), np.zeros((*WHOLE, 2), "f4")[..., 0]
    frozen.flags.writeable = False
    for root in (0, RANK):
        calls = known_of(array, array, BROADCAST, root=root)
        assert calls.again(array, array) is not None
        assert (calls.again(frozen, frozen) is None) == (root != RANK)
        assert calls.again(gaps, gaps) is None


def test_calls_that_are_not_known():
    """Lists, arrays of other types, parts with gaps, and arguments of odd types."""
    array, out = np.zeros(PART, "f4"), np.zeros(WHOLE, "f4")
    assert known_of(array, out, GATHER) is not None
    assert known_of([array], [out], GATHER) is None
    assert known_of(array.view(np.matrix), out, GATHER) is None
    assert known_of(np.zeros((), "f4"), np.zeros(N, "f4"), GATHER) is None
    assert known_of(array, out, GATHER, axis=np.int64(0)) is None
    for rows in (1, 2):
        whole = np.zeros((rows, 12), "f4")
        again = known_of(array[:rows], whole, GATHER, axis=1).again(array[:rows], whole)
        assert (again is None) == (rows > 1), "one row has no gaps"
