"""Texts of other people's objects: exceptions, names, values. Nothing here raises, whatever they are.

Every text that comes out can be encoded and printed: a lone surrogate, as in file names by :func:`os.fsdecode`, is
spelt out as ``\\udcff``.
"""

from __future__ import annotations

import errno
import reprlib
import resource
from typing import Any

_SHOWN = (str, bytes, bool, int, float, complex)  # by their values
_NO_DESCRIPTOR = errno.EMFILE, errno.ENFILE


def text_of(thing: Any) -> str:
    """``str(thing)``, or a note of the kind of error that this raises."""
    try:
        return printable(str(thing))
    except Exception as error:
        return f"a {type(thing).__name__} without a text: its __str__ raised {type(error).__name__}"


def shown(value: Any) -> str:
    """A value as a message shows it: None, a number or a str by its text, cut; all else by its type only.

    An array's text is long, and on a GPU reading it waits for the device.
    """
    if value is None or type(value) in _SHOWN:
        try:
            return printable(reprlib.repr(value))
        except ValueError:  # an int of thousands of digits
            pass
    return type(value).__qualname__


def described(error: BaseException) -> str:
    """The error as a traceback ends: its class and its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_limit(error: OSError) -> str:
    """The text of an error of the system, and the limit that the process has met by it, if it is that of open files."""
    text = text_of(error)
    if not out_of_descriptors(error):
        return text
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{text}: this process may have {soft} files open (ulimit -n)"


def out_of_descriptors(error: BaseException | None) -> bool:
    """True for the error of a process, or a system, that cannot open any further file."""
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR


def printable(text: str) -> str:
    """The text, with its lone surrogates spelt out."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def encoded(text: str, most: int | None = None) -> bytes:
    """The text as UTF-8, cut between two characters to at most ``most`` bytes."""
    data = str.encode(text, "utf-8", "backslashreplace")
    return data if most is None or len(data) <= most else data[:most].decode(errors="ignore").encode()


def decoded(data: bytes) -> str:
    """The text of bytes that should be UTF-8, without the zeros that fill its field."""
    return data.rstrip(b"\0").decode(errors="replace")
