"""Lists of arrays: the plan of their launches, outputs that share memory, and what a list of host arrays gives."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ipcreduce.arrays import views
from ipcreduce.arrays.lists import HostList, ListCall, check_apart, outputs
from ipcreduce.calls.addresses import addresses_of
from ipcreduce.calls.request import Member, Request
from ipcreduce.device.arguments import ARG_WORDS
from ipcreduce.device.prepared import Prepared
from ipcreduce.errors import ArgumentError
from ipcreduce.ipc import lists, plan
from ipcreduce.types import Stream

PACKET = plan.PACKET_BYTES


def in_steps(most_packets: int) -> Any:
    """A plan of launches of up to so many packets."""

    def planned(nbytes: int) -> list[Any]:
        assert nbytes % PACKET == 0
        most = most_packets * PACKET
        return [
            SimpleNamespace(offset=begin, nbytes=min(most, nbytes - begin), algorithm="", grid=1, block=1)
            for begin in range(0, nbytes, most)
        ]

    return planned


# ---- the plan
@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2000)), max_size=60), st.integers(1, 20), st.integers(1, 300)
)
def test_every_byte_is_in_one_part(sizes: list[int], most: int, most_packets: int):
    """Every byte of every array once and in order, in parts whose packets lie one behind the other in their launch."""
    done = [0] * len(sizes)
    last = -1
    for one in lists.make_plan(sizes, most, in_steps(most_packets)):
        assert 1 <= len(one.members) <= min(most, one.parts)
        packet = 0
        for member, offset, first, nbytes in zip(one.members, one.offsets, one.first, one.nbytes, strict=True):
            assert member >= last, "in the order of the list"
            assert (offset, first) == (done[member], packet)
            assert nbytes > 0
            assert nbytes % PACKET == 0 or offset + nbytes == sizes[member], "but for the last one, whole packets"
            done[member] += int(nbytes)
            packet += -(-int(nbytes) // PACKET)
            last = member
        assert packet * PACKET == one.step.nbytes, "no packet of a launch is without an array"
    assert done == sizes


@given(st.lists(st.integers(0, 500), max_size=400))
def test_the_table_has_the_parts_and_no_others(sizes: list[int]):
    for one in lists.make_plan(sizes, lists.LONG, in_steps(1 << 20)):
        assert one.parts == (lists.SHORT if len(one.members) <= lists.SHORT else lists.LONG)
        words = lists.table(one)
        assert len(words) == 3 * one.parts
        numbers, count = words[2 * one.parts :].view(np.uint32), len(one.members)
        assert numbers[:count].tolist() == one.first.tolist()
        assert (numbers[count : one.parts] == 0xFFFFFFFF).all()
        assert numbers[one.parts : one.parts + count].tolist() == one.nbytes.tolist()


@pytest.mark.parametrize("most_packets", [1000, 3], ids=["one launch", "several"])
def test_addresses_of_parts(most_packets: int):
    """Each part has its array's address and what comes before it; by the words in and out kernels see alignment."""
    sizes = [16, 0, 100, 32]
    sources, targets = [4096, 1, 8192, 1 << 20], [64, 3, 256, 16]
    found: dict[int, list[tuple[int, int, int]]] = {}
    for one in lists.make_plan(sizes, 100, in_steps(most_packets)):
        words = np.concatenate([np.zeros(ARG_WORDS, np.uint64), lists.table(one)])
        launch: Any = SimpleNamespace(args=words)
        lists.step(one, launch, len(sizes)).set((addresses_of(sources), addresses_of(targets)))
        ins = words[ARG_WORDS:]
        outs = ins[one.parts :]
        for at, member in enumerate(one.members.tolist()):
            found.setdefault(member, []).append((int(ins[at]), int(outs[at]), int(one.nbytes[at])))
        assert bool(words[0] % 16) == any(one.nbytes % 16), "the kernel takes all packets for whole, or none"
        assert words[1] % 16 == 0
    for member, parts in found.items():
        at = 0
        for source, target, nbytes in parts:
            assert (source, target) == (sources[member] + at, targets[member] + at)
            at += nbytes
        assert at == sizes[member]
    assert sorted(found) == [0, 2, 3]


@pytest.mark.parametrize("sizes", [[16, 0, 100, 32], [16, 48, 100, 32]], ids=["one without bytes", "all with bytes"])
@pytest.mark.parametrize("most_packets", [1000, 3], ids=["one launch", "several"])
def test_a_list_is_launched_by_its_parts(sizes: list[int], most_packets: int):
    """Also if a member without bytes has an address."""
    sources, targets, launched = [4096, 1 << 16, 8192, 1 << 20], [64, 320, 256, 1024], []
    steps: list[Any] = []
    planned = []
    for one in lists.make_plan(sizes, 100, in_steps(most_packets)):
        words = np.concatenate([np.zeros(ARG_WORDS, np.uint64), lists.table(one)])
        launch: Any = SimpleNamespace(args=words, run=lambda stream, of=(one, words): launched.append((*of, stream)))
        steps.append(lists.step(one, launch, len(sizes)))
        planned.append(one)
    nothing: Any = None
    prepared = Prepared(request=nothing, fingerprint=nothing, kernels="", nbytes=sum(sizes), steps=tuple(steps))
    places = addresses_of(sources), addresses_of(targets)
    prepared.start(places, Stream(5))
    assert [one for one, _, _ in launched] == planned
    first, launched[:] = [words.tolist() for _, words, _ in launched], []
    for _, words, _ in launched:
        words[:] = 0
    bound = prepared.bind(places)
    bound.launch(bound.argument, Stream(5))
    assert [words.tolist() for _, words, _ in launched] == first
    for one, words, stream in launched:
        for at, places in enumerate((sources, targets)):
            found = words[ARG_WORDS + at * one.parts :][: len(one.members)].tolist()
            expected = zip(one.members.tolist(), one.offsets.tolist(), strict=True)
            assert found == [places[member] + offset for member, offset in expected]
        assert stream == 5


def test_as_many_parts_as_the_driver_takes():
    for version, most in (((11, 8), lists.SHORT), ((12, 0), lists.SHORT), ((12, 1), lists.LONG), ((13, 0), lists.LONG)):
        assert lists.most_parts(version) == most


def test_what_the_ranks_compare():
    """Shapes, dtypes, their order, the op and the number of arrays."""
    one = [((2, 3), "float32"), ((6,), "int8")]
    others = [
        (one[::-1], "sum"), (one, "max"), (one[:1], "sum"), ([((6,), "float32"), one[1]], "sum"), ([], "sum"),
        ([one[0], ((6,), "uint8")], "sum"),
    ]  # fmt: skip

    def checksum(members: Any, op: str) -> int:
        return Request(op, tuple(Member(*member) for member in members), is_list=True).fingerprint.crc

    fingerprints = {checksum(members, op) for members, op in [(one, "sum"), *others]}
    assert len(fingerprints) == 1 + len(others)
    assert checksum(one, "sum") == checksum([*one], "sum")


# ---- outputs
def test_outputs_of_a_list():
    arrays = [np.zeros(2), np.zeros(3)]
    assert outputs(arrays, None) == [None, None]
    assert outputs(arrays, arrays) is arrays
    for out, words in (
        (arrays[0], "array is a list of 2 arrays, but out is an ndarray"),
        (arrays[:1], "out is a list of 1. Pass an output for each array"),
        ([arrays[0], None], "member 1 of the list: out is None"),
    ):
        with pytest.raises(ArgumentError, match=words):
            outputs(arrays, out)


def test_outputs_that_share_no_memory():
    memory = np.zeros((6, 8))
    rows = [*memory]
    interleaved = [memory[:, column] for column in range(8)]
    empty = np.zeros((0, 3))
    fresh = np.zeros((6, 8))
    for pairs in (
        [],
        [(row, row) for row in rows],
        [(column, column) for column in interleaved],
        list(zip(interleaved, [fresh[:, column] for column in range(8)], strict=True)),
        [(rows[0], fresh[0]), (rows[0], fresh[1])],  # one array as two inputs
        [(empty, empty), (empty, empty), (rows[0], rows[0])],
        [(memory[0, :4], memory[0, 2:6]), (rows[1], rows[2])],  # an output over a part of its own array
        [(memory[0, 1:1], memory[0, 2:2]), (rows[0], rows[0])],
    ):
        check_apart(pairs)


def test_outputs_that_share_memory(subtests: pytest.Subtests):
    memory, fresh = np.zeros((6, 8)), np.zeros((6, 8))
    rows, column = [*memory], memory[:, 0]
    for pairs, first, kind, second in (
        ([(rows[0], rows[0]), (rows[1], rows[1]), (rows[0], rows[0])], 0, "output", 2),  # twice in place
        ([(fresh[0], rows[0]), (fresh[1], rows[0])], 0, "output", 1),
        ([(fresh[0, :5], memory[0, :5]), (fresh[1, :4], memory[0, 4:])], 0, "output", 1),  # by one element
        ([(rows[0], rows[1]), (rows[1], fresh[0])], 0, "array", 1),
        ([(rows[1], fresh[0]), (rows[0], rows[1])], 1, "array", 0),
        ([(np.zeros(6), memory[:, 3]), (memory[2], fresh[2])], 0, "array", 1),  # strided over a row
        ([(fresh[0], rows[3]), (fresh[1], memory.reshape(-1)[20:28])], 0, "output", 1),
        ([(memory, memory), (fresh[0], rows[2])], 0, "output", 1),  # a small one within a large one
        ([(column, column), (fresh[0, :1], memory[1, 1:2]), (fresh[0, :1], memory[5, :1])], 0, "output", 2),
    ):  # fmt: skip
        with subtests.test(first=first, kind=kind, second=second):
            words = f"the output of member {first} of the list shares memory with the {kind} of member {second}"
            with pytest.raises(ArgumentError, match=words):
                check_apart(pairs)


def test_columns_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch):
    """A thousand of them took 30 s."""
    compared: list[None] = []
    monkeypatch.setattr(views, "share_memory", lambda *_: compared.append(None))
    matrix, other = np.zeros((4, 1000), np.float32), np.zeros((4, 8, 1000), np.float32)
    check_apart([(column, column) for column in matrix.T])
    check_apart([(head, head) for head in np.moveaxis(other.reshape(32, 125, 8), 1, 0)])
    check_apart([(row, row) for row in np.zeros((1000, 8))])
    check_apart([(matrix, row) for row in np.zeros((4000, 8))])  # one array, which is only read
    assert not compared


def test_any_strided_arrays():
    """As every pair by NumPy."""
    rng = np.random.default_rng(3)
    found = {True: 0, False: 0}
    for _ in range(600):
        memory = np.zeros(int(rng.integers(40, 200)), np.int16)
        views_of = []
        for _ in range(int(rng.integers(2, 6))):
            dims = int(rng.integers(1, 3))
            shape = [int(rng.integers(0 if rng.random() < 0.05 else 1, 5)) for _ in range(dims)]
            strides = [2 * int(rng.integers(-9, 10)) for _ in range(dims)]
            low = sum(min(0, step * (size - 1)) for step, size in zip(strides, shape, strict=True))
            high = sum(max(0, step * (size - 1)) for step, size in zip(strides, shape, strict=True)) + 2
            at = int(rng.integers(0, max(1, (memory.nbytes - high + low) // 2)))
            views_of.append(np.ndarray(shape, np.int16, memory, at * 2 - low, strides))
        shared = any(np.shares_memory(one, other) for one, other in itertools.combinations(views_of, 2))
        found[shared] += 1
        with pytest.raises(ArgumentError) if shared else nullcontext():
            check_apart([(one, one) for one in views_of])
    assert min(found.values()) > 50


def test_outputs_for_which_it_takes_hours_to_tell():
    """They count as sharing memory. NumPy looks for a common byte of such strides for many minutes."""
    memory = np.zeros(192163377, np.int8)
    one = as_strided(memory, (1049, 1049, 1049), (36674, 61119, 85569))
    other = as_strided(memory[64023025:], (1049, 1049, 1), (12223, 12224, 1))
    with pytest.raises(ArgumentError, match="the output of member 0 of the list shares memory with"):
        check_apart([(one, one), (other, other)])


# ---- on the host
def test_lists_of_host_arrays_by_dtype():
    """Those of a dtype and an op go together, complex numbers as their parts and truth values as bytes."""
    arrays = [np.ones(2, "f4"), np.ones(3, "f8"), np.ones((2, 2), "f4"), np.ones(1, "F"), np.zeros(0, "f8")]
    assert groups_of(arrays, "sum") == [("sum", 8, np.float32), ("sum", 3, np.float64)]
    assert groups_of([np.array([True]), np.array([False, True])], "any") == [("max", 3, np.uint8)]
    assert groups_of([], "sum") == [("sum", 0, np.uint8)], "it waits for the other ranks"


def groups_of(arrays: list[Any], op: str) -> list[Any]:
    """Op, size and dtype of what is reduced together."""
    parts = HostList(ListCall(arrays, op, None)).parts()
    return [(op, array.size, array.dtype) for array, op, out in parts if out is None]


def test_results_of_host_lists():
    arrays = [np.ones((2, 3)), np.ones(2, "F"), np.array([True, False]), np.ones(3, ml_dtypes.bfloat16)[::2]]
    used = HostList(ListCall(arrays[:2] + arrays[3:], "sum", None))
    reduced = [2 * array for array, *_ in used.parts()]
    found = used.result(reduced)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in (*arrays[:2], arrays[3])]
    assert not any(np.shares_memory(one, other) for one in found for other in reduced)
    for one, array in zip(found, arrays[:2] + arrays[3:], strict=True):
        assert (one == 2 * array).all()
    wide = np.zeros((2, 6))
    out = (wide[:, ::2],)
    assert HostList(ListCall(arrays[:1], "sum", out)).result([np.full(6, 7.0)]) is out
    assert wide.tolist() == [[7.0, 0.0] * 3] * 2


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ([np.zeros(2), np.zeros(4)], r"member 1 of the list: out has shape \(4,\)"),
        ([np.zeros(2), np.zeros(3, "f4")], "member 1 of the list: out has shape .* dtype float32"),
        ([np.frombuffer(bytes(16)), np.zeros(3)], "member 0 of the list: out cannot be written"),
        ([np.zeros(2), 1.0], "member 1 of the list: .*out is a float"),
    ],
)
def test_outputs_that_do_not_fit(out: Any, words: str):
    with pytest.raises(ArgumentError, match=words):
        HostList(ListCall([np.zeros(2), np.zeros(3)], "sum", out))


def test_an_op_that_a_member_does_not_take():
    with pytest.raises(ArgumentError, match="member 1 of the list: dtype bool has no"):
        HostList(ListCall([np.zeros(2), np.zeros(2, bool)], "sum", None))
