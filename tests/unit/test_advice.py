"""What is said of values that are no arrays, ops or words: short, on one line, and without a look at their contents."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ipcreduce import texts
from ipcreduce.arrays import lists, views
from ipcreduce.dtypes import op_name
from ipcreduce.errors import ArgumentError
from ipcreduce.graphs.forward_context import MODES, check_word
from ipcreduce.options import Options, workspace_bytes
from ipcreduce.ranks import groups


class Unreadable:
    """Has a text that must not be asked for, as a device array's waits for the GPU."""

    def __repr__(self) -> str:
        raise AssertionError("made into a text")

    __str__ = __format__ = __bool__ = __iter__ = __len__ = __array__ = __repr__  # type: ignore[assignment]


class Sparse:
    def toarray(self) -> np.ndarray:
        raise AssertionError("converted")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (0.5, "0.5"),
        ("a\nb", r"'a\nb'"),
        ("\udc80", r"'\udc80'"),
        (b"\xff", r"b'\xff'"),
        (np.float32(1), "float32"),
        ([1, 2], "list"),
        (np.zeros((99, 99)), "ndarray"),
        (Unreadable(), "Unreadable"),
    ],
)
def test_a_value_is_shown_in_few_words(value: Any, text: str):
    assert texts.shown(value) == text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Unreadable(), "Pass numpy.asarray(it)"),
        ({"x": np.zeros(2)}, "Pass a list of its values"),
        (Sparse(), "Pass it.toarray()"),
        (decimal.Decimal(1), "Pass float(it)"),
    ],
)
def test_what_is_no_array(value: Any, words: str):
    with pytest.raises(ArgumentError) as caught:
        views.is_device(value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([Unreadable(), Unreadable()], "member 0 of the list: array is a "),
        ([[1, 2], [3]], "member 0 of the list: it is a list, and no array. If the list stands for one array"),
        ([np.zeros(2), 1], "member 1 of the list: it is an int, and no array. Pass numpy.array(it)"),
        ([np.zeros(2), None], "member 1 of the list: it is None, as the gradient of an unused parameter is. Leave"),
        ([np.zeros(2), [np.zeros(2)]], "member 1 of the list: it is a list, and no array. Pass all arrays in one list"),
        ([np.zeros(2), "f"], "member 1 of the list: it is a str, and no array. Pass the array alone"),
        ((1.0, np.zeros(3)), "member 0 of the list: it is a float"),
        ([np.zeros(2), Sparse()], "Pass it.toarray()"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_arrays(arrays: Any, words: str):
    with pytest.raises(ArgumentError) as caught:
        lists.on_device(arrays)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [np.zeros((30, 30)), Unreadable(), [Unreadable()]], ids=["array", "object", "list"])
@pytest.mark.parametrize(
    "check",
    [
        lambda wrong: check_word("mode", wrong, MODES), groups.of, workspace_bytes,
        lambda wrong: Options.of(wrong, 1.0, None), lambda wrong: Options.of(None, wrong, None),
        lambda wrong: Options.of(None, 1.0, wrong), lambda wrong: Options.of(None, 1.0, None, wrong),
    ],
)  # fmt: skip
def test_other_arguments(check: Callable[[Any], Any], wrong: Any):
    try:
        text = check(wrong).wrong
    except ArgumentError as error:
        text = str(error)
    assert type(wrong).__qualname__ in text
    assert len(text) < 400


def test_an_op_whose_attributes_raise():
    class Raising:
        def __getattr__(self, name: str) -> Any:
            raise LookupError(name)

    with pytest.raises(ArgumentError, match=r"there is no op \S*Raising\."):
        op_name(Raising())
