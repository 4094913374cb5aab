"""The lines of code of the package and its kernels, without docstrings, comments and blanks, and its longest parts.

    python -m tests.tools.lines [TREE]

TREE is another checkout, to compare with. Complexity is counted by ruff (C901), whose limit is in pyproject.toml.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.tools.machine import ROOT

_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines of a Python file that hold code."""
    held = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            held -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(held)


def kernel_lines(source: str) -> int:
    """The same of a CUDA file."""
    bare = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in bare.splitlines())


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The name of each function of a Python file, and its lines from ``def`` to its end."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def main(trees: list[Path]) -> None:
    """Print a table of the trees."""
    for tree in trees:
        python = sorted((tree / "ipcreduce").rglob("*.py"))
        kernels = sorted((tree / "kernels").glob("*.cu*"))
        longest = max((lines, name) for path in python for name, lines in functions(path.read_text()))
        file = max((len(path.read_text().splitlines()), path.name) for path in python)
        print(
            f"{tree}: {sum(code_lines(path.read_text()) for path in python)} lines in {len(python)} Python files, ",
            end="",
        )
        print(f"{sum(kernel_lines(path.read_text()) for path in kernels)} in {len(kernels)} kernel files; ", end="")
        print(f"the longest function is {longest[1]} ({longest[0]}), the longest file {file[1]} ({file[0]})")


if __name__ == "__main__":
    main([ROOT, *map(Path, sys.argv[1:])])
