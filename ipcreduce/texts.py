"""The text of any object, for messages: exceptions, names, values. No function here raises, whatever the object is.

Every text can be encoded and printed: a lone surrogate, as :func:`os.fsdecode` makes it in file names, is written as
``\\udcff``.
"""

from __future__ import annotations

import errno
import reprlib
import resource
from collections.abc import Sequence
from typing import Any

_SHOWN = (str, bytes, bool, int, float, complex)  # messages show the values of these types
_CUT = b"..."
_MAX_BITS = 2_000
_qualname = type.__dict__["__qualname__"].__get__
_NO_DESCRIPTOR = errno.EMFILE, errno.ENFILE


def text_of(thing: Any) -> str:
    """``str(thing)``; if that raises, a text that names the error."""
    try:
        return printable(str(thing))
    except Exception as error:
        return f"{kind_of(thing)} without a text: its __str__ raised {type(error).__name__}"


def shown(value: Any) -> str:
    """A value as a message shows it: the short text of None, a number or a str, and the type of any other object.

    The text of an array is long, and reading it from a GPU waits for the device.
    """
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return "int"  # of as many digits as Python may refuse to print
    if value is None or type(value) in _SHOWN:
        return printable(reprlib.repr(value))
    return type_name(value)


def type_name(value: Any) -> str:
    """The name of the value's type, of which no metaclass is asked."""
    name: str = _qualname(type(value))
    return name


def kind_of(value: Any) -> str:
    """The value's type with its article, as in "it is an int"."""
    name = type_name(value)
    return f"{'an' if name.startswith(('a', 'e', 'i', 'o', 'nd')) else 'a'} {name}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 0, 1 and 3"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def described(error: BaseException) -> str:
    """The last line of the error's traceback: its class and its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_limit(error: OSError) -> str:
    """The text of an error of the system. If the process has too many files open, it includes their limit."""
    text = text_of(error)
    if not out_of_descriptors(error):
        return text
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{text}: this process may have {soft} open files (ulimit -n)"


def out_of_descriptors(error: BaseException | None) -> bool:
    """True for the error that this process, or the whole system, cannot open a further file."""
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR


def printable(text: str) -> str:
    """The text with its lone surrogates written as ``\\udcff``."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def whole(text: str | None) -> int | None:
    """The number that a text of at most 18 digits means; None for any other one, which ``int()`` may refuse."""
    return int(text) if text and len(text) <= 18 and text.isascii() and text.isdigit() else None


def encoded(text: str, most: int | None = None) -> bytes:
    """The text as UTF-8; of more than ``most`` bytes its beginning, which ends between two characters, and "..."."""
    data = str.encode(text, "utf-8", "backslashreplace")
    if most is None or len(data) <= most:
        return data
    return (data[: max(0, most - len(_CUT))].decode(errors="ignore").encode() + _CUT)[:most]


def decoded(data: bytes) -> str:
    """The text of UTF-8 bytes, without the zeros that fill its field. Wrong bytes are replaced."""
    return data.rstrip(b"\0").decode(errors="replace")


def text_in(record: Any) -> str:
    """The field ``text`` of a NumPy record, which another rank may have written."""
    return decoded(bytes(record["text"]))
