"""The parsers of the commands' arguments, and the sizes to measure."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 40


def size(text: str, least: int = 1) -> int:
    """Parse a number of bytes, such as "4", "64K" or "1G".

    :raises argparse.ArgumentTypeError: if the text is not a number of bytes from ``least`` to 1024G.
    """
    found = re.fullmatch(r"([0-9]{1,15})([KMG]?)", text.upper())
    nbytes = int(found[1]) * _UNITS[found[2]] if found else 0
    if not least <= nbytes <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes from {least} to 1024G. Write it as 4, 64K, 1M or 1G"
        )
    return nbytes


def count(text: str) -> int:
    """Parse a whole number from 1 to 1,000,000. :raises argparse.ArgumentTypeError: if the text is no such number."""
    if not re.fullmatch("[0-9]{1,7}", text) or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1000000")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse numbers with commas between them. :raises argparse.ArgumentTypeError: if :func:`count` takes one not."""
    return [count(part.strip()) for part in text.split(",")]


def names_of(known: Collection[str], text: str) -> list[str]:
    """Parse names with commas between them; none for "". :raises argparse.ArgumentTypeError: if a name is unknown."""
    found = list(dict.fromkeys(name.strip() for name in text.split(","))) if text.strip() else []
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown. Choose from {', '.join(known)}")
    return found


def sizes(smallest: int, largest: int, between: bool, itemsize: int = 1) -> list[int]:
    """The powers of two from ``smallest`` to ``largest`` bytes that are multiples of ``itemsize``.

    :param between: whether to add the sizes 3 * 2**k.
    """
    found = [1 << k for k in range(41)] + ([3 << k for k in range(40)] if between else [])
    return sorted(nbytes for nbytes in found if smallest <= nbytes <= largest and nbytes % itemsize == 0)


def why_not_writable(path: Path) -> str:
    """The reason why a file cannot be written; "" if it can. An existing file keeps its content."""
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        return f"{error.strerror}: {path}"
    return ""
