"""Texts of foreign objects: nothing raises, and all that comes out can be encoded."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from ipcreduce import texts
from ipcreduce.calls.votes import Vote
from ipcreduce.page.fingerprint import Fingerprint
from ipcreduce.page.records import Slot, record
from ipcreduce.page.rounds import Left


class Mute(Exception):
    """Has neither text nor representation."""

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


class Odd(str):
    """A str that is not what it seems."""

    def encode(self, *args: Any) -> bytes:
        raise LookupError("not to be encoded")


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (ValueError("a"), "a"),
        (ValueError("/data/\udcff"), "/data/\\udcff"),
        (ValueError(Odd("b")), "b"),
        (Odd("\ud800"), "\\ud800"),
        (Mute(), "a Mute without a text: its __str__ raised LookupError"),
        (KeyError("x"), "'x'"),
        (7, "7"),
    ],
    ids=range(7),
)
def test_text_of(thing: Any, text: str):
    found = texts.text_of(thing)
    assert (found, type(found)) == (text, str)
    found.encode()


@pytest.mark.parametrize(
    ("error", "text"),
    [(MemoryError(), "MemoryError"), (KeyError("x"), "KeyError: 'x'"), (Mute(), "Mute: a Mute without")],
)
def test_described(error: BaseException, text: str):
    assert texts.described(error).startswith(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\udcff", r"'a\udcff'"), (Mute(), "Mute")],
)
def test_shown(value: Any, text: str):
    assert texts.shown(value) == text


def test_kinds_have_their_articles():
    values: list[Any] = [1, 1.5, [], np.zeros(1), np.uint8(1), None, iter([])]
    assert [texts.kind_of(value) for value in values] == [
        "an int", "a float", "a list", "an ndarray", "a uint8", "a NoneType", "a list_iterator",
    ]  # fmt: skip


def test_of_a_long_int_only_its_type_is_shown():
    """From Python 3.14 on, reprlib shows the address of one that has too many digits."""
    assert texts.shown(1 << 2_000) == texts.shown(-(10**5000)) == "int"
    assert texts.shown(1 << 64) == "18446744073709551616"


def test_a_long_value_is_cut():
    text = texts.shown("x" * 1000)
    assert len(text) < 50
    assert text.startswith("'xxx")
    assert "..." in text


@pytest.mark.parametrize("character", ["a", "é", "\N{SNOWMAN}", "\N{PILE OF POO}"])
@pytest.mark.parametrize("most", range(9))
def test_a_text_is_cut_between_characters(character: str, most: int):
    kept = character * (max(0, most - 3) // len(character.encode()))
    assert texts.encoded(character * 9, most).decode() == kept + "..."[:most]


def test_a_text_that_fits_is_whole():
    assert texts.encoded("é" * 4, 8).decode() == texts.encoded("é" * 4).decode() == "é" * 4


def test_a_limit_is_named_where_it_was_met():
    assert texts.with_limit(OSError(errno.ENOENT, "gone")) == "[Errno 2] gone"
    assert "this process may have" in texts.with_limit(OSError(errno.EMFILE, "too many"))


def test_whole_numbers():
    """Those that no int() refuses, and no other text."""
    assert [texts.whole(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
    for text in (None, "", " 1", "-1", "1.0", "²", "١", "9" * 19, "1" * 5000, "x"):
        assert texts.whole(text) is None


TEXT = "a\udcff" + "é" * 2000


@pytest.mark.parametrize(
    "through",
    [
        lambda text: Vote.unpack(Vote(1, False, 0, 0, text).pack()).text,
        lambda text: Left.unpack(Left(3, text).pack()).text,
    ],
)
def test_texts_that_ranks_exchange(through: Any):
    """A lone surrogate, and more text than there is room for."""
    found = through(TEXT)
    assert found.startswith("a\\udcffé")
    assert found.endswith("é...")
    assert (r"a\udcff" + "é" * 2000).startswith(found[:-3])


def test_a_text_in_a_record():
    layout = record(("text", "S16"))
    memory = bytearray(layout.itemsize)
    slot = Slot(memory, 0, layout)  # type: ignore[arg-type]
    slot.write(1, text=TEXT)
    assert texts.text_in(slot.read()) == r"a\udcff" + "é" * 3 + "..."


def test_a_fingerprint_of_any_name():
    assert Fingerprint.of(TEXT).crc == Fingerprint.of(TEXT).crc != Fingerprint.of("a").crc


def test_the_name_of_a_type_without_its_metaclass():
    class Mute(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(name)

    class Odd(metaclass=Mute):
        pass

    odd = Odd()
    name = "test_the_name_of_a_type_without_its_metaclass.<locals>.Odd"
    assert (texts.type_name(odd), texts.shown(odd), texts.kind_of(odd)) == (name, name, f"a {name}")
