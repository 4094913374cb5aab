"""Nests of lists, tuples and dicts that are deep, that contain themselves, or in which one object stands twice."""

from __future__ import annotations

from typing import Any

import pytest

from ipcreduce.graphs.nests import holders, objects, rebuilt

DEEP = 100_000


def negative(value: Any) -> Any:
    return -value if isinstance(value, int) else value


def test_only_the_leaves_differ():
    once = [1]
    nest = {"a": (once, (2, [], {})), 5: [once, {"b": 3}], "c": once}
    copy = rebuilt(nest, negative)
    assert copy == {"a": ([-1], (-2, [], {})), 5: [[-1], {"b": -3}], "c": [-1]}
    assert copy["a"][0] is copy[5][0] is copy["c"] is not once
    assert list(copy) == list(nest)
    assert rebuilt(4, negative) == -4


def test_what_holds_nothing_wanted_stays_itself():
    kept: list[Any] = ["a", {"b": "c"}]
    kept.append(kept)
    nest = {"a": (1, kept), "b": [kept], "c": [[2]]}
    copy = rebuilt(nest, negative, holders(nest, lambda one: isinstance(one, int)))
    assert (copy["a"][0], copy["c"]) == (-1, [[-2]])
    assert copy["a"][1] is kept is copy["b"][0]
    assert copy["b"] is nest["b"]
    assert copy["c"] is not nest["c"]


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_deep_nest(kind: Any):
    nest: Any = 1
    for _ in range(DEEP):
        nest = {"x": nest} if kind is dict else kind([nest])
    assert sum(1 for _ in objects(nest)) == DEEP + 1 == len(holders(nest, lambda one: one == 1))
    copy = rebuilt(nest, negative)
    for _ in range(DEEP):
        assert type(copy) is kind
        (copy,) = copy.values() if kind is dict else copy
    assert copy == -1


def test_a_nest_that_contains_itself():
    inner: list[Any] = [1]
    outer = ("a", inner, {"b": ()})
    table = {"outer": outer}
    inner += [outer, table, inner]  # a cycle through two tuples and a dict
    for nest in (outer, inner, table):
        assert len(list(objects(nest))) == 7
    name, found, _ = copy = rebuilt(outer, negative)
    assert (name, found[0]) == ("a", -1)
    assert found[1] is found[2]["outer"] is copy
    assert found[3] is found is not inner
    assert rebuilt(inner, negative)[1][1][0] == -1


def test_one_object_many_times_takes_no_time():
    nest: Any = [1]
    for _ in range(200):
        nest = [nest, (nest, nest)]
    assert len(list(objects(nest))) == 402
    assert len(list(objects(rebuilt(nest, negative)))) == 402


def test_classes_of_the_program_are_leaves():
    class Own(list):  # type: ignore[type-arg]
        """It may be anything, and copied in a way of its own."""

    own = Own([1])
    assert rebuilt([own], negative)[0] is own
    assert len(list(objects([own]))) == 2
