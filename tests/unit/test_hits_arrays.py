"""Lists that are found by their arrays, or by the addresses of their tensors, with stand-ins for both libraries."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ipcreduce.arrays.lists import ListCall
from ipcreduce.calls.addresses import Places, numbers_of
from ipcreduce.cuda import cupy_runtime, torch_lists, torch_runtime
from ipcreduce.device.hits import lists as hits_lists
from ipcreduce.device.hits.lists import ListHits
from ipcreduce.device.hits.plain import PlainHits
from ipcreduce.device.launch_cache import MISS, LaunchCache
from ipcreduce.device.prepared import BoundLaunch, OwnStep, Prepared
from ipcreduce.types import Stream

TURNS = 6  # in the last of them a list is found by its arrays
CURRENT, OTHER = 8, 9
DTYPE = np.dtype(np.float32)


class Array:
    """What the fast path reads of CuPy's arrays. ``looks``: how often any array was asked where it lies."""

    looks = 0

    def __init__(self, shape: tuple[int, ...] = (6,), at: int = 0, dtype: Any = DTYPE, device: int = 0) -> None:
        self._of = np.zeros(shape, dtype)
        self.place, self._c_contiguous = SimpleNamespace(ptr=at, device_id=device), True

    def __len__(self) -> int:
        return len(self._of)

    @property
    def data(self) -> Any:
        Array.looks += 1
        return self.place

    @property
    def shape(self) -> tuple[int, ...]:
        return self._of.shape

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self._of = self._of.reshape(shape)

    dtype = property(lambda self: self._of.dtype)
    ndim = property(lambda self: self._of.ndim)
    size = property(lambda self: self._of.size)
    nbytes = property(lambda self: self._of.nbytes)


class Subclass(Array):
    """A class of the program's own, which can mean anything."""


class Tensor:
    """A tensor whose memory the program may change."""

    shape, dtype, nbytes = (6,), "float32", 24

    def __init__(self, at: int) -> None:
        self.at = at


def arrays_of(count: int, first: int = 4096) -> list[Array]:
    return [Array(at=first + 64 * index) for index in range(count)]


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_runtime, "cupy", SimpleNamespace(ndarray=Array))
    monkeypatch.setattr(cupy_runtime, "get_current_stream", lambda: SimpleNamespace(ptr=CURRENT))
    monkeypatch.setattr(torch_runtime, "works", lambda: True)
    monkeypatch.setattr(torch_runtime, "is_plain_type", lambda kind: kind is Tensor)
    monkeypatch.setattr(torch_runtime, "stream_handle", lambda device: OTHER)
    monkeypatch.setattr(torch_runtime, "dtype_of", lambda dtype: np.dtype(dtype))
    monkeypatch.setattr(torch_lists, "reader", reader_of_tensors)


def reader_of_tensors(tensors: Sequence[Any], device: int) -> Callable[[Sequence[Any]], list[int] | None]:
    def read(others: Sequence[Any]) -> list[int] | None:
        return [one.at for one in others] if len(others) == len(tensors) else None

    return read


class Calls:
    """The memory of lists. Each call returns the addresses for which its launch was made, and its stream."""

    def __init__(self) -> None:
        order: Any = SimpleNamespace(quick=lambda stream: "ON_STREAM")
        self.cache = LaunchCache(0, order, self._bind)
        self.lists = ListHits(self.cache)
        self.cache.kinds[ListCall] = self.lists
        self.made = 0  # launches of places that have come before
        self.launched: Any = None

    def _start(self, places: Places, stream: Stream) -> None:
        self.launched = tuple(numbers_of(words) for words, _ in places), stream

    def _bind(self, prepared: Prepared, places: Places) -> BoundLaunch:
        self.made += 1
        return BoundLaunch(prepared.fingerprint, self._start, places)

    def insert(self, arrays: Sequence[Any]) -> None:
        request: Any = len(arrays)
        prepared = Prepared(
            request=request, fingerprint=request, kernels="", nbytes=sum(one.nbytes for one in arrays),
            steps=(OwnStep(self._start),), wire_dtypes=(None,) * len(arrays),
        )  # fmt: skip
        self.cache.insert_form(ListCall(arrays, "sum", None), None, prepared)

    def lookup(self, arrays: Sequence[Any], out: Any, stream: Any = None, op: str = "sum") -> Any:
        bound, result, current = self.lists.lookup(arrays, op, out, stream)
        if bound is None:
            assert (bound, result, current) == MISS
            return None
        assert result is out
        bound.launch(bound.argument, current)
        return self.launched

    def is_cached(self, arrays: Sequence[Any], out: Any) -> bool:
        """A launch is found without a look at where the arrays lie."""
        before = Array.looks
        assert self.lookup(arrays, out) is not None
        return Array.looks == before


def cached_list(arrays: Sequence[Any], out: Any) -> Calls:
    calls = Calls()
    calls.insert(arrays)
    for _ in range(TURNS):
        assert calls.lookup(arrays, out) is not None
    return calls


@pytest.mark.parametrize("in_place", [True, False])
def test_a_list_is_found_by_its_arrays(in_place: bool):
    arrays = arrays_of(3)
    out = arrays if in_place else arrays_of(3, 8192)
    calls = cached_list(arrays, out)
    made, places = calls.made, tuple([one.place.ptr for one in ones] for ones in (arrays, out))
    assert calls.is_cached(arrays, out)
    assert calls.lookup(arrays, out) == (places, CURRENT)
    again = [*arrays]
    assert calls.is_cached(again, again if in_place else tuple(out)), "another list of the same arrays"
    assert calls.lookup(arrays, out, CURRENT) == (places, CURRENT)
    assert calls.lookup(arrays, out, OTHER) == (places, OTHER), "on the stream that it is given"
    assert calls.made == made


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_other_arrays_are_not_those_of_a_cached_list(at: int, in_place: bool):
    arrays = arrays_of(3)
    out = arrays if in_place else arrays_of(3, 8192)
    for changed in (arrays, out):
        calls = cached_list(arrays, out)
        before, changed[at] = changed[at], Array(at=1 << 20)
        places = tuple([one.place.ptr for one in ones] for ones in (arrays, out))
        for _ in range(TURNS):
            assert calls.lookup(arrays, out) == (places, CURRENT)
        changed[at] = before


@pytest.mark.parametrize("in_place", [True, False])
def test_the_shape_of_a_cached_array_changes(in_place: bool):
    arrays = arrays_of(3)
    out = arrays if in_place else arrays_of(3, 8192)
    for changed in (arrays, out):
        calls = cached_list(arrays, out)
        changed[1].shape = (2, 3)
        assert calls.lookup(arrays, out) is None
        changed[1].shape = (6,)
        assert calls.lookup(arrays, out) is not None


def replace_by_namesake(patch: pytest.MonkeyPatch, arrays: list[Any], at: int) -> None:
    """Let the only reference to an array go, and put another one there, elsewhere in memory, that has its id."""
    dead, heir = id(arrays[at]), Array(arrays[at].shape, 1 << 24, arrays[at].dtype)
    arrays[at] = heir
    patch.setattr(hits_lists, "id", lambda one: dead if one is heir else id(one), raising=False)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_cached_array_dies(monkeypatch: pytest.MonkeyPatch, in_place: bool):
    """Another one may have its id then, and other memory."""
    arrays = arrays_of(3)
    out = arrays if in_place else arrays_of(3, 8192)
    calls = cached_list(arrays, out)
    replace_by_namesake(monkeypatch, out, 1)
    places = tuple([one.place.ptr for one in ones] for ones in (arrays, out))
    assert calls.lookup(arrays, out) == (places, CURRENT)


def test_a_cached_array_dies_within_a_call(monkeypatch: pytest.MonkeyPatch):
    """In another thread, say, between two looks at it."""
    arrays = arrays_of(3)
    calls = cached_list(arrays, arrays)
    arrays[1].shape = (2, 3)

    def stream() -> Any:
        calls.cache.objects.clear()
        return SimpleNamespace(ptr=CURRENT)

    monkeypatch.setattr(cupy_runtime, "get_current_stream", stream)
    assert calls.lookup(arrays, arrays) is None


def test_lists_and_tuples_are_found_as_lists():
    order: Any = None
    make: Any = None
    of_lists: Any = SimpleNamespace(lookup=lambda *given: (None, given, None))
    calls = PlainHits(LaunchCache(0, order, make), of_lists)
    for arrays in (arrays_of(2), tuple(arrays_of(2))):
        assert calls.lookup(arrays, "sum", None, 5)[1] == (arrays, "sum", None, 5)


def test_outputs_of_another_length():
    """The slow path tells what is wrong."""
    arrays, out = arrays_of(3), arrays_of(4, 8192)
    calls = cached_list(arrays, out[:3])
    for wrong in (out, out[:2], [*out[:3], None], [], (), iter(out), out[0], arrays[:2]):
        assert calls.lookup(arrays, wrong) is None
    assert calls.lookup(out, arrays) is None
    assert calls.lookup([], []) is None
    assert calls.lookup(arrays, out[:3]) is not None


def test_new_arrays_at_the_addresses_of_others():
    """As gradients are, of which each comes once: to refer to all of them would take as long as to read them."""
    calls, kept = Calls(), []
    calls.insert(arrays_of(3))
    for _ in range(2 * TURNS):
        arrays = arrays_of(3)
        kept.append(arrays)
        assert calls.lookup(arrays, arrays) is not None
    assert calls.made == 1
    assert sum(weakref.getweakrefcount(one) for arrays in kept for one in arrays) == 3, "of one list alone"


@pytest.mark.parametrize("in_place", [True, False])
def test_lists_in_turns_at_places_of_their_own(in_place: bool):
    calls = Calls()
    calls.insert(arrays_of(3))
    lists = [(arrays_of(3, 4096 * turn), arrays_of(3, 4096 * turn + 2048)) for turn in range(1, 4)]
    for turn in range(2 * TURNS):
        for arrays, out in lists[: 1 + turn]:
            targets = arrays if in_place else out
            places = tuple([one.place.ptr for one in ones] for ones in (arrays, targets))
            assert calls.lookup(arrays, targets) == (places, CURRENT)
    assert calls.made == len(lists)


def test_lists_without_bytes_go_the_usual_way():
    """Also where their arrays have addresses."""
    calls, arrays = Calls(), [Array((0,), at) for at in (4096, 8192)]
    calls.insert(arrays)
    for _ in range(TURNS):
        assert calls.lookup(arrays, arrays) is None


def test_lists_of_one_length():
    """The first kind is found by its length, until there is another one: then each by its arrays."""
    kinds: list[Callable[[int], list[Any]]] = [
        lambda first: arrays_of(3, first),
        lambda first: [Array((2, 3), at=first + 64 * index) for index in range(3)],
        lambda first: [Tensor(first + 64 * index) for index in range(3)],
    ]
    calls = Calls()
    for count, kind in enumerate(kinds, 1):
        assert calls.lookup(one := kind(4096), one) is None, "not inserted yet"
        calls.insert(kind(4096))
        for other in kinds[:count]:
            lists = [other(8192 * (turn + 1)) for turn in range(TURNS)]
            streams = [calls.lookup(one, one)[1] for one in lists]
            assert streams == [OTHER if isinstance(lists[0][0], Tensor) else CURRENT] * TURNS
    calls.lists._of_length.clear()  # as when it is full
    calls.insert([Array((1, 6), at=4096 + 64 * index) for index in range(3)])
    one = kinds[0](4096)
    assert calls.lookup(one, one) is None
    calls.insert(one)
    assert calls.lookup(one, one) is not None


def test_lists_of_another_op():
    arrays = arrays_of(3)
    calls = cached_list(arrays, arrays)
    assert calls.lookup(arrays, arrays, op="max") is None


def test_tensors_whose_memory_changes():
    tensors = [Tensor(4096 + 64 * index) for index in range(3)]
    for out in (tensors, [Tensor(8192 + 64 * index) for index in range(3)]):
        for changed in (tensors, out):
            calls = cached_list(tensors, out)
            for at in (1 << 20, 1 << 21):
                changed[1].at = at
                places = tuple([one.at for one in ones] for ones in (tensors, out))
                for _ in range(TURNS):
                    assert calls.lookup(tensors, out) == (places, OTHER)
    assert calls.lookup(tensors, out, OTHER) == (places, OTHER)
    assert calls.lookup(tensors, out, CURRENT) is None, "PyTorch has to be told of another stream"


def test_ids_of_tensors_that_arrays_have_by_now(monkeypatch: pytest.MonkeyPatch):
    """The call is on the stream of the arrays' own library."""
    arrays = arrays_of(2)
    tensors = [Tensor(one.place.ptr) for one in arrays]
    calls = cached_list(tensors, tensors)
    calls.insert(arrays)
    (ends,) = calls.cache.objects
    calls.cache.objects[("sum", 2, id(arrays[0]), id(arrays[-1]), 0)] = calls.cache.objects[ends]
    monkeypatch.setattr(Array, "at", -1, raising=False)  # which the tensors' reader reads
    places = [one.place.ptr for one in arrays]
    assert calls.lookup(arrays, arrays) == ((places, places), CURRENT)


@st.composite
def lists_of_shapes(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of a list's arrays, each with one of as many elements."""
    most = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=most).map(tuple), min_size=1, max_size=4))
    found = []
    for shape in shapes:
        others = [shape, tuple(reversed(shape)), (int(np.prod(shape)),), (*shape, 1), (1, *shape)]
        if not np.prod(shape):
            others += [(0, 5), (5, 0), (0,)]
        if np.prod(shape) == 1:
            others += [()]
        found.append((shape, draw(st.sampled_from(others))))
    return found


@given(lists_of_shapes())
@example([((2, 3), (3, 2)), ((4,), (4,))])
@example([((2, 3), (6,)), ((6,), (2, 3))])
@example([((0, 3), (0, 5))])
@example([((1,), ()), ((2, 3), (2, 3))])
def test_any_change_of_shapes_is_seen(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]):
    arrays = [Array(shape) for shape, _ in shapes]
    have_shapes = cupy_runtime.same_shapes(arrays)
    assert have_shapes(arrays)
    for array, (_, other) in zip(arrays, shapes, strict=True):
        array.shape = other
    assert have_shapes(arrays) is all(shape == other for shape, other in shapes)


@given(st.lists(st.tuples(*[st.lists(st.integers(0, 3), max_size=3).map(tuple)] * 2), min_size=1, max_size=3))
@example([((2,), (2, 1))])
@example([((2,), (3,))])
@example([((2, 3), (2, 4)), ((1,), (1,))])
@example([((2, 3), (6, 1)), ((1,), (1,))])
@example([((0, 3), (0, 2))])
@example([((1, 2), ())])
def test_other_shapes_of_any_size_are_seen(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]):
    have_shapes = cupy_runtime.same_shapes([Array(shape) for shape, _ in shapes], of_any_size=True)
    assert have_shapes([Array(shape) for shape, _ in shapes])
    assert have_shapes([Array(other) for _, other in shapes]) is all(shape == other for shape, other in shapes)


SHAPES: list[tuple[int, ...]] = [(6,), (2, 3), (2, 3, 1), (), (0,)]


def test_what_a_reader_of_arrays_takes():
    ones = [Array(shape, 4096 + 64 * index) for index, shape in enumerate(SHAPES)]
    read = cupy_runtime.reader(ones, 0)
    assert read is not None
    places = [one.place.ptr for one in ones]
    assert read(ones) == read(tuple(ones)) == places
    assert read(ones[:-1]) is None
    assert read([*ones, ones[0]]) is None
    assert read([*ones, None]) is read([None, *ones]) is None  # type: ignore[list-item]
    strided, elsewhere = (Array(at=4096, device=device) for device in (0, 1))
    strided._c_contiguous = False
    for at in range(len(SHAPES)):
        others = [Array(shape, 4096) for shape in [*SHAPES, (3,), (7,), (3, 2)] if shape != SHAPES[at]]
        others += [Array(SHAPES[at], 4096, np.int32), Subclass(SHAPES[at], 4096), elsewhere, strided]
        for other in [*others, None, 1.0]:
            wrong: list[Any] = [*ones[:at], other, *ones[at + 1 :]]
            assert read(wrong) is None, (at, other)
    same = pickle.loads(pickle.dumps(np.dtype([("a", "f4")])))
    assert same is not np.dtype([("a", "f4")])
    read = cupy_runtime.reader([Array(at=1, dtype=same)], 0)
    assert read is not None
    assert read([Array(at=2, dtype=np.dtype([("a", "f4")]))]) == [2], "an equal dtype is the same"


def test_lists_without_a_reader():
    strided = Array()
    strided._c_contiguous = False
    for wrong in (strided, Array(device=1), Subclass(), None):
        assert cupy_runtime.reader([Array(), wrong], 0) is None
