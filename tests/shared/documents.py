"""The Python code in README.md, CONTRIBUTING.md, SECURITY.md and docs/, as tests run it. Standard library only.

Every block fenced by ```python runs on two ranks of the simulated device. The blocks of a page share their names. Two
kinds of HTML comments, which a reader does not see, may stand before a block or behind it:

    <!-- fragment: needs PyTorch -->     The next block does not run, for this reason. It still has to be Python.
                                         tests/mpi/documents.py runs those that need PyTorch or NCCL, of some pages.
    <!-- not shown:                      Code that runs in this place: it prepares a block, or checks the result.
    x = cupy.ones(4)
    -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tools.machine import ROOT

_PIECE = re.compile(
    r"^(?:(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<block>.*?)^(?P=fence)[ \t]*$"
    r"|<!--[ \t]*(?P<kind>fragment|not shown):(?P<text>.*?)-->[ \t]*$)",
    re.DOTALL | re.MULTILINE,
)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SPELLINGS = re.compile(r"python\b|py(thon)?3?$|ipython|pycon|\{.*\}\s*py", re.IGNORECASE)


@dataclass(frozen=True)
class Piece:
    """Code in a page, and its first line. ``fragment``: the reason why it does not run; None if it does."""

    page: str
    line: int
    code: str
    fragment: str | None
    shown: bool

    def compiled(self) -> object:
        """The code object, with the line numbers of the page. :raises SyntaxError: if it is not Python."""
        return compile("\n" * (self.line - 1) + self.code, self.page, "exec", dont_inherit=True)


def pages() -> list[Path]:
    """The pages whose code is tested."""
    written = (path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(written)]


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text()))


def first_program(page: Path) -> str:
    """The first block of a page that a reader sees, with the check behind it: a program by itself."""
    found = first_pieces(page)
    index = next(number for number, piece in enumerate(found) if piece.shown)
    return "".join(piece.code for piece in found[index:])


def first_pieces(page: Path) -> list[Piece]:
    """The first block of a page that a reader sees and that runs, with the code around it that no reader sees."""
    found = list(pieces(page))
    shown = [number for number, piece in enumerate(found) if piece.shown and piece.fragment is None]
    if not shown:
        return []
    behind = shown[0] + 1
    while behind < len(found) and not found[behind].shown:
        behind += 1
    return found[:behind]


def pieces(page: Path) -> Iterator[Piece]:
    """The Python code in a page, in order. :raises ValueError: if code would be passed over."""
    text = page.read_text()
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else str(page)
    reason, until = None, 0
    for found in _PIECE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if reason is not None and text[until : found.start()].strip():
            raise ValueError(f"{name}, line {line}: a fragment's comment must stand right before its block")
        if found["kind"] == "fragment":
            if reason is not None or not found["text"].strip():
                raise ValueError(f"{name}, line {line}: expected one reason for a fragment")
            reason, until = found["text"].strip(), found.end()
            continue
        language = (found["language"] or "").strip()
        if found["kind"] == "not shown":
            yield Piece(name, line, found["text"], None, False)
        elif language == "python":
            yield Piece(name, line + 1, found["block"], reason, True)
        elif _SPELLINGS.match(language):
            raise ValueError(f"{name}, line {line}: write ```python; found ```{language}")
        elif reason is not None:
            raise ValueError(f"{name}, line {line}: only Python can be a fragment; found ```{language}")
        reason = None
    if reason is not None:
        raise ValueError(f"{name}: a fragment's comment without a block")
    if re.search(r"^[ \t]+(```|~~~)[ \t]*py", text, re.MULTILINE):
        raise ValueError(f"{name}: a block that is indented would not be run")
