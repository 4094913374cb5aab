"""Lists that have come before: what makes addresses usable, told by Python for few members and by NumPy for many."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ipcreduce.device.hits import lists

MANY = lists._MANY + 7
COUNTS = pytest.mark.parametrize("count", [1, 3, MANY])


def kind_of(sizes: list[int], itemsizes: list[int] | None = None) -> lists._Layout:
    return lists._Layout(nothing, nothing, lists.Members(itemsizes or [1] * len(sizes), sizes, sizes))


def nothing(_: Any) -> None:
    return None


def words(addresses: list[int]) -> bytes:
    return np.array(addresses, np.uint64).tobytes()


def fits(kind: lists._Layout, addresses: list[int]) -> bool:
    bits = kind._fits(addresses, words(addresses))
    every = functools.reduce(operator.or_, addresses)
    assert bits in (0, every) or (bits, every % 256) == (256, 0)
    return bits != 0


def apart(sizes: list[int], sources: list[int], targets: list[int] | None = None) -> bool:
    targets = sources if targets is None else targets
    froms = words(sources)
    return kind_of(sizes)._are_apart(sources, targets, froms, froms if targets is sources else words(targets))


@COUNTS
def test_addresses_that_fit(count: int):
    """Each is a multiple of its own itemsize, and none is 0."""
    itemsizes = [8, 4, 1][:count] * count
    kind = kind_of([64] * count, itemsizes[:count])
    good = [4096 + 64 * at for at in range(count)]
    assert fits(kind, good)
    for at, size in enumerate(itemsizes[:count]):
        assert not fits(kind, [*good[:at], 0, *good[at + 1 :]])
        assert fits(kind, [*good[:at], good[at] + size, *good[at + 1 :]])
        if size > 1:
            assert not fits(kind, [*good[:at], good[at] + 1, *good[at + 1 :]])
    every = [4096 + 256 * at for at in range(count)]
    assert fits(kind, every)
    for at in range(count):
        assert not fits(kind, [*every[:at], 0, *every[at + 1 :]])
        assert fits(kind, [*every[:at], every[at] + 64, *every[at + 1 :]])
        assert fits(kind, [*every[:at], every[at] + 1, *every[at + 1 :]]) == (itemsizes[at] == 1)
    if count > 1:  # the first one is no multiple of 8, and no other has to be
        assert not fits(kind, [0, *(one + 4 for one in good[1:])])


@st.composite
def places(draw: st.DrawFn) -> tuple[list[int], list[int], list[int] | None]:
    """Sizes, sources and targets of lists that are close together, and some apart."""
    count = draw(st.one_of(st.integers(1, 6), st.integers(MANY - 14, MANY)))
    sizes = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    step = draw(st.sampled_from([29, 30, 31, 64]))
    sources = [1000 + step * at for at in draw(st.permutations(range(count)))]
    targets = [100_000 + step * at for at in draw(st.permutations(range(count)))]
    for at in draw(st.lists(st.integers(0, count - 1), max_size=2)):
        targets[at] = draw(st.sampled_from(sources)) + draw(st.sampled_from([0, 0, 1, -1]))
    return sizes, sources, draw(st.sampled_from([None, targets]))


@given(places())
def test_outputs_that_are_apart(given: tuple[list[int], list[int], list[int] | None]):
    """None is let through in which an output has a byte of another output, or of a source that is not its own."""
    sizes, sources, outs = given
    targets = sources if outs is None else outs
    spans = [(at, size, -1) for at, size in zip(targets, sizes, strict=True)]
    shared = any(
        first < other + size and other < first + length
        for at, (first, length, _) in enumerate(spans)
        for to, (other, size, _) in enumerate(spans)
        if at != to
    ) or any(
        first < source + size and source < first + length and not (at == to and first == source)
        for at, (first, length, _) in enumerate(spans)
        for to, (source, size) in enumerate(zip(sources, sizes, strict=True))
        if outs is not None
    )  # fmt: skip
    if apart(sizes, sources, outs):
        assert not shared
    elif outs is None:
        assert shared


@COUNTS
def test_lists_side_by_side_are_apart(count: int):
    """Without a byte between them, and in any order."""
    sizes = [16 + at % 3 for at in range(count)]
    ends = np.cumsum(sizes).tolist()
    sources = [end - size for end, size in zip(ends, sizes, strict=True)]
    others = [ends[-1] + at for at in sources]
    order = np.random.default_rng(1).permutation(count).tolist()
    sizes, sources, others = ([ones[at] for at in order] for ones in (sizes, sources, others))
    assert apart(sizes, sources)
    assert apart(sizes, sources, others)
    assert apart(sizes, sources, [*sources[:-1], others[-1]]), "in place but for one"
    if count > 1:
        assert not apart(sizes, sources, [*others[:-1], others[0]])
        assert not apart(sizes, sources, [*others[:-1], sources[0]])


# ---- arrays that are split
@st.composite
def splits(draw: st.DrawFn) -> tuple[lists.Members, list[int], list[int]]:
    """Members of a list, and addresses of parts and of whole arrays that are close together, some in their places."""
    count = draw(st.one_of(st.integers(1, 4), st.just(MANY)))
    kinds = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 2)), min_size=3, max_size=3))
    rows = [kinds[at % 3] for at in range(count)]
    sizes, places = [part for part, _, _ in rows], [before for _, before, _ in rows]
    wholes = [part + before + behind for part, before, behind in rows]
    if draw(st.booleans()):
        places[draw(st.integers(0, count - 1))] = lists.NOWHERE
    begins = [1000 + 20 * at for at in draw(st.permutations(range(count)))]
    parts = [draw(st.sampled_from([5000 + 12 * at, 5000 + 8 * at])) for at in range(count)] if count < 9 else [
        5000 + 12 * at for at in range(count)
    ]  # fmt: skip
    for at in draw(st.lists(st.integers(0, count - 1), max_size=3)):
        of = draw(st.sampled_from([at, at, count - 1]))
        parts[at] = begins[of] + draw(st.sampled_from([0, 1, -1])) + places[of] % lists.NOWHERE
    return lists.Members([1] * count, sizes, wholes, places, draw(st.booleans())), parts, begins


@given(splits())
def test_outputs_of_splits_that_are_apart(given: tuple[lists.Members, list[int], list[int]]):
    """None is let through that has a byte of another array, but for a part that is in its own place."""
    members, parts, begins = given
    layout = lists._Layout(nothing, nothing, members)
    sources, targets = (parts, begins) if members.gathers else (begins, parts)
    spans = [
        [(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
        for firsts, sizes in ((parts, members.parts), (begins, members.wholes))
    ]
    assert members.places is not None
    own = [begin + place for begin, place in zip(begins, members.places, strict=True)]
    written, read = (1, 0) if members.gathers else (0, 1)
    shared = any(
        first < end and begin < past and (side == written or at != to or parts[at] != own[at])
        for at, (first, past) in enumerate(spans[written])
        for side in (written, read)
        for to, (begin, end) in enumerate(spans[side])
        if (side, to) != (written, at)
    )
    event(f"shared: {shared}")
    if layout._are_apart(sources, targets, words(sources), words(targets)):
        assert not shared


@COUNTS
@pytest.mark.parametrize("gathers", [True, False])
def test_splits_side_by_side_are_apart(count: int, gathers: bool):
    """Parts elsewhere, in their own places, and some of both."""
    sizes, begins = [8 + at % 3 for at in range(count)], [4096 + 32 * at for at in range(count)]
    members = lists.Members([1] * count, sizes, [32] * count, [at % 3 for at in range(count)], gathers)
    layout = lists._Layout(nothing, nothing, members)
    apart, own = [1 << 20 | 16 * at for at in range(count)], [at + at_begin % 3 for at_begin, at in enumerate(begins)]

    def are_apart(parts: list[int]) -> bool:
        both = (parts, begins) if gathers else (begins, parts)
        return layout._are_apart(*both, *map(words, both))

    assert are_apart(apart)
    assert are_apart(own)
    assert are_apart([*own[:-1], apart[-1]])
    for wrong in (own[-1] + 1, own[-1] - 1, begins[0] + 20, begins[-1] + 31):
        assert not are_apart([*own[:-1], wrong])
        assert not are_apart([*apart[:-1], wrong])
